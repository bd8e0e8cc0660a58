"""
Merges follow each other, and once all faults are over everything recovers within stated bounds.

    while a quorum of learners and the syncer have no fault, or no longer have any, the next merge comes
    within a bound, whatever happens to the others; afterwards each healthy learner takes part again, and
    each connected learner has the newest result of every fragment, or a newer one; the job is complete
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Committed, Moment, Refused

Version = tuple[int, int]
"""Epoch and global step."""

WAITED_SECONDS = 10.0
"""A loop that has waited longer for a block of data makes no step, so its learner takes no results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Virtual seconds."""

    progress: float
    """From a merge to the next one, while a quorum of learners and the syncer have had no fault."""
    recovery: float
    """From the moment when such a quorum no longer has a fault, or of a merge, to the next merge."""
    merge: float
    """From the start, the end of the last fault, or a merge, to the next merge."""
    participation: float
    """From the end of the last fault, or a merge of a learner, to its next merge."""
    result: float
    """From a commit until each connected learner has it."""


class Liveness:
    """
    Args:
        steps: T; no merge follows after it.
        bounds: how long each may take.
        exempt: learners that need not take part.
    """

    observes = (dict, Moment, Committed, Refused)

    def __init__(self, steps: int, bounds: Bounds, exempt: frozenset[str] = frozenset()) -> None:
        self._steps, self._bounds, self._exempt = steps, bounds, exempt
        self._quiet_at: float | None = None
        self._merged_at = 0.0
        self._took_part: dict[str, float] = {}
        self._committed: dict[int, list[tuple[float, Version]]] = {}
        """Fragment → when it got which version, newest last."""
        self._epoch = 0
        """Of the newest start."""
        self._connected_at: dict[str, float] = {}
        self._exported = False

    def observe(self, event: dict[str, Any] | Moment | Committed | Refused, now: float) -> None:
        """See `Checker`."""
        match event:
            case Moment():
                self._judge(event, now)
            case Committed():
                versions = self._committed.setdefault(event.commit.fragment, [])
                versions.append((now, event.fragment.version))
            case Refused():
                self._fail(f"{event.learner} is refused for good: {event.text}", 0, now)
            case {"event": "merge", "members": members}:
                self._merged_at = now
                for member in members:
                    self._took_part[member["learner"]] = now
            case {"event": "start", "step": step, "epoch": epoch}:
                self._epoch = epoch
                for versions in self._committed.values():
                    versions[:] = [(at, v) for at, v in versions if v[1] <= step]
                self._exported = False
            case {"event": "complete"}:
                self._exported = True

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _judge(self, moment: Moment, now: float) -> None:
        for name, learner in moment.learners.items():
            waited = now - learner.waits_since if learner.waits_since is not None else 0.0
            if not learner.connected or waited > WAITED_SECONDS:
                self._connected_at.pop(name, None)
            else:
                self._connected_at.setdefault(name, now)
        if moment.healthy_since is not None and moment.step < self._steps:
            self._judge_progress(moment, moment.healthy_since, now)
        if not moment.quiet:
            return
        if self._quiet_at is None:
            self._quiet_at = now
        if not self._exported:
            self._judge_merges(moment, self._quiet_at, now)
            for name, learner in moment.learners.items():
                self._judge_versions(name, learner.versions, self._quiet_at, moment.step, now)

    def _judge_progress(self, moment: Moment, since: float, now: float) -> None:
        seconds = now - max(self._merged_at, since)
        # The first learner that is asked for the initial parameters may have a fault.
        first = self._bounds.progress if self._merged_at else self._bounds.merge
        bound = self._bounds.recovery if since else first
        if seconds > bound:
            self._fail(
                f"no merge for {seconds:.0f} s with a quorum without a fault, expected one within {bound:.0f}",
                moment.step, now,
            )  # fmt: skip

    def _judge_merges(self, moment: Moment, quiet_at: float, now: float) -> None:
        seconds = now - max(quiet_at, self._merged_at)
        if seconds > self._bounds.merge:
            self._fail(
                f"no merge for {seconds:.0f} s without a fault, expected one within {self._bounds.merge:.0f}",
                moment.step,
                now,
            )
        for name in (n for n in moment.learners if n not in self._exempt):
            seconds = now - max(quiet_at, self._took_part.get(name, 0.0))
            if seconds > self._bounds.participation:
                self._fail(
                    f"{name} has been in no merge for {seconds:.0f} s without a fault, expected one "
                    f"within {self._bounds.participation:.0f}",
                    moment.step,
                    now,
                )

    def _judge_versions(
        self,
        name: str,
        held: tuple[Version | None, ...],
        quiet_at: float,
        step: int,
        now: float,
    ) -> None:
        since = self._connected_at.get(name)
        if since is None:
            return
        until = now - self._bounds.result
        if until < max(since, quiet_at):
            return
        for fragment, versions in self._committed.items():
            due = next((v for at, v in reversed(versions) if at <= until), None)
            version = held[fragment]
            if due is not None and not self._is_newer(version, due, versions):
                self._fail(
                    f"{name} holds {version} of fragment {fragment}, {due} was committed more than "
                    f"{self._bounds.result:.0f} s ago",
                    step,
                    now,
                )

    def _is_newer(
        self, version: Version | None, due: Version, committed: list[tuple[float, Version]]
    ) -> bool:
        """
        Whether it is `due`, or a newer version.

        One that a restart has undone may be newer; it is of an earlier epoch. Any other that was never
        committed is of a history before the syncer's files were restored: no order compares the two.
        """
        if version is None or version < due:
            return False
        return version[0] < self._epoch or any(v == version for _, v in reversed(committed))

    def _fail(self, sentence: str, step: int, now: float) -> None:
        raise Violation("liveness", sentence, step=step, now=now)
