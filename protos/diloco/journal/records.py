"""
The lines of events.jsonl as values, one class per kind of event. Pure.

A line is {"time", "epoch", "event": kind, ...fields}. Reading ignores kinds and fields that are not
known here; fields without which nothing can be proved are required, the others have a default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Protocol, Self, get_args, get_origin, get_type_hints

MAX_NUMBER = 1 << 64
"""No counter comes near it; JSON allows numbers that no float can hold."""


class RecordError(Exception):
    """A field is missing or has another type; the message completes "<kind> ..."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Conversion of the fields; JSON has their names in camelCase and their order."""

    def to_json(self) -> dict[str, Any]:
        """JSON values; a field that defaults to None is left out while it is None."""
        out: dict[str, Any] = {}
        own: Any = type(self)
        for name, key, _, default in _table(own):
            value = getattr(self, name)
            if value is None and default is None:
                continue
            out[key] = [v.to_json() for v in value] if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """
        The value that `to_json` gave.

        Raises:
            RecordError: a required field is missing, or one has another type.
        """
        own: Any = cls
        return cls(
            **{
                name: value(data, key, kind)
                for name, key, kind, default in _table(own)
                if key in data or default is MISSING
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Fields):
    """What happened; `kind` is its "event" in the file."""

    kind: ClassVar[str]


class Recorder(Protocol):
    """Appends a line to events.jsonl; must not raise."""

    def __call__(self, event: str, **fields: object) -> None:
        """One line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Record):
    """A syncer began to serve; its schedule holds from here on."""

    kind = "start"
    step: int = 0
    steps: int = 0
    fragments: int
    interval: int
    quorum: int = 0
    spec: str = ""
    """Hash of the run spec."""
    learners: Mapping[str, int] | None = None
    """Region → its learners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """The numbers of learners changed while the syncer ran."""

    kind = "limits"
    learners: Mapping[str, int]
    """Region → its learners."""
    step: int = 0
    """Global."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Record):
    """A learner was admitted."""

    kind = "join"
    learner: str
    incarnation: int
    step: int = 0
    """Global."""
    fresh: bool = False
    """A new incarnation, not a session that reconnected."""
    local_step: int = 0
    peer: str | None = None
    """Its address, as gRPC names it."""
    certificate: str | None = None
    """Serial number of its certificate, hexadecimal; "": no TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery(Record):
    """With which state the optimizers of an incarnation began; a syncer that restarts writes it again."""

    kind = "recovery"
    learner: str
    incarnation: int
    step: int = 0
    """Global, of the syncer."""
    source: str
    """Checkpoint, Peer, OldCheckpoint or None."""
    peer: str = ""
    """The learner whose state it is; "": not that of another one."""
    state_step: int = 0
    """Global step of that state; 0: there is none."""
    age: int = 0
    """Global steps between that and the start."""
    bytes: int = 0
    """That came from the peer."""
    seconds: float = 0.0
    """From the first request to a peer until the last answer; 0: none was asked."""
    problem: str = ""
    """Why the state is not that of a peer; "": it is, or none was needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Record):
    """A learner's session ended."""

    kind = "leave"
    learner: str
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Record):
    """A message or transfer of a learner was refused."""

    kind = "refuse"
    learner: str
    reason: str
    detail: str = ""
    step: int | None = None
    fragment: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eject(Record):
    """A learner did not deliver: the rounds continue without it until a probe succeeds."""

    kind = "eject"
    learner: str
    reason: str
    probe_seconds: float = math.nan
    """Time until the first probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readmit(Record):
    """An ejected learner has proven that it delivers."""

    kind = "readmit"
    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Record):
    """The syncer itself was paused; no learner is late because of that time."""

    kind = "pause"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Record):
    """A decision could not be carried out; what it was part of is repeated."""

    kind = "error"
    decision: str
    """Its class."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialised(Record):
    """The initial parameters of this learner are those of the job."""

    kind = "initialised"
    learner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeMember(Fields):
    """What one learner contributed to a merge."""

    learner: str
    incarnation: int
    step: int
    """t_m, the local step of its report."""
    steps: float
    tokens: float
    weight: float
    base: int | None
    """Global step of the version that its delta refers to; None: the initial one."""
    norm: float | None = None
    """Of its delta, as it arrived."""
    deviation: float | None = None
    """Largest relative difference of a tensor's norm from what its header stated."""
    of_median: float | None = None
    """Largest norm of a tensor in multiples of the members' median; 0: fewer than 3, or no guard."""
    clipped: int | None = None
    """Tensors that were clipped to `guard` times the median."""
    digests: str | None = None
    """Of the values at the learner, in hexadecimal (diloco/model/digests.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Record):
    """A round was committed."""

    kind = "merge"
    step: int
    """Global."""
    fragment: int
    attempt: int = 1
    quorum: int
    quorum_seconds: float = math.nan
    grace_seconds: float = math.nan
    sync_seconds: float = math.nan
    bytes_up: int = 0
    bytes_down: int = 0
    delta_norm: float = math.nan
    guard: float | None = None
    """Multiple of the members' median norm to which deltas are clipped; 0: off."""
    buffers: bool | None = None
    """Whether the fragment holds buffers; None: it does not."""
    clock: Mapping[str, int] | None = None
    """t_m of the newest report of each learner that trained, when this was pulled."""
    abandoned: str | None = None
    """Members of attempts that were aborted: names, separated by commas; None: there are none."""
    digests: str | None = None
    """Of Θ and momentum of the fragment, in hexadecimal; None: nothing has changed."""
    members: tuple[MergeMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Fields):
    """Serials of blocks that follow each other."""

    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(Record):
    """The state of all blocks from here on: a learner stated the dataset, or a syncer began with a snapshot."""

    kind = "data"
    items: int
    size: int
    learner: str = ""
    """Who stated the dataset."""
    next: int
    """Serials from here on were not leased."""
    free: tuple[Span, ...]
    """Serials below `next` to be leased again."""
    open: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Record):
    """Blocks are open at this learner from here on."""

    kind = "lease"
    learner: str
    incarnation: int
    blocks: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Record):
    """Blocks are no longer open at this learner: they are leased again."""

    kind = "release"
    learner: str
    incarnation: int
    blocks: tuple[Span, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBlock(Fields):
    """One block, and the local steps (begin, end] of its items."""

    block: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Record):
    """A learner has trained on these blocks."""

    kind = "trained"
    learner: str
    incarnation: int
    blocks: tuple[TrainedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged(Record):
    """Several rounds in a row were committed without a change: no member had a weight."""

    kind = "unchanged"
    step: int
    """Global, of the last of them."""
    rounds: int
    learners: str
    """Members that reported no tokens: names, separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt(Record):
    """A merge would have made Θ grow implausibly: nothing is merged until a person chooses a snapshot."""

    kind = "halt"
    step: int
    """Global, of the merge that was discarded."""
    fragment: int
    reason: str
    learners: str = ""
    """Its members: names, separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Record):
    """A snapshot was written, or failed."""

    kind = "snapshot"
    step: int
    ok: bool
    seconds: float | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Record):
    """A snapshot was copied to the object store, or an attempt failed."""

    kind = "copy"
    step: int
    """Global, of the newest snapshot there; -1: none is known."""
    ok: bool
    seconds: float | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Record):
    """The final model could not be written, or was copied to a URL."""

    kind = "export"
    step: int
    ok: bool
    detail: str = ""
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete(Record):
    """The last step was merged."""

    kind = "complete"
    step: int
    tokens: int = 0
    unchanged: bool | None = None
    """Whether no merge has changed a trained parameter; None: one has, or it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Record):
    """The syncer ends in an orderly way."""

    kind = "stop"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Record):
    """The supervisor restarts a process; its "epoch" is the last one that it knew of."""

    kind = "restart"
    process: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate(Record):
    """A new part of the journal begins; parts before the oldest one that is there were deleted."""

    kind = "rotate"
    part: int
    """From 1 on; the first part has no such line."""
    fragments: int = 0
    """The schedule that holds; 0: not known."""
    interval: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Record):
    """Lines are missing here: the disk did not take them, or not in time."""

    kind = "dropped"
    lines: int
    events: Mapping[str, int]
    """Number of lines by event."""
    torn: int | None = None
    """Lines before this one of which the disk took a part, or which a crash of the machine may make unreadable:
    the disk could not make them durable."""


KINDS: Mapping[str, type[Record]] = {
    record.kind: record
    for record in (
        *(
            Start,
            Join,
            Recovery,
            Leave,
            Refuse,
            Eject,
            Readmit,
            Pause,
            Error,
            Initialised,
            Merge,
            Unchanged,
        ),
        *(Halt, Data, Lease, Release, Trained),
        *(Snapshot, Copy, Export, Complete, Stop, Restart, Rotate, Dropped, Limits),
    )
}


def encode(record: Record, *, epoch: int) -> dict[str, Any]:
    """The line of a record, without its time."""
    return {"epoch": epoch, "event": record.kind, **record.to_json()}


def decode(event: Mapping[str, Any]) -> Record | None:
    """
    The record of one line; None: a kind that is not known here.

    Raises:
        RecordError: a required field is missing, or one has another type.
    """
    kind = event.get("event")
    record = KINDS.get(kind) if isinstance(kind, str) else None
    return None if record is None else record.from_json(event)


def value(data: Mapping[str, Any], key: str, kind: Any) -> Any:
    """
    One field of a line, checked against its annotated type.

    Raises:
        RecordError: it is missing or has another type.
    """
    found = data.get(key)
    plain = isinstance(kind, type)  # as of most fields
    if not plain and get_origin(kind) is Mapping:
        if not isinstance(found, dict) or not all(type(n) is int for n in found.values()):
            raise RecordError(f"has {key} {found!r}, expected whole numbers by name")
        return found
    options = () if plain else get_args(kind)
    if NoneType in options:
        return None if found is None else value(data, key, options[0])
    if options and options[-1] is Ellipsis:
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise RecordError(f"has {key} {found!r}, expected a list of objects")
        return tuple(options[0].from_json(item) for item in found)
    expected = "a whole number" if kind is int else "a number"
    accepted: Any = int | float if kind is float else kind
    if kind in (str, bool):
        expected = "a string" if kind is str else "true or false"
    if not isinstance(found, accepted) or (isinstance(found, bool) and kind is not bool):
        raise RecordError(f"has {key} {found!r}, expected {expected}")
    if isinstance(found, int) and abs(found) > MAX_NUMBER:
        raise RecordError(f"has {key} of {found.bit_length()} bits, expected at most 64")
    return found


@cache
def _table(cls: Any) -> tuple[tuple[str, str, Any, Any], ...]:
    """Of each field: name, key in JSON, type, default."""
    hints = get_type_hints(cls)
    return tuple((f.name, _camel(f.name), hints[f.name], f.default) for f in fields(cls))


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)
