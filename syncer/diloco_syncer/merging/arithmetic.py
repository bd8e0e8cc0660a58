"""
The arithmetic of one merge: deltas of one chunk in, a chunk of the new Θ out.

No locks, no waiting: `streaming` orders the calls. Different threads may work on different chunks at
the same time; `complete` and `result` are called by one thread at a time. Sums over members run in
the order of learner names, sums over chunks are exact (fsum): the order of arrival changes no bit.

Shape letters used in this file:
    N = elements of the fragment (padded), M = members, S = segments: the part of one tensor that
    lies in one chunk
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.codec import formats, frames
from diloco.codec.kernels import read_only
from diloco.model.fragments import BLOCK, Fragment
from diloco_syncer.core.contribution import (
    NORM_FLOOR,
    Contribution,
    NotFiniteContributionError,
)
from diloco_syncer.core.events import ConfirmedNorm
from diloco_syncer.core.outer import REPLACE, OuterOptimizer
from diloco_syncer.merging import kernels
from diloco_syncer.merging.blend import blend
from diloco_syncer.merging.buffers import Buffers

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeResult:
    """The fragment after the outer step. The arrays are new and belong to the caller."""

    theta_N: F32
    momentum_N: F32
    delta_norm: float
    """‖Δ‖ over the whole fragment, digits of integers left out; so are those of `confirmed`."""
    encoded_bytes: int
    """Payload of the result for one learner."""
    confirmed: tuple[ConfirmedNorm, ...] = ()
    """Of each member, by name."""
    sizes: tuple[float, float] = (0.0, 0.0)
    """Root of the mean square of Θ, before and after; 0 of buffers, which may grow as the data does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part of one tensor that lies in one chunk, in elements of the fragment."""

    index: int
    slot: int
    lo: int
    hi: int
    start: int
    """`lo` in elements of the chunk."""
    used: int
    """Elements of it that are the tensor's own; zeros follow."""

    @property
    def here(self) -> slice:
        """Its place in the fragment."""
        return slice(self.lo, self.hi)

    @property
    def in_chunk(self) -> slice:
        """Its place in the chunk."""
        return slice(self.start, self.start + self.hi - self.lo)


class Arithmetic:
    """
    What `FragmentMerge` computes with.

    Args:
        fragment: where the tensors lie.
        theta_N, momentum_N: the current fragment; never modified.
        contributions: of positive weight, at least one, in the order of learner names.
        radial: False: everything by plain average.
        outer: the outer optimizer; buffers have none.
        down: format of the result, FP32 or BF16.
        buffers: source of the two new vectors.
    """

    def __init__(
        self,
        *,
        fragment: Fragment,
        theta_N: F32,
        momentum_N: F32,
        contributions: Sequence[Contribution],
        radial: bool,
        outer: OuterOptimizer,
        down: int,
        buffers: Buffers,
    ) -> None:
        self._fragment, self._contributions, self._down = fragment, contributions, down
        self._outer = (REPLACE if fragment.buffers else outer).factors
        self._theta_N, self._momentum_N = theta_N, momentum_N
        # u lies where the new momentum will be. The weighted mean, needed only where directions
        # cancel, lies where the new Θ will be: no memory of its own, no second pass over any chunk.
        self._new_momentum_N = buffers.take(fragment.elements)
        self._new_theta_N = buffers.take(fragment.elements)
        weights, merged = [c.weight for c in contributions], [c.merged_norms for c in contributions]
        newest = max(contributions, key=lambda c: c.local_step)  # of several, the first by name
        self._blends = [
            blend(
                [c.norms[index] for c in contributions],
                [float(c is newest) for c in contributions] if slot.tensor.newest else weights,
                radial=radial and not slot.average,
                clipped=[norms[index] for norms in merged],
            )
            for index, slot in enumerate(fragment.slots)
        ]
        self._scales: list[float | None] = [1.0] * len(fragment.slots)
        self.segments = cut_into_segments(fragment)
        """Per chunk."""
        self._of_slot: list[list[int]] = [[] for _ in fragment.slots]
        for segment in (s for segments in self.segments for s in segments):
            self._of_slot[segment.slot].append(segment.index)
        slots = zip(fragment.slots, self._of_slot, strict=True)
        self._measured = [s for slot, mine in slots if not slot.tensor.newest for s in mine]
        count = sum(len(mine) for mine in self._of_slot)
        self._squares_SM = np.zeros((count, len(contributions)))
        self._deviations_M = [0.0] * len(contributions)
        self._u_squares_S = np.zeros(count)
        self._delta_squares_S = np.zeros(count)
        self._theta_squares_S2 = np.zeros((count, 2))
        self._encoded: dict[int, npt.NDArray[Any]] = {}

    def needs_whole(self, slot: int) -> bool:
        """Whether a tensor's outer step must wait until all of it has arrived."""
        return self._blends[slot].radial

    def merge(self, chunk: int, payloads: Sequence[formats.Buffer]) -> None:
        """
        Merge one chunk of all members; averaged tensors make their outer step at once.

        Raises:
            NotFiniteContributionError: naming the member with NaN or Inf, or the one to blame for an
                overflow.
        """
        start, end = self._fragment.chunk(chunk)
        table_M, _alive = _table(payloads, [c.format for c in self._contributions], end - start)
        encoded = np.empty(end - start, np.uint16 if self._down == formats.BF16 else np.uint32)
        for segment in self.segments[chunk]:
            squares_M = self._squares_SM[segment.index]
            if self._blends[segment.slot].radial:
                self._sum(segment, table_M, squares_M)
                bad = 0
            else:
                bad = self._average(segment, table_M, squares_M, encoded[segment.in_chunk])
            finite_M = np.isfinite(squares_M)
            if not finite_M.all():
                raise NotFiniteContributionError(
                    f"the delta of {self._name(segment.slot)} holds NaN or Inf; "
                    "check its loss and learning rate",
                    learner=self._contributions[int(np.argmin(finite_M))].learner,
                )
            if bad:
                raise self._overflow(segment.slot)
        self._encoded[chunk] = encoded

    def complete(self, slot: int) -> None:
        """
        Verify the norms of a tensor that has arrived, and fix the scale of its Δ.

        Raises:
            ContributionError: a norm disagrees with what arrived, or the sum overflowed.
        """
        mine = self._of_slot[slot]
        for row, contribution in enumerate(self._contributions):
            found = math.sqrt(math.fsum(self._squares_SM[mine, row]))
            contribution.check_norm(slot, self._name(slot), found)
            stated = contribution.norms[slot]
            rests = stated > NORM_FLOOR or self._blends[slot].rests_on(row)
            deviation = abs(found - stated) / stated if rests else 0.0
            self._deviations_M[row] = max(self._deviations_M[row], deviation)
        u_square = math.fsum(self._u_squares_S[mine])
        if not math.isfinite(u_square):
            raise self._overflow(slot)
        scale = self._scales[slot] = self._blends[slot].scale(math.sqrt(u_square))
        if scale is not None:
            self._delta_squares_S[mine] = self._u_squares_S[mine] * scale**2

    def finish(self, chunk: int) -> bytes:
        """
        The chunk as a packed message, once every tensor in it that needs it is complete.

        Raises:
            NotFiniteContributionError: the new Θ leaves the range of the wire format.
        """
        encoded = self._encoded.pop(chunk)
        for segment in self.segments[chunk]:
            radial = self._blends[segment.slot].radial
            if radial and self._step(segment, encoded[segment.in_chunk]):
                raise self._overflow(segment.slot)
        return frames.pack(frames.Kind.CHUNK, chunk, encoded.view(np.uint8))

    def result(self) -> MergeResult:
        """The whole fragment, once every chunk is finished."""
        return MergeResult(
            theta_N=self._new_theta_N,
            momentum_N=self._new_momentum_N,
            delta_norm=math.sqrt(math.fsum(self._delta_squares_S[self._measured])),
            encoded_bytes=formats.encoded_bytes(self._down, self._fragment.elements),
            confirmed=tuple(
                ConfirmedNorm(
                    learner=contribution.learner,
                    norm=math.sqrt(math.fsum(self._squares_SM[self._measured, row])),
                    deviation=self._deviations_M[row],
                )
                for row, contribution in enumerate(self._contributions)
            ),
            sizes=(self._size(0), self._size(1)),
        )

    def _size(self, column: int) -> float:
        if self._fragment.buffers:
            return 0.0
        elements = max(1, sum(slot.tensor.elements for slot in self._fragment.slots))
        return math.sqrt(math.fsum(self._theta_squares_S2[:, column]) / elements)

    # ------------------------------------------------------------ one segment

    def _average(self, segment: Segment, table_M: Any, squares_M: Any, encoded: Any) -> int:
        """Merge and make the outer step; returns how many blocks the result's format cannot hold."""
        self._u_squares_S[segment.index], bad = kernels.merge_average(
            table_M,
            segment.start,
            segment.used,
            squares_M,
            self._blends[segment.slot].factors,
            read_only(self._theta_N[segment.here]),
            read_only(self._momentum_N[segment.here]),
            self._new_theta_N[segment.here],
            self._new_momentum_N[segment.here],
            encoded,
            self._theta_squares_S2[segment.index],
            self._fragment.buffers,
            *self._outer,
        )
        return int(bad)

    def _sum(self, segment: Segment, table_M: Any, squares_M: Any) -> None:
        """Merge as far as possible before the whole tensor has arrived."""
        self._u_squares_S[segment.index] = kernels.merge_radial(
            table_M,
            segment.start,
            segment.used,
            squares_M,
            self._blends[segment.slot].factors,
            self._blends[segment.slot].shares,
            self._new_momentum_N[segment.here],
            self._new_theta_N[segment.here],
        )

    def _step(self, segment: Segment, encoded: Any) -> int:
        """The outer step of a radial segment; returns the same as `_average`."""
        new_theta_N = self._new_theta_N[segment.here]
        new_momentum_N = self._new_momentum_N[segment.here]
        scale = self._scales[segment.slot]
        if scale is None:
            mean_N = read_only(new_theta_N)
            self._delta_squares_S[segment.index] = kernels.square_sum(mean_N)
            new_momentum_N[:] = mean_N
        bad = kernels.step(
            read_only(self._theta_N[segment.here]),
            read_only(self._momentum_N[segment.here]),
            new_theta_N,
            new_momentum_N,
            encoded,
            self._theta_squares_S2[segment.index],
            np.float32(1.0 if scale is None else scale),
            *self._outer,
        )
        return int(bad)

    def _name(self, slot: int) -> str:
        return self._fragment.slots[slot].tensor.name

    def _overflow(self, slot: int) -> NotFiniteContributionError:
        """Finite deltas, but not their merge: the longest of them is to blame."""
        worst = max(self._contributions, key=lambda c: c.norms[slot])
        return NotFiniteContributionError(
            f"its delta of {self._name(slot)} is the longest (norm {worst.norms[slot]:.3g}), and "
            "with it the merge leaves the range of fp32; check its loss and learning rate",
            learner=worst.learner,
        )


def cut_into_segments(fragment: Fragment) -> list[list[Segment]]:
    """Per chunk: the parts of tensors in it, in order; together they cover the fragment."""
    per_chunk: list[list[Segment]] = [[] for _ in range(fragment.chunks)]
    index = 0
    for number, slot in enumerate(fragment.slots):
        lo, last = slot.offset, slot.offset + slot.tensor.length
        while lo < slot.end:
            chunk = lo // fragment.chunk_elements
            first, end = fragment.chunk(chunk)
            hi = min(slot.end, end)
            segment = Segment(
                index=index,
                slot=number,
                lo=lo,
                hi=hi,
                start=lo - first,
                used=min(max(last - lo, 0), hi - lo),
            )
            per_chunk[chunk].append(segment)
            lo, index = hi, index + 1
    return per_chunk


def _table(
    payloads: Sequence[formats.Buffer], fmts: Sequence[int], elements: int
) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """Chunks of `elements` values as the kernels see them, and what must outlive that table."""
    rows, arrays = [], []
    for payload, fmt in zip(payloads, fmts, strict=True):
        array = np.frombuffer(payload, np.uint8)
        address = formats.address_of(array)
        if address % 4:
            array = array.copy()
            address = formats.address_of(array)
        scale_bytes = 4 * (elements // BLOCK) if fmt in (formats.INT8, formats.INT4) else 0
        rows.append((fmt, address + scale_bytes, address))
        arrays.append(array)
    return np.array(rows, kernels.PAYLOAD), arrays
