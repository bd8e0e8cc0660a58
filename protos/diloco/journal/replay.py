"""
What each worker must do to execute a tape, and where an execution first differs from it. Pure.

    events.jsonl, tape.jsonl of each learner ─► plan_of ─► Plan: rounds for the syncer, a Life for each process
    events.jsonl, tape.jsonl of the replay ──────────────► first_difference

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
from diloco.journal.records import Join, Merge, MergeMember, RecordError, Start, decode
from diloco.journal.tape import Process

Key = tuple[str, int]
"""Name of a learner and the previous restarts of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A host copy that was merged."""

    fragment: int
    round: int
    """Global step of the merge."""
    after: int
    """Of the previous merge of a copy of this fragment, which the memory holds until then; 0: there was none."""
    base: int | None
    """Version that the delta refers to, by its global step; None: the fragment came whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A version of a fragment that the process applied."""

    fragment: int
    step: int
    """Global, of the merge."""
    local_step: int
    after: int
    """Of the last merge of an earlier copy of the fragment: the inbox must not change before; 0: there was none."""


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
    final: int = 0
    """Global step of the last merge of a copy; 0: none was merged."""
    peer: Peer | None = None
    """None: it took the optimizers' state from none."""

    @property
    def key(self) -> Key:
        """Learner and restarts."""
        return self.process.begin.learner, self.process.begin.restarts

    def versions(self) -> Iterator[tuple[int, int]]:
        """Fragment and global step of each version that it gets."""
        for held in self.process.begin.held:
            yield held.fragment, held.step
        for result in self.results:
            yield result.fragment, result.step

    @property
    def killed(self) -> bool:
        """It ended without leaving the job."""
        return self.process.end is None and not self.stopped


@dataclass(kw_only=True)
class Plan:
    """A replay; it does not change once `plan_of` has returned it."""

    initialiser: str
    """The learner that uploaded Θ^(0)."""
    epoch: int
    steps: int
    """T."""
    rounds: list[Merge]
    """In order."""
    lives: dict[Key, Life]
    ends: str = ""
    """Why the replay ends before the run did; "": it does not."""

    @property
    def to(self) -> int:
        """Global step of the last merge."""
        return self.rounds[-1].step

    @cached_property
    def by_step(self) -> dict[int, Merge]:
        """The rounds by global step."""
        return {merge.step: merge for merge in self.rounds}

    @cached_property
    def complete(self) -> bool:
        """Whether the last global step is part of it: no more steps are missing than have ever been without a round."""
        gaps = (b.step - a.step for a, b in pairwise(self.rounds))
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
        to: last global step; None: that of the run.

    Raises:
        ConfigError: nothing of the run can be replayed; the sentence states why.
    """
    run = _Run(tapes, feedback=feedback, to=to)
    for line in events:
        if not run.ends:
            run.read(line)
    if not run.rounds:
        raise ConfigError(f"nothing can be replayed: {run.ends or 'no step was merged'}")
    plan = Plan(
        initialiser=run.initialiser, epoch=run.epoch, steps=run.steps, rounds=run.rounds, lives={},
        ends=run.ends,
    )  # fmt: skip
    for processes in tapes.values():
        _add_lives(plan, processes)
    _add_copies(plan)
    for life in plan.lives.values():
        _add_results(life)
    for life in list(plan.lives.values()):
        _add_peer(plan, life)
    lives = {learner: plan.lives_of(learner) for learner in tapes}
    plan.rounds = [_with_clock(merge, lives) for merge in plan.rounds]
    return plan


class _Run:
    """What of events.jsonl can be replayed."""

    def __init__(
        self, tapes: Mapping[str, Sequence[Process]], *, feedback: bool, to: int | None
    ) -> None:
        self._by_incarnation = {
            (name, process.begin.incarnation): process
            for name, processes in tapes.items()
            for process in processes
        }
        self._tapes, self._feedback, self._to = tapes, feedback, to
        self.rounds: list[Merge] = []
        self.initialiser = self.ends = ""
        self.epoch = self.steps = 0
        self._incarnations: dict[str, int] = {}
        self._lost: dict[tuple[str, int, int], int] = {}
        """Learner, incarnation, fragment → step at which its upload was received and not merged."""

    def read(self, line: Mapping[str, Any]) -> None:
        """Take the next line, or note why the replay ends before it."""
        kind = line.get("event")
        try:
            record = decode(line)
        except RecordError as error:
            self.ends = f"events.jsonl is damaged after step {self._step()}: {kind} {error}"
            return
        match record:
            case Start() if self.epoch:
                self.ends = f"the syncer was started again after step {self._step()}, which is not replayed yet"
            case Start():
                self.steps, self.epoch = record.steps, int(line.get("epoch", 0))
                if record.step:
                    self.ends = "events.jsonl does not begin with step 0"
            case Join():
                self._incarnations[record.learner] = record.incarnation
            case Merge():
                self._merge(record)
            case _ if kind == "initialised":
                self.initialiser = str(line.get("learner"))
            case _ if kind in ("data", "halt", "dropped", "rotate"):
                self._other(str(kind), line)

    def _other(self, kind: str, line: Mapping[str, Any]) -> None:
        if kind == "rotate" and self.rounds:
            return
        self.ends = {
            "data": "the program takes its data by learner.blocks, whose leases are not replayed yet",
            "halt": f"the syncer halted after step {self._step()}: {line.get('reason')}",
            "dropped": f"events.jsonl has lost lines after step {self._step()}: the disk did not take them in time",
            "rotate": "the oldest parts of events.jsonl were deleted",
        }[kind]

    def _step(self) -> int:
        return self.rounds[-1].step if self.rounds else 0

    def _merge(self, merge: Merge) -> None:
        if not self.epoch or not self.initialiser:
            self.ends = "events.jsonl does not begin with the start of the syncer"
        elif merge.clock is None:
            self.ends = "the run was made by a release that wrote no tape"
        elif self._to is not None and merge.step > self._to:
            self.ends = f"--to {self._to}"
        else:
            self.ends = next(filter(None, (self._why_not(merge, m) for m in merge.members)), "")
        if self.ends:
            return
        self.rounds.append(merge)
        for learner in merge.abandoned.split(", ") if merge.abandoned else ():
            self._lost[learner, self._incarnations.get(learner, 0), merge.fragment] = merge.step

    def _why_not(self, merge: Merge, member: MergeMember) -> str:
        who, before = member.learner, f"the replay ends before step {merge.step}: "
        process = self._by_incarnation.get((who, member.incarnation))
        if process is None:
            return f"{before}{who} has no tape of incarnation {member.incarnation}"
        begin = process.begin
        if begin.peer_step is not None and not any(
            covers(each, begin.peer_step) for each in self._tapes.get(begin.optimizers, ())
        ):
            return (
                f"{before}{who} began with the optimizers' state of local step {begin.peer_step} of "
                f"{begin.optimizers}, of which there is no tape"
            )
        if begin.epoch != self.epoch:
            return f"{before}{who} began in another epoch of the syncer"
        if member.step > process.last:
            last = process.last
            return f"{before}{who} has no tape of local step {member.step}, which was merged; its last is {last}"
        lost = self._lost.get((who, member.incarnation, merge.fragment))
        if self._feedback and lost is not None:
            return (
                f"{before}the error feedback of {who} has an upload of step {lost}, which was discarded; that is not "
                "replayed yet"
            )
        return ""


def covers(process: Process, local_step: int) -> bool:
    """Whether the process made this step."""
    return process.begin.local_step < local_step <= process.last


def _add_lives(plan: Plan, processes: Sequence[Process]) -> None:
    """The processes of one learner that can be replayed: up to the first that cannot."""
    added: list[Life] = []
    for process in processes:
        begin = process.begin
        complete = {held.fragment for held in begin.held} == {f.fragment for f in begin.fragments}
        if (
            not complete
            or begin.epoch != plan.epoch
            or any(held.step > plan.to for held in begin.held)
        ):
            return
        if begin.found and not any(
            life.process.begin.local_step < begin.found <= life.last for life in added
        ):
            return
        later = (
            number - 1
            for number, step in sorted(process.steps.items())
            if any(not 0 <= held.step <= plan.to for held in step.results or ())
        )
        last = min(process.last, next(later, process.last))
        life = Life(process=process, last=last, stopped=last < process.last)
        for earlier in reversed(added):
            if begin.found and earlier.process.begin.local_step < begin.found <= earlier.last:
                earlier.saves.add(begin.found)
                break
        if process.end is not None and not life.stopped:
            life.saves.add(last)
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
    newest: dict[tuple[Key, int], int] = {}
    """Process and fragment → the last merge of a copy."""
    for merge in plan.rounds:
        for member in merge.members:
            life = lives.get((member.learner, member.incarnation))
            if life is None or member.step > life.last:
                raise ConfigError(
                    f"nothing can be replayed: step {merge.step} merged local step {member.step} of {member.learner}, "
                    "and its tape does not state what that process began from"
                )
            place = life.key, merge.fragment
            copy = Copy(
                fragment=merge.fragment,
                round=merge.step,
                after=newest.get(place, 0),
                base=member.base,
            )
            life.copies.setdefault(member.step, []).append(copy)
            newest[place] = life.final = merge.step


def _add_results(life: Life) -> None:
    newest: dict[int, int] = {}
    """Fragment → the last merge of a copy of this step or an earlier one."""
    for number in sorted({*life.process.steps, *life.copies}):
        if number > life.last:
            return
        for copy in life.copies.get(number, ()):
            newest[copy.fragment] = max(newest.get(copy.fragment, 0), copy.round)
        step = life.process.steps.get(number)
        for held in (step.results if step is not None else None) or ():
            life.results.append(
                Result(
                    fragment=held.fragment, step=held.step, local_step=number,
                    after=newest.get(held.fragment, 0),
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
        needed = (r for r in peer.results if r.local_step <= save and r.step >= min(rounds))
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


# ---------------------------------------------------------------- comparison


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

    def __str__(self) -> str:
        """One sentence."""
        where = f"step {self.step}, {self.worker}, fragment {self.fragment}"
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
    for recorded, found in zip(plan.rounds[since:], merges[since:], strict=False):
        if difference := _of_merge(plan, recorded, found):
            return difference
    if len(merges) < len(plan.rounds):
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


def _of_merge(plan: Plan, recorded: Merge, found: Merge) -> Difference | None:
    def at(worker: str, what: str, tensor: str = "") -> Difference:
        return Difference(
            step=recorded.step, worker=worker, fragment=recorded.fragment, tensor=tensor, what=what
        )

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
                step=plan.to, worker=life.key[0], fragment=each.fragment, tensor=tensor, what=what
            )
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
