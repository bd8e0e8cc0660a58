"""
How the ranks of one learner do the same at each step without waiting for each other. Pure.

Every rank runs the same `TrainerCore` with the same inputs. At its boundary n, the end of step n, rank 0 writes the
plan of boundary n + 1; there, every rank follows it and enters n + 1 into its row. Step n + 1 of the training
itself has a collective in which rank 0 takes part after its boundary n, so the plan is always there in time. At
rank 0's boundary n + 2 all rows have n + 1, for the same reason: only then does the link learn of boundary n + 1. So
it never sees a host copy that is partly written, nor overwrites an inbox that a rank still reads.

While ranks write the next host copy of a fragment, the link may read the previous one: a fragment has a place of its
own in memory, and a few spare places are shared by the fragments that are announced.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState

HOME = 0
"""The place of a fragment's own; higher numbers are spare places."""

PLANS = 4
"""Plans in memory at a time: the ranks are at most two boundaries apart."""

TEXT_CHARACTERS = 1000
"""Of the link's sentence, if a plan is too long with all of it."""

_HEAD = struct.Struct("<QII")  # boundary, bytes, checksum
_ROW = struct.Struct("<QQ")  # boundary, whether the rank is to end


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

    def publish(self, plan: Plan) -> None:
        """Rank 0: write the plan of a boundary."""
        data = plan.to_bytes()
        if len(data) > self._plan_bytes - _HEAD.size:
            text = plan.link_state.text[:TEXT_CHARACTERS] + "…"
            state = dataclasses.replace(plan.link_state, text=text)
            data = dataclasses.replace(plan, link_state=state).to_bytes()
        if len(data) > self._plan_bytes - _HEAD.size:
            raise ValueError(f"a plan of {len(data)} bytes, at most {self._plan_bytes} expected")
        head = _HEAD.pack(plan.boundary, len(data), _checksum(plan.boundary, data))
        self._area.write_control(self._offset(plan.boundary), head + data)

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

    def enter(self, rank: int, boundary: int, *, terminated: bool) -> None:
        """The rank has followed the plan of this boundary."""
        self._area.write_control(_ROW.size * rank, _ROW.pack(boundary, terminated))

    def rows(self) -> list[tuple[int, bool]]:
        """(boundary, whether the rank is to end) of each rank."""
        data = self._area.read_control(0, _ROW.size * self._ranks)
        return [(boundary, bool(ends)) for boundary, ends in _ROW.iter_unpack(data)]

    def behind(self, boundary: int) -> list[int]:
        """The ranks that have not followed the plan of this boundary."""
        return [rank for rank, (reached, _) in enumerate(self.rows()) if reached < boundary]

    def _offset(self, boundary: int) -> int:
        return _ROW.size * self._ranks + boundary % PLANS * self._plan_bytes


def board_bytes(*, ranks: int, fragments: int) -> int:
    """Size of the memory of a `Board`."""
    return _ROW.size * ranks + PLANS * _plan_bytes(fragments)


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
    """

    def __init__(self, fragments: int, spares: int) -> None:
        self.current = [HOME] * fragments
        """Per fragment, the place that the link reads."""
        self._spares = spares
        self._planned: dict[int, int] = {}
        self._written: dict[int, int] = {}

    @property
    def writing(self) -> bool:
        """Whether a place may still be written."""
        return bool(self._written)

    def plan(self, fragments: Iterable[int]) -> dict[int, int]:
        """Places for the copies of the next boundary; a fragment for which none is free has no copy."""
        self._planned = {}
        for fragment in fragments:
            taken = self._taken(fragment)
            free = (place for place in range(self._spares + 1) if place not in taken)
            if (place := next(free, None)) is not None:
                self._planned[fragment] = place
        return dict(self._planned)

    def write(self, fragments: Iterable[int]) -> None:
        """The planned copies of these fragments are being made, and no others."""
        self._written = {fragment: self._planned[fragment] for fragment in fragments}
        self._planned = {}

    def written(self) -> dict[int, int]:
        """Every rank has made its part of the copies: where they are."""
        written, self._written = self._written, {}
        return written

    def go_home(self) -> None:
        """Every host copy is in the place of its fragment's own, and none is planned."""
        self.current, self._planned = [HOME] * len(self.current), {}

    def idle(self, announced: Sequence[int]) -> list[int]:
        """Fragments whose copy occupies a spare place, of which none is announced or being written."""
        return [
            fragment
            for fragment, place in enumerate(self.current)
            if place != HOME and fragment not in announced and fragment not in self._written
        ]

    def _taken(self, fragment: int) -> set[int]:
        """What the fragment cannot use: its own places, and the spare ones of all others."""
        busy = (self._planned, self._written, dict(enumerate(self.current)))
        spare = {place for used in busy for place in used.values() if place != HOME}
        return spare | {used[fragment] for used in busy if fragment in used}


class FirstRank:
    """
    What rank 0 decides for all ranks, and when the link learns of it.

    At each boundary: `settle` the previous one as soon as all rows have it, follow the own plan, report it by
    `followed`, and `plan` the next.

    Args:
        fragments: of the model.
        spares: spare places for host copies.
    """

    def __init__(self, fragments: int, spares: int) -> None:
        self.places = Places(fragments, spares)
        self.settled = TrainerState()
        """The newest state that holds for every rank: what the link may know."""
        self.short = 0
        """Fragments that the last plan does not copy because no place was free."""
        self._copies: Mapping[int, HostCopy] = {}
        self._state: TrainerState | None = None

    @property
    def copying(self) -> bool:
        """Whether copies of the last plan may still be written."""
        return self.places.writing

    def followed(self, state: TrainerState, copies: Mapping[int, HostCopy]) -> None:
        """
        Rank 0 has followed a plan.

        Args:
            state: for the link, when all ranks have.
            copies: that it made, with their counters.
        """
        self._state, self._copies = state, copies
        self.places.write(copies)

    def written(self) -> list[tuple[int, int, HostCopy]]:
        """All ranks have followed the plan: (fragment, place, counters) of the copies that are complete."""
        copies = self._copies
        return [(p, place, copies[p]) for p, place in self.places.written().items()]

    def settle(self, offers: Iterable[tuple[int, int]]) -> TrainerState | None:
        """
        The link can read these copies from now on.

        Args:
            offers: (fragment, place); a copy whose predecessor the link was reading is not among them.

        Returns:
            What to send to the link; None: no boundary is open.
        """
        offered = dict(offers)
        for fragment, place in offered.items():
            self.places.current[fragment] = place
        state, self._state, self._copies = self._state, None, {}
        if state is None:
            return None
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
        self.short = 0
        if model:
            # Home: what the link uploads for minutes must not be lost with a spare place that is released.
            self.places.go_home()
            return Plan(
                boundary=boundary, link_state=dataclasses.replace(link_state, open=()),
                places=dict(enumerate(self.places.current)), terminated=terminated, now=now,
            )  # fmt: skip
        replaced = {p for p, generation in link_state.ready if generation > applied[p]}
        wanted = [p for p in link_state.open if p not in replaced]
        places = self.places.plan(wanted)
        self.short = len(wanted) - len(places)
        return Plan(
            boundary=boundary,
            link_state=dataclasses.replace(link_state, open=[*places]),
            places=places,
            terminated=terminated,
            now=now,
        )
