"""
`Link`: carries out the decisions of core/link_protocol.py and turns what happens into events.

Threads: the main thread decides and writes to the trainer; `trainer` reads from it; `session` reads
the syncer's messages; `upload` and `download` transfer fragments (bulk.py); `health` writes the health
file and `log` the log, since the main thread sends heartbeats and must not wait for a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import queue
import random
import threading
import time
from collections.abc import Iterator

from diloco.rpc.channels import Connection
from diloco.rpc.connection_reasons import explain
from diloco.rpc.identity import server_name
from diloco.rpc.tls import fault_of
from diloco.runtime.backoff import Backoff
from diloco.runtime.health import BackgroundHealthFile
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import TrainerState
from diloco_worker.core.peer_recovery import PeerRecovery
from diloco_worker.ipc.pipe import Pipe
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.link import session
from diloco_worker.link.bulk import BulkTransfers, Ended
from diloco_worker.link.heartbeat import HealthReporter
from diloco_worker.link.metrics import Metrics
from diloco_worker.link.peer_ends import Peers
from diloco_worker.link.peer_server import Facts
from diloco_worker.link.transfer import Identity
from diloco_worker.settings import LearnerSettings

log = logging.getLogger("diloco.link")

GOODBYE_SECONDS = 2.0
"""Timeout for sending Goodbye."""

RECONNECT_SECONDS = (0.2, 5.0)
"""First and longest pause between attempts to reach the syncer."""

SWEEP_SECONDS = 15.0
"""Interval at which idle buffers are freed; one is freed after 15 to 30 s without a transfer."""

LAST_HEALTH_SECONDS = 0.5
"""How long the end waits for the disk to take the last state of the health file."""

HEALTH_RETRY_SECONDS = 5.0
"""Pause after a health report that failed unexpectedly."""

_Entry = tuple[int, ev.Event] | Ended | Exception | None
"""
An event with the number of its session, or 0 if it belongs to none; the end of a transfer; what ended
a thread; None: the trainer is gone.
"""


class Link:
    """
    The link of one trainer.

    Args:
        config: from the environment.
        spec: of the job.
        shared: memory shared with the trainer.
        pipe: socket to the trainer.

    Raises:
        ConfigError: the TLS files cannot be used.
    """

    def __init__(
        self, config: LearnerSettings, spec: RunSpec, shared: SharedMemory, pipe: Pipe
    ) -> None:
        self._config, self._spec, self._shared, self._pipe = config, spec, shared, pipe
        self._events: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._control = Connection(
            config.syncer, tls_dir=config.tls, purpose="control",
            server_name=server_name(config.job), proxy=config.proxy,
        )  # fmt: skip
        self._session: session.Session | None = None
        self._session_number = 0
        self._transfers = BulkTransfers(config, spec, shared, self._events.put)
        self._identity = Identity(learner=config.learner, epoch=0, incarnation=0)
        self._step_seconds, self._saves = 0.0, False
        facts = Facts(
            run=lambda: self._protocol.link_state.run,
            step=lambda: self._protocol.link_state.step,
            saves=lambda: self._saves,
            step_seconds=lambda: self._step_seconds,
            uploading=lambda: self._transfers.uploading,
            wanted=lambda step: self._events.put((0, ev.PeerAsks(step=step))),
        )
        self._metrics = Metrics(config.metrics_port, restarts=config.restarts)
        self._health = HealthReporter(BackgroundHealthFile(config.health_file))
        self._health_retry_at = float("-inf")
        self._failed: set[str] = set()
        """What failed unexpectedly and was logged."""
        self._sweep_at: float | None = None
        backoff = Backoff(*RECONNECT_SECONDS, random.Random())  # noqa: S311  jitter, not a secret
        self._protocol = LinkProtocol(
            slots=[self._slot(index) for index in range(len(shared.layout.fragments))],
            has_constants=bool(shared.layout.constants),
            next_delay=backoff.next,
            reset_delay=backoff.reset,
            syncer=config.syncer,
            recovery=PeerRecovery(interval=spec.interval) if config.peers else None,
        )
        self._peers = Peers(
            config,
            spec,
            shared.layout,
            facts=facts,
            post=lambda event: self._events.put((0, event)),
        )

    def _slot(self, fragment: int) -> Slot:
        inbox = self._shared.inbox_state(fragment)
        return Slot(fragment=fragment, published=inbox.generation, version=inbox.version)

    # ------------------------------------------------------------ the event loop

    def run(self) -> str:
        """
        Return when the trainer is gone, leaves the job, or something unexpected has happened.

        Returns:
            The reason if the link cannot continue, and the trainer is to start another; else empty.
        """
        threading.Thread(target=self._listen, name="trainer", daemon=True).start()
        try:
            while self._turn():
                pass
        except Exception as error:
            # A decision that was not carried out, or only in part, leaves this process in an
            # unknown state; a new one continues from the shared memory.
            log.exception("unexpected error; the link process ends")
            reason = f"the link failed: {error!r}"
            with contextlib.suppress(Exception):
                state = dataclasses.replace(self._protocol.link_state, connected=False, text=reason)
                self._pipe.offer(state.to_line())
            return reason
        return ""

    def _turn(self) -> bool:
        """Wait for an event and process it; False if this process is to end."""
        now = time.monotonic()
        due = (self._protocol.wake_at, self._report_health(now), self._sweep(now))
        wake = min((at for at in due if at is not None), default=None)
        try:
            entry = self._events.get(timeout=None if wake is None else max(0.0, wake - now))
        except queue.Empty:
            entry = 0, ev.Tick()
        if entry is None:
            return False
        if isinstance(entry, Exception):
            raise entry
        event = self._transfers.settle(entry) if isinstance(entry, Ended) else self._current(*entry)
        if event is not None:
            if not self._handle(event):
                return False
            self._pipe.flush()
        if isinstance(entry, Ended):
            self._transfers.proceed()
        return True

    def _current(self, number: int, event: ev.Event) -> ev.Event | None:
        """The event, unless it is from a session that was replaced."""
        return event if number in (0, self._session_number) else None

    def _sweep(self, now: float) -> float | None:
        """Free idle buffers if that is due; when it is due next, None if there are no buffers."""
        if self._sweep_at is not None and now >= self._sweep_at:
            self._transfers.buffers.sweep()
            self._sweep_at = None
        if self._sweep_at is None and self._transfers.buffers.held_bytes:
            self._sweep_at = now + SWEEP_SECONDS
        return self._sweep_at

    def _report_health(self, now: float) -> float | None:
        """Write the health file if that is due; when it is due next, None if there is none."""
        if now >= self._health_retry_at:
            self._health_retry_at = now + HEALTH_RETRY_SECONDS
            with self._logged("health file"):
                unchanged = self._transfers.unchanged
                self._health.report(self._protocol.link_state, now, unchanged=unchanged)
                self._health_retry_at = now
        due = self._health.due_at
        return None if due is None else max(due, self._health_retry_at)

    def _observe(self, state: TrainerState) -> None:
        """Metrics and health of a state of the trainer; neither may end this process."""
        self._step_seconds, self._saves = state.step_seconds, state.saves
        with self._logged("health file"):
            self._health.observe(state, time.monotonic())
        with self._logged("metrics"):
            self._metrics.observe(state)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log the first unexpected exception of the block and continue after it."""
        try:
            yield
        except Exception:
            if what not in self._failed:
                log.exception("%s: unexpected error; further ones are not logged", what)
            self._failed.add(what)

    def _listen(self) -> None:
        try:
            while True:
                self._pipe.wait(60.0)
                line = self._pipe.newest()
                if line is not None:
                    self._events.put((0, ev.TrainerUpdate(state=TrainerState.from_line(line))))
        except EOFError:
            self._events.put(None)
        except Exception as error:
            self._events.put(error)

    def _handle(self, event: ev.Event) -> bool:
        """Decide and act; False if this process is to end."""
        if isinstance(event, ev.TrainerUpdate):
            self._observe(event.state)
        elif isinstance(event, ev.Welcomed):
            self._identity = Identity(
                learner=self._config.learner, epoch=event.epoch, incarnation=event.incarnation,
                start_id=event.start_id,
            )  # fmt: skip
            log.info(
                "joined as incarnation %d in epoch %d at step %d",
                event.incarnation,
                event.epoch,
                event.step,
            )
        elif isinstance(event, ev.SessionLost):
            event = self._explained(event)
            log.warning("session lost: %s", event.text)
        was_late = bool(self._protocol.late)
        pending = self._protocol.handle(event, time.monotonic())
        if bool(self._protocol.late) != was_late:
            log.warning("%s", self._protocol.late or "every fragment may be offered again")
        while pending:
            decision, *pending = pending
            if isinstance(decision, ev.Leave):
                self._leave(decision.reason)
                return False
            if isinstance(decision, ev.Place):
                # The decisions that follow from placing come before the remaining ones.
                placed = self._transfers.place(decision)
                pending = [*self._protocol.handle(placed, time.monotonic()), *pending]
            else:
                self._carry_out(decision)
        return True

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.NotifyTrainer():
                self._pipe.offer(self._protocol.link_state.to_line())
            case ev.Connect():
                self._connect(decision.state)
            case ev.SendReport():
                if self._session is not None:
                    self._session.report(session.report(decision.state))
            case ev.SendBlocks():
                if self._session is not None:
                    self._session.blocks(session.blocks(decision.blocks))
            case ev.SendRecovery():
                if self._session is not None:
                    self._session.send(session.recovery(decision.recovery))
            case ev.SendHeartbeat():
                if self._session is not None:
                    self._session.send(pb.LearnerMessage(heartbeat=pb.Heartbeat()))
            case ev.CancelTransfers():
                self._transfers.cancel_all()
            case ev.Upload():
                self._transfers.upload(decision.pull, self._identity)
            case ev.UploadInitial():
                self._transfers.upload_initial(decision, self._identity)
            case ev.Download():
                self._transfers.download(decision, self._identity)
            case ev.Discard():
                self._transfers.discard(decision.staged)
            case ev.AskPeer():
                self._peers.ask(decision)
            case ev.DropPeer():
                self._peers.drop(decision.number)
            case ev.Place() | ev.Leave():
                raise AssertionError("handled by the event loop")

    # ------------------------------------------------------------ the session

    def _connect(self, state: TrainerState) -> None:
        if self._session is not None:
            self._session.close()
        self._control.renew()
        self._transfers.renew_connections()
        facts = {
            "hostname": platform.node(),
            "pid": str(os.getppid()),
            "restarts": str(self._config.restarts),
        }
        first = session.hello(
            self._config,
            self._spec,
            self._shared.layout,
            state,
            facts,
            peer_address=self._peers.address,
        )
        self._session_number += 1
        number = self._session_number
        self._session = session.Session(
            self._control.channel, first, lambda event: self._events.put((number, event))
        )

    def _explained(self, lost: ev.SessionLost) -> ev.SessionLost:
        """Add what is wrong with this learner's certificate, which the syncer does not report."""
        if self._config.tls is None or explain(lost.text) != "HandshakeRefused":
            return lost
        fault = fault_of(self._config.tls)
        return dataclasses.replace(lost, text=f"{lost.text}; {fault}") if fault else lost

    def _leave(self, reason: str) -> None:
        with self._logged("health file"):
            self._health.leave(reason, time.monotonic())
        if self._session is not None:
            self._session.goodbye(reason)
            self._session.close(timeout_seconds=GOODBYE_SECONDS)
        self._health.settle(LAST_HEALTH_SECONDS)
