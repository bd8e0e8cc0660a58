"""
Carries the decisions of a replay out: learners get the versions that they are shown, and no others.

A version that a learner applied late is kept until it was shown, so at most as many as in the run that is replayed.
"""

from __future__ import annotations

from collections import Counter

from diloco_syncer import learner_messages
from diloco_syncer.coordinator import Coordinator
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Version
from diloco_syncer.core.replay import ReplayEngine
from diloco_syncer.storage.parameters import FragmentParameters


class ReplayCoordinator(Coordinator):
    """See `Coordinator`; its engine is a `ReplayEngine`."""

    _kept: dict[tuple[int, int], FragmentParameters]
    """Fragment and global step → a version that a learner is still to be shown."""
    _left: Counter[tuple[int, int]] | None = None
    """How often each will be shown."""

    def _carry_out(self, decision: ev.Decision) -> None:
        if isinstance(decision, ev.ShowVersion):
            self._show(decision)
        else:
            super()._carry_out(decision)

    def _show(self, decision: ev.ShowVersion) -> None:
        left, key = self._counted(), (decision.fragment, decision.step)
        version = self._kept.get(key)
        if version is None:
            raise AssertionError(f"version {key} of {decision} is not kept")
        self._parameters().show(decision.learner, decision.fragment, version)
        left[key] -= 1
        if left[key] <= 0:
            del self._kept[key]
        if decision.announced:
            message = learner_messages.committed(decision.fragment, version.version)
            self.sessions.send(decision.learner, message)

    def _counted(self) -> Counter[tuple[int, int]]:
        if self._left is None:
            self._left = Counter(
                version for life in self._engine.plan.lives.values() for version in life.versions()
            )
            self._kept = {(p, 0): found for p, found in enumerate(self._parameters().all())}
        return self._left

    @property
    def _engine(self) -> ReplayEngine:
        engine = self._state.engine
        if not isinstance(engine, ReplayEngine):
            raise AssertionError("a replay without its engine")
        return engine

    def _send_pull(self, decision: ev.Pull) -> None:
        for member in self._engine.plan.by_step[decision.round].members:
            bases = () if member.base is None else ((self._engine.epoch, member.base),)
            message = learner_messages.pull(decision, self._parameters(), bases=bases)
            self.sessions.send(member.learner, message)

    def _announce(self, fragment: int, version: Version) -> None:
        key = (fragment, version[1])
        if self._counted()[key] > 0:
            self._kept[key] = self._parameters().current(fragment)
