"""
Where an execution of a tape first differs from it. Pure.

    events.jsonl, tape.jsonl of the replay ─► first_difference
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.journal.records import Merge
from diloco.journal.replay import Life, Plan
from diloco.journal.replay_epochs import Epoch
from diloco.journal.tape import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a replay first differs from its tape."""

    step: int
    """Global."""
    worker: str
    """ "syncer" or a learner."""
    fragment: int
    tensor: str
    """The first that differs; "": not one of its values."""
    what: str
    epoch: int = 0
    """Of the syncer; 0: the run had only one."""

    def __str__(self) -> str:
        """One sentence."""
        step = f"step {self.step} of epoch {self.epoch}" if self.epoch else f"step {self.step}"
        where = f"{step}, {self.worker}, fragment {self.fragment}"
        return f"{where}{f', {self.tensor}' if self.tensor else ''}: {self.what}"


def first_difference(
    plan: Plan,
    merges: Sequence[Merge],
    tapes: Mapping[str, Sequence[Process]],
    *,
    since: int = 0,
) -> Difference | None:
    """
    Where a replay first differs from its tape.

    Args:
        plan: of the replay.
        merges: of the replay, in order; it may have come less far.
        tapes: of the replay, by learner.
        since: so many merges were compared before.
    """
    places = [(epoch, merge) for epoch in plan.epochs for merge in epoch.rounds]
    for (epoch, recorded), found in zip(places[since:], merges[since:], strict=False):
        if difference := _of_merge(plan, epoch, recorded, found):
            return difference
    if len(merges) < len(places):
        return None
    for (learner, restarts), life in plan.lives.items():
        for process in tapes.get(learner, ()):
            same = process.begin.restarts == restarts
            if same and (difference := _of_end(plan, life, process)):
                return difference
    return None


def names_of(plan: Plan, fragment: int) -> list[str]:
    """What the digests of a fragment are of."""
    for life in plan.lives.values():
        for tensors in life.process.begin.fragments:
            if tensors.fragment == fragment:
                return tensors.names.split("\n")
    return []


def _shown(plan: Plan, epoch: Epoch) -> int:
    return epoch.number if len(plan.epochs) > 1 else 0


def _of_merge(plan: Plan, epoch: Epoch, recorded: Merge, found: Merge) -> Difference | None:
    def at(worker: str, what: str, tensor: str = "") -> Difference:
        return Difference(
            step=recorded.step, worker=worker, fragment=recorded.fragment, tensor=tensor, what=what,
            epoch=_shown(plan, epoch),
        )  # fmt: skip

    if (found.step, found.fragment) != (recorded.step, recorded.fragment):
        what = f"the syncer merged fragment {found.fragment} in step {found.step} instead"
        return at("syncer", what)
    members = {member.learner: member for member in found.members}
    if members.keys() != {member.learner for member in recorded.members}:
        names = ", ".join(sorted(members))
        return at("syncer", f"its members are {names}")
    for member in recorded.members:
        other = members[member.learner]
        where = f"the parameters of local step {member.step}"
        if tensor := _tensor(plan, recorded.fragment, member.digests, other.digests):
            return at(member.learner, f"{where} differ from the tape", tensor)
        for name in ("step", "steps", "tokens", "base", "norm", "weight", "clipped"):
            ours, theirs = getattr(member, name), getattr(other, name)
            if ours != theirs:
                return at(member.learner, f"{name} is {theirs} in its upload, {ours} on the tape")
    if tensor := _tensor(plan, recorded.fragment, recorded.digests, found.digests):
        return at("syncer", "the merged values or their momentum differ from the tape", tensor)
    return None


def _of_end(plan: Plan, life: Life, process: Process) -> Difference | None:
    recorded = life.process.end
    if recorded is None or life.stopped or process.end is None:
        return None
    found = {each.fragment: each.digests for each in process.end.parameters}
    for each in recorded.parameters:
        if tensor := _tensor(plan, each.fragment, each.digests, found.get(each.fragment)):
            what = f"its last parameters, of local step {recorded.local_step}, differ from the tape"
            return Difference(
                step=plan.to, worker=life.key[0], fragment=each.fragment, tensor=tensor, what=what,
                epoch=_shown(plan, plan.epochs[-1]),
            )  # fmt: skip
    return None


def _tensor(plan: Plan, fragment: int, ours: str | None, theirs: str | None) -> str:
    """The first tensor whose digests differ; "": none does, or they are not known."""
    if ours is None or theirs is None or ours == theirs:
        return ""
    width = 8  # hexadecimal digits of a digest
    names = names_of(plan, fragment)
    for number, name in enumerate(names):
        part = slice(number * width, (number + 1) * width)
        if ours[part] != theirs[part]:
            return name
    return names[0] if names else "its first tensor"
