"""
What a learner whose model is on a device has under way, and what the link may know of it. Pure.

Copies between device and host end some time after the step boundary that began them. All of one boundary are given
to the device together, and one event ends them; until it is done, later boundaries begin nothing:

    boundary n      stage fragments to copy out, apply results that are on the device, then `close`: copies begin
    boundary n + 1  the event is done: `settle` makes the copies known to the link, with the state of boundary n

So the link never sees a host copy before it is complete, nor overwrites an inbox that the device still reads. A
result is copied to the device at one boundary and applied at the next one whose event was done. A buffer on the
device, or a place in memory, is used by one transfer until the event of the boundary that uses it last is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_worker.core.agreement import HOME
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.core.rooms import Rooms, smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A host copy that is being made: from a buffer on the device to a place in memory."""

    fragment: int
    copy: HostCopy
    buffer: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A result on its way from the inbox to the parameters, in a buffer on the device."""

    fragment: int
    generation: int
    buffer: int


class DeviceWork:
    """
    The transfers of the open boundary.

    Args:
        fragments: elements of each.
        rooms: places and buffers.
    """

    def __init__(self, fragments: Sequence[int], rooms: Rooms) -> None:
        self.current = [HOME] * len(fragments)
        """Per fragment, the place of the host copy that the link reads."""
        self._fragments, self._rooms = fragments, rooms
        self._copies: list[Outgoing] = []
        self._applied: list[Incoming] = []
        self._fetched: list[Incoming] = []
        self._staged: dict[int, Incoming] = {}
        """By fragment, results that are on the device and not applied."""
        self._held: TrainerState | None = None
        """Of the boundary that is under way."""
        self._settled: TrainerState | None = None
        """Of the last boundary that is done, until the link gets it."""
        self._known: TrainerState | None = None
        self._requested = 0

    @property
    def busy(self) -> bool:
        """Whether the work of a boundary is under way: nothing else may begin."""
        return self._held is not None

    def shown(self, state: LinkState) -> LinkState:
        """What the trainer may act on at this boundary: results are ready when they are on the device."""
        if self.busy:
            asked = min(state.initial_requested, self._requested)
            return dataclasses.replace(state, open=(), ready=(), initial_requested=asked)
        ready = [(p, g) for p, g in state.ready if self._is_staged(p, g)]
        self._staged = {p: self._staged[p] for p, _ in ready}
        self._requested = state.initial_requested
        return dataclasses.replace(state, ready=ready)

    # ------------------------------------------------------------ a boundary

    def copy_out(self, fragment: int, copy: HostCopy) -> Outgoing | None:
        """Begin a host copy; None: no buffer or place is free."""
        elements = self._fragments[fragment]
        buffer = smallest(self._rooms.outgoing, elements, {c.buffer for c in self._copies})
        places = {c.place for c in self._copies} | set(self.current)
        place = smallest((0, *self._rooms.spares), elements, {HOME} | places)
        if self.busy or buffer is None or place is None:
            return None
        self._copies.append(Outgoing(fragment=fragment, copy=copy, buffer=buffer, place=place))
        return self._copies[-1]

    @property
    def copies(self) -> Sequence[Outgoing]:
        """The host copies of the open boundary."""
        return tuple(self._copies)

    def lost(self, out: Outgoing) -> None:
        """This host copy of the boundary that is under way is not made."""
        self._copies.remove(out)

    def idle(self, announced: Sequence[int], fragment: int) -> list[int]:
        """Fragments that are not announced, and whose host copy occupies a place that another one fits in."""
        rooms, elements = (0, *self._rooms.spares), self._fragments[fragment]
        return [
            p for p, s in enumerate(self.current) if rooms[s] >= elements and p not in announced
        ]

    def apply(self, fragment: int) -> Incoming:
        """The result of this fragment, which `shown` stated as ready, is being applied."""
        self._applied.append(self._staged.pop(fragment))
        return self._applied[-1]

    def fetch(self, ready: Sequence[Sequence[int]], applied: Sequence[int]) -> list[Incoming]:
        """Begin to copy results to the device, as many as there are buffers for."""
        for fragment, generation in () if self.busy else ready:
            used = {i.buffer for i in (*self._staged.values(), *self._applied, *self._fetched)}
            buffer = smallest(self._rooms.incoming, self._fragments[fragment], used)
            if buffer is None:
                continue
            if generation > applied[fragment] and not self._is_staged(fragment, generation):
                wanted = Incoming(fragment=fragment, generation=generation, buffer=buffer)
                self._fetched.append(wanted)
        return self._fetched if not self.busy else []

    def close(self, state: TrainerState) -> TrainerState | None:
        """
        Nothing more begins at this boundary.

        Args:
            state: of the trainer after it, with the fragments that are copied as `offers`.

        Returns:
            What the link may know now; None: nothing new. If work has begun, `busy` is true from now on.
        """
        if self.busy:
            return (
                None  # the link gets the state of the boundary that is under way, with its offers
            )
        previous, self._settled = self._settled, None
        if self._copies or self._applied or self._fetched:
            self._held = state
        elif previous is not None and previous.offers:
            self._settled = state  # both at once: the newer one would replace the offers
        else:
            previous = state
        if previous is not None:
            self._known = dataclasses.replace(previous, offers=())
        return previous

    def known(self, state: TrainerState) -> TrainerState:
        """What a new link may know at first, if this is the trainer's state now."""
        waiting = self.busy or self._settled is not None or self._copies or self._applied
        if not waiting or self._known is None:
            return state
        # Of the newest copy of the whole model: an older number would be that of a request that was answered since.
        return dataclasses.replace(self._known, initial_copied=state.initial_copied)

    def settle(self, installed: Sequence[Outgoing]) -> None:
        """
        The boundary is over: buffers are free, results that were copied can be applied.

        Args:
            installed: copies that the link reads from now on; the others it does not see, because it was reading
                their predecessors.
        """
        if self._held is None:
            raise AssertionError("no boundary is under way")
        for out in installed:
            self.current[out.fragment] = out.place
        offered = {out.fragment for out in installed}
        offers = [p for p in self._held.offers if p in offered]
        self._settled, self._held = dataclasses.replace(self._held, offers=offers), None
        self._staged |= {i.fragment: i for i in self._fetched}
        self._copies, self._applied, self._fetched = [], [], []

    def _is_staged(self, fragment: int, generation: int) -> bool:
        staged = self._staged.get(fragment)
        return staged is not None and staged.generation == generation
