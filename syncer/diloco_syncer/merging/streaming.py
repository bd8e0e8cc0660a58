"""
The streaming merge of one fragment: chunks of many learners in, chunks of the new Θ out.

It has no clock, no I/O and no threads of its own: the callers that add chunks do the work. `has_room`
and `ready` answer at once; `wait_for_room` and `output` wait for other threads and are for the gRPC
shell only. One lock guards the bookkeeping, which costs O(1) per chunk and member. It is never held
during arithmetic, whose results do not depend on the order of arrival. So a replay is bitwise
identical.

    chunk i has arrived ─► u += Σ factor·v, Σ v², Σ u² ─► its tensors complete? ─► outer step,
    from all members       (into the new buffers)         Average: at once         encode
                                                          Radial: when ‖u‖ is known

Memory: two new buffers (Θ and momentum, soon the fragment's own), the encoded result, and at most
`window` chunks, and as many for gaps, per member that wait for the other members.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from diloco.codec import formats, frames
from diloco.errors import AbortedError, DilocoError, ProtocolError, UnavailableError
from diloco.model.digests import digests
from diloco.model.fragments import BLOCK, Fragment, Slot, Tensor
from diloco_syncer.core.contribution import Contribution, ContributionError
from diloco_syncer.core.outer import REPLACE, OuterOptimizer
from diloco_syncer.merging.arithmetic import Arithmetic, MergeResult
from diloco_syncer.merging.buffers import Buffers

F32 = npt.NDArray[np.float32]


MIN_GAP = 4
"""Chunks of a member that may be missing before one that arrives, however small the window is."""


class MergeFailedError(UnavailableError):
    """The merge itself failed, for example because memory ran out: no member is at fault."""

    reason = "Aborted"


class FragmentMerge:
    """
    One attempt to merge one fragment.

    Args:
        fragment: where the tensors lie.
        theta_N, momentum_N: the current fragment; never modified.
        contributions: any order; learners differ. Their norms have been checked.
        merge: "Radial" (slots marked `average` still by average) or "Average".
        outer: the outer optimizer.
        down: bulk_pb2.Format of the result: FP32 or BF16.
        window: how many chunks a member may be ahead of the slowest.
        buffers: source of the two new vectors; None: newly allocated.
    """

    def __init__(
        self,
        *,
        fragment: Fragment,
        theta_N: F32,
        momentum_N: F32,
        contributions: tuple[Contribution, ...],
        merge: str,
        outer: OuterOptimizer,
        down: int,
        window: int,
        buffers: Buffers | None = None,
    ) -> None:
        if down not in (formats.FP32, formats.BF16):
            raise ValueError(f"results go down in FP32 or BF16, not in format {down}")
        learners = sorted(c.learner for c in contributions)
        if len(set(learners)) != len(learners):
            raise ValueError(f"a learner contributes twice: {learners}")
        self._fragment, self._down, self._window = fragment, down, window
        self._theta_N, self._momentum_N = theta_N, momentum_N
        self._ignored = frozenset(c.learner for c in contributions if c.weight == 0)
        weighted = (c for c in contributions if c.weight > 0)
        self._contributions = tuple(sorted(weighted, key=lambda c: c.learner))
        self._row = {c.learner: row for row, c in enumerate(self._contributions)}
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        """The slowest member has advanced, or the merge is over."""
        self._output = threading.Condition(self._lock)
        """A chunk is final, or the merge is over."""
        self._abort_reason: str | None = None
        self._digests: bytes | None = None
        self._outputs: list[bytes | None] = [None] * fragment.chunks
        self._unfinished = fragment.chunks if self._contributions else 0
        if not self._contributions:
            return
        self._arithmetic = Arithmetic(
            fragment=fragment,
            theta_N=theta_N,
            momentum_N=momentum_N,
            contributions=self._contributions,
            radial=merge == "Radial",
            outer=outer,
            down=down,
            buffers=buffers or Buffers(),
        )
        self._payloads: list[dict[int, formats.Buffer]] = [{} for _ in self._outputs]
        self._arrived = [bytearray(fragment.chunks) for _ in self._contributions]
        self._arrivals = [0] * len(self._contributions)
        self._progress = _Progress(len(self._contributions), chunks=fragment.chunks)
        self._ready: deque[int] = deque()
        self._missing = [0] * len(fragment.slots)  # segments of each tensor that are not merged
        self._blockers = [1] * fragment.chunks  # its own merge, and every tensor it must wait for
        for chunk, segments in enumerate(self._arithmetic.segments):
            for segment in segments:
                self._missing[segment.slot] += 1
                self._blockers[chunk] += self._arithmetic.needs_whole(segment.slot)

    # ------------------------------------------------------------ chunks in

    def has_room(self, learner: str, index: int) -> bool:
        """
        Whether chunk `index` of this member may be added; True as well once the merge is over.

        A member's position is how far its stream has come, missing chunks included: a gap (a damaged
        chunk, sent again at the end) delays no other member, and the slowest always has room. Gaps
        hold what the others send, so they are bounded like the window.

        Raises:
            ContributionError: more chunks before this one are missing than the bound.
        """
        if self._weightless(learner):
            return True
        with self._lock:
            self._came_to(self._row[learner], index)
            return self._admits(index)

    def wait_for_room(self, learner: str, index: int, timeout_seconds: float) -> bool:
        """
        Wait until chunk `index` of this member may be added.

        Returns:
            False: no room within the timeout. True: there is room, or the merge is over and `add`
            will ignore the chunk.

        Raises:
            ContributionError: as `has_room` does.
        """
        if self._weightless(learner):
            return True
        with self._lock:
            self._came_to(self._row[learner], index)
            return self._room.wait_for(lambda: self._admits(index), timeout_seconds)

    def add(self, learner: str, index: int, payload: formats.Buffer) -> None:
        """
        Add one chunk; the thread that adds the last missing one does the work that it enables.

        Args:
            learner: a member.
            index: of the chunk. A repeat is ignored, as is everything once the merge is over.
            payload: kept, not copied, until the chunk is merged; must not change.

        Raises:
            ContributionError: `learner` of the error (not always the caller) broke the contract;
                the merge is aborted.
            MergeFailedError: the work on it failed; the merge is aborted.
        """
        if self._weightless(learner):
            return
        row = self._row[learner]
        with self._lock:
            if self._over:
                return
            try:
                size = np.frombuffer(payload, np.uint8).size
                self._contributions[row].check_chunk(self._fragment, index, size)
            except ContributionError as error:
                self.abort(str(error))
                raise
            if self._arrived[row][index]:
                return
            self._arrived[row][index] = 1
            self._arrivals[row] += 1
            self._payloads[index][row] = payload
            self._reached(row, index + 1)
            complete = len(self._payloads[index]) == len(self._contributions)
        if complete:
            self._work(index)

    def abort(self, reason: str) -> None:
        """End the merge without a result and wake all waiting threads. The first reason stays."""
        with self._lock:
            if self._abort_reason is None:
                self._abort_reason = reason
                self._payloads = [{} for _ in self._outputs]
                self._room.notify_all()
                self._output.notify_all()

    # ------------------------------------------------------------ chunks out

    @property
    def finished(self) -> bool:
        """Every chunk is merged, verified and encoded (or no member has a weight), and no abort."""
        return self._unfinished == 0 and self._abort_reason is None

    def ready(self, index: int) -> bytes | None:
        """
        Chunk `index` of the new Θ as a packed message; the same object for every caller.

        Returns:
            None: it is not final yet.

        Raises:
            AbortedError: the merge was aborted.
        """
        with self._lock:
            self._raise_if_aborted()
            if not self._contributions and self._outputs[index] is None:
                self._outputs[index] = self._unchanged(index)
            return self._outputs[index]

    def wait_for_output(self, index: int, timeout_seconds: float) -> bool:
        """Wait until `ready` has an answer for this chunk; False: not within the timeout."""
        with self._lock:
            return self._output.wait_for(
                lambda: (
                    self._outputs[index] is not None
                    or self._abort_reason is not None
                    or not self._contributions
                ),
                timeout_seconds,
            )

    def output(self, index: int, timeout_seconds: float) -> bytes:
        """
        `ready`, after waiting for it.

        Raises:
            AbortedError: the merge was aborted.
            UnavailableError: the chunk was not final within the timeout.
        """
        self.wait_for_output(index, timeout_seconds)
        message = self.ready(index)
        if message is None:
            raise UnavailableError(
                f"chunk {index} of fragment {self._fragment.index} was not merged within "
                f"{timeout_seconds:g} s; request it again"
            )
        return message

    def result(self) -> MergeResult:
        """
        The fragment after the outer step; unchanged if no member has a weight.

        Raises:
            AbortedError: the merge was aborted.
            UnavailableError: it is not finished.
        """
        self._raise_if_aborted()
        if not self.finished:
            raise UnavailableError(f"{self._unfinished} chunks are not merged; wait for `finished`")
        if self._contributions:
            return self._arithmetic.result()
        return MergeResult(
            theta_N=self._theta_N,
            momentum_N=self._momentum_N,
            delta_norm=0.0,
            encoded_bytes=formats.encoded_bytes(self._down, self._fragment.elements),
        )

    def digests(self) -> bytes:
        """Of the new Θ and momentum, once it is `finished`: several members may end at the same time."""
        with self._lock:
            if self._digests is None:
                result = self.result()
                self._digests = digests(self._fragment, result.theta_N, result.momentum_N)
            return self._digests

    # ------------------------------------------------------------ bookkeeping

    @property
    def _over(self) -> bool:
        return self._abort_reason is not None or self._unfinished == 0

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise AbortedError(f"the merge was aborted: {self._abort_reason}")

    def _weightless(self, learner: str) -> bool:
        if learner in self._row:
            return False
        if learner in self._ignored:
            return True
        raise ProtocolError(
            f"{learner} is not a member of this merge; its members are {sorted(self._row)}"
        )

    def _admits(self, index: int) -> bool:
        return self._over or index < self._progress.slowest + self._window

    def _came_to(self, row: int, index: int) -> None:
        missing, most = index - self._arrivals[row], max(self._window, MIN_GAP)
        if missing > most and not self._over:
            raise ContributionError(
                f"chunk {index} arrived before {missing} others; at most {most} may come later",
                learner=self._contributions[row].learner,
            )
        self._reached(row, index)

    def _reached(self, row: int, index: int) -> None:
        if self._progress.reached(row, index):
            self._room.notify_all()

    def _work(self, index: int) -> None:
        """Merge one chunk, then finish the chunks that it completes, in parallel with other threads."""
        try:
            payloads = dict(self._payloads[index])
            if len(payloads) < len(self._contributions):
                return  # aborted in the meantime
            self._arithmetic.merge(
                index, [payloads[row] for row in range(len(self._contributions))]
            )
            with self._lock:
                self._note_merged(index)
            while (ready := self._next_ready()) is not None:
                message = self._arithmetic.finish(ready)
                with self._lock:
                    self._outputs[ready] = message
                    self._unfinished -= 1
                    self._output.notify_all()
                    if self._unfinished == 0:
                        self._room.notify_all()
        except BaseException as error:
            # Whatever the error, no thread may wait for a chunk that will never be finished.
            self.abort(str(error))
            if isinstance(error, DilocoError) or not isinstance(error, Exception):
                raise
            raise MergeFailedError(f"the merge failed: {error!r}") from error

    def _next_ready(self) -> int | None:
        with self._lock:
            return self._ready.popleft() if self._ready and not self._over else None

    def _note_merged(self, chunk: int) -> None:
        """Verify the tensors that this chunk completes, and release the chunks that waited for them."""
        self._payloads[chunk].clear()
        if self._over:
            return
        released = [chunk]
        for segment in self._arithmetic.segments[chunk]:
            self._missing[segment.slot] -= 1
            if self._missing[segment.slot] == 0:
                self._arithmetic.complete(segment.slot)
                if self._arithmetic.needs_whole(segment.slot):
                    slot = self._fragment.slots[segment.slot]
                    size = self._fragment.chunk_elements
                    released += range(slot.offset // size, -(-slot.end // size))
        for other in released:
            self._blockers[other] -= 1
            if self._blockers[other] == 0:
                self._ready.append(other)

    def _unchanged(self, chunk: int) -> bytes:
        lo, hi = self._fragment.chunk(chunk)
        encoded = np.empty(formats.encoded_bytes(self._down, hi - lo), np.uint8)
        formats.encode(self._down, self._theta_N[lo:hi], encoded)
        return frames.pack(frames.Kind.CHUNK, chunk, encoded)


class _Progress:
    """
    How far each member has come, and the slowest of them, in O(1) per step.

    Positions only grow, so the slowest is found by moving one mark: over a whole fragment it moves
    once per chunk, however many members there are.
    """

    def __init__(self, members: int, *, chunks: int) -> None:
        self.slowest = 0
        self._chunks = chunks
        self._position = [0] * members
        self._members_at = [members] + [0] * chunks

    def reached(self, row: int, index: int) -> bool:
        """A member has come to this chunk; whether that has moved the slowest."""
        before, position = self._position[row], min(index, self._chunks)
        if position <= before:
            return False
        self._position[row] = position
        self._members_at[before] -= 1
        self._members_at[position] += 1
        slowest = self.slowest
        while self._members_at[self.slowest] == 0:
            self.slowest += 1
        return self.slowest > slowest


def warm_up() -> None:
    """Compile every kernel or load it from numba's cache, so that the first merge is not delayed."""
    tensor = Tensor(name="warm-up", shape=(BLOCK,), dtype="float32")
    ones_N = np.ones(BLOCK, np.float32)
    contributions = tuple(
        Contribution(
            learner=name, incarnation=1, round=1, attempt=1, local_step=1, steps=1, tokens=1,
            base=(1, 0), format=formats.FP32, norms=(math.sqrt(BLOCK),),
        )
        for name in ("a", "b")
    )  # fmt: skip
    for down in (formats.FP32, formats.BF16):
        for average in (False, True):
            merge = FragmentMerge(
                fragment=Fragment(index=0, slots=(Slot(tensor=tensor, offset=0, average=average),)),
                theta_N=ones_N,
                momentum_N=ones_N,
                contributions=contributions,
                merge="Radial",
                outer=REPLACE,
                down=down,
                window=1,
            )
            for contribution in contributions:
                merge.add(contribution.learner, 0, ones_N.tobytes())
