"""
One round of a fragment is in flight at a time, at most τ in all; they commit in order, each once.

A round is in flight from its first pull to its commit, also while an attempt of it was aborted and the
next has not begun.
"""

from __future__ import annotations

from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_syncer.core.events import AbortMerge, BeginMerge, Commit, Pull


class Rounds:
    """
    Args:
        overlap: τ of the spec.
    """

    observes = (dict, Pull, BeginMerge, AbortMerge, Commit)

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._fragments: dict[int, int] = {}
        """Fragment → its round in flight."""
        self._attempts: dict[int, int] = {}
        """Round in flight → its newest attempt."""
        self._members: dict[int, frozenset[str] | None] = {}
        """Round in flight → learners of the attempt that runs; None: it was aborted."""
        self._committed = 0

    def observe(
        self, event: dict[str, Any] | Pull | BeginMerge | AbortMerge | Commit, now: float
    ) -> None:
        """See `Checker`."""
        match event:
            case Pull():
                self._pull(event, now)
            case BeginMerge():
                self._begin(event, now)
            case AbortMerge(round=round_, attempt=attempt):
                if self._attempts.get(round_) == attempt:
                    self._members[round_] = None
            case Commit():
                self._commit(event, now)
            case {"event": "start", "step": step}:
                self._fragments.clear()
                self._attempts.clear()
                self._members.clear()
                self._committed = step

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _pull(self, pull: Pull, now: float) -> None:
        step, attempt, fragment = pull.round, pull.attempt, pull.fragment
        other = self._fragments.setdefault(fragment, step)
        if other != step:
            self._fail(f"fragment {fragment} is pulled while round {other} of it runs", step, now)
        if step <= self._committed:
            self._fail(f"round {step} is pulled after {self._committed} was committed", step, now)
        if attempt <= self._attempts.get(step, 0):
            before = self._attempts[step]
            self._fail(f"attempt {attempt} is pulled after attempt {before}", step, now)
        if self._members.get(step) is not None:
            self._fail(f"attempt {attempt} begins before the one before it ended", step, now)
        if len(set(pull.learners)) != len(pull.learners):
            self._fail(f"attempt {attempt} pulls a learner twice", step, now)
        self._attempts[step] = attempt
        self._members[step] = frozenset(pull.learners)
        if len(self._attempts) > self._overlap:
            rounds = ", ".join(map(str, sorted(self._attempts)))
            self._fail(f"rounds {rounds} are in flight, at most {self._overlap} may be", step, now)

    def _begin(self, merge: BeginMerge, now: float) -> None:
        step, members = merge.round, self._members.get(merge.round)
        if members is None or self._attempts[step] != merge.attempt:
            self._fail(f"attempt {merge.attempt} is merged and does not run", step, now)
        learners = [c.learner for c in merge.contributions]
        if members is not None and not members.issuperset(learners):
            outsiders = ", ".join(sorted(set(learners) - members))
            self._fail(f"{outsiders} is merged and was not pulled", step, now)
        if len(set(learners)) != len(learners):
            self._fail("a learner is merged twice", step, now)

    def _commit(self, commit: Commit, now: float) -> None:
        step = commit.round
        if self._fragments.get(commit.fragment) != step or step not in self._attempts:
            self._fail(f"fragment {commit.fragment} is committed without a round", step, now)
        # A merge in which every weight is zero is aborted and committed: Θ does not change.
        aborted = self._members[step] is None
        if self._attempts[step] != commit.attempt or aborted is commit.changed:
            self._fail(f"attempt {commit.attempt} is committed and does not run", step, now)
        if step <= self._committed:
            self._fail(f"it is committed after round {self._committed}", step, now)
        if (oldest := min(self._attempts)) != step:
            self._fail(f"it is committed before round {oldest}", step, now)
        self._committed = step
        del self._fragments[commit.fragment], self._attempts[step], self._members[step]

    def _fail(self, sentence: str, step: int, now: float) -> None:
        raise Violation("rounds", sentence, step=step, now=now)
