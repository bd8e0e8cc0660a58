"""
gRPC in, events out: translates, never decides.

Two services on one port. Learners use a connection of their own for each, so bulk data cannot delay a heartbeat.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from diloco import wire
from diloco.errors import (
    DamagedError,
    DilocoError,
    MismatchError,
    ProtocolError,
    StaleEpochError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.fragments import CHUNK, Fragment, Layout, Tensor, cut, differences
from diloco.transport import aborting
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco.v1 import syncer_pb2_grpc
from diloco_syncer import state, status
from diloco_syncer.attempt import Attempt, AttemptAbortedError
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import HEARTBEAT_SECONDS
from diloco_syncer.identity import Gate
from diloco_syncer.runner import Runner
from diloco_syncer.runner import Session as Stream
from diloco_syncer.store import EventLog
from diloco_syncer.theta import Theta
from diloco_syncer.uploads import Initial, receive

log = logging.getLogger(__name__)

OUTPUT_SECONDS = 300.0
"""The longest a download waits for one more chunk of a running merge."""


class SyncerService(syncer_pb2_grpc.SyncerServicer):
    """The control service."""

    def __init__(self, runner: Runner, evaluations: EventLog, gate: Gate) -> None:
        self._runner = runner
        self._gate = gate
        self._evaluations = evaluations
        self._joining = threading.Lock()

    # ------------------------------------------------------------ sessions

    def Session(
        self, request_iterator: Iterator[pb.LearnerMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.SyncerMessage]:
        """One learner's stream, from its Hello to its end."""
        with aborting(context):
            first = next(request_iterator, None)
            if first is None or first.WhichOneof("kind") != "hello":
                raise ProtocolError("a session begins with Hello")
            session = self._join(first.hello, context)
            reader = threading.Thread(
                target=self._read,
                args=(session, request_iterator),
                name=f"session {session.learner}",
                daemon=True,
            )
            reader.start()
            try:
                yield from self._write(session, context)
            finally:
                self._runner.close_session(session, "StreamEnded")

    def _join(self, hello: pb.Hello, context: grpc.ServicerContext) -> Stream:
        runner = self._runner
        try:
            self._gate.admit(context, hello.learner)
            _know(runner, hello)
            with self._joining:
                _agree(runner, hello)
                session = runner.open_session(hello.learner)
                runner.post(
                    ev.Hello(
                        session=session.number,
                        learner=hello.learner,
                        region=hello.region,
                        presented_incarnation=hello.incarnation,
                        fresh_incarnation=(
                            0 if hello.incarnation else runner.store.next_incarnation()
                        ),
                        local_step=hello.local_step,
                        checkpoint_step=hello.checkpoint_step,
                        restarts=_count(hello.facts.get("restarts", "")),
                    )
                )
        except DilocoError as error:
            runner.record("refuse", learner=hello.learner, reason=error.reason, detail=str(error))
            log.warning("refused %s: %s", hello.learner, error)
            raise
        return session

    def _read(self, session: Stream, messages: Iterator[pb.LearnerMessage]) -> None:
        reason = "StreamEnded"
        try:
            for message in messages:
                kind = message.WhichOneof("kind")
                if kind == "report":
                    self._runner.post(_reported(session, message.report))
                elif kind == "goodbye":
                    reason = message.goodbye.reason or "Goodbye"
                    break
                else:
                    self._runner.post(ev.Heard(session=session.number, learner=session.learner))
        except Exception as error:  # gRPC raises a bare Exception when the peer is gone
            log.debug("stream of %s ended: %s", session.learner, error)
        # The leave event carries the first reason given; the writer ends after it.
        self._runner.close_session(session, reason)
        session.outbox.put(None)

    @staticmethod
    def _write(session: Stream, context: grpc.ServicerContext) -> Iterator[pb.SyncerMessage]:
        while context.is_active():
            try:
                message = session.outbox.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                yield pb.SyncerMessage(heartbeat=pb.Heartbeat())
                continue
            if message is None:
                return
            if isinstance(message, DilocoError):
                raise message
            yield message

    # ------------------------------------------------------------ facts

    def GetStatus(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        """What people and controllers want to know."""
        with aborting(context):
            return self._runner.ask(lambda: status.reply(self._runner))

    def Evaluated(self, request: pb.Evaluation, context: grpc.ServicerContext) -> pb.EvaluatedReply:
        """Keep a score in eval.jsonl."""
        with aborting(context):
            runner = self._runner
            detail: dict[str, Any] = {}
            if request.detail:
                try:
                    detail = json.loads(request.detail)
                except ValueError:
                    raise ProtocolError("Evaluation.detail is not JSON") from None
            tokens = runner.ask(lambda: runner.engine.tokens)
            self._evaluations.append(
                {
                    "tokens": tokens,  # as of now, unless the evaluator knows them as of `step`
                    **detail,
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "step": request.step,
                    "loss": request.loss,
                }
            )
            runner.evaluation = (request.step, request.loss)
            return pb.EvaluatedReply()


def _count(text: str) -> int:
    """A peer's count; 0 where it says none, or nonsense."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _reported(session: Stream, report: pb.Report) -> ev.Reported:
    return ev.Reported(
        session=session.number,
        learner=session.learner,
        local_step=report.local_step,
        steps=tuple(report.steps),
        tokens=tuple(report.tokens),
        offers=frozenset(report.offers),
        total_tokens=report.total_tokens,
        global_step=report.global_step,
        step_seconds=report.step_seconds,
        sync_seconds=report.sync_seconds,
        loss=report.loss if report.has_loss else None,
    )


def _know(runner: Runner, hello: pb.Hello) -> None:
    """
    Is this one of ours?

    Raises:
        UnknownLearnerError, MismatchError.
    """
    spec = runner.spec
    if hello.job != spec.job:
        raise MismatchError(
            f"{hello.learner} is of job {hello.job!r}, this syncer runs {spec.job!r}; "
            "check DILOCO_SYNCER and DILOCO_JOB"
        )
    named = re.fullmatch(r"([^/]+)/[0-9]{1,9}", hello.learner)
    if named is None or named[1] != hello.region or hello.region not in spec.learners:
        raise UnknownLearnerError(
            f"{hello.learner!r} is in none of the job's regions {', '.join(sorted(spec.learners))}"
        )
    runner.differing.pop(hello.learner, None)
    if hello.spec_hash != spec.hash:
        runner.differing[hello.learner] = hello.spec_hash
        raise MismatchError(
            f"{hello.learner} runs spec {hello.spec_hash}, this syncer runs {spec.hash}; "
            "start it with the spec of this job"
        )


def _agree(runner: Runner, hello: pb.Hello) -> None:
    """
    Hold the learner's model against the job's; the first learner of a fresh job defines it.

    Raises:
        MismatchError: with every difference spelled out.
        ConfigError: the model cannot be cut into that many fragments.
    """
    layout = cut(
        [_tensor(t) for t in hello.tensors],
        num_fragments=runner.spec.fragments,
        constants=[_tensor(t) for t in hello.constants],
        average=runner.spec.average_parameters,
    )
    known = runner.layout
    if known is None or (runner.theta is None and not runner.sessions):
        runner.layout = layout
    elif known.digest != layout.digest:
        said = "; ".join(differences(known, layout))
        raise MismatchError(f"{hello.learner} trains another model than this job: {said}")


def _tensor(info: pb.TensorInfo) -> Tensor:
    return Tensor(
        name=info.name,
        shape=tuple(info.shape),
        dtype=info.dtype,
        embedding=info.embedding,
        aliases=tuple(info.aliases),
    )


# ---------------------------------------------------------------- bulk


class BulkService:
    """Raw bytes: uploads and downloads (bulk.proto)."""

    def __init__(self, runner: Runner, gate: Gate) -> None:
        self._runner = runner
        self._gate = gate
        self._initial = Initial()

    def handler(self) -> grpc.GenericRpcHandler:
        """For the server: methods without serializers, so nothing is copied on the way."""
        return grpc.method_handlers_generic_handler(
            "diloco.v1.Bulk",
            {
                "Upload": grpc.stream_stream_rpc_method_handler(self.upload),
                "Download": grpc.unary_stream_rpc_method_handler(self.download),
            },
        )

    def upload(
        self, request_iterator: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Take in one fragment (or the constants) of one learner."""
        with aborting(context):
            yield from receive(
                self._runner,
                self._initial,
                request_iterator,
                admit=lambda learner: self._gate.admit(context, learner),
                cancel=lambda: _cancel(context),
            )

    def download(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send the result of a round while it is being made, or a current fragment, or the constants."""
        with aborting(context):
            wanted = _wanted(request)
            runner = self._runner
            if wanted.learner:  # an observer reads and changes nothing
                self._admit(wanted.learner, context)
            theta, layout = runner.theta, runner.layout
            if theta is None or layout is None:
                raise UnavailableError("there are no parameters yet; wait for Ready")
            _entitled(runner, wanted)
            for message in self._messages(theta, layout, wanted):
                runner.count_down(wanted.learner, len(message))
                yield message

    def _admit(self, learner: str, context: grpc.ServicerContext) -> None:
        try:
            self._gate.admit(context, learner)
        except DilocoError as error:
            log.warning("refused a download: %s", error)
            self._runner.record("refuse", learner=learner, reason=error.reason, detail=str(error))
            raise

    def _messages(
        self, theta: Theta, layout: Layout, wanted: bulk.DownloadRequest
    ) -> Iterator[bytes]:
        if wanted.fragment == len(layout.fragments):
            return _constants(theta, wanted)
        if wanted.fragment > len(layout.fragments):
            raise ProtocolError(
                f"fragment {wanted.fragment} does not exist; the model has {len(layout.fragments)}"
            )
        fragment = layout.fragments[wanted.fragment]
        _exist(wanted, fragment.chunks)
        if wanted.round == 0:
            fmt = wanted.format or state.down_format(self._runner.spec)
            return _current(theta, fragment, wanted, fmt, self._runner.engine.step)
        attempt = self._runner.attempt(wanted.round, wanted.attempt)
        if attempt is None or attempt.fragment != wanted.fragment:
            raise UnavailableError(
                f"round {wanted.round} attempt {wanted.attempt} is over; ask for the current version"
            )
        return _result(
            attempt,
            fragment,
            wanted,
            state.down_format(self._runner.spec),
            self._runner.engine.step,
        )


def _wanted(request: bytes) -> bulk.DownloadRequest:
    try:
        return bulk.DownloadRequest.FromString(bytes(wire.unpack(request).payload))
    except DecodeError as error:
        raise DamagedError(f"the download request cannot be read: {error}") from None


def _exist(wanted: bulk.DownloadRequest, chunks: int) -> None:
    if max(wanted.chunks, default=0) >= max(1, chunks):
        raise ProtocolError(
            f"chunk {max(wanted.chunks)} of fragment {wanted.fragment}; it has {chunks}"
        )


def _cancel(context: grpc.ServicerContext) -> None:
    context.cancel()


def _entitled(runner: Runner, wanted: bulk.DownloadRequest) -> None:
    if wanted.learner == "":
        return  # an observer reads and changes nothing
    if wanted.epoch != runner.engine.epoch:
        raise StaleEpochError(
            f"the download is for epoch {wanted.epoch}, this is epoch {runner.engine.epoch}; say Hello again"
        )
    living = runner.living_incarnation(wanted.learner)
    if living != wanted.incarnation:
        raise StaleIncarnationError(
            f"incarnation {wanted.incarnation} of {wanted.learner} was replaced; this process must stop"
        )


def _frame(kind: wire.Kind, message: bulk.DownloadHeader | bulk.DownloadTrailer) -> bytes:
    return wire.pack(kind, 0, message.SerializeToString())


def _result(
    attempt: Attempt, fragment: Fragment, wanted: bulk.DownloadRequest, fmt: int, step: int
) -> Iterator[bytes]:
    """Chunks as the merge finishes them; whether they count is said at the end."""
    header = bulk.DownloadHeader(
        fragment=fragment.index,
        format=bulk.Format.ValueType(fmt),
        elements=fragment.elements,
        chunks=fragment.chunks,
        version=pb.Version(epoch=attempt.version[0], step=attempt.version[1]),
        step=step,
    )
    yield _frame(wire.Kind.HEADER, header)
    committed, reason = False, ""
    try:
        merge = attempt.merge(timeout_seconds=OUTPUT_SECONDS)
        for index in wanted.chunks or range(fragment.chunks):
            yield merge.output(index, OUTPUT_SECONDS)
        committed = attempt.outcome(timeout_seconds=OUTPUT_SECONDS)
        reason = "" if committed else "the round was aborted"
    except DilocoError as error:
        if not isinstance(error, AttemptAbortedError):
            log.info("round %d: %s", attempt.round, error)
        reason = str(error)
    yield _frame(wire.Kind.TRAILER, bulk.DownloadTrailer(committed=committed, reason=reason))


def _current(
    theta: Theta, fragment: Fragment, wanted: bulk.DownloadRequest, fmt: int, step: int
) -> Iterator[bytes]:
    """The committed version, encoded on the way."""
    held = theta.held(fragment.index)
    header = bulk.DownloadHeader(
        fragment=fragment.index,
        format=bulk.Format.ValueType(fmt),
        elements=fragment.elements,
        chunks=fragment.chunks,
        version=pb.Version(epoch=held.version[0], step=held.version[1]),
        step=step,
    )
    yield _frame(wire.Kind.HEADER, header)
    buffer = np.empty(wire.encoded_bytes(fmt, min(CHUNK, fragment.elements)), np.uint8)
    for index in wanted.chunks or range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        size = wire.encode(fmt, held.theta_N[lo:hi], buffer)
        yield wire.pack(wire.Kind.CHUNK, index, buffer[:size])
    yield _frame(wire.Kind.TRAILER, bulk.DownloadTrailer(committed=True))


def _constants(theta: Theta, wanted: bulk.DownloadRequest) -> Iterator[bytes]:
    """Frozen parameters and buffers as one safetensors blob."""
    blob, size = theta.constants, CHUNK * 4
    count = -(-len(blob) // size)
    _exist(wanted, count)
    version = pb.Version(epoch=theta.held(0).version[0], step=0)
    header = bulk.DownloadHeader(
        fragment=wanted.fragment, format=bulk.RAW, elements=len(blob), chunks=count, version=version
    )
    yield _frame(wire.Kind.HEADER, header)
    for index in wanted.chunks or range(count):
        yield wire.pack(wire.Kind.CHUNK, index, blob[index * size : (index + 1) * size])
    yield _frame(wire.Kind.TRAILER, bulk.DownloadTrailer(committed=True))
