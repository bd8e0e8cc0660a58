"""A report, which is (learner, incarnation, t_m), is merged at most once, into whatever fragment."""

from __future__ import annotations

from typing import Any

from diloco_sim.checkers.checker import Violation

Report = tuple[str, int, int]
"""Learner, incarnation, t_m."""


class Reports:
    """
    Args:
        undone: a report may be merged again if a restart undid its merge (the syncer resumed from a
            snapshot of an earlier step).
    """

    observes = (dict,)

    def __init__(self, *, undone: bool = True) -> None:
        self._undone = undone
        self._merged: dict[Report, int] = {}
        """Report → global step of its merge."""

    def observe(self, event: dict[str, Any], now: float) -> None:
        """See `Checker`."""
        kind = event.get("event")
        if kind == "start" and self._undone:
            step = event["step"]
            self._merged = {report: at for report, at in self._merged.items() if at <= step}
        elif kind == "merge":
            step = event["step"]
            for member in event["members"]:
                report = member["learner"], member["incarnation"], member["step"]
                before = self._merged.setdefault(report, step)
                if before != step or sum(m["learner"] == report[0] for m in event["members"]) > 1:
                    raise Violation(
                        "reports",
                        f"the report of {report[0]} (incarnation {report[1]}) of local step {report[2]} is merged "
                        f"at global step {step}, it was merged at {before} before",
                        step=step,
                        now=now,
                    )

    def finish(self, now: float) -> None:
        """See `Checker`."""
