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
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from diloco.codec import formats
from diloco.errors import DilocoError, NotFiniteError, ProtocolError, UnavailableError
from diloco.model.fragments import Fragment, Layout
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.attempts import Attempt, AttemptAbortedError
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution, ContributionError
from diloco_syncer.merging.streaming import FragmentMerge
from diloco_syncer.rpc.initial import InitialParameters
from diloco_syncer.rpc.transfers import (
    F32,
    Chunks,
    Host,
    Waiting,
    check_sender,
    decode_chunk,
    reply,
    unpack,
)
from diloco_syncer.storage.parameters import Parameters

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.25
"""The engine is notified of a member's progress at most this often, and at the end."""

HELD_BACK_SECONDS = 0.25
"""How often a member that the window holds back is noted as alive."""

MERGE_SECONDS = 60.0
"""How often an upload whose round has not begun to merge asks again; the end of the round wakes it."""


class _Part(Protocol):
    """Where the chunks of one upload go."""

    @property
    def waiting(self) -> Waiting | None:
        """Why the next message must wait."""

    @property
    def delivered(self) -> bool:
        """Everything has arrived and been taken."""

    def take(self, index: int, payload: memoryview, now: float) -> None:
        """Take one chunk."""

    def end(self, now: float) -> None:
        """All chunks were taken."""

    def resume(self, now: float) -> None:
        """Continue after waiting, if that is possible now."""


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
        self._part: _Part | None = None
        self.done = False
        """The last reply was returned: `done` or `refused`. Further messages are ignored."""

    @property
    def waiting(self) -> Waiting | None:
        """What must happen before `receive` may be called; None: nothing."""
        return None if self.done or self._part is None else self._part.waiting

    def receive(self, message: bytes | None, now: float) -> list[bytes]:
        """
        Receive a message; returns packed replies.

        Args:
            message: the next of the stream; None: the peer has sent its last.
            now: monotonic seconds.
        """
        if self.done:
            return []
        if self._header is None:
            return self._begin(message, now)
        if message is not None:
            self._host.metrics.received(self._header.learner, len(message))
        header = self._header
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
        """The stream broke: the round must not wait for this member."""
        if self._header is None or self.done:
            return
        self.done = True
        error = ProtocolError("the upload ended unexpectedly; see the log of the syncer")
        self._drop(self._header, error)

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
        check_header(header, layout, up=formats.format_of(self._host.spec.wire_up))
        if header.content in (bulk.INITIAL, bulk.CONSTANTS):
            self._part = self._initial.begin(header, layout)
        else:
            self._part = self._contribute(header, layout)
        self._chunks = Chunks(header.chunks)  # a number that was checked
        self._part.resume(now)
        return []

    def _take(self, learner: str, message: bytes | None, now: float) -> list[bytes]:
        if self._part is None:
            raise AssertionError("a message before the header was accepted")
        if message is None:
            raise self._chunks.ended_early()
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
            refusal = error
            if isinstance(error, ContributionError) and error.learner != header.learner:
                refusal = AttemptAbortedError(f"the round was aborted: {error}")
            return [reply(refused=refusal.reason, detail=str(refusal))]

    # ------------------------------------------------------------ contributions

    def _contribute(self, header: bulk.UploadHeader, layout: Layout) -> _Part:
        fragment, contribution = layout.fragments[header.fragment], contribution_of(header)
        if contribution.base is not None:
            contribution.check_norms(fragment)
        attempt = self._host.attempts.get(header.round, header.attempt)
        if attempt is None or attempt.fragment != header.fragment:
            raise AttemptAbortedError(
                f"round {header.round} attempt {header.attempt} is not running; wait for the next pull"
            )
        parameters = self._host.facts.parameters
        if parameters is None:
            raise UnavailableError("there are no parameters yet")
        delivery = _Delivery(self._host, attempt, header.learner, self._cancel)
        if attempt.probe:
            return _Discarded(delivery, contribution, fragment)
        if contribution.base == parameters.current(fragment.index).version:
            return _Streamed(delivery, contribution)
        return _Staged(delivery, contribution, fragment, parameters)

    def _drop(self, header: bulk.UploadHeader, error: DilocoError) -> None:
        """Notify the engine that a member cannot deliver."""
        if isinstance(error, UnavailableError):
            return  # no member is at fault: the attempt is over
        if not header.round:
            self._refuse(header.learner, error)
            if isinstance(error, NotFiniteError):
                failed = ev.InitialFailed(
                    learner=header.learner, reason=error.reason, detail=str(error)
                )
                self._host.post(failed)
            return
        attempt = self._host.attempts.get(header.round, header.attempt)
        if attempt is not None:
            # The end of the attempt cancels the streams of its members; this one gets a reply.
            attempt.delivered(header.learner)
        self._host.post(
            ev.Dropped(
                # The thread that completes a chunk may detect the fault of another member.
                learner=error.learner if isinstance(error, ContributionError) else header.learner,
                round=header.round,
                attempt=header.attempt,
                reason=error.reason,
                detail=str(error),
            )
        )


class _Delivery:
    """Chunks of one member on their way into the merge, held while it has no room or has not begun."""

    def __init__(
        self, host: Host, attempt: Attempt, learner: str, cancel: Callable[[], None]
    ) -> None:
        self.attempt, self.learner = attempt, learner
        self._host, self._cancel = host, cancel
        self._merge: FragmentMerge | None = None
        self._held: deque[tuple[int, formats.Buffer]] = deque()
        self._joined = False
        self._bytes = 0
        self._posted_at, self._posted_waiting = float("-inf"), False

    def join(self, contribution: Contribution) -> None:
        """Hand the contribution to the engine, which begins the merge once it has all of them."""
        self.attempt.join(self.learner, self._cancel)
        self._joined = True
        self._host.post(contribution)

    def add(self, index: int, payload: formats.Buffer) -> None:
        """Add a chunk; it is kept until the merge takes it."""
        self._held.append((index, payload))

    def advance(self, now: float) -> None:
        """Add to the merge what it has room for."""
        if self._joined and self._merge is None:
            self._merge = self.attempt.running()
        if self._merge is None:
            return
        while self._held:
            index, payload = self._held[0]
            if not self._merge.has_room(self.learner, index):
                if self.attempt.over:
                    raise AttemptAbortedError(f"round {self.attempt.round} was aborted")
                self.post_progress(now, waiting=True)
                return
            self._held.popleft()
            self._merge.add(self.learner, index, payload)
        if self._posted_waiting:
            # From now on the others wait for this member, also if its next chunk never comes.
            self.post_progress(now, resumed=True)

    def received(self, size: int, now: float) -> None:
        """Count payload that arrived."""
        self._bytes += size
        self.attempt.count(size)
        self.post_progress(now)

    def post_progress(
        self, now: float, *, waiting: bool = False, resumed: bool = False, done: bool = False
    ) -> None:
        """Notify the engine of the bytes so far, unless that was done a moment ago."""
        if not (done or resumed) and now - self._posted_at < PROGRESS_SECONDS:
            return
        self._posted_at, self._posted_waiting = now, waiting
        self._host.post(
            ev.Progress(
                learner=self.learner,
                round=self.attempt.round,
                attempt=self.attempt.attempt,
                received_bytes=self._bytes,
                waiting=waiting,
                done=done,
            )
        )

    @property
    def waiting(self) -> Waiting | None:
        """For the merge to begin, or for room in it."""
        if not self._joined:
            return None
        if self._merge is None:
            return Waiting(until=self.attempt.wait_for_merge, seconds=MERGE_SECONDS)
        if self._held:
            until = partial(self._merge.wait_for_room, self.learner, self._held[0][0])
            return Waiting(until=until, seconds=HELD_BACK_SECONDS)
        return None

    def end(self, now: float) -> None:
        """Every chunk was added."""
        merge, attempt = self._merge, self.attempt
        attempt.delivered(self.learner)
        self.post_progress(now, done=True)
        if merge is not None and merge.finished:
            result = merge.result()
            self._host.post(
                ev.Merged(
                    round=attempt.round,
                    attempt=attempt.attempt,
                    delta_norm=result.delta_norm,
                    bytes_up=attempt.bytes_up,
                    bytes_result=result.encoded_bytes,
                    confirmed=result.confirmed,
                    sizes=result.sizes,
                )
            )


class _Discarded:
    """A probe: what counts is that all of it arrives."""

    waiting: Waiting | None = None

    def __init__(self, delivery: _Delivery, contribution: Contribution, fragment: Fragment) -> None:
        self._delivery, self._contribution, self._fragment = delivery, contribution, fragment
        self.delivered = False

    def take(self, index: int, payload: memoryview, now: float) -> None:
        self._contribution.check_chunk(self._fragment, index, len(payload))
        self._delivery.received(len(payload), now)

    def end(self, now: float) -> None:
        self._delivery.end(now)
        self.delivered = True

    def resume(self, now: float) -> None:
        if self._delivery.attempt.over:
            raise AttemptAbortedError("the probe is over")


class _Streamed:
    """The usual case: a delta against the current version goes chunk by chunk into the merge."""

    def __init__(self, delivery: _Delivery, contribution: Contribution) -> None:
        self._delivery = delivery
        self.delivered = False
        delivery.join(contribution)

    @property
    def waiting(self) -> Waiting | None:
        return self._delivery.waiting

    def take(self, index: int, payload: memoryview, now: float) -> None:
        self._delivery.received(len(payload), now)
        self._delivery.add(index, payload)
        self._delivery.advance(now)

    def end(self, now: float) -> None:
        self._delivery.end(now)
        self.delivered = True

    def resume(self, now: float) -> None:
        self._delivery.advance(now)


class _Staged:
    """Whole, or against an older version: rebuild v = Θ_p − θ_{m,p}, then merge that."""

    def __init__(
        self, delivery: _Delivery, contribution: Contribution, fragment: Fragment,
        parameters: Parameters,
    ) -> None:  # fmt: skip
        self._delivery, self._contribution, self._fragment = delivery, contribution, fragment
        self._current_N = parameters.current(fragment.index).theta_N
        self._base_N = _base(parameters, fragment.index, contribution)
        self._delta_N = np.zeros(fragment.elements, np.float32)
        self._rebuilt = False
        self.delivered = False

    @property
    def waiting(self) -> Waiting | None:
        return self._delivery.waiting

    def take(self, index: int, payload: memoryview, now: float) -> None:
        if self._delivery.attempt.over:
            raise AttemptAbortedError(f"round {self._delivery.attempt.round} was aborted")
        self._delivery.received(len(payload), now)
        decode_chunk(self._contribution.format, self._fragment, index, payload, self._delta_N)

    def end(self, now: float) -> None:
        delta_N, fragment = self._delta_N, self._fragment
        if self._base_N is None:
            np.subtract(self._current_N, delta_N, out=delta_N)
        else:
            delta_N += self._current_N - self._base_N
        norms = tuple(formats.slot_norms(fragment, delta_N))
        staged = replace(self._contribution, format=bulk.FP32, norms=norms)
        staged.check_norms(fragment)
        self._delivery.join(staged)
        for index in range(fragment.chunks):
            lo, hi = fragment.chunk(index)
            self._delivery.add(index, delta_N[lo:hi].view(np.uint8))
        self._rebuilt = True
        self.resume(now)

    def resume(self, now: float) -> None:
        self._delivery.advance(now)
        if self._rebuilt and not self.delivered and self._delivery.waiting is None:
            self._delivery.end(now)
            self.delivered = True


def _base(parameters: Parameters, fragment: int, contribution: Contribution) -> F32 | None:
    if contribution.base is None:
        return None
    base_N = parameters.at(fragment, contribution.base)
    if base_N is None:
        raise ProtocolError(
            f"fragment {fragment} came as a delta against {contribution.base}, which "
            "the syncer no longer holds; send it whole"
        )
    return base_N


def check_header(header: bulk.UploadHeader, layout: Layout, *, up: int) -> None:
    """
    Check that the header fits the model and the job.

    Args:
        header: of the upload.
        layout: of the model.
        up: the job's format of deltas; what comes whole is FP32.

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
        raise ProtocolError(f"content {header.content} is none of DELTA, WHOLE, INITIAL, CONSTANTS")
    expected = up if header.content == bulk.DELTA else formats.FP32
    if header.format != expected:
        raise ProtocolError(f"format {header.format}, expected {expected} of this job for it")


def contribution_of(header: bulk.UploadHeader) -> Contribution:
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
    )
