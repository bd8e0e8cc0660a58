"""
What each worker must do to execute a tape. Pure.

    events.jsonl, tape.jsonl of each learner ─► plan_of ─► Plan: epochs for the syncer, a Life for each process

All processes of a replay make the same plan from the same files. Differs from the paper: a tape has no
decision that follows from another one, such as what the syncer merges, only those of clock and network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from diloco.errors import ConfigError
from diloco.journal.records import Merge
from diloco.journal.replay_epochs import (
    NEVER,
    Applied,
    Epoch,
    Made,
    Recorded,
    Version,
    covers,
    version_of,
)
from diloco.journal.tape import Process

Key = tuple[str, int]
"""Name of a learner and the previous restarts of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A host copy that was merged."""

    fragment: int
    round: Version
    """Of the merge."""
    after: Version
    """Of the previous merge of a copy of this fragment, which the memory holds until then; NEVER: there was none."""
    base: Version | None
    """Version that the delta refers to; None: the fragment came whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A version of a fragment that the process applied."""

    fragment: int
    version: Version
    local_step: int
    after: Version
    """
    Of the last merge of an earlier copy of the fragment: the inbox must not change before; NEVER: there was none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Whose local checkpoint a process took the optimizers' state from."""

    learner: str
    local_step: int
    """Of the checkpoint."""
    step: int
    """Its global step."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a learner."""

    process: Process
    last: int
    """Its last local step in the replay."""
    stopped: bool = False
    """It ends earlier than it did: what it applied next is not part of the replay."""
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    """By local step."""
    results: list[Result] = field(default_factory=list)
    """In the order of local steps."""
    saves: set[int] = field(default_factory=set)
    """Local steps of the checkpoints that later processes found."""
    final: Version = NEVER
    """Of the last merge of a copy; NEVER: none was merged."""
    peer: Peer | None = None
    """None: it took the optimizers' state from none."""

    @property
    def key(self) -> Key:
        """Learner and restarts."""
        return self.process.begin.learner, self.process.begin.restarts

    def versions(self) -> Iterator[tuple[int, Version]]:
        """Fragment and version of all that it gets."""
        yield from self.held()
        for result in self.results:
            yield result.fragment, result.version

    def held(self) -> Iterator[tuple[int, Version]]:
        """Fragment and version of what it begins with."""
        for held in self.process.begin.held:
            yield held.fragment, version_of(held, self.process)

    @property
    def killed(self) -> bool:
        """It ended without leaving the job."""
        return self.process.end is None and not self.stopped


@dataclass(kw_only=True)
class Plan:
    """A replay; it does not change once `plan_of` has returned it."""

    initialiser: str
    """The learner that uploaded Θ^(0)."""
    epochs: list[Epoch]
    """Of the syncer, in order; only the first may have no round."""
    steps: int
    """T."""
    lives: dict[Key, Life]
    ends: str = ""
    """Why the replay ends before the run did; "": it does not."""

    @property
    def to(self) -> int:
        """Global step of the last merge."""
        return self.epochs[-1].rounds[-1].step

    @cached_property
    def rounds(self) -> list[Merge]:
        """Of all epochs, in order."""
        return [merge for epoch in self.epochs for merge in epoch.rounds]

    @cached_property
    def complete(self) -> bool:
        """Whether the last global step is part of it: no more steps are missing than have ever been without a round."""
        gaps = (b.step - a.step for epoch in self.epochs for a, b in pairwise(epoch.rounds))
        return not self.ends and self.to + max(gaps, default=1) > self.steps

    def lives_of(self, learner: str) -> list[Life]:
        """Of one learner, in order."""
        return [life for (name, _), life in self.lives.items() if name == learner]


def plan_of(
    events: Iterable[Mapping[str, Any]],
    tapes: Mapping[str, Sequence[Process]],
    *,
    feedback: bool,
    to: int | None = None,
) -> Plan:
    """
    The plan of a run.

    Args:
        events: lines of events.jsonl, from the first on.
        tapes: by learner.
        feedback: whether uploads have error feedback.
        to: the replay ends before the first merge of a later global step; None: where the run did.

    Raises:
        ConfigError: nothing of the run can be replayed; the sentence states why.
    """
    run = Recorded(tapes, feedback=feedback, to=to)
    for line in events:
        if not run.ends:
            run.read(line)
    run.end()
    if not any(epoch.rounds for epoch in run.epochs):
        raise ConfigError(f"nothing can be replayed: {run.ends or 'no step was merged'}")
    plan = Plan(
        initialiser=run.initialiser, epochs=run.epochs, steps=run.steps, lives={}, ends=run.ends
    )
    for processes in tapes.values():
        known = (p for p in processes if p.begin.epoch <= run.newest_epoch)
        _add_lives(plan, known, run.made)
    _add_copies(plan)
    for life in plan.lives.values():
        _add_results(life)
    for life in list(plan.lives.values()):
        _add_peer(plan, life)
    lives = {learner: plan.lives_of(learner) for learner in tapes}
    plan.epochs = [
        replace(epoch, rounds=[_with_clock(merge, lives) for merge in epoch.rounds])
        for epoch in plan.epochs
    ]
    return plan


def _add_lives(plan: Plan, processes: Iterable[Process], made: Made) -> None:
    """The processes of one learner that can be replayed: up to the first that cannot."""
    added: list[Life] = []
    for process in processes:
        begin, applied = process.begin, Applied(process)
        complete = {held.fragment for held in begin.held} == {f.fragment for f in begin.fragments}
        if not complete or (
            applied.unknown(made, to=process.last) and applied.last < begin.local_step
        ):
            return
        if begin.found and not any(
            life.process.begin.local_step < begin.found <= life.last for life in added
        ):
            return
        life = Life(process=process, last=applied.last, stopped=applied.last < process.last)
        for earlier in reversed(added):
            if begin.found and earlier.process.begin.local_step < begin.found <= earlier.last:
                earlier.saves.add(begin.found)
                break
        if process.end is not None and not life.stopped:
            life.saves.add(life.last)
        added.append(life)
        plan.lives[life.key] = life
        if life.stopped:
            return


def _add_copies(plan: Plan) -> None:
    """
    The host copies that were merged.

    Raises:
        ConfigError: a member has no process that can be replayed.
    """
    lives = {(life.key[0], life.process.begin.incarnation): life for life in plan.lives.values()}
    newest: dict[tuple[Key, int], Version] = {}
    """Process and fragment → the last merge of a copy."""
    for epoch, merge in ((each, merge) for each in plan.epochs for merge in each.rounds):
        for member in merge.members:
            life = lives.get((member.learner, member.incarnation))
            if life is None or member.step > life.last:
                raise ConfigError(
                    f"nothing can be replayed: step {merge.step} merged local step {member.step} of {member.learner}, "
                    "and its tape does not state what that process began from"
                )
            place, version = (life.key, merge.fragment), (epoch.number, merge.step)
            copy = Copy(
                fragment=merge.fragment,
                round=version,
                after=newest.get(place, NEVER),
                base=epoch.base(member),
            )
            life.copies.setdefault(member.step, []).append(copy)
            newest[place] = life.final = version


def _add_results(life: Life) -> None:
    newest: dict[int, Version] = {}
    """Fragment → the last merge of a copy of this step or an earlier one."""
    for number in sorted({*life.process.steps, *life.copies}):
        if number > life.last:
            return
        for copy in life.copies.get(number, ()):
            newest[copy.fragment] = max(newest.get(copy.fragment, NEVER), copy.round)
        step = life.process.steps.get(number)
        for held in (step.results if step is not None else None) or ():
            life.results.append(
                Result(
                    fragment=held.fragment, version=version_of(held, life.process), local_step=number,
                    after=newest.get(held.fragment, NEVER),
                )
            )  # fmt: skip


def _add_peer(plan: Plan, life: Life) -> None:
    """
    Have the peer save what the process took; one of which nothing was merged is left out.

    Raises:
        ConfigError: the peer may have saved a later checkpoint before the process asks.
    """
    begin = life.process.begin
    if begin.peer_step is None:
        return
    local_step = begin.peer_step
    found = (
        p
        for p in plan.lives_of(begin.optimizers)
        if covers(p.process, local_step) and local_step <= p.last
    )
    peer = next(found, None)
    rounds = [copy.round for copies in life.copies.values() for copy in copies]
    if peer is None or not rounds:
        later = [key for key in plan.lives if key[0] == life.key[0] and key[1] >= life.key[1]]
        for key in later:
            del plan.lives[key]
        return
    # The newest is served: what the peer needs of this process keeps it from saving the next one too early.
    for save in peer.saves:
        needed = (r for r in peer.results if r.local_step <= save and r.version >= min(rounds))
        if save > local_step and next(needed, None) is None:
            raise ConfigError(
                f"nothing can be replayed: {begin.optimizers} saved local step {save} soon after {local_step}, which "
                f"{begin.learner} took, and the replay cannot distinguish them"
            )
    peer.saves.add(local_step)
    step = peer.process.steps[local_step].step
    life.peer = Peer(learner=begin.optimizers, local_step=local_step, step=step)


def _with_clock(merge: Merge, lives: Mapping[str, Sequence[Life]]) -> Merge:
    """The merge with the part of its clock that the replay reaches: the last steps of a process may be lost."""
    clock = {}
    for learner, local_step in (merge.clock or {}).items():
        reached = [
            min(local_step, life.last)
            for life in lives.get(learner, ())
            if life.process.begin.local_step < local_step
        ]
        clock[learner] = max(reached, default=0)
    return replace(merge, clock=clock)
