"""
One Session stream as the learner's end sees it: messages out, events in.

Reports are newest-wins: when the stream is slower than the steps, only the latest leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import grpc

from diloco.errors import (
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    ConfigError,
    DilocoError,
    MismatchError,
    StaleIncarnationError,
    UnauthorisedError,
    UnknownLearnerError,
)
from diloco.fragments import Layout, Tensor
from diloco.spec import RunSpec
from diloco.transport import error_of
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_worker.core import events as ev
from diloco_worker.core.messages import TrainerState
from diloco_worker.settings import LearnerSettings

UNAUTHORISED_SECONDS = 10.0
"""Pause after the certificate was refused: people replace it, each refusal is a line in the audit."""


class Session:
    """
    One stream; its events go to `post`, the last of them is `Lost`.

    Args:
        channel: control channel; not closed here.
        hello: first message.
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
        self._call = SyncerStub(channel).Session(self._outgoing())
        self._thread = threading.Thread(target=self._incoming, name="session", daemon=True)
        self._thread.start()

    def report(self, message: pb.Report) -> None:
        """Send a report, instead of any that has not left yet."""
        with self._changed:
            self._report = pb.LearnerMessage(report=message)
            self._changed.notify()

    def send(self, message: pb.LearnerMessage) -> None:
        """Send a message, after those before it."""
        with self._changed:
            self._queue.append(message)
            self._changed.notify()

    def close(self, *, timeout_seconds: float = 0.0) -> None:
        """Send what is queued, then end the stream; cut it when that takes too long."""
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
        lost = ev.Lost(text="the syncer ended the session")
        try:
            for message in self._call:
                event = _event(message)
                if event is not None:
                    self._post(event)
        except grpc.RpcError as error:
            lost = _lost(error_of(error))
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
) -> pb.Hello:
    """The first message of a session."""
    return pb.Hello(
        job=settings.job,
        learner=settings.learner,
        region=settings.region,
        spec_hash=spec.hash,
        tensors=tensor_infos(layout.tensors),
        constants=tensor_infos(layout.constants),
        incarnation=state.incarnation,
        local_step=max(state.local_step, state.checkpoint_local_step),
        checkpoint_step=state.checkpoint_step,
        facts=facts,
    )


def tensor_infos(tensors: Iterable[Tensor]) -> list[pb.TensorInfo]:
    """Descriptions as they travel."""
    return [
        pb.TensorInfo(
            name=t.name, shape=t.shape, dtype=t.dtype, embedding=t.embedding, aliases=t.aliases
        )
        for t in tensors
    ]


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


def _event(message: pb.SyncerMessage) -> ev.Event | None:
    match message.WhichOneof("kind"):
        case "welcome":
            w = message.welcome
            return ev.Welcomed(
                epoch=w.epoch, incarnation=w.incarnation, step=w.step, steps=w.steps, local_step=w.local_step,
                total_tokens=w.total_tokens, heartbeat_seconds=w.heartbeat_seconds or 1.0,
                use_checkpoint=w.use_checkpoint,
            )  # fmt: skip
        case "initialise":
            return ev.InitialWanted()
        case "ready":
            return ev.ModelReady()
        case "open":
            o = message.open
            return ev.Opened(step=o.step, steps=o.steps, fragments=tuple(o.fragments))
        case "pull":
            p = message.pull
            versions = tuple((v.epoch, v.step) for v in p.versions)
            return ev.Pulled(
                round=p.round, attempt=p.attempt, fragment=p.fragment, versions=versions
            )
        case "result":
            r = message.result
            return ev.ResultComing(round=r.round, attempt=r.attempt, fragment=r.fragment)
        case "complete":
            return ev.Completed(step=message.complete.step)
    return None  # a heartbeat, or something newer than this program


def _lost(error: DilocoError) -> ev.Lost:
    if isinstance(error, StaleIncarnationError):
        text = f"this process was replaced by a newer one of the same learner: {error}"
        return ev.Lost(text=text, refused_exit=EXIT_TRY_AGAIN)
    if isinstance(error, MismatchError | UnknownLearnerError | ConfigError):
        return ev.Lost(
            text=f"the syncer refused this learner ({error.reason}): {error}",
            refused_exit=EXIT_REFUSED,
        )
    if isinstance(error, UnauthorisedError):
        # No reason to end: the files may be replaced, and training goes on meanwhile.
        return ev.Lost(
            text=f"the syncer refused the certificate of this learner: {error}",
            pause_seconds=UNAUTHORISED_SECONDS,
        )
    return ev.Lost(text=str(error))
