"""
The receiving end of one upload, without I/O and without waiting: messages in, replies out.

    header ─► delta against the current version ──────────────► merge, chunk by chunk
           ─► whole, or against an older version ─► staged ───► merge, once v is known
           ─► a part of Θ^(0) ────────────────────────────────► kept until all parts are there

A gRPC thread drives it (uploads.py), and so does the simulator. Nothing that it receives is visible
before the engine commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.codec import formats
from diloco.errors import AbortedError, DilocoError, NotFiniteError, ProtocolError, UnavailableError
from diloco.model.digests import MAX_BYTES
from diloco.model.fragments import Layout
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.attempts import MemberUpload
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution, ContributionError
from diloco_syncer.merging.streaming import MergeFailedError
from diloco_syncer.rpc.initial import InitialParameters
from diloco_syncer.rpc.transfers import (
    Chunks,
    Host,
    Waiting,
    check_sender,
    check_size,
    reply,
    unpack,
)
from diloco_syncer.rpc.upload_parts import MemberChunks, Part, part_of

log = logging.getLogger(__name__)


class UploadReceiver:
    """
    One upload of one learner.

    Call `receive` with each message while `waiting` is None, else `resume`, until `done`.

    Args:
        host: the syncer.
        initial: the parts of Θ^(0) so far, shared by all uploads.
        authorise: raises a DilocoError unless the peer may act for this learner.
        cancel: ends the stream.
        refuse: records a refusal that concerns no round, with the name that the peer stated.
    """

    def __init__(
        self, host: Host, initial: InitialParameters, *,
        authorise: Callable[[str], None], cancel: Callable[[], None],
        refuse: Callable[[str, DilocoError], None],
    ) -> None:  # fmt: skip
        self._host, self._initial = host, initial
        self._authorise, self._cancel, self._refuse = authorise, cancel, refuse
        self._header: bulk.UploadHeader | None = None
        self._chunks = Chunks(0)
        self._part: Part | None = None
        self._upload: MemberUpload | None = None
        self.done = False
        """The last reply was returned: `done` or `refused`. Further messages are ignored."""

    @property
    def waiting(self) -> Waiting | None:
        """What must happen before `receive` may be called; None: nothing."""
        return None if self.done or self._part is None else self._part.waiting

    def awaits(self, now: float) -> None:
        """The caller waits for the next message from now on: until it comes, the time is the peer's own."""
        if self._upload is not None and self._upload.awaits_from is None:
            self._upload.awaits_from = now

    def receive(self, message: bytes | None, now: float) -> list[bytes]:
        """
        Receive a message; returns packed replies.

        Args:
            message: the next of the stream; None: the peer has sent its last.
            now: monotonic seconds.
        """
        if self.done:
            return []
        if self._upload is not None and self._upload.awaits_from is not None:
            self._upload.awaited_seconds += now - self._upload.awaits_from
            self._upload.awaits_from = None
        if self._header is None:
            return self._begin(message, now)
        if message is None:
            # gRPC may present a call that was cut as one whose peer has sent its last.
            self.lost()
            return [reply(refused=UnavailableError.reason, detail=self._chunks.ended_early())]
        header = self._header
        self._host.metrics.received(header.learner, len(message))
        return self._checked(header, lambda: self._take(header.learner, message, now))

    def resume(self, now: float) -> list[bytes]:
        """Continue if what `waiting` shows has happened; returns packed replies."""
        if self.done or self._header is None or self._part is None:
            return []
        part = self._part

        def resume() -> list[bytes]:
            part.resume(now)
            return self._replies()

        return self._checked(self._header, resume)

    def lost(self) -> None:
        """The stream broke: the round must not wait for this member, which is not at fault."""
        header, over = self._header, self.done
        self.done = True
        if header is None or over or (self._upload is not None and self._upload.replaced):
            return
        if header.round:
            detail = "the connection broke in the middle of the upload"
            self._dropped(header, header.learner, ev.STREAM_BROKEN, detail)
        else:
            log.info("an upload of initial parameters by %s broke", header.learner)

    def failed(self, error: Exception) -> list[bytes]:
        """
        An error of this program, such as an OOM: no member is at fault, and the round continues without this one.

        Returns:
            The packed reply that ends the upload; its sender may try again.
        """
        header, name = self._header, self._header.learner if self._header else "an unknown sender"
        if header is not None and header.round:
            # First, and `done` last: if this fails as well, `lost` reports that the member is not at fault.
            self._end_delivery(header)
            self._host.post(self._failed(header, repr(error), learner=name))
        self.done = True
        log.error("an upload of %s cannot be received", name, exc_info=error)
        detail = f"the syncer could not receive the upload ({type(error).__name__}); see its log"
        return [reply(refused=UnavailableError.reason, detail=detail)]

    # ------------------------------------------------------------ messages

    def _begin(self, message: bytes | None, now: float) -> list[bytes]:
        header: bulk.UploadHeader | None = None
        try:
            if message is None:
                raise ProtocolError("an upload without a header; send UploadHeader first")
            header = unpack(message, bulk.UploadHeader)
            self._authorise(header.learner)
            check_sender(self._host, header)
        except DilocoError as error:
            # The sender is not who it claims: the round that it names is not affected.
            self._refuse(header.learner if header else "", error)
            self.done = True
            return [reply(refused=error.reason, detail=str(error))]
        self._host.metrics.received(header.learner, len(message))
        self._header = header
        return self._checked(header, lambda: self._open(header, now))

    def _open(self, header: bulk.UploadHeader, now: float) -> list[bytes]:
        layout = self._host.facts.layout
        if layout is None:
            raise UnavailableError("no model is known yet; send Hello first")
        check_header(header, layout, up=self._host.spec.wire_up)
        self._upload = MemberUpload(header.learner, self._cancel)
        if header.content in (bulk.INITIAL, bulk.CONSTANTS):
            self._part = self._initial.begin(header, layout, self._upload)
        else:
            self._part = self._contribute(header, layout, self._upload, now)
        self._chunks = Chunks(header.chunks)  # a number that was checked
        self._part.resume(now)
        return []

    def _take(self, learner: str, message: bytes, now: float) -> list[bytes]:
        if self._part is None:
            raise AssertionError("a message before the header was accepted")
        check_size(message)
        chunk = self._chunks.receive(message)
        if chunk is not None:
            self._part.take(*chunk, now)
        elif self._chunks.again:
            if self._chunks.damage:
                log.warning("upload of %s: %s; requested again", learner, self._chunks.damage)
            return [reply(again=self._chunks.again)]
        elif self._chunks.complete:
            self._part.end(now)
        return self._replies()

    def _replies(self) -> list[bytes]:
        if self._part is None or not self._part.delivered:
            return []
        self.done = True
        return [reply(done=True)]

    def _checked(self, header: bulk.UploadHeader, action: Callable[[], list[bytes]]) -> list[bytes]:
        """A DilocoError becomes a refusal, and the engine learns that the member cannot deliver."""
        try:
            return action()
        except DilocoError as error:
            self.done = True
            self._drop(header, error)
            # In no variable of this function: its frame is part of the traceback, and such a circle
            # would keep the merge in memory until the next full garbage collection.
            if isinstance(error, ContributionError) and error.learner != header.learner:
                return [
                    reply(refused=AbortedError.reason, detail=f"the round was aborted: {error}")
                ]
            return [reply(refused=error.reason, detail=str(error))]

    # ------------------------------------------------------------ contributions

    def _contribute(
        self, header: bulk.UploadHeader, layout: Layout, upload: MemberUpload, now: float
    ) -> Part:
        fragment, contribution = layout.fragments[header.fragment], contribution_of(header, layout)
        if contribution.base is not None:
            contribution.check_norms(fragment)
        attempt = self._host.attempts.get(header.round, header.attempt)
        if attempt is None or attempt.fragment != header.fragment:
            raise AbortedError(
                f"round {header.round} attempt {header.attempt} is not running; wait for the next pull"
            )
        parameters = self._host.facts.parameters
        if parameters is None:
            raise UnavailableError("there are no parameters yet")
        attempt.join(upload)
        chunks = MemberChunks(self._host, attempt, upload, chunks=fragment.chunks)
        if upload.received_bytes and attempt.running() is not None:
            chunks.post_progress(now)  # the stream before may have been held back; this one is not
        return part_of(chunks, contribution, fragment, parameters)

    def _drop(self, header: bulk.UploadHeader, error: DilocoError) -> None:
        """Notify the engine that a member cannot deliver, or that the merge failed."""
        if isinstance(error, MergeFailedError):
            log.error("round %d: %s", header.round, error, exc_info=error.__cause__)
            self._host.post(self._failed(header, str(error)))
        if isinstance(error, UnavailableError):
            self._end_delivery(header)
            return  # no member is at fault: the attempt is over
        if not header.round:
            self._refuse(header.learner, error)
            if isinstance(error, NotFiniteError):
                failed = ev.InitialFailed(
                    learner=header.learner, reason=error.reason, detail=str(error)
                )
                self._host.post(failed)
            return
        # The thread that completes a chunk may detect the fault of another member.
        learner = error.learner if isinstance(error, ContributionError) else header.learner
        self._dropped(header, learner, error.reason, str(error))

    def _dropped(self, header: bulk.UploadHeader, learner: str, reason: str, detail: str) -> None:
        self._end_delivery(header)
        self._host.post(
            ev.Dropped(
                learner=learner,
                round=header.round,
                attempt=header.attempt,
                reason=reason,
                detail=detail,
            )
        )

    def _end_delivery(self, header: bulk.UploadHeader) -> None:
        """The end of the attempt cancels the streams of its members; this one gets a reply."""
        attempt = self._host.attempts.get(header.round, header.attempt)
        if attempt is not None and self._upload is not None:
            attempt.leave(self._upload)

    def _failed(self, header: bulk.UploadHeader, reason: str, *, learner: str = "") -> ev.Failed:
        """The thread of an upload does the work of the syncer, like the coordinator's own."""
        attempt = self._host.attempts.get(header.round, header.attempt)
        if attempt is not None and attempt.probe:
            probe = ev.ProbeLearner(
                round=header.round,
                attempt=header.attempt,
                fragment=header.fragment,
                learner=header.learner,
            )
            return ev.Failed(decision=probe, reason=reason)
        begun = ev.BeginMerge(
            round=header.round, attempt=header.attempt, fragment=header.fragment, contributions=()
        )
        return ev.Failed(decision=begun, reason=reason, learner=learner)


def check_header(header: bulk.UploadHeader, layout: Layout, *, up: str) -> None:
    """
    Check that the header fits the model and the job.

    Args:
        header: of the upload.
        layout: of the model.
        up: the job's format of deltas; what comes whole is FP32, and so are buffers.

    Raises:
        ProtocolError: its fragment, size, format or content does not exist.
    """
    if header.content == bulk.CONSTANTS:
        return  # no fragment; initial.py checks it
    if header.fragment >= len(layout.fragments):
        raise ProtocolError(
            f"fragment {header.fragment} does not exist; the model has {len(layout.fragments)}"
        )
    fragment = layout.fragments[header.fragment]
    if (header.elements, header.chunks) != (fragment.elements, fragment.chunks):
        raise ProtocolError(
            f"fragment {header.fragment} came with {header.elements} values in {header.chunks} chunks, "
            f"expected {fragment.elements} in {fragment.chunks}"
        )
    if header.content not in (bulk.DELTA, bulk.WHOLE, bulk.INITIAL):
        raise ProtocolError(
            f"content {header.content} is not one of DELTA, WHOLE, INITIAL, CONSTANTS"
        )
    delta = header.content == bulk.DELTA
    expected = formats.of_fragment(up, fragment) if delta else formats.FP32
    if header.format != expected:
        raise ProtocolError(f"format {header.format}, expected {expected} of this job for it")


def contribution_of(header: bulk.UploadHeader, layout: Layout) -> Contribution:
    """The contribution that an upload of content DELTA or WHOLE announces."""
    whole = header.content == bulk.WHOLE
    return Contribution(
        learner=header.learner,
        incarnation=header.incarnation,
        round=header.round,
        attempt=header.attempt,
        local_step=header.local_step,
        steps=header.steps,
        tokens=header.tokens,
        base=None if whole else (header.base.epoch, header.base.step),
        format=header.format,
        norms=tuple(header.norms),
        buffers=layout.fragments[header.fragment].buffers,
        # No merge depends on them, and a line of the journal is bounded.
        digests=header.digests if len(header.digests) <= MAX_BYTES else b"",
    )
