"""
The lines of tape.jsonl: what a learner's process decided by clock and network, step by step. Pure.

With events.jsonl of the syncer this is the tape of a run (paper E.1): from it, `diloco.journal.replay` knows what
each worker must do to end with the same bits. A process begins with `begin`; then there is one `step` for each local
step, and `end` if it left the job in an orderly way. Each line names its incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.journal.records import Fields, Record, RecordError

TAPE = "tape.jsonl"
"""Name of the file in the directory of a learner."""

VERSION = 1
"""Of the form of a tape; a reader refuses others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Fields):
    """A version of a fragment that the parameters hold."""

    fragment: int
    step: int
    """Global, of the merge; 0: the initial one."""
    epoch: int | None = None
    """
    Of the syncer that made the merge. None: of a result, that of `Begin.epoch`; of a version that a process begins
    with, not known or, by an earlier release, not stated.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests(Fields):
    """Digests of the values of a fragment (diloco/model/digests.py), in hexadecimal."""

    fragment: int
    digests: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors(Fields):
    """What the digests of a fragment are of."""

    fragment: int
    names: str
    """Separated by line ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Record):
    """A process of the learner has the job's parameters and begins to train."""

    kind = "begin"
    tape: int
    """VERSION."""
    learner: str
    incarnation: int
    epoch: int
    """Of the syncer."""
    restarts: int
    """Previous ones of this learner, as its supervisor counts them: a seed may depend on it."""
    local_step: int
    """t_m: the next step is the one after it."""
    tokens: int
    """Total of this learner."""
    step: int
    """Global step, as the program sees it."""
    found: int
    """Local step of the newest local checkpoint; 0: there was none."""
    source: str
    """Of the parameters: "model" or "checkpoint"."""
    optimizers: str
    """Of their state: "new", "checkpoint" or the name of a peer."""
    held: tuple[Held, ...]
    """Of the fragments whose version is known."""
    fragments: tuple[Tensors, ...]
    peer_step: int | None = None
    """Local step of the peer that the optimizers' state is of; None: it is of none."""
    machine: str
    """Processor, libraries and threads: on others, the last bits of a sum may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """One local step."""

    kind = "step"
    incarnation: int
    local_step: int
    seen: int
    """Global step during the step, on which the learning rate depends."""
    step: int
    """Global step after it."""
    results: tuple[Held, ...] | None = None
    """What was applied after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Record):
    """The process left the job; a process that was killed has no such line."""

    kind = "end"
    incarnation: int
    local_step: int
    reason: str
    parameters: tuple[Digests, ...]
    """Those that it ended with; empty: not known."""


KINDS: Mapping[str, type[Record]] = {record.kind: record for record in (Begin, Step, End)}


@dataclass(slots=True, kw_only=True)
class Process:
    """What one process of a learner has written."""

    begin: Begin
    steps: dict[int, Step]
    """By local step; without a gap."""
    end: End | None = None

    @property
    def last(self) -> int:
        """Its last local step."""
        return self.begin.local_step + len(self.steps)


def encode(record: Record) -> dict[str, Any]:
    """The line of a record, without its time."""
    return {"event": record.kind, **record.to_json()}


def processes(lines: Iterable[Mapping[str, Any]]) -> list[Process]:
    """
    The processes of a tape, in the order in which they began.

    Lines before the first `begin`, which rotation has left over, do not count.

    Raises:
        RecordError: a line is damaged, of another version, or steps are missing before it; what was lost
            at the end of a process that was killed is not noticed here.
    """
    found: dict[int, Process] = {}
    for line in lines:
        kind = line.get("event")
        known = KINDS.get(kind) if isinstance(kind, str) else None
        if kind == "dropped":
            raise RecordError(
                f"has lost {line.get('lines')} lines: the disk did not take them in time"
            )
        if known is None:
            continue
        record = known.from_json(line)
        if isinstance(record, Begin):
            if record.tape != VERSION:
                raise RecordError(
                    f"has version {record.tape}, this release reads version {VERSION}"
                )
            found[record.incarnation] = Process(begin=record, steps={})
        elif isinstance(record, Step) and record.incarnation in found:
            process = found[record.incarnation]
            if record.local_step != process.last + 1:
                raise RecordError(
                    f"has local step {record.local_step} after {process.last} in incarnation {record.incarnation}"
                )
            process.steps[record.local_step] = record
        elif isinstance(record, End) and record.incarnation in found:
            found[record.incarnation].end = record
    return list(found.values())
