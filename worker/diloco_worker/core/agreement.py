"""
How the ranks of one learner do the same at each step without waiting for each other. Pure.

Every rank runs the same `TrainerCore` with the same inputs. At its boundary n, the end of step n, rank 0 writes the
plan of boundary n + 1; there, every rank follows it and enters n + 1 into its row. Step n + 1 of the training
itself has a collective in which rank 0 takes part after its boundary n, so the plan is always there in time. At
rank 0's boundary n + 2 all rows have n + 1, for the same reason: only then does the link learn of boundary n + 1. So
it never sees a host copy that is partly written, nor overwrites an inbox that a rank still reads.

While ranks write the next host copy of a fragment, the link may read the previous one: a fragment has a place of its
own in memory, and a few spare places are shared by the fragments that are announced.

If the ranks copy by devices (docs/adr/0029), a boundary is over when all devices have finished its work. Each row also
has the newest such boundary of its rank, which is an earlier one; until all rows have it, further boundaries copy, up
to three at a time. Results are fetched to the devices at one boundary, and applied at a later one.

Each machine of a learner has a `Board` in its own memory. Plans and rows of the others are relayed to it
(docs/adr/0027), and so are the parts of host copies: what a boundary copied is offered when its parts have arrived, and
until then no further copies are planned.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diloco_worker.core.fetches import Fetch, Fetches
from diloco_worker.core.findings import NONE, Finding
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.core.rooms import UNDER_WAY, Devices, smallest

HOME = 0
"""The place of a fragment's own; higher numbers are spare places."""

PLANS = 4
"""Plans in memory at a time: the ranks are at most two boundaries apart."""

TEXT_CHARACTERS = 1000
"""Of the link's sentence, if a plan is too long with all of it."""

_HEAD = struct.Struct("<QII")  # boundary, bytes, checksum
_ROW = struct.Struct("<QQQQ")  # boundary that was followed, boundary that is over, flags, steps
_ENDS, _LEFT = 1, 2
_FINDINGS = 2
"""Bits of the flags below those of what the rank has found out about its program."""

_STEPS = 32
"""Bits of the number of steps. The boundary is in the same word, because a row is not written at once."""

FAILURE_BYTES = 2048
"""Room for the sentence with which the ranks end."""

_FAILURE = struct.Struct("<II")  # bytes, checksum


class PassedError(Exception):
    """The plan of an earlier boundary was overwritten: a rank is more than two boundaries behind rank 0."""


class Area(Protocol):
    """Memory that all ranks of a learner share."""

    def read_control(self, offset: int, size: int) -> bytes:
        """Bytes at an offset."""

    def write_control(self, offset: int, data: bytes) -> None:
        """Overwrite the bytes at an offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank does at one boundary."""

    boundary: int
    link_state: LinkState
    """`open` has the fragments to copy only."""
    places: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Fragment → place of the copy to make."""
    fetches: Sequence[Fetch] = ()
    """Results to copy to the devices, after those that are applied at this boundary."""
    terminated: bool = False
    """A rank received SIGTERM."""
    now: float = 0.0
    """Clock of rank 0 in seconds."""
    checkpoint: int | None = None
    """A local checkpoint begins, after so many attempts in a row that were discarded; None: none begins."""

    def to_bytes(self) -> bytes:
        """JSON."""
        data = {
            "boundary": self.boundary,
            "linkState": self.link_state.to_line().decode(),
            "places": [*self.places.items()],
            "fetches": [[f.fragment, f.generation, f.buffer] for f in self.fetches],
            "terminated": self.terminated,
            "now": self.now,
            "checkpoint": self.checkpoint,
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The inverse of `to_bytes`."""
        fields: dict[str, Any] = json.loads(data)
        return cls(
            boundary=fields["boundary"],
            link_state=LinkState.from_line(fields["linkState"].encode()),
            places={int(fragment): int(place) for fragment, place in fields["places"]},
            fetches=tuple(Fetch(*numbers) for numbers in fields["fetches"]),
            terminated=fields["terminated"],
            now=fields["now"],
            checkpoint=fields["checkpoint"],
        )


class Board:
    """
    The plans of the next boundaries, and how far each rank is.

    Args:
        area: shared memory of `board_bytes` bytes, at first zeros.
        ranks: of the learner.
        fragments: of the model.
    """

    def __init__(self, area: Area, *, ranks: int, fragments: int) -> None:
        self._area, self._ranks = area, ranks
        self._plan_bytes = _plan_bytes(fragments)
        self._failure_at = _ROW.size * ranks + PLANS * self._plan_bytes

    def publish(self, plan: Plan) -> bytes:
        """Rank 0: write the plan of a boundary; returns it for the boards of other machines."""
        data = plan.to_bytes()
        if len(data) > self._plan_bytes - _HEAD.size:
            text = plan.link_state.text[:TEXT_CHARACTERS] + "…"
            state = dataclasses.replace(plan.link_state, text=text)
            data = dataclasses.replace(plan, link_state=state).to_bytes()
        if len(data) > self._plan_bytes - _HEAD.size:
            raise ValueError(f"a plan of {len(data)} bytes, expected at most {self._plan_bytes}")
        record = _HEAD.pack(plan.boundary, len(data), _checksum(plan.boundary, data)) + data
        self._area.write_control(self._offset(plan.boundary), record)
        return record

    def take(self, record: bytes) -> None:
        """
        Write a plan that rank 0 published on another machine.

        Raises:
            ValueError: it is none.
        """
        if not _HEAD.size < len(record) <= self._plan_bytes:
            raise ValueError(f"a plan of {len(record)} bytes, expected at most {self._plan_bytes}")
        boundary, size, checksum = _HEAD.unpack_from(record)
        data = record[_HEAD.size :]
        if size != len(data) or checksum != _checksum(boundary, data):
            raise ValueError(f"a plan of boundary {boundary} with another checksum")
        self._area.write_control(self._offset(boundary), record)

    def plan(self, boundary: int) -> Plan | None:
        """
        The plan of a boundary; None: it is not there, or not completely.

        Raises:
            PassedError: it was there, and was overwritten.
        """
        offset = self._offset(boundary)
        found, size, checksum = _HEAD.unpack(self._area.read_control(offset, _HEAD.size))
        if found < boundary or size > self._plan_bytes - _HEAD.size:
            return None
        if found > boundary:
            raise PassedError(f"the plan of boundary {boundary} was overwritten by that of {found}")
        data = self._area.read_control(offset + _HEAD.size, size)
        return Plan.from_bytes(data) if checksum == _checksum(found, data) else None

    def enter(
        self, rank: int, boundary: int, *, terminated: bool, finished: int | None = None, steps: int = 0,
        findings: Finding = NONE,
    ) -> None:  # fmt: skip
        """
        The rank has followed the plan of this boundary.

        Args:
            rank: that writes its row.
            boundary: of the plan.
            terminated: the rank is to end.
            finished: the newest boundary of which its device has finished the work; None: this one.
            steps: that its first optimizer has made; 0: not known.
            findings: all that this rank has until now.
        """
        over = boundary if finished is None else finished
        counted = boundary << _STEPS | steps
        row = _ROW.pack(boundary, over, findings << _FINDINGS | _ENDS * terminated, counted)
        self._area.write_control(_ROW.size * rank, row)

    def leave(self, rank: int) -> None:
        """The rank leaves the job: its process may end from now on."""
        row = self._area.read_control(_ROW.size * rank, _ROW.size)
        boundary, over, flags, counted = _ROW.unpack(row)
        row = _ROW.pack(boundary, over, flags | _LEFT, counted)
        self._area.write_control(_ROW.size * rank, row)

    def left(self, rank: int) -> bool:
        """Whether the rank has left the job."""
        *_, flags, _ = _ROW.unpack(self._area.read_control(_ROW.size * rank, _ROW.size))
        return bool(flags & _LEFT)

    def rows(self) -> list[tuple[int, bool]]:
        """(boundary, whether the rank is to end) of each rank."""
        data = self._area.read_control(0, _ROW.size * self._ranks)
        return [(boundary, bool(flags & _ENDS)) for boundary, _, flags, _ in _ROW.iter_unpack(data)]

    def findings(self) -> list[Finding]:
        """What each rank has found out about its program."""
        data = self._area.read_control(0, _ROW.size * self._ranks)
        return [Finding(flags >> _FINDINGS) for _, _, flags, _ in _ROW.iter_unpack(data)]

    def steps(self) -> list[tuple[int, int]]:
        """(boundary, steps of the first optimizer until then) of each rank."""
        data = self._area.read_control(0, _ROW.size * self._ranks)
        return [(n >> _STEPS, n & (1 << _STEPS) - 1) for *_, n in _ROW.iter_unpack(data)]

    def finished(self, ranks: Iterable[int] | None = None) -> int:
        """The newest boundary of which all ranks, or these, have finished the work."""
        rows = self.rows_of(range(self._ranks) if ranks is None else ranks)
        return min(int(over) for _, over, *_ in _ROW.iter_unpack(rows))

    def rows_of(self, ranks: Iterable[int]) -> bytes:
        """The rows of these ranks, for the boards of other machines."""
        return b"".join(self._area.read_control(_ROW.size * rank, _ROW.size) for rank in ranks)

    def take_rows(self, ranks: Sequence[int], rows: bytes) -> None:
        """
        Write the rows of ranks on other machines.

        Raises:
            ValueError: they are of another number of ranks.
        """
        if len(rows) != _ROW.size * len(ranks):
            raise ValueError(f"{len(rows)} bytes of rows, expected those of {len(ranks)} ranks")
        for place, rank in enumerate(ranks):
            row = rows[_ROW.size * place : _ROW.size * (place + 1)]
            self._area.write_control(_ROW.size * rank, row)

    def fail(self, text: str) -> None:
        """All ranks of this machine are to end with this sentence; an earlier one stays."""
        if self.failure:
            return
        data = text.encode()[: FAILURE_BYTES - _FAILURE.size]
        head = _FAILURE.pack(len(data), zlib.crc32(data))
        self._area.write_control(self._failure_at, head + data)

    @property
    def failure(self) -> str:
        """Why all ranks are to end; empty: they are not."""
        size, checksum = _FAILURE.unpack(self._area.read_control(self._failure_at, _FAILURE.size))
        if not 0 < size <= FAILURE_BYTES - _FAILURE.size:
            return ""
        data = self._area.read_control(self._failure_at + _FAILURE.size, size)
        return data.decode(errors="replace") if checksum == zlib.crc32(data) else ""

    def behind(self, boundary: int) -> list[int]:
        """The ranks that have not followed the plan of this boundary."""
        return [rank for rank, (reached, _) in enumerate(self.rows()) if reached < boundary]

    def _offset(self, boundary: int) -> int:
        return _ROW.size * self._ranks + boundary % PLANS * self._plan_bytes


def board_bytes(*, ranks: int, fragments: int) -> int:
    """Size of the memory of a `Board`."""
    return _ROW.size * ranks + PLANS * _plan_bytes(fragments) + FAILURE_BYTES


def _plan_bytes(fragments: int) -> int:
    # Per fragment: its number, generation, version and place; the rest for one sentence.
    return 32768 + 128 * fragments


def _checksum(boundary: int, data: bytes) -> int:
    return zlib.crc32(data, boundary & 0xFFFFFFFF)


class Places:
    """
    Which place holds the host copy of each fragment, and which is written next.

    Args:
        fragments: of the model.
        spares: spare places.
        devices: how large they are, if devices copy; then no copy is made to the place of a fragment's own.
    """

    def __init__(self, fragments: int, spares: int, *, devices: Devices | None = None) -> None:
        self.current = [HOME] * fragments
        """Per fragment, the place that the link reads."""
        self._sizes: Sequence[int] = devices.fragments if devices else [0] * fragments
        self._rooms = (-1, *devices.rooms.spares) if devices else (0,) * (spares + 1)
        self._planned: dict[int, int] = {}
        self._written: deque[dict[int, int]] = deque()
        """Of each boundary that made copies, the oldest first."""

    @property
    def writing(self) -> bool:
        """Whether a place may still be written."""
        return bool(self._written)

    def plan(self, fragments: Iterable[int]) -> dict[int, int]:
        """Places for the copies of the next boundary; a fragment for which none is free has no copy."""
        self._planned = {}
        for fragment in fragments:
            place = smallest(self._rooms, self._sizes[fragment], self._taken(fragment))
            if place is not None:
                self._planned[fragment] = place
        return dict(self._planned)

    def write(self, fragments: Iterable[int]) -> None:
        """The planned copies of these fragments are being made, and no others."""
        written = {fragment: self._planned[fragment] for fragment in fragments}
        if written:
            self._written.append(written)
        self._planned = {}

    def written(self) -> dict[int, int]:
        """Every rank has made its part of the oldest copies: where they are."""
        return self._written.popleft() if self._written else {}

    def go_home(self) -> None:
        """Every host copy is in the place of its fragment's own, and none is planned."""
        self.current, self._planned = [HOME] * len(self.current), {}

    def idle(self, announced: Sequence[int]) -> list[int]:
        """Fragments whose copy occupies a spare place, of which none is announced or being written."""
        return [
            fragment
            for fragment, place in enumerate(self.current)
            if place != HOME
            and fragment not in announced
            and not any(fragment in written for written in self._written)
        ]

    def fits(self, fragment: int, other: int) -> bool:
        """Whether the place of another fragment's copy has room for this one."""
        return self._rooms[self.current[other]] >= self._sizes[fragment]

    def _taken(self, fragment: int) -> set[int]:
        """What the fragment cannot use: its own places, and the spare ones of all others."""
        busy = (self._planned, *self._written, dict(enumerate(self.current)))
        spare = {place for used in busy for place in used.values() if place != HOME}
        return spare | {used[fragment] for used in busy if fragment in used}


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A boundary at which rank 0 has followed its plan."""

    boundary: int
    state: TrainerState
    """For the link, when all ranks have followed it and all copies have arrived."""
    copies: Mapping[int, HostCopy]
    model: bool
    """The ranks copied the whole model."""

    @property
    def copying(self) -> bool:
        """Whether anything was copied."""
        return self.model or bool(self.copies)


class FirstRank:
    """
    What rank 0 decides for all ranks, and when the link learns of it.

    At each boundary: `settle` the previous one as soon as all rows have it and the copies of other machines have
    arrived, follow the own plan, report it by `followed`, and `plan` the next.

    Args:
        fragments: of the model.
        spares: spare places for host copies.
        devices: how the ranks copy by devices; None: copies are made at once.
    """

    def __init__(self, fragments: int, spares: int, *, devices: Devices | None = None) -> None:
        self.places = Places(fragments, spares, devices=devices)
        self.finished = 0
        """The newest boundary of which the devices of all ranks have finished the work."""
        self.settled = TrainerState()
        """The newest state that holds for every rank: what the link may know."""
        self.short: list[int] = []
        """Fragments that the last plan does not copy because no place was free."""
        self._followed: deque[Followed] = deque()
        """What the link does not know yet; of several boundaries without copies, the newest."""
        self._devices = devices
        self._fetches = Fetches(devices.fragments, devices.rooms.incoming) if devices else None
        self._waits = False
        """The last plan copies nothing, because earlier copies are late."""

    @property
    def copying(self) -> bool:
        """Whether copies may still be written, or are on their way from other machines."""
        return self.places.writing or self.model_copying

    @property
    def model_copying(self) -> bool:
        """Whether these are of the whole model."""
        return any(followed.model for followed in self._followed)

    @property
    def oldest(self) -> Followed | None:
        """What the link is to learn next; None: nothing."""
        return self._followed[0] if self._followed else None

    def late(self, boundary: int) -> bool:
        """
        Whether nothing may be copied after this boundary.

        Copies of an earlier one have not arrived, which further ones would make later; or, with devices, all buffers
        are in use.
        """
        copying = [followed.boundary for followed in self._followed if followed.copying]
        return len(copying) >= UNDER_WAY if self._devices else any(n < boundary for n in copying)

    def followed(
        self, state: TrainerState, copies: Mapping[int, HostCopy], *, boundary: int = 0, model: bool = False
    ) -> None:  # fmt: skip
        """
        Rank 0 has followed a plan.

        Args:
            state: for the link, when all ranks have.
            copies: that it made, with their counters.
            boundary: of the plan.
            model: it copied the whole model.
        """
        found = Followed(boundary=boundary, state=state, copies=copies, model=model)
        if self._waits and not found.copying:
            return  # its report would replace that of the late copies, and their offers
        if self._followed and not (found.copying or self._followed[-1].copying):
            self._followed.pop()
        self._followed.append(found)
        self.places.write(copies)

    def written(self) -> list[tuple[int, int, HostCopy]]:
        """Of `oldest`, which is complete: (fragment, place, counters) of the copies."""
        copies = self._followed[0].copies if self._followed else {}
        places = self.places.written() if copies else {}
        return [(p, place, copies[p]) for p, place in places.items()]

    def settle(self, offers: Iterable[tuple[int, int]]) -> TrainerState | None:
        """
        The link can read these copies of `oldest` from now on.

        Args:
            offers: (fragment, place); a copy whose predecessor the link was reading is not among them.

        Returns:
            What to send to the link; None: no boundary is open.
        """
        offered = dict(offers)
        for fragment, place in offered.items():
            self.places.current[fragment] = place
        if not self._followed:
            return None
        state = self._followed.popleft().state
        self.settled = dataclasses.replace(state, offers=())
        return dataclasses.replace(state, offers=[p for p in state.offers if p in offered])

    def plan(
        self, boundary: int, link_state: LinkState, *, applied: Sequence[int], terminated: bool, now: float,
        model: bool = False,
    ) -> Plan:  # fmt: skip
        """
        The plan of a boundary.

        Args:
            boundary: the one after that which rank 0 followed last.
            link_state: the newest.
            applied: per fragment, the generation that the parameters hold.
            terminated: a rank received SIGTERM.
            now: clock of this rank in seconds.
            model: the ranks copy the whole model, each fragment to its own place: the link must not read meanwhile, and
                no copy may be being written.
        """
        self.short, self._waits = [], False
        replaced = {p for p, generation in link_state.ready if generation > applied[p]}
        fetches: list[Fetch] = []
        if self._fetches is not None:
            ready, fetches = self._fetches.plan(
                boundary, link_state.ready, applied=applied, finished=self.finished
            )
            link_state = dataclasses.replace(link_state, ready=ready)
        if model:
            # Home: what the link uploads for minutes must not be lost with a spare place that is released.
            self.places.go_home()
            places = dict(enumerate(self.places.current))
        else:
            self._waits = self.late(boundary - 1)
            wanted = [] if self._waits else [p for p in link_state.open if p not in replaced]
            wanted = wanted[: self._devices.announced] if self._devices else wanted
            places = self.places.plan(wanted)
            self.short = [p for p in wanted if p not in places]
        return Plan(
            boundary=boundary,
            link_state=dataclasses.replace(link_state, open=() if model else [*places]),
            places=places,
            fetches=fetches,
            terminated=terminated,
            now=now,
        )
