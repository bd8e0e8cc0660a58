"""
Carries the decisions of a replay out: learners get the versions that they are shown, and no others.

A version that a learner applied late is kept until it was shown, so at most as many as in the run that is replayed.
One process carries out all epochs: the fragments that a snapshot held are kept until the epoch that began with it
does, and are what the syncer has then. Learners see what they saw: their sessions end, and another epoch welcomes them.
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

    _kept: dict[tuple[int, Version], FragmentParameters]
    """Fragment and version → one that a learner is still to be shown, or that an epoch begins with."""
    _left: Counter[tuple[int, Version]] | None = None
    """How often each will be needed."""

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.ShowVersion():
                self._show(decision)
            case ev.BeginEpoch():
                self._begin_epoch(decision)
            case _:
                super()._carry_out(decision)

    def _show(self, decision: ev.ShowVersion) -> None:
        version = self._take(decision.fragment, decision.version)
        self._parameters().show(decision.learner, decision.fragment, version)
        if decision.announced:
            message = learner_messages.committed(decision.fragment, version.version)
            self.sessions.send(decision.learner, message)

    def _begin_epoch(self, decision: ev.BeginEpoch) -> None:
        fragments = range(len(self._parameters().all()))
        versions = [decision.versions.get(p, decision.initial) for p in fragments]
        self._parameters().restore([self._take(p, v) for p, v in enumerate(versions)])
        self.attempts.forget()
        self.start(0.0)

    def _take(self, fragment: int, version: Version) -> FragmentParameters:
        left, key = self._counted(), (fragment, version)
        found = self._kept.get(key)
        if found is None:
            raise AssertionError(f"version {version} of fragment {fragment} is not kept")
        left[key] -= 1
        if left[key] <= 0:
            del self._kept[key]
        return found

    def _counted(self) -> Counter[tuple[int, Version]]:
        if self._left is None:
            plan, fragments = self._engine.plan, self._parameters().all()
            self._left = Counter(v for life in plan.lives.values() for v in life.versions())
            for epoch in plan.epochs[1:]:
                versions = (epoch.versions.get(p, epoch.initial) for p in range(len(fragments)))
                self._left.update(enumerate(versions))
            self._kept = {(p, found.version): found for p, found in enumerate(fragments)}
        return self._left

    @property
    def _engine(self) -> ReplayEngine:
        engine = self._state.engine
        if not isinstance(engine, ReplayEngine):
            raise AssertionError("a replay without its engine")
        return engine

    def _send_pull(self, decision: ev.Pull) -> None:
        for member, base in self._engine.members(decision.round):
            bases = () if base is None else (base,)
            message = learner_messages.pull(decision, self._parameters(), bases=bases)
            self.sessions.send(member, message)

    def _announce(self, fragment: int, version: Version) -> None:
        key = (fragment, version)
        if self._counted()[key] > 0:
            self._kept[key] = self._parameters().current(fragment)
