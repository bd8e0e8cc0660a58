"""
The link process: everything of a learner that touches the network, so that the training process
never does.

Started by the training process with two file descriptors: the shared memory and a socket. It lives
exactly as long as the training process: end of file on the socket, or the death of the parent, ends
it. No torch in here.

Threads: `main` decides (core/conversation.py) and writes to the trainer; `trainer` reads from it;
`session` reads the syncer's messages; `upload` and `download` carry fragments.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import logging
import os
import platform
import queue
import random
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diloco import wire
from diloco.errors import EXIT_REFUSED, ConfigError, DilocoError
from diloco.health import HealthFile
from diloco.spec import RunSpec
from diloco.telemetry import configure_logging
from diloco.tls import explain, fault_of, server_name
from diloco.transport import Backoff, Connection, kernel_warnings, tune_interpreter, tune_malloc
from diloco.v1 import syncer_pb2 as pb
from diloco_worker import download, session, settings
from diloco_worker.core import events as ev
from diloco_worker.core.conversation import Conversation
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.metrics import Metrics
from diloco_worker.pipe import Pipe
from diloco_worker.settings import LearnerSettings
from diloco_worker.shared import Shared
from diloco_worker.transfer import Buffers, Cancel, Identity
from diloco_worker.upload import Uploader
from diloco_worker.vitals import Vitals

log = logging.getLogger("diloco.link")

GOODBYE_SECONDS = 2.0
"""How long a goodbye may take to leave."""

MOST_THREADS = 8
"""Uploads, and downloads, at a time; more than this gains nothing even where τ is larger."""

RECONNECT_SECONDS = (0.2, 5.0)
"""First and longest pause between two tries to reach the syncer."""


class Link:
    """Carries decisions out and turns what happens into events."""

    def __init__(self, config: LearnerSettings, spec: RunSpec, shared: Shared, pipe: Pipe) -> None:
        self._config, self._spec, self._shared, self._pipe = config, spec, shared, pipe
        self._events: queue.SimpleQueue[tuple[int, ev.Event] | None] = queue.SimpleQueue()
        """Events with the number of the session they come from; 0: from elsewhere."""
        self._sessions = 0
        name = server_name(config.job)
        self._control = Connection(
            config.syncer, tls_dir=config.tls, purpose="control", server_name=name
        )
        # Two connections for bulk data: a download that waits for a merge must not hold an upload
        # back.
        self._up, self._down = (
            Connection(config.syncer, tls_dir=config.tls, purpose="bulk", server_name=name)
            for _ in range(2)
        )
        self._uploader = Uploader(lambda: self._up.channel, shared, spec, faults=config.faults)
        layout = shared.layout
        largest = max(f.elements for f in layout.fragments)
        self._buffers = Buffers(wire.encoded_bytes(wire.FP32, largest))
        # One more than rounds in flight: a transfer that was replaced may take a moment to end.
        threads = min(spec.overlap, MOST_THREADS) + 1
        self._uploads = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        self._downloads = ThreadPoolExecutor(threads, thread_name_prefix="download")
        self._cancels: dict[tuple[str, int, bool], Cancel] = {}
        self._staged: dict[int, download.Payloads] = {}
        self._tickets = itertools.count(1)
        self._session: session.Session | None = None
        self._metrics = Metrics(config.metrics_port, restarts=config.restarts)
        self._vitals = Vitals(HealthFile(config.health_file))
        self._identity = Identity(learner=config.learner, epoch=0, incarnation=0)
        backoff = Backoff(*RECONNECT_SECONDS, random.Random())  # noqa: S311  jitter, not a secret
        self._conversation = Conversation(
            slots=[self._slot(index) for index in range(len(layout.fragments))],
            has_constants=bool(layout.constants),
            next_delay=backoff.next,
            reset_delay=backoff.reset,
            syncer=config.syncer,
        )

    def _slot(self, fragment: int) -> Slot:
        found = self._shared.inbox_state(fragment)
        return Slot(fragment=fragment, published=found.generation, version=found.version)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until the trainer is gone or says that it leaves."""
        threading.Thread(target=self._listen, name="trainer", daemon=True).start()
        while True:
            now = time.monotonic()
            self._vitals.tell(self._conversation.said, now)
            due = (self._conversation.wake_at, self._vitals.due_at)
            wake = min((at for at in due if at is not None), default=None)
            timeout = None if wake is None else max(0.0, wake - now)
            try:
                entry = self._events.get(timeout=timeout)
            except queue.Empty:
                entry = 0, ev.Tick()
            if entry is None:
                return
            number, event = entry
            if number not in (0, self._sessions):
                continue  # of a session that was given up
            if not self._handle(event):
                return
            self._pipe.flush()

    def _post(self, event: ev.Event) -> None:
        self._events.put((0, event))

    def _listen(self) -> None:
        while True:
            self._pipe.wait(60.0)
            try:
                line = self._pipe.newest()
            except EOFError:
                self._events.put(None)
                return
            if line is not None:
                self._post(ev.Heard(state=TrainerState.from_line(line)))

    def _handle(self, event: ev.Event) -> bool:
        """Decide and do; False when this process is to end."""
        if isinstance(event, ev.Heard):
            self._metrics.heard(event.state)
            self._vitals.heard(event.state, time.monotonic())
        elif isinstance(event, ev.Welcomed):
            self._identity = Identity(
                learner=self._config.learner, epoch=event.epoch, incarnation=event.incarnation
            )
            log.info(
                "joined as incarnation %d in epoch %d at step %d",
                event.incarnation,
                event.epoch,
                event.step,
            )
        elif isinstance(event, ev.Lost):
            event = self._explained(event)
            log.warning("session lost: %s", event.text)
        todo = self._conversation.handle(event, time.monotonic())
        while todo:
            decision, *todo = todo
            if isinstance(decision, ev.Leave):
                self._vitals.leave(decision.reason, time.monotonic())
                self._leave(decision.reason)
                return False
            if isinstance(decision, ev.Place):
                # Placed before anything else is heard: what follows from it comes first.
                todo = [*self._conversation.handle(self._place(decision), time.monotonic()), *todo]
            else:
                self._carry_out(decision)
        return True

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Tell():
                self._pipe.offer(self._conversation.said.to_line())
            case ev.Connect():
                self._connect(decision.state)
            case ev.SendReport():
                if self._session is not None:
                    self._session.report(session.report(decision.state))
            case ev.SendHeartbeat():
                if self._session is not None:
                    self._session.send(pb.LearnerMessage(heartbeat=pb.Heartbeat()))
            case ev.CancelTransfers():
                for cancel in self._cancels.values():
                    cancel.stop()
                self._cancels.clear()
            case ev.Upload():
                cancel = self._begin("up", decision.pull.fragment, once=False)
                self._uploads.submit(self._pull, decision.pull, self._identity, cancel)
            case ev.UploadInitial():
                cancel = self._begin("initial", 0, once=False)
                self._uploads.submit(self._initial, decision, self._identity, cancel)
            case ev.Download():
                cancel = self._begin("down", decision.fragment, once=decision.round == 0)
                self._downloads.submit(self._download, decision, self._identity, cancel)
            case ev.Drop():
                self._forget(decision.staged)
            case ev.Place() | ev.Leave():
                raise AssertionError("taken by the loop")

    # ------------------------------------------------------------ the session

    def _connect(self, state: TrainerState) -> None:
        if self._session is not None:
            self._session.close()
        self._control.renew()
        self._renew_bulk()
        facts = {
            "hostname": platform.node(),
            "pid": str(os.getppid()),
            "restarts": str(self._config.restarts),
        }
        first = session.hello(self._config, self._spec, self._shared.layout, state, facts)
        self._sessions += 1
        number = self._sessions
        self._session = session.Session(
            self._control.channel, first, lambda event: self._events.put((number, event))
        )

    def _renew_bulk(self) -> None:
        """Dial anew if the certificate files were replaced."""
        self._up.renew()
        self._down.renew()

    def _explained(self, lost: ev.Lost) -> ev.Lost:
        """With what is wrong with our own certificate, which the syncer does not tell."""
        if self._config.tls is None or explain(lost.text) != "HandshakeRefused":
            return lost
        fault = fault_of(self._config.tls)
        return dataclasses.replace(lost, text=f"{lost.text}; {fault}") if fault else lost

    def _leave(self, reason: str) -> None:
        if self._session is not None:
            self._session.send(pb.LearnerMessage(goodbye=pb.Goodbye(reason=reason)))
            self._session.close(timeout_seconds=GOODBYE_SECONDS)

    # ------------------------------------------------------------ transfers

    def _begin(self, kind: str, fragment: int, *, once: bool) -> Cancel:
        """A new transfer replaces the one of the same kind and fragment that still runs."""
        cancel = Cancel()
        before = self._cancels.get((kind, fragment, once))
        if before is not None:
            before.stop()
        self._cancels[(kind, fragment, once)] = cancel
        return cancel

    def _pull(self, pull: ev.Pulled, identity: Identity, cancel: Cancel) -> None:
        try:
            if not cancel.stopped:
                self._uploader.pull(pull, identity, cancel)
        except DilocoError as error:
            self._renew_bulk()
            if not cancel.stopped:
                log.warning(
                    "upload of fragment %d for round %d attempt %d: %s: %s",
                    pull.fragment, pull.round, pull.attempt, error.reason, error,
                )  # fmt: skip
        except Exception:
            log.exception("upload of fragment %d", pull.fragment)

    def _initial(self, decision: ev.UploadInitial, identity: Identity, cancel: Cancel) -> None:
        error = ""
        try:
            if cancel.wait(decision.delay_seconds):
                return
            self._uploader.initial(identity, cancel)
        except DilocoError as problem:
            self._renew_bulk()
            error = f"{problem.reason}: {problem}"
        except Exception as problem:
            log.exception("upload of the initial model")
            error = repr(problem)
        if cancel.stopped:
            return
        if error:
            log.warning("upload of the initial model: %s", error)
        self._post(ev.InitialSent(request=decision.request, error=error))

    def _download(self, wish: ev.Download, identity: Identity, cancel: Cancel) -> None:
        staged, error = None, ""
        try:
            if cancel.wait(wish.delay_seconds):
                return
            staged = self._fetch(wish, identity, cancel)
        except DilocoError as problem:
            self._renew_bulk()
            error = f"{problem.reason}: {problem}"
        except Exception as problem:
            log.exception("download of fragment %d", wish.fragment)
            error = repr(problem)
        if cancel.stopped and staged is None:
            return
        if error:
            log.info("download of fragment %d for round %d: %s", wish.fragment, wish.round, error)
        self._post(ev.Downloaded(wish=wish, staged=staged, error=error))

    def _fetch(self, wish: ev.Download, identity: Identity, cancel: Cancel) -> Staged | None:
        fragments = self._shared.layout.fragments
        constants = wish.fragment == len(fragments)
        # A result that could not be had as such is current by now, or came to nothing.
        current = wish.round == 0 or wish.tries > 1
        payloads = download.fetch(
            self._down.channel,
            identity=identity,
            fragment=wish.fragment,
            round=0 if current else wish.round,
            attempt=0 if current else wish.attempt,
            # A fresh learner starts from exactly Θ; results come in the job's format.
            fmt=wire.RAW if constants else wire.FP32 if wish.round == 0 else 0,
            expected=None if constants else fragments[wish.fragment],
            take_buffer=(lambda n: np.empty(n, np.uint8))
            if constants
            else (lambda n: self._buffers.take()),
            cancel=cancel,
        )
        if payloads is None:
            return None
        if constants:
            room = self._shared.constants
            if payloads.size_bytes > room.size:
                raise DilocoError(
                    f"constants of {payloads.size_bytes} bytes, expected at most {room.size}"
                )
            room[: payloads.size_bytes] = payloads.buffer[: payloads.size_bytes]
        ticket = next(self._tickets)
        self._staged[ticket] = payloads
        return Staged(fragment=wish.fragment, version=payloads.version, ticket=ticket)

    def _place(self, decision: ev.Place) -> ev.Placed:
        staged = decision.staged
        fragment = self._shared.layout.fragments[staged.fragment]
        error = ""
        with self._shared.hold(fragment.index):
            self._shared.begin_inbox(fragment.index)
            try:
                download.decode_into(
                    self._staged[staged.ticket], fragment, self._shared.inbox(fragment.index)
                )
            except DilocoError as problem:
                log.error("fragment %d of version %s: %s", fragment.index, staged.version, problem)
                error = str(problem)
            else:
                self._shared.publish(fragment.index, decision.generation, staged.version)
        self._forget(staged)
        return ev.Placed(fragment=fragment.index, error=error)

    def _forget(self, staged: Staged) -> None:
        payloads = self._staged.pop(staged.ticket, None)
        if payloads is not None and staged.fragment < len(self._shared.layout.fragments):
            self._buffers.give(payloads.buffer)


def main() -> None:
    """Entry point of `python -m diloco_worker.link`."""
    parser = argparse.ArgumentParser(
        description="The network side of one learner; started by the learner."
    )
    parser.add_argument(
        "--memory", type=int, required=True, help="file descriptor of the shared memory"
    )
    parser.add_argument(
        "--socket", type=int, required=True, help="file descriptor of the socket to the trainer"
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    options = parser.parse_args()
    _live_with(options.parent)
    tune_malloc()
    tune_interpreter()
    config = settings.from_env()
    if config is None:
        raise SystemExit("DILOCO_SYNCER is not set; the link is started by a learner, not by hand")
    configure_logging(json=config.json_logs, name="link")
    for warning in kernel_warnings():
        log.info("%s", warning)
    pipe = Pipe(socket.socket(fileno=options.socket))
    try:
        link = Link(config, config.read_spec(), Shared.attach(options.memory), pipe)
    except ConfigError as error:
        pipe.offer(LinkState(refused_exit=EXIT_REFUSED, text=str(error)).to_line())
        raise SystemExit(EXIT_REFUSED) from None
    link.run()
    sys.stderr.flush()
    # Threads of gRPC and of transfers may still wait for a network that nobody needs any more.
    os._exit(0)


def _live_with(parent: int) -> None:
    """
    Die with the trainer, and only with it: signals meant for the whole group are the trainer's
    business.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)  # it died before we asked for the signal


if __name__ == "__main__":
    main()
