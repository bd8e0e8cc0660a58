"""
The learner's end of a Session stream: messages out, events in.

A newer report replaces one that was not sent yet, so a stream slower than the steps carries only
the latest.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from diloco.errors import (
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    ConfigError,
    DilocoError,
    MismatchError,
    NotFiniteError,
    StaleIncarnationError,
    UnauthorisedError,
    UnknownLearnerError,
)
from diloco.model.fragments import Layout
from diloco.rpc.peer_address import is_address
from diloco.rpc.status_codes import error_of
from diloco.rpc.tensor_info import pack_frozen, to_proto
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_worker.core import events as ev
from diloco_worker.core.messages import TrainerState
from diloco_worker.settings import LearnerSettings

log = logging.getLogger("diloco.link")

HEARTBEATS = (0.1, 60.0)
"""Seconds between two heartbeats that a syncer may ask for."""

MAX_RUN_CHARACTERS = 64

MAX_PEERS = 8
"""Of one Welcome; further ones are not asked."""

UNAUTHORISED_SECONDS = 10.0
"""Pause after the certificate was refused: each refusal is an event in the journal of the syncer."""


class Session:
    """
    One stream; its events go to `post`, the last of them is `SessionLost`.

    Args:
        channel: control channel; not closed here.
        hello: the first message.
        post: takes events from this session's thread.
    """

    def __init__(
        self, channel: grpc.Channel, hello: pb.Hello, post: Callable[[ev.Event], None]
    ) -> None:
        self._post = post
        self._changed = threading.Condition()
        self._queue: deque[pb.LearnerMessage] = deque([pb.LearnerMessage(hello=hello)])
        self._report: pb.LearnerMessage | None = None
        self._closing = False
        self._compared = bool(hello.frozen) or any(t.buffer for t in hello.tensors)
        """Whether the model has something that a syncer of an earlier version does not know."""
        self._call = SyncerStub(channel).Session(self._outgoing())
        self._thread = threading.Thread(target=self._incoming, name="session", daemon=True)
        self._thread.start()

    def report(self, message: pb.Report) -> None:
        """Send a report, in place of any that was not sent yet."""
        with self._changed:
            self._report = pb.LearnerMessage(report=message)
            self._changed.notify()

    def blocks(self, message: pb.Blocks) -> None:
        """State the blocks of this learner, in place of a statement that was not sent yet."""
        with self._changed:
            waiting = [m for m in self._queue if m.WhichOneof("kind") == "blocks"]
            for earlier in waiting:
                self._queue.remove(earlier)
            self._queue.append(pb.LearnerMessage(blocks=message))
            self._changed.notify()

    def send(self, message: pb.LearnerMessage) -> None:
        """Send a message, after all earlier ones."""
        with self._changed:
            self._queue.append(message)
            self._changed.notify()

    def goodbye(self, reason: str) -> None:
        """Send the report that was not sent yet, and why the learner leaves."""
        with self._changed:
            if self._report is not None:
                self._queue.append(self._report)
                self._report = None
            self._queue.append(pb.LearnerMessage(goodbye=pb.Goodbye(reason=reason)))
            self._changed.notify()

    def close(self, *, timeout_seconds: float = 0.0) -> None:
        """Send what is queued, then end the stream; cancel it after the timeout."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_seconds)
        self._call.cancel()

    def _outgoing(self) -> Iterator[pb.LearnerMessage]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._report or self._closing)
                if self._queue:
                    message = self._queue.popleft()
                elif self._report is not None:
                    message, self._report = self._report, None
                else:
                    return
            yield message

    def _incoming(self) -> None:
        lost = ev.SessionLost(text="the syncer ended the session")
        try:
            for message in self._call:
                if self._compared and not_compared(message):
                    lost = NOT_COMPARED
                    self._call.cancel()
                    break
                event = event_of(message)
                if event is not None:
                    self._post(event)
        except grpc.RpcError as error:
            lost = lost_of(error_of(error))
        except Exception as error:  # else the link would wait for a session that no thread reads
            log.exception("a message of the syncer could not be processed")
            lost = ev.SessionLost(text=f"a message could not be processed: {error!r}")
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify()
        self._post(lost)


def hello(
    settings: LearnerSettings,
    spec: RunSpec,
    layout: Layout,
    state: TrainerState,
    facts: dict[str, str],
    *,
    peer_address: str = "",
) -> pb.Hello:
    """The first message of a session."""
    return pb.Hello(
        job=settings.job,
        learner=settings.learner,
        region=settings.region,
        spec_hash=spec.hash,
        tensors=[to_proto(t) for t in layout.tensors],
        constants=[to_proto(t) for t in layout.constants],
        incarnation=state.incarnation,
        local_step=max(state.local_step, state.checkpoint_local_step),
        checkpoint_step=state.checkpoint_step,
        facts=facts,
        frozen=pack_frozen(layout.frozen),
        peer_address=peer_address,
        cluster=settings.cluster,
    )


def report(state: TrainerState) -> pb.Report:
    """The trainer's state as a report."""
    return pb.Report(
        local_step=state.local_step,
        steps=state.steps,
        tokens=state.tokens,
        offers=state.offers,
        total_tokens=state.total_tokens,
        loss=state.loss if state.loss is not None else 0.0,
        has_loss=state.loss is not None,
        step_seconds=state.step_seconds,
        sync_seconds=state.sync_seconds,
        global_step=state.global_step,
    )


def recovery(stated: Mapping[str, Any]) -> pb.LearnerMessage:
    """With which state the optimizers began (core/recovery.py), as a message."""
    return pb.LearnerMessage(recovery=pb.Recovery(**stated))


def blocks(stated: Mapping[str, Any]) -> pb.Blocks:
    """The trainer's blocks (core/open_blocks.py) as a message."""
    trained = [pb.TrainedBlock(serial=s, begin=b, end=e) for s, b, e in stated["trained"]]
    return pb.Blocks(
        items=stated["items"],
        size=stated["size"],
        wanted=stated["wanted"],
        open=stated["open"],
        trained=trained,
    )


def event_of(message: pb.SyncerMessage) -> ev.Event | None:
    """What a message of the syncer means; None: nothing."""
    match message.WhichOneof("kind"):
        case "welcome":
            w = message.welcome
            return ev.Welcomed(
                epoch=w.epoch, incarnation=w.incarnation, step=w.step, steps=w.steps, local_step=w.local_step,
                total_tokens=w.total_tokens, heartbeat_seconds=_heartbeat(w.heartbeat_seconds),
                use_checkpoint=w.use_checkpoint, run=w.run[:MAX_RUN_CHARACTERS],
                start_id=w.start_id[:MAX_RUN_CHARACTERS],
                snapshot_start_id=w.snapshot_start_id[:MAX_RUN_CHARACTERS],
                peers=tuple(
                    ev.PeerAddress(p.learner, p.address)
                    for p in w.peers[:MAX_PEERS] if is_address(p.address)
                ),
                leases_blocks=w.leases_blocks,
            )  # fmt: skip
        case "initialise":
            return ev.InitialRequested()
        case "ready":
            versions = tuple((v.epoch, v.step) for v in message.ready.versions)
            return ev.ModelReady(versions=versions)
        case "committed":
            c = message.committed
            return ev.Committed(fragment=c.fragment, version=(c.version.epoch, c.version.step))
        case "open":
            o = message.open
            return ev.Opened(step=o.step, steps=o.steps, fragments=tuple(o.fragments))
        case "pull":
            p = message.pull
            versions = tuple((v.epoch, v.step) for v in p.versions)
            return ev.Pulled(
                round=p.round, attempt=p.attempt, fragment=p.fragment, versions=versions,
                probe=p.probe,
            )  # fmt: skip
        case "result":
            r = message.result
            return ev.ResultAnnounced(round=r.round, attempt=r.attempt, fragment=r.fragment)
        case "leases":
            return ev.Leased(serials=tuple(message.leases.serials))
        case "complete":
            return ev.Completed(step=message.complete.step)
    return None  # a heartbeat, or a message of a newer version


NOT_COMPARED = ev.SessionLost(
    text=(
        "the syncer is older than this learner: it would not compare frozen parameters with those of the other "
        "learners, nor merge buffers that change; use the same version for both, or set sync.frozen to Ship and "
        "sync.buffers to Initial in a new job"
    ),
    refused_exit=EXIT_REFUSED,
)


def not_compared(message: pb.SyncerMessage) -> bool:
    """Whether it is the Welcome of a syncer that knows neither `Hello.frozen` nor `TensorInfo.buffer`."""
    return message.WhichOneof("kind") == "welcome" and not message.welcome.compares_frozen


def _heartbeat(seconds: float) -> float:
    """The interval that the syncer states; of 0 or NaN seconds, the link would do nothing else."""
    return seconds if HEARTBEATS[0] <= seconds <= HEARTBEATS[1] else 1.0


def lost_of(error: DilocoError) -> ev.SessionLost:
    """What the error that ended a session means."""
    if isinstance(error, StaleIncarnationError):
        text = f"this process was replaced by a newer one of the same learner: {error}"
        return ev.SessionLost(text=text, refused_exit=EXIT_TRY_AGAIN)
    if isinstance(error, MismatchError | UnknownLearnerError | ConfigError | NotFiniteError):
        return ev.SessionLost(
            text=f"refused by the syncer ({error.reason}): {error}",
            refused_exit=EXIT_REFUSED,
        )
    if isinstance(error, UnauthorisedError):
        # Keep running: the files can be replaced, and training continues meanwhile.
        return ev.SessionLost(
            text=f"the syncer refused the certificate of this learner: {error}",
            pause_seconds=UNAUTHORISED_SECONDS,
        )
    return ev.SessionLost(text=str(error))
