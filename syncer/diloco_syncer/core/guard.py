"""
No member owns a merge: limits on the share and on the norms of each, from those of the others. Pure.

With fewer than GUARDED_MEMBERS there is no majority that a member could be compared with.
Both limits are larger than what honest learners of different speeds and batches need
(docs/algorithm.md, "Guard"), so an honest merge is the same, bit by bit, with and without them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diloco_syncer.core.contribution import NORM_FLOOR, Contribution
from diloco_syncer.core.events import ConfirmedNorm

GUARDED_MEMBERS = 3

RATE_MULTIPLE = 2.1
"""
Tokens per step count at most this many times the members' median: twice the batch, and 5 % for
sequences that are packed.
"""

MINOR_SHARE = 0.1
"""
Share of the fragment's norm that counts as usual for a tensor which most members hardly change, such
as an expert that few of them train while weight decay moves it a little in all.
"""

GROWTHS = (0.5, 1.0)
"""
Powers of the steps with which norms may grow: of steps in random directions, and of steps that agree,
as in a warm-up.
"""


def guarded(contributions: Sequence[Contribution], multiple: float) -> tuple[Contribution, ...]:
    """
    The contributions of one merge with their limits; the norms of buffers have none.

    Args:
        contributions: with the steps and tokens that are credited; norms checked.
        multiple: of the members' median norm that a norm may have; 0: no limits.
    """
    members = [c for c in contributions if c.weight > 0]
    if multiple <= 0 or len(members) < GUARDED_MEMBERS:
        return tuple(contributions)
    weights = weight_limits(members)
    if any(c.buffers for c in members):
        limits: list[tuple[float, ...]] = [() for _ in members]
    else:
        limits = norm_limits(members, multiple)
    of = {c.learner: (weights[row], limits[row]) for row, c in enumerate(members)}
    return tuple(
        replace(c, weight_limit=of[c.learner][0], norm_limits=of[c.learner][1])
        if c.learner in of
        else c
        for c in contributions
    )


def weight_limits(members: Sequence[Contribution]) -> list[float]:
    """Per member, the weight of its steps at RATE_MULTIPLE times the median of tokens per step."""
    usual = statistics.median_low(c.tokens / c.steps for c in members)
    return [(RATE_MULTIPLE * usual) ** 2 * c.steps for c in members]


def norm_limits(members: Sequence[Contribution], multiple: float) -> list[tuple[float, ...]]:
    """
    Per member and tensor, `multiple` times the median of norms per √step, times its own √steps, or the
    same per step, whichever is larger.

    Of a tensor that most members did not change, it is the same with the norms of the fragment; of
    one that they hardly changed, with MINOR_SHARE of these.
    """
    of_each_growth = (_norm_limits(members, multiple, growth) for growth in GROWTHS)
    return [tuple(map(max, *limits)) for limits in zip(*of_each_growth, strict=True)]


def _norm_limits(
    members: Sequence[Contribution], multiple: float, growth: float
) -> list[tuple[float, ...]]:
    scales = [c.steps**growth for c in members]
    whole = _median([c.norm for c in members], scales)
    medians = (
        _median([c.norms[slot] for c in members], scales) for slot in range(len(members[0].norms))
    )
    usual = [max(median, MINOR_SHARE * whole) if median else whole for median in medians]
    return [tuple(multiple * u * scale for u in usual) for scale in scales]


def explained_members(
    contributions: Mapping[str, Contribution], confirmed: Sequence[ConfirmedNorm], multiple: float
) -> set[str]:
    """
    The members whose delta is as long as their steps explain.

    Its norm per √step is at least the `multiple`-th part of the members' median; of fewer than
    GUARDED_MEMBERS, it is not zero.
    """
    norms = {
        c.learner: c.norm / math.sqrt(contributions[c.learner].steps)
        for c in confirmed
        if c.norm > NORM_FLOOR
    }
    if multiple <= 0 or len(confirmed) < GUARDED_MEMBERS or not norms:
        return set(norms)
    least = statistics.median_low(norms.values()) / multiple
    return {name for name, norm in norms.items() if norm >= least}


def _median(norms: Sequence[float], scales: Sequence[float]) -> float:
    return statistics.median_low(n / scale for n, scale in zip(norms, scales, strict=True))
