"""
Which reports of one incarnation rounds have used: a report is merged at most once, into whatever fragment. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_MERGED = 256
"""Merged reports kept one by one; older ones are covered by the floor."""


@dataclass(slots=True)
class UsedReports:
    """
    The reports that belong to a round, each named by its t_m.

    A round pulls a learner, claims the report that the upload states, and either merges or releases
    it. A release concerns the claim of that round only, so a round that fails cannot give back what
    another round has used.
    """

    floor: int = -1
    """Every t_m up to this one counts as merged."""
    merged: set[int] = field(default_factory=set)
    """Merged reports above the floor."""
    pulled: dict[int, int] = field(default_factory=dict)
    """Round (its global step) → the newest report when it pulled; its upload is of that t_m or later."""
    claimed: dict[int, int] = field(default_factory=dict)
    """Round → the t_m that its upload states."""
    _newest_merged: int = field(init=False)
    """Or the floor."""
    _spent: int = field(init=False)
    """The newest report that counts for no other round: one pulled for it and received an upload."""

    def __post_init__(self) -> None:
        self._spent = self._newest_merged = max([self.floor, *self.merged])

    @property
    def newest(self) -> int:
        """The newest report that was merged, is claimed, or for which a round pulls."""
        return max(self._newest_used, max(self.pulled.values(), default=-1))

    @property
    def _newest_used(self) -> int:
        claimed = max(self.claimed.values(), default=-1)
        return max(self._newest_merged, claimed)

    def fresh(self, local_step: int, lag: float) -> bool:
        """
        Whether a report counts for another quorum: no round has used it or pulls for it.

        An upload is of the step at which the pull reaches the learner. For a far learner that is
        `lag` steps after its report, so reports that arrive later name steps below it and are still
        unused.
        """
        if lag < 1.0:
            return local_step > self.newest
        pulled = max(self.pulled.values(), default=self._spent)
        unused = local_step + math.floor(lag) > self._newest_used
        return unused and local_step > max(pulled, self._spent)

    def pull(self, round_: int, local_step: int) -> None:
        """A round pulls the learner, whose newest report is this one."""
        self.pulled[round_] = local_step

    def claim(self, round_: int, local_step: int) -> None:
        """The upload to a round is of this report."""
        self.claimed[round_] = local_step

    def refused(self, round_: int, local_step: int) -> str:
        """Why a round may not merge this report; empty: it may."""
        if local_step <= self.floor or local_step in self.merged:
            return f"t_m {local_step} was merged before"
        for other, claimed in self.claimed.items():
            if other != round_ and claimed == local_step:
                return f"t_m {local_step} is part of round {other}, which is in flight"
        return ""

    def release(self, round_: int) -> None:
        """The round does not merge the report that it claims."""
        self.claimed.pop(round_, None)
        self.pulled.pop(round_, None)

    def spend(self, round_: int) -> None:
        """The report for which the round pulled counts for no other one."""
        self._spent = max(self._spent, self.pulled.get(round_, self._spent))

    def merge(self, round_: int, local_step: int) -> None:
        """The round has merged this report."""
        self.spend(round_)
        self.release(round_)
        self._keep(local_step)

    def add(self, local_step: int) -> None:
        """Count a report as merged, which no longer counts for a round."""
        self._spent = max(self._spent, local_step)
        self._keep(local_step)

    def _keep(self, local_step: int) -> None:
        if local_step > self.floor:
            self.merged.add(local_step)
            self._newest_merged = max(self._newest_merged, local_step)
        if len(self.merged) > MAX_MERGED:
            # Half at once: the cost of sorting is shared by many merges.
            oldest = sorted(self.merged)[: MAX_MERGED // 2]
            self.floor = oldest[-1]
            self.merged.difference_update(oldest)

    def to_json(self) -> dict[str, Any]:
        """What must outlive the syncer; reports of rounds in flight are not merged."""
        return {"floor": self.floor, "merged": sorted(self.merged)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> UsedReports:
        """The inverse of `to_json`."""
        merged: Iterable[Any] = data["merged"]
        return cls(floor=int(data["floor"]), merged={int(step) for step in merged})
