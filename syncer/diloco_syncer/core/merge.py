"""
The streaming merge of one fragment: chunks of many learners in, chunks of the new Θ out meanwhile.

No clock, no I/O, no threads of its own: the threads that bring chunks do the work. One lock (a
condition) guards the bookkeeping and is never held while numbers are touched; `arithmetic` does
those, and what it computes does not depend on who comes when. So a replay is bitwise.

    chunk i is here from all ─► u += Σ factor·v, Σ v², Σ u² ─► its tensors complete? ─► outer step,
    members                     (into the new buffers)         Average: at once         encode
                                                               Radial: when ‖u‖ is known

Memory: two new buffers (Θ and momentum, soon the fragment's own), the encoded result, and at most
`window` chunks per member that wait for others.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from diloco import wire
from diloco.errors import ProtocolError, UnavailableError
from diloco.fragments import BLOCK, CHUNK, Fragment, Slot, Tensor
from diloco_syncer.core.arithmetic import Arithmetic, MergeResult
from diloco_syncer.core.blend import merge_slot
from diloco_syncer.core.buffers import Buffers
from diloco_syncer.core.member import (
    DamagedMemberError,
    Member,
    MemberError,
    NotFiniteMemberError,
)
from diloco_syncer.core.outer import OuterOptimizer

__all__ = [
    "DamagedMemberError",
    "FragmentMerge",
    "Member",
    "MemberError",
    "MergeAbortedError",
    "MergeResult",
    "NotFiniteMemberError",
    "merge_slot",
    "warm_up",
]

F32 = npt.NDArray[np.float32]


class MergeAbortedError(UnavailableError):
    """This merge came to nothing; its bytes are to be forgotten."""

    reason = "Aborted"


class FragmentMerge:
    """
    One attempt to merge one fragment.

    Args:
        fragment: where the tensors lie.
        theta_N, momentum_N: the fragment now; never modified.
        members: any order; names differ.
        merge: "Radial" (slots marked `average` still by average) or "Average".
        outer: the outer optimizer.
        down: bulk_pb2.Format of the result: FP32 or BF16.
        window: how many chunks a member may be ahead of the slowest.
        buffers: where the two new vectors come from; None: fresh ones.

    Raises:
        MemberError: a member's norms do not fit the fragment or are not finite.
    """

    def __init__(
        self,
        *,
        fragment: Fragment,
        theta_N: F32,
        momentum_N: F32,
        members: tuple[Member, ...],
        merge: str,
        outer: OuterOptimizer,
        down: int,
        window: int,
        buffers: Buffers | None = None,
    ) -> None:
        for member in members:
            member.check_header(fragment)
        if down not in (wire.FP32, wire.BF16):
            raise ValueError(f"results go down in FP32 or BF16, not in format {down}")
        if len({m.learner for m in members}) != len(members):
            raise ValueError(f"a learner is a member twice: {sorted(m.learner for m in members)}")
        self._fragment, self._down, self._window = fragment, down, window
        self._theta_N, self._momentum_N = theta_N, momentum_N
        self._ignored = frozenset(m.learner for m in members if m.weight == 0)
        self._members = tuple(sorted((m for m in members if m.weight > 0), key=lambda m: m.learner))
        self._row = {m.learner: row for row, m in enumerate(self._members)}
        self._changed = threading.Condition()
        self._why_aborted: str | None = None
        self._outputs: list[bytes | None] = [None] * fragment.chunks
        self._unfinished = fragment.chunks if self._members else 0
        if not self._members:
            return
        self._numbers = Arithmetic(
            fragment=fragment,
            theta_N=theta_N,
            momentum_N=momentum_N,
            members=self._members,
            radial=merge == "Radial",
            outer=outer,
            down=down,
            buffers=buffers or Buffers(),
        )
        self._payloads: list[dict[int, wire.Buffer]] = [{} for _ in self._outputs]
        self._arrived = [[False] * fragment.chunks for _ in self._members]
        self._position = [0] * len(self._members)
        self._ready: deque[int] = deque()
        self._missing = [0] * len(fragment.slots)  # segments of each tensor that are not merged
        self._blockers = [1] * fragment.chunks  # its own merge, and every tensor it must wait for
        for chunk, segments in enumerate(self._numbers.segments):
            for segment in segments:
                self._missing[segment.slot] += 1
                self._blockers[chunk] += self._numbers.needs_whole(segment.slot)

    # ------------------------------------------------------------ chunks in

    def wait_for_room(self, learner: str, index: int, timeout_seconds: float) -> bool:
        """
        Wait until chunk `index` of this member may be added.

        A member's place is how far its stream has come, whatever is missing on the way: a hole (a
        damaged chunk, sent again at the end) holds nobody up, and the slowest always has room.

        Returns:
            False: no room within the timeout. True: there is, or the merge is over and `add` will
            ignore the chunk.
        """
        if self._weightless(learner):
            return True
        with self._changed:
            self._reached(self._row[learner], index)
            return self._changed.wait_for(
                lambda: self._over or index < min(self._position) + self._window, timeout_seconds
            )

    def add(self, learner: str, index: int, payload: wire.Buffer) -> None:
        """
        Hand in one chunk; the thread that brings the last one does what has become possible.

        Args:
            learner: a member.
            index: of the chunk. A repeat is ignored, as is everything once the merge is over.
            payload: kept, not copied, until the chunk is merged; must not change.

        Raises:
            MemberError: `learner` of the error (not always the caller) broke the contract; the
                merge is aborted.
        """
        if self._weightless(learner):
            return
        row = self._row[learner]
        with self._changed:
            if self._over:
                return
            try:
                size = np.frombuffer(payload, np.uint8).size
                self._members[row].check_chunk(self._fragment, index, size)
            except MemberError as error:
                self.abort(str(error))
                raise
            if self._arrived[row][index]:
                return
            self._arrived[row][index] = True
            self._payloads[index][row] = payload
            self._reached(row, index + 1)
            complete = len(self._payloads[index]) == len(self._members)
        if complete:
            self._work(index)

    def abort(self, reason: str) -> None:
        """Give up: wakes everybody, nothing comes out any more. The first reason stays."""
        with self._changed:
            if self._why_aborted is None:
                self._why_aborted = reason
                self._payloads = [{} for _ in self._outputs]
                self._changed.notify_all()

    # ------------------------------------------------------------ chunks out

    @property
    def finished(self) -> bool:
        """Every chunk is merged, verified and encoded (or no member has a weight), and no abort."""
        return self._unfinished == 0 and self._why_aborted is None

    def output(self, index: int, timeout_seconds: float) -> bytes:
        """
        Chunk `index` of the new Θ as a packed message; the same object for every caller.

        Raises:
            MergeAbortedError: the merge was aborted.
            UnavailableError: the chunk was not final within the timeout.
        """
        with self._changed:
            if not self._members and self._outputs[index] is None:
                self._outputs[index] = self._unchanged(index)
            self._changed.wait_for(
                lambda: self._outputs[index] is not None or self._why_aborted is not None,
                timeout_seconds,
            )
            message = self._outputs[index]
        self._raise_if_aborted()
        if message is None:
            raise UnavailableError(
                f"chunk {index} of fragment {self._fragment.index} was not merged within "
                f"{timeout_seconds:g} s; ask again"
            )
        return message

    def result(self) -> MergeResult:
        """
        The fragment after the outer step; as it was if no member has a weight (decision 7).

        Raises:
            MergeAbortedError: the merge was aborted.
            UnavailableError: it is not finished.
        """
        self._raise_if_aborted()
        if not self.finished:
            raise UnavailableError(f"{self._unfinished} chunks are not merged; wait for `finished`")
        if self._members:
            return self._numbers.result()
        return MergeResult(
            theta_N=self._theta_N,
            momentum_N=self._momentum_N,
            delta_norm=0.0,
            encoded_bytes=wire.encoded_bytes(self._down, self._fragment.elements),
        )

    # ------------------------------------------------------------ bookkeeping

    @property
    def _over(self) -> bool:
        return self._why_aborted is not None or self._unfinished == 0

    def _raise_if_aborted(self) -> None:
        if self._why_aborted is not None:
            raise MergeAbortedError(f"the merge was given up: {self._why_aborted}")

    def _weightless(self, learner: str) -> bool:
        if learner in self._row:
            return False
        if learner in self._ignored:
            return True
        raise ProtocolError(f"{learner} is no member of this merge, {sorted(self._row)} are")

    def _reached(self, row: int, index: int) -> None:
        slowest = min(self._position)
        self._position[row] = max(self._position[row], index)
        if min(self._position) > slowest:
            self._changed.notify_all()

    def _work(self, index: int) -> None:
        """Merge one chunk, then finish what became possible, side by side with other threads."""
        try:
            payloads = dict(self._payloads[index])
            if len(payloads) < len(self._members):
                return  # aborted meanwhile
            self._numbers.merge(index, [payloads[row] for row in range(len(self._members))])
            with self._changed:
                self._note_merged(index)
            while (ready := self._next_ready()) is not None:
                message = self._numbers.finish(ready)
                with self._changed:
                    self._outputs[ready] = message
                    self._unfinished -= 1
                    self._changed.notify_all()
        except BaseException as error:
            # Whatever it was: nobody may wait for a chunk that nobody will finish.
            self.abort(str(error))
            raise

    def _next_ready(self) -> int | None:
        with self._changed:
            return self._ready.popleft() if self._ready and not self._over else None

    def _note_merged(self, chunk: int) -> None:
        """Complete tensors are verified, and let the chunks go that waited for them."""
        self._payloads[chunk].clear()
        if self._over:
            return
        released = [chunk]
        for segment in self._numbers.segments[chunk]:
            self._missing[segment.slot] -= 1
            if self._missing[segment.slot] == 0:
                self._numbers.complete(segment.slot)
                if self._numbers.needs_whole(segment.slot):
                    place = self._fragment.slots[segment.slot]
                    released += range(place.offset // CHUNK, -(-place.end // CHUNK))
        for other in released:
            self._blockers[other] -= 1
            if self._blockers[other] == 0:
                self._ready.append(other)

    def _unchanged(self, chunk: int) -> bytes:
        lo, hi = self._fragment.chunk(chunk)
        encoded = np.empty(wire.encoded_bytes(self._down, hi - lo), np.uint8)
        wire.encode(self._down, self._theta_N[lo:hi], encoded)
        return wire.pack(wire.Kind.CHUNK, chunk, encoded)


def warm_up() -> None:
    """Compile every kernel, or load it from numba's cache: so that no first merge pays for it."""
    tensor = Tensor(name="warm-up", shape=(BLOCK,), dtype="float32")
    ones_N = np.ones(BLOCK, np.float32)
    members = tuple(
        Member(learner=name, weight=1.0, format=wire.FP32, norms=(math.sqrt(BLOCK),))
        for name in ("a", "b")
    )
    for down in (wire.FP32, wire.BF16):
        for average in (False, True):
            merge = FragmentMerge(
                fragment=Fragment(index=0, slots=(Slot(tensor=tensor, offset=0, average=average),)),
                theta_N=ones_N,
                momentum_N=ones_N,
                members=members,
                merge="Radial",
                outer=OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=False),
                down=down,
                window=1,
            )
            for member in members:
                merge.add(member.learner, 0, ones_N.tobytes())
