"""
What of events.jsonl can be replayed: the merges of each epoch of the syncer, and the versions that they made. Pure.

    epoch 1   0 ── merges ──────► 45, killed          its newest snapshot is of step 36
    epoch 2            36 ── merges ──────► 90        begins with the versions that epoch 1 had at step 36

A restart undoes the merges after the snapshot. A learner that has applied a result of them keeps it, and the new
epoch uses the same global steps again: so a version is (epoch, global step), and each step has one in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.journal.records import Join, Merge, MergeMember, RecordError, Start, decode
from diloco.journal.tape import Held, Process

Version = tuple[int, int]
"""(epoch, global step) of the merge that made it; the step 0 is Θ^(0)."""

NEVER: Version = (0, 0)
"""Before all merges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The merges between one start of the syncer and the next."""

    number: int
    step: int
    """Global, of the snapshot that it begins with."""
    initial: Version
    """Of Θ^(0)."""
    versions: Mapping[int, Version] = field(default_factory=dict)
    """Of the fragments in that snapshot; of one that is missing: `initial`."""
    made_in: Mapping[int, int] = field(default_factory=dict)
    """Global step → epoch, of the merges that the snapshot holds."""
    rounds: list[Merge] = field(default_factory=list)
    """In order."""

    def version(self, step: int) -> Version:
        """That the syncer had of a fragment in this epoch, by its global step."""
        if step == 0:
            return self.initial
        return self.made_in.get(step, self.number), step

    def base(self, member: MergeMember) -> Version | None:
        """Version that the delta of a member refers to; None: the fragment came whole."""
        return None if member.base is None else self.version(member.base)


def version_of(held: Held, process: Process) -> Version:
    """What a line of this process states: without an epoch, it is that of the beginning."""
    return process.begin.epoch if held.epoch is None else held.epoch, held.step


def states_epochs(process: Process) -> bool:
    """Whether its tape has an epoch wherever it is another one: earlier releases stated none."""
    return all(held.epoch is not None or held.step < 0 for held in process.begin.held)


@dataclass(slots=True, kw_only=True)
class Made:
    """The versions that merges have made."""

    initial: Version = NEVER
    _found: set[tuple[int, Version]] = field(default_factory=set)

    def add(self, fragment: int, version: Version) -> None:
        """A merge made this one."""
        self._found.add((fragment, version))

    def __contains__(self, found: tuple[int, Version]) -> bool:
        """Whether this version of this fragment exists."""
        return found[1] == self.initial or found in self._found


class Applied:
    """
    The versions that a process held, step by step.

    Args:
        process: of a learner.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._newest: dict[int, Version] = {}
        self.last = process.begin.local_step - 1
        """Up to this local step, all that it held was made by merges; one before its first: not what it began with."""

    def unknown(self, made: Made, *, to: int) -> str:
        """
        What no merge has made of what it applied up to a local step, for people; "": nothing.

        Args:
            made: the versions that exist.
            to: last local step.
        """
        begin = self._process.begin
        if self.last < begin.local_step:
            for held in begin.held:
                if why := self._hold(held, made):
                    return f"{begin.learner} began with {why}"
            self.last = begin.local_step
        while self.last < to:
            number = self.last + 1
            for held in self._process.steps[number].results or ():
                if why := self._hold(held, made):
                    return f"{begin.learner} applied {why}, after local step {number}"
            self.last = number
        return ""

    def _hold(self, held: Held, made: Made) -> str:
        if held.step < 0:
            return f"a version of fragment {held.fragment} that it did not know"
        version, newest = version_of(held, self._process), self._newest.get(held.fragment)
        text = f"fragment {held.fragment} of step {version[1]} of epoch {version[0]}"
        if (held.fragment, version) not in made:
            return f"{text}, of which events.jsonl has no merge"
        if newest is not None and version <= newest:
            return f"{text} in place of a newer version"
        self._newest[held.fragment] = version
        return ""


class Recorded:
    """
    What of events.jsonl can be replayed.

    Args:
        tapes: by learner.
        feedback: whether uploads have error feedback.
        to: last global step; None: that of the run.
    """

    def __init__(
        self, tapes: Mapping[str, Sequence[Process]], *, feedback: bool, to: int | None
    ) -> None:
        self._tapes, self._feedback, self._to = tapes, feedback, to
        self._by_incarnation = {
            (name, process.begin.incarnation): process
            for name, processes in tapes.items()
            for process in processes
        }
        self.epochs: list[Epoch] = []
        self.made = Made()
        self.initialiser = self.ends = ""
        self.steps = self.newest_epoch = 0
        self._history: list[tuple[Version, Merge]] = []
        """Merges that the present epoch has not undone, in order."""
        self._incarnations: dict[str, int] = {}
        self._applied: dict[tuple[str, int], Applied] = {}
        """By learner and incarnation."""
        self._lost: dict[tuple[str, int, int], int] = {}
        """Learner, incarnation, fragment → step at which its upload was received and not merged in this epoch."""

    def read(self, line: Mapping[str, Any]) -> None:
        """Take the next line, or note why the replay ends before it."""
        kind = line.get("event")
        try:
            record = decode(line)
        except RecordError as error:
            self.ends = f"events.jsonl is damaged after step {self._step()}: {kind} {error}"
            return
        match record:
            case Start():
                number = line.get("epoch")
                self._start(record, number=number if isinstance(number, int) else 0)
            case Join():
                self._incarnations[record.learner] = record.incarnation
            case Merge():
                self._merge(record)
            case _ if kind == "initialised":
                self._initialised(str(line.get("learner")))
            case _ if kind in ("data", "halt", "dropped", "rotate"):
                self._other(str(kind), line)

    def end(self) -> None:
        """All lines were read: an epoch without a merge is not part of the replay."""
        if len(self.epochs) > 1 and not self.epochs[-1].rounds:
            left = self.epochs.pop()
            if left.step < self._step() and not self.ends:
                self.ends = f"epoch {left.number} of the syncer, which began again at step {left.step}, merged nothing"

    def _other(self, kind: str, line: Mapping[str, Any]) -> None:
        if kind == "rotate" and self._step():
            return
        self.ends = {
            "data": "the program takes its data by learner.blocks, whose leases are not replayed yet",
            "halt": f"the syncer halted after step {self._step()}: {line.get('reason')}",
            "dropped": f"events.jsonl has lost lines after step {self._step()}: the disk did not take them in time",
            "rotate": "the oldest parts of events.jsonl were deleted",
        }[kind]

    def _step(self) -> int:
        """Of the last merge."""
        return next((epoch.rounds[-1].step for epoch in reversed(self.epochs) if epoch.rounds), 0)

    # ------------------------------------------------------------ epochs

    def _start(self, start: Start, *, number: int) -> None:
        if not self.initialiser:  # nothing that an earlier start did is left
            self.epochs = [Epoch(number=number, step=0, initial=(number, 0))]
            self.steps, self.made.initial, self.newest_epoch = start.steps, (number, 0), number
            if start.step:
                self.ends = "events.jsonl does not begin with step 0"
            return
        again = f"the syncer was started again after step {self._step()}"
        silent = (name for name, found in self._tapes.items() if not all(map(states_epochs, found)))
        if (name := next(silent, None)) is not None:
            self.ends = f"{again}, and a release wrote the tape of {name} that did not state epochs"
        elif number <= self.newest_epoch:
            self.ends = f"{again} as epoch {number}, after epoch {self.newest_epoch}: its directory was restored"
        elif start.steps != self.steps:
            self.ends = f"{again} with {start.steps} steps in place of {self.steps}"
        if self.ends:
            return
        self._history = [found for found in self._history if found[1].step <= start.step]
        if len(self.epochs) > 1 and not self.epochs[-1].rounds:
            self.epochs.pop()
        self.newest_epoch = number
        self.epochs.append(
            Epoch(
                number=number,
                step=start.step,
                initial=self.made.initial,
                versions={m.fragment: version for version, m in self._history if changes(m)},
                made_in={version[1]: version[0] for version, _ in self._history},
            )
        )
        self._lost.clear()  # a learner forgets its error feedback when it meets another epoch

    def _initialised(self, learner: str) -> None:
        if self.initialiser:
            self.ends = (
                f"the syncer was started again after step {self._step()} without a snapshot: with which parameters "
                f"{learner} began the run again is not on the tape"
            )
        self.initialiser = learner

    # ------------------------------------------------------------ merges

    def _merge(self, merge: Merge) -> None:
        if not (self.epochs and self.initialiser):
            self.ends = "events.jsonl does not begin with the start of the syncer"
        elif merge.clock is None:
            self.ends = "the run was made by a release that wrote no tape"
        elif self._to is not None and merge.step > self._to:
            self.ends = f"--to {self._to}"
        else:
            self.ends = next(filter(None, (self._why_not(merge, m) for m in merge.members)), "")
        if self.ends:
            return
        epoch = self.epochs[-1]
        epoch.rounds.append(merge)
        version = (epoch.number, merge.step)
        self._history.append((version, merge))
        if changes(merge):
            self.made.add(merge.fragment, version)
        for learner in merge.abandoned.split(", ") if merge.abandoned else ():
            self._lost[learner, self._incarnations.get(learner, 0), merge.fragment] = merge.step

    def _why_not(self, merge: Merge, member: MergeMember) -> str:
        of = f" of epoch {self.newest_epoch}" if len(self.epochs) > 1 else ""
        who, before = member.learner, f"the replay ends before step {merge.step}{of}: "
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
        if member.step > process.last:
            last = process.last
            return f"{before}{who} has no tape of local step {member.step}, which was merged; its last is {last}"
        if unknown := self._unknown(process, member.step):
            return f"{before}{unknown}"
        lost = self._lost.get((who, member.incarnation, merge.fragment))
        if self._feedback and lost is not None:
            return (
                f"{before}the error feedback of {who} has an upload of step {lost}, which was discarded; that is not "
                "replayed yet"
            )
        return ""

    def _unknown(self, process: Process, local_step: int) -> str:
        """What the process, and those before it, held before this step, and no merge has made."""
        begin = process.begin
        key = begin.learner, begin.incarnation
        if key not in self._applied:
            for earlier in self._before(process):
                if why := Applied(earlier).unknown(self.made, to=earlier.last):
                    return why
            self._applied[key] = Applied(process)
        # Copies of a step are taken before its results are applied.
        return self._applied[key].unknown(self.made, to=local_step - 1)

    def _before(self, process: Process) -> Iterator[Process]:
        for each in self._tapes[process.begin.learner]:
            if each is process:
                return
            yield each


def changes(merge: Merge) -> bool:
    """Whether a merge made a version: without a weight, nothing changes."""
    return any(member.weight > 0 for member in merge.members)


def covers(process: Process, local_step: int) -> bool:
    """Whether the process made this step."""
    return process.begin.local_step < local_step <= process.last
