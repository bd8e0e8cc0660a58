"""
What is wrong with the work of processes although they run, as their health files state it, and when that means
that no learner can train. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.runtime.formatting import shorten
from diloco.runtime.health import Health

# Paper leaves this open: how long all learners may do nothing useful before the run fails. A step may take minutes,
# so their absence counts only after what liveness probes in a cluster allow. The first step may compile for much
# longer: NoFirstStep is shown, and fails no run.
STUCK_SECONDS = 900.0
FATAL_SECONDS: Mapping[str, float] = {"NotFinite": 60.0, "NoTokens": 60.0, "NoSteps": STUCK_SECONDS}
"""Of a learner, by kind of problem; with other kinds it still trains."""

NOTE_SECONDS = 600.0
"""The same problem of the same process is noted again after this."""

MAX_TEXT = 400
MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with the work of one process."""

    kind: str
    text: str
    since: float
    """Monotonic seconds."""


class Problems:
    """
    The problems of the processes that run.

    Args:
        learners: names of all learners of the plan.
        stuck_seconds: how long all of them may take no step, after their first.
    """

    def __init__(self, learners: Iterable[str], *, stuck_seconds: float = STUCK_SECONDS) -> None:
        self._learners = tuple(learners)
        self._fatal_seconds = {**FATAL_SECONDS, "NoSteps": stuck_seconds}
        self._noted: dict[tuple[str, str], float] = {}
        self.current: Mapping[str, Problem] = {}
        """By process."""

    def update(self, healths: Mapping[str, Health], now: float) -> list[str]:
        """
        Take the health of the processes that run; returns a line for each problem that is new.

        Args:
            healths: by process; without those that have not reported any.
            now: monotonic seconds.
        """
        before, self.current = self.current, {}
        found: dict[str, Problem] = {}
        for name, health in healths.items():
            if health.problem:
                kind, known = shorten(health.problem, 32), before.get(name)
                since = known.since if known is not None and known.kind == kind else now
                found[name] = Problem(kind=kind, text=shorten(health.why, MAX_TEXT), since=since)
        self.current = found
        return [
            f"warning: {name}: {problem.kind}: {problem.text}"
            for name, problem in found.items()
            if self._is_new(name, problem.kind, now)
        ]

    def _is_new(self, name: str, kind: str, now: float) -> bool:
        if now - self._noted.get((name, kind), float("-inf")) < NOTE_SECONDS:
            return False
        self._noted[name, kind] = now
        return True

    def standstill(self, now: float) -> str:
        """Why no learner can train as it is; empty: at least one may."""
        problems = {name: self.current.get(name) for name in self._learners}
        for problem in problems.values():
            if problem is None or now - problem.since < self._fatal_seconds.get(
                problem.kind, float("inf")
            ):
                return ""
        named = [
            f"{name} ({problem.kind}: {problem.text})"
            for name, problem in problems.items()
            if problem is not None
        ]
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        return f"no learner can train: {', '.join(named[:MAX_NAMED])}{more}" if named else ""
