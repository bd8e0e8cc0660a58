"""
The control service: sessions of learners, status, evaluations. Translates, never decides.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial

import grpc
from google.protobuf.message import Message

from diloco.errors import DilocoError, ProtocolError, UnavailableError
from diloco.journal.background import BackgroundWriter
from diloco.rpc.status_codes import aborting
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer import sessions
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import HEARTBEAT_SECONDS
from diloco_syncer.core.refusals import Refusals
from diloco_syncer.rpc import status, telemetry
from diloco_syncer.rpc.authorizer import Authorizer, certificate_serial
from diloco_syncer.rpc.call_limits import CallLimits
from diloco_syncer.runner import Runner
from diloco_syncer.state import State

log = logging.getLogger(__name__)

QUEUED_MESSAGES = 32
"""Messages of one session that may wait for the runner; more are left to gRPC's flow control."""

EVALUATIONS_PER_MINUTE = 120
"""Scores that are written; each is a line on the volume of the snapshots. Evaluators retry."""

EVALUATIONS_PART_BYTES = 8 << 20
"""Size of each of the two parts of eval.jsonl: about 50,000 scores."""

EVALUATIONS_SECONDS = 5.0
"""How long a reply waits until the disk has the score."""

MODEL_SECONDS = 60.0
"""How long a Hello waits while another one with frozen parameters is compared, which takes seconds at most."""

_QUERY_BYTES = 4096


class ControlService:
    """
    The gRPC service `Syncer` (syncer.proto).

    Args:
        runner: the syncer.
        evaluations: eval.jsonl.
        authorizer: checks who may join.
        limits: limits streams and records refusals.
        next_incarnation: a number never used before, durable; blocks.
    """

    def __init__(
        self, runner: Runner, evaluations: BackgroundWriter, authorizer: Authorizer, limits: CallLimits,
        *, next_incarnation: Callable[[], int],
    ) -> None:  # fmt: skip
        self._runner, self._evaluations, self._authorizer = runner, evaluations, authorizer
        self._limits, self._next_incarnation = limits, next_incarnation
        self._models = threading.Lock()
        """Held while the frozen parameters of a Hello are compared: each list may take hundreds of MB."""
        self._scored: deque[float] = deque(maxlen=EVALUATIONS_PER_MINUTE)
        """When the newest scores were written, monotonic."""
        self._reported = Refusals()
        """Reports of failures by region, "": of the job; any member may send as many as it likes."""

    def handler(self) -> grpc.GenericRpcHandler:
        """For the server: raw requests, so that nothing is parsed before its length was checked."""
        limits, serialize = self._limits, {"response_serializer": _serialize}
        return grpc.method_handlers_generic_handler(
            "diloco.v1.Syncer",
            {
                "Session": limits.sessions.handler(self.session, **serialize),
                "GetStatus": limits.queries.handler(self.get_status, **serialize),
                "Evaluated": limits.queries.handler(self.evaluated, **serialize),
                "Failed": limits.queries.handler(self.failed, **serialize),
                "RegionFailed": limits.queries.handler(self.region_failed, **serialize),
            },
        )

    # ------------------------------------------------------------ sessions

    def session(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.SyncerMessage]:
        """One learner's stream, from its Hello to its end."""
        with aborting(context):
            first = self._limits.first(self._limits.sessions, requests, context)
            session = self._join(first, context)
            reader = threading.Thread(
                target=self._read,
                args=(session, requests, context.cancel),
                name=f"session {session.learner}",
                daemon=True,
            )
            try:
                _start(reader)
                yield from _write(session, context)
            finally:
                self._leave(session, "StreamEnded")

    def _join(self, first: bytes | None, context: grpc.ServicerContext) -> sessions.Session:
        learner = ""
        try:
            hello = telemetry.hello(first)
            learner = hello.learner
            self._authorizer.check(context, learner)
            session = self._admit(hello)
            session.on_end = partial(self._limits.cancel_later, context)
            try:
                self._limits.join(learner, time.monotonic())
                incarnation = hello.incarnation or self._next_incarnation()
                event = telemetry.joined(
                    hello, session=session.number, incarnation=incarnation,
                    peer=context.peer(), certificate=certificate_serial(context),
                )  # fmt: skip
                self._runner.post(event)
            except BaseException:
                self._runner.sessions.close(session)
                raise
        except DilocoError as error:
            self._limits.refusals.refuse("a session", learner, error)
            raise
        return session

    def _admit(self, hello: pb.Hello) -> sessions.Session:
        spec = self._runner.spec
        if (hello.job, hello.spec_hash) != (spec.job, spec.hash):
            hello.ClearField("frozen")  # refused by these, before models are compared
        with self._one_at_a_time() if hello.frozen else nullcontext():
            applicant = telemetry.applicant(hello)
            hello.ClearField("frozen")
            _ = applicant.model  # checked here, not on the runner's thread
            return self._runner.admit(applicant)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._models.acquire(timeout=MODEL_SECONDS):
            raise UnavailableError(
                "the frozen parameters of other learners are being compared; try again"
            )
        try:
            yield
        finally:
            self._models.release()

    def _leave(self, session: sessions.Session, reason: str) -> None:
        self._runner.sessions.close(session)
        left = ev.Left(session=session.number, learner=session.learner, reason=reason)
        self._runner.post(left)

    def _read(
        self, session: sessions.Session, requests: Iterator[bytes], cancel: Callable[[], object]
    ) -> None:
        reason, end = "StreamEnded", None
        try:
            reason = self._receive(session, requests)
        except DilocoError as error:
            self._limits.refusals.refuse("a message", session.learner, error)
            reason, end = error.reason, error
        except grpc.RpcError as error:  # the peer is gone
            log.debug("stream of %s ended: %s", session.learner, error)
        except Exception as error:
            end = UnavailableError(
                f"a message of {session.learner} met an error of the syncer ({type(error).__name__}); see its log"
            )
            reason = end.reason
            self._limits.refusals.refuse("a message", session.learner, end, cause=error)
        # Before the writer ends: the leave event carries the first reason.
        self._leave(session, reason)
        session.outbox.put(end)
        if session.unread is not None:
            cancel()  # its writer waits for a peer that does not read

    def _receive(self, session: sessions.Session, requests: Iterator[bytes]) -> str:
        """Post what the learner sends; returns why it ended. Raises ProtocolError."""
        number, learner = session.number, session.learner
        fragments = self._runner.spec.fragments
        for count, request in enumerate(requests, start=1):
            if session.unread is not None:
                raise session.unread
            event = telemetry.received(
                request, session=number, learner=learner, fragments=fragments
            )
            if isinstance(event, ev.Left):
                return event.reason
            self._runner.post(event)
            if count % QUEUED_MESSAGES == 0:
                self._wait_for_runner()
        return "StreamEnded"

    def _wait_for_runner(self) -> None:
        """Until everything that this session posted is handled, however fast its learner sends."""
        while True:
            try:
                return self._runner.ask(lambda state: None)
            except UnavailableError:
                if self._runner.failure is not None:
                    return None  # the process ends

    # ------------------------------------------------------------ facts

    def get_status(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.StatusReply]:
        """The status for people and controllers."""
        with aborting(context):
            request = self._query(requests, context, pb.StatusRequest, most=_QUERY_BYTES)
            metrics = self._runner.metrics
            reply = self._runner.ask(lambda state: status.reply(state, metrics, request))
            yield from self._replying(reply, context)

    def evaluated(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.EvaluatedReply]:
        """Append a score to eval.jsonl."""
        with aborting(context):
            most = _QUERY_BYTES + telemetry.DETAIL_BYTES
            request = self._query(requests, context, pb.Evaluation, most=most)
            score = telemetry.score(request, steps=self._runner.spec.steps)

            def keep(state: State) -> int:
                self._count_score()
                state.evaluation = (score.step, score.loss)
                return state.engine.tokens

            tokens = self._runner.ask(keep)
            line = {
                "tokens": tokens,  # the current count, unless the evaluator knows that of `step`
                **score.detail,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "step": score.step,
                "loss": score.loss,
            }
            written = self._evaluations.append(line)
            if not (written and self._evaluations.flush(EVALUATIONS_SECONDS)):
                raise UnavailableError("the disk of the syncer does not accept the score; retry")
            yield from self._replying(pb.EvaluatedReply(), context)

    def failed(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.FailedReply]:
        """Keep why the job failed, for the operators of other regions."""
        with aborting(context):
            request = self._query(
                requests,
                context,
                pb.Failure,
                most=_QUERY_BYTES,
                check=self._authorizer.check_syncer,
            )
            failure = telemetry.failure(request)

            def keep(state: State) -> None:
                state.failure = failure
                self._log("", "the operator reported that the job failed: %s: %s", *failure)

            self._runner.ask(keep)
            yield from self._replying(pb.FailedReply(), context)

    def region_failed(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.RegionFailedReply]:
        """Record the region whose learners failed, for the operators of the other regions."""
        with aborting(context):
            request = self._query(requests, context, pb.RegionFailure, most=_QUERY_BYTES)
            with self._refusing("a RegionFailure"):
                self._authorizer.check_region(context, request.region)
                self._runner.ask(lambda state: self._keep_region_failure(state, request))
            yield from self._replying(pb.RegionFailedReply(), context)

    def _keep_region_failure(self, state: State, request: pb.RegionFailure) -> None:
        """Called on the runner's thread. Raises ProtocolError: the job has no such region."""
        region, reason, message = telemetry.region_failure(request, state.engine.limits)
        if not reason:
            state.region_failures.pop(region, None)
            return
        state.region_failures[region] = (reason, message, request.learners)
        text = "the operator of region %s reported that its learners failed: %s: %s"
        self._log(region, text, region, reason, message)

    def _log(self, region: str, text: str, *values: str) -> None:
        """Called on the runner's thread. A few lines per minute: the status has the newest report."""
        now = time.monotonic()
        self._reported.ended(now=now)
        if self._reported.refused(region, now=now):
            log.info(text, *values)

    def _count_score(self) -> None:
        """Called on the runner's thread. Raises UnavailableError: too many within a minute."""
        now = time.monotonic()
        if len(self._scored) == EVALUATIONS_PER_MINUTE and now < self._scored[0] + 60.0:
            raise UnavailableError(
                f"{EVALUATIONS_PER_MINUTE} scores were submitted within a minute; retry"
            )
        self._scored.append(now)

    def _query(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, message: type[telemetry.M],
        *, most: int, check: Callable[[grpc.ServicerContext], None] | None = None,
    ) -> telemetry.M:  # fmt: skip
        first = self._limits.first(self._limits.queries, requests, context)
        with self._refusing(f"a {message.DESCRIPTOR.name}"):
            (check or self._authorizer.check_observer)(context)
            if first is None:
                raise ProtocolError(f"a call without its {message.DESCRIPTOR.name}")
            return telemetry.parse(first, message, most=most)

    def _replying(self, reply: telemetry.M, context: grpc.ServicerContext) -> Iterator[telemetry.M]:
        """The reply of a query, whose thread must not wait for long until the peer reads it."""
        with self._limits.replying(self._limits.queries, context):
            yield reply

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Record the error of the body as a refusal."""
        try:
            yield
        except DilocoError as error:
            self._limits.refusals.refuse(what, "", error)
            raise


def _start(thread: threading.Thread) -> None:
    """Raises UnavailableError: the system refuses one more."""
    try:
        thread.start()
    except RuntimeError as error:
        raise UnavailableError(f"{thread.name}: {error}; connect again") from None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _write(session: sessions.Session, context: grpc.ServicerContext) -> Iterator[pb.SyncerMessage]:
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
