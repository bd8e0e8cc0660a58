"""
Where the chunks of one upload go: into the merge, chunk by chunk or rebuilt, or nowhere (a probe).

No I/O and no waiting: what cannot proceed shows what it is `Waiting` for. `part_of` chooses one for
each contribution; those of Θ^(0) are in `initial`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from diloco.codec import formats
from diloco.errors import AbortedError, ProtocolError
from diloco.model.fragments import Fragment
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.attempts import Attempt, MemberUpload
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.merging.streaming import FragmentMerge
from diloco_syncer.rpc.transfers import F32, Host, Waiting, decode_chunk
from diloco_syncer.storage.parameters import Parameters

PROGRESS_SECONDS = 0.25
"""The engine is notified of a member's progress at most this often, and at the end."""

HELD_BACK_SECONDS = 0.25
"""How often a member that the window holds back is noted as alive."""

MERGE_SECONDS = 60.0
"""How often an upload whose round has not begun to merge asks again; the end of the round wakes it."""


class Part(Protocol):
    """Where the chunks of one upload go."""

    @property
    def waiting(self) -> Waiting | None:
        """
        Why the next message must wait.

        Only the calls below change it: if it ended by itself, its thread would read on, and no message may come.
        """

    @property
    def delivered(self) -> bool:
        """Everything has arrived and been taken."""

    def take(self, index: int, payload: memoryview, now: float) -> None:
        """Take one chunk."""

    def end(self, now: float) -> None:
        """All chunks were taken."""

    def resume(self, now: float) -> None:
        """Continue after waiting, if that is possible now."""


class MemberChunks:
    """Chunks of one member on their way into the merge, held while it has no room or has not begun."""

    def __init__(self, host: Host, attempt: Attempt, upload: MemberUpload, *, chunks: int) -> None:
        self.attempt, self.learner = attempt, upload.learner
        self._host, self._upload = host, upload
        self._merge: FragmentMerge | None = None
        self._held: deque[tuple[int, formats.Buffer]] = deque()
        self._all, self._added = chunks, 0
        self._first_awaited, self._expected = 0.0, 0.0
        self._posted_at, self._posted_waiting = float("-inf"), False

    def contribute(self, contribution: Contribution) -> None:
        """Hand the contribution to the engine, which begins the merge once it has all of them."""
        self._upload.contributed = True
        if self._upload.counted_from is None or self.attempt.running() is None:
            self._upload.counted_from, self._upload.awaits_from = self._upload.awaited_seconds, None
        self._host.post(contribution)

    def add(self, index: int, payload: formats.Buffer) -> None:
        """Add a chunk; it is kept until the merge takes it."""
        self._held.append((index, payload))
        self._added += 1
        if self._added == 1:
            self._first_awaited = self._awaited()

    def advance(self, now: float) -> None:
        """Add to the merge what it has room for."""
        if self._upload.replaced:
            raise AbortedError(f"a newer upload of {self.learner} has begun")
        if self._upload.contributed and self._merge is None:
            self._merge = self.attempt.running()
        if self._merge is None:
            return
        while self._held:
            index, payload = self._held[0]
            if not self._merge.has_room(self.learner, index):
                if self.attempt.over:
                    raise AbortedError(f"round {self.attempt.round} was aborted")
                self._expected = self._expected or self._expect()
                self.post_progress(now, waiting=True)
                return
            self._held.popleft()
            self._merge.add(self.learner, index, payload)
        if self._posted_waiting:
            # From now on the others wait for this member, also if its next chunk never comes.
            self.post_progress(now)

    def _awaited(self) -> float:
        counted_from = self._upload.counted_from
        return 0.0 if counted_from is None else self._upload.awaited_seconds - counted_from

    def _expect(self) -> float:
        """At the rate so far, without the time until the first chunk, which does not depend on their number."""
        later = self._awaited() - self._first_awaited
        return self._first_awaited + later * (self._all - 1) / max(1, self._added - 1)

    def received(self, size: int, now: float) -> None:
        """Count payload that arrived."""
        self._upload.received_bytes += size
        self.attempt.count(size)
        self.post_progress(now)

    def post_progress(self, now: float, *, waiting: bool = False, done: bool = False) -> None:
        """Notify the engine of the bytes so far, unless that was done a moment ago and nothing else changed."""
        changed = done or waiting != self._posted_waiting
        if not changed and now - self._posted_at < PROGRESS_SECONDS:
            return
        self._posted_at, self._posted_waiting = now, waiting
        self._host.post(
            ev.Progress(
                learner=self.learner,
                round=self.attempt.round,
                attempt=self.attempt.attempt,
                received_bytes=self._upload.received_bytes,
                awaited_seconds=self._awaited(),
                expected_seconds=self._expected,
                waiting=waiting,
                done=done,
            )
        )

    @property
    def waiting(self) -> Waiting | None:
        """For the merge to begin, or for room in it."""
        if not self._upload.contributed:
            return None
        if self._merge is None:
            until = partial(self.attempt.wait_for_merge, upload=self._upload)
            return Waiting(until=until, seconds=MERGE_SECONDS)
        if self._held:
            until = partial(self._merge.wait_for_room, self.learner, self._held[0][0])
            return Waiting(until=until, seconds=HELD_BACK_SECONDS)
        return None

    def end(self, now: float) -> None:
        """Every chunk was added."""
        merge, attempt = self._merge, self.attempt
        attempt.delivered(self._upload)
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
                    digests=merge.digests(),
                )
            )


class _Discarded:
    """A probe: what counts is that all of it arrives."""

    waiting: Waiting | None = None

    def __init__(
        self, chunks: MemberChunks, contribution: Contribution, fragment: Fragment
    ) -> None:
        self._chunks, self._contribution, self._fragment = (
            chunks,
            contribution,
            fragment,
        )
        self.delivered = False

    def take(self, index: int, payload: memoryview, now: float) -> None:
        self.resume(now)  # the rest would only keep the learner from its next upload
        self._contribution.check_chunk(self._fragment, index, len(payload))
        self._chunks.received(len(payload), now)

    def end(self, now: float) -> None:
        self._chunks.end(now)
        self.delivered = True

    def resume(self, now: float) -> None:
        if self._chunks.attempt.over:
            raise AbortedError("the probe is over")


class _Streamed:
    """The usual case: a delta against the current version goes chunk by chunk into the merge."""

    def __init__(self, chunks: MemberChunks, contribution: Contribution) -> None:
        self._chunks = chunks
        self.delivered = False
        chunks.contribute(contribution)

    @property
    def waiting(self) -> Waiting | None:
        return self._chunks.waiting

    def take(self, index: int, payload: memoryview, now: float) -> None:
        self._chunks.received(len(payload), now)
        self._chunks.add(index, payload)
        self._chunks.advance(now)

    def end(self, now: float) -> None:
        self._chunks.end(now)
        self.delivered = True

    def resume(self, now: float) -> None:
        self._chunks.advance(now)


class _Staged:
    """Whole, or against an older version: rebuild v = Θ_p − θ_{m,p}, then merge that."""

    def __init__(
        self, chunks: MemberChunks, contribution: Contribution, fragment: Fragment,
        parameters: Parameters,
    ) -> None:  # fmt: skip
        self._chunks, self._contribution, self._fragment = (
            chunks,
            contribution,
            fragment,
        )
        self._current_N = parameters.current(fragment.index).theta_N
        self._base_N = _base(parameters, fragment.index, contribution)
        self._delta_N = np.zeros(fragment.elements, np.float32)
        self._rebuilt = False
        self.delivered = False

    @property
    def waiting(self) -> Waiting | None:
        return self._chunks.waiting

    def take(self, index: int, payload: memoryview, now: float) -> None:
        if self._chunks.attempt.over:
            raise AbortedError(f"round {self._chunks.attempt.round} was aborted")
        self._chunks.received(len(payload), now)
        decode_chunk(self._contribution.format, self._fragment, index, payload, self._delta_N)

    def end(self, now: float) -> None:
        delta_N, fragment = self._delta_N, self._fragment
        if self._base_N is not None and fragment.buffers:
            np.subtract(
                self._base_N, delta_N, out=delta_N
            )  # θ: no variance becomes negative by rounding
        if self._base_N is None or fragment.buffers:
            np.subtract(self._current_N, delta_N, out=delta_N)
        else:
            delta_N += self._current_N - self._base_N
        norms = tuple(formats.slot_norms(fragment, delta_N))
        staged = replace(self._contribution, format=bulk.FP32, norms=norms)
        staged.check_norms(fragment)
        self._chunks.contribute(staged)
        for index in range(fragment.chunks):
            lo, hi = fragment.chunk(index)
            self._chunks.add(index, delta_N[lo:hi].view(np.uint8))
        self._rebuilt = True
        self.resume(now)

    def resume(self, now: float) -> None:
        self._chunks.advance(now)
        if self._rebuilt and not self.delivered and self._chunks.waiting is None:
            self._chunks.end(now)
            self.delivered = True


def part_of(
    chunks: MemberChunks, contribution: Contribution, fragment: Fragment, parameters: Parameters
) -> Part:
    """
    Where the chunks of a contribution go.

    Raises:
        ProtocolError: its base is no longer held.
    """
    if chunks.attempt.probe:
        return _Discarded(chunks, contribution, fragment)
    if contribution.base == parameters.current(fragment.index).version:
        return _Streamed(chunks, contribution)
    return _Staged(chunks, contribution, fragment, parameters)


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
