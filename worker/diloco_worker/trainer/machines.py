"""
A learner whose ranks are on several machines: what the first rank of each does for the others there.

Each machine has a memory and a board of its own. The machine of rank 0 has the link process, and a connection to each
of the others (ipc/relay.py). Over it go the plans and the rows of the agreement, what the ranks of the other machine
copied of host copies, and what they need of results. Nothing here waits: a copy is offered, and a result is planned,
when all of its bytes have arrived (docs/adr/0027).
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from diloco_worker.core.agreement import HOME, Board, Followed, Plan
from diloco_worker.core.machine_parts import Part
from diloco_worker.core.messages import LinkState, Phase
from diloco_worker.ipc.relay import Kind, Message, Relay
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.trainer.rank_replica import MachineShares

U8 = npt.NDArray[np.uint8]

ROWS_POLL_SECONDS = 0.002

ROWS_SECONDS = 0.5
"""After waiting this long for a rank of the own machine, the others are reported without it."""


class FirstMachine:
    """
    The side of rank 0.

    `publish`, `visible` and `arrived` are called by its training thread; messages arrive in other threads.

    Args:
        shared: the memory of this machine.
        board: of this machine.
        machines: the others.
        named: describes ranks, for messages.
    """

    def __init__(
        self, shared: SharedMemory, board: Board, machines: Sequence[MachineShares],
        *, ranks: int, named: Callable[[Sequence[int]], str],
    ) -> None:  # fmt: skip
        self._shared, self._board, self._ranks = shared, board, ranks
        self._constants = len(shared.layout.fragments)
        self._others = [_Other(machine, named(machine.ranks[:1])) for machine in machines]
        self._lock = threading.Lock()
        self._places: dict[int, Mapping[int, int]] = {}
        """By boundary, where the copies of its plan are."""
        self._reported = False

    def begin(self, sockets: Mapping[int, socket.socket]) -> None:
        """Exchange messages with the other machines over these connections, by number of the machine."""
        for number, other in enumerate(self._others, start=1):
            other.relay = Relay(
                sockets[number],
                handle=functools.partial(self._handle, other),
                lost=functools.partial(self._lost, other),
                beat=lambda: self._board.rows_of(range(self._ranks)),
            )
        for other in self._others:
            other.relay.start()

    def _lost(self, other: _Other, why: str) -> None:
        self._board.fail(f"{other.name} does not answer: {why}")

    def publish(self, plan: Plan, record: bytes) -> None:
        """Send the plan of a boundary; parts of the copies of its places may come from now on."""
        with self._lock:
            if plan.places:
                self._places[plan.boundary] = dict(plan.places)
        for other in self._others:
            other.relay.send(Message(Kind.PLAN, (plan.boundary, 0, 0), record))

    def arrived(self, followed: Followed) -> bool:
        """Whether the copies of a boundary, which all ranks have made, are complete here."""
        units = [*range(self._constants + 1)] if followed.model else [*followed.copies]
        with self._lock:
            for other in self._others:
                found = other.arrived.get(followed.boundary, {})
                if any(found.get(unit, 0) < len(other.shares.copied[unit]) for unit in units):
                    return False
            for boundary in [b for b in self._places if b <= followed.boundary]:
                del self._places[boundary]
                for other in self._others:
                    other.arrived.pop(boundary, None)
        return True

    def visible(self, state: LinkState) -> LinkState:
        """
        A state of the link without the results that have not reached all machines; those are sent.

        While they are on their way, their fragments are not copied: the link would not offer them.
        """
        ready = [(int(p), int(g)) for p, g in state.ready]
        wanted = dict(ready)
        model = state.phase is Phase.APPLY_MODEL
        if model:
            # The constants have no generation of their own: they come with the model.
            wanted[self._constants] = max([g for _, g in ready], default=1)
        late = set()
        for other in self._others:
            for unit, generation in wanted.items():
                if not self._stored(other, unit, generation):
                    late.add(unit)
        if not late:
            return state
        if model:
            text = f"sending the model to {len(self._others)} other machines of this learner"
            return dataclasses.replace(state, phase=Phase.DOWNLOADING, text=text, ready=(), open=())
        return dataclasses.replace(
            state, ready=[r for r in ready if r[0] not in late], open=[p for p in state.open if p not in late]
        )  # fmt: skip

    def check(self) -> None:
        """Report a failure to the other machines."""
        if (text := self._board.failure) and not self._reported:
            self._reported = True
            for other in self._others:
                other.relay.send(Message(Kind.FAILED, data=text.encode()))

    def close(self) -> None:
        """The ranks of this machine leave the job, or have failed."""
        self.check()
        for other in self._others:
            if not self._reported:
                other.relay.send(Message(Kind.LEFT))
        for other in self._others:
            other.relay.close()

    # ------------------------------------------------------------ results

    def _stored(self, other: _Other, unit: int, generation: int) -> bool:
        """Whether a machine has a result; it is sent if it is not on its way."""
        parts = other.shares.held[unit]
        with self._lock:
            if not parts or other.stored.get(unit) == generation:
                return True
            if other.sent.get(unit) == generation:
                return False
            other.sent[unit] = generation
        other.relay.send_bulk(self._result(other, unit, generation))
        return False

    def _result(self, other: _Other, unit: int, generation: int) -> Iterator[Message]:
        memory = _inbox(self._shared, unit)
        if unit != self._constants:
            # Its ranks round what they copy, and the base of the next delta must not contain that rounding.
            for part in other.shares.copied[unit]:
                _round(part, memory)
                yield Message(Kind.BEAT)  # a plan may go between two parts
        for place, part in enumerate(other.shares.held[unit]):
            yield Message(Kind.RESULT, (generation, unit, place), part.view(memory).tobytes())

    # ------------------------------------------------------------ messages

    def _handle(self, other: _Other, message: Message) -> None:
        first, unit, place = message.numbers
        match message.kind:
            case Kind.ROWS:
                self._board.take_rows(other.shares.ranks, bytes(message.data))
            case Kind.PART:
                self._part(other, first, unit, place, message.data)
            case Kind.STORED:
                with self._lock:
                    if other.sent.get(unit) == first:
                        other.stored[unit] = first
            case Kind.FAILED:
                self._board.fail(bytes(message.data).decode(errors="replace"))
            case Kind.LEFT:
                for rank in other.shares.ranks:
                    self._board.leave(rank)
            case Kind.BEAT:
                pass
            case _:
                raise ValueError(f"a message of kind {message.kind.name}")

    def _part(
        self, other: _Other, boundary: int, unit: int, place: int, data: bytes | bytearray
    ) -> None:
        with self._lock:
            places = self._places.get(boundary)
            found = other.arrived.setdefault(boundary, {}) if places is not None else {}
            if places is None or not (unit == self._constants or unit in places):
                raise ValueError(
                    f"a copy of unit {unit} at boundary {boundary}, which is not planned"
                )
            if place != found.get(unit, 0):
                raise ValueError(f"part {place} of unit {unit}, expected {found.get(unit, 0)}")
        memory = _copy(self._shared, unit, places.get(unit, HOME))
        _write(other.shares.copied[unit][place], memory, data)
        with self._lock:
            found[unit] = place + 1


class _Other:
    """Another machine, as rank 0 knows it."""

    relay: Relay

    def __init__(self, shares: MachineShares, name: str) -> None:
        self.shares, self.name = shares, name
        self.arrived: dict[int, dict[int, int]] = {}
        """By boundary and unit, parts of copies that are here."""
        self.sent: dict[int, int] = {}
        """By unit, the generation that was sent last, or is being sent."""
        self.stored: dict[int, int] = {}
        """By unit, the generation that the machine has."""


class FurtherMachine:
    """
    The side of the first rank of another machine.

    `entered` is called by its training thread; messages arrive in other threads.

    Args:
        shared: the memory of this machine.
        board: of this machine.
        shares: of its ranks.
        others: the ranks of all other machines.
        first: describes rank 0, for messages.
    """

    def __init__(
        self, shared: SharedMemory, board: Board, shares: MachineShares,
        *, others: Sequence[int], first: str,
    ) -> None:  # fmt: skip
        self._shared, self._board, self._shares = shared, board, shares
        self._others, self._first = others, first
        self._constants = len(shared.layout.fragments)
        self._relay: Relay
        self._stored: dict[int, tuple[int, int]] = {}
        """By unit, the generation of which parts are here, and how many."""
        self._reported = self._closed = False
        self._entered: list[tuple[int, Mapping[int, int]]] = []
        """Boundaries that this rank has passed and the others here perhaps not, and their copies."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._report, name="diloco-rows", daemon=True)

    def begin(self, sock: socket.socket) -> None:
        """Exchange messages with rank 0 over this connection."""
        self._relay = Relay(
            sock,
            handle=self._handle,
            lost=lambda why: self._board.fail(f"{self._first} does not answer: {why}"),
        )
        self._relay.start()
        self._thread.start()

    def entered(self, boundary: int, places: Mapping[int, int], *, model: bool) -> None:
        """
        This rank has followed the plan of a boundary.

        Args:
            boundary: of the plan.
            places: by fragment, where the copies are that the ranks make.
            model: they copy the whole model, and the constants.
        """
        copies = {**places, **({self._constants: HOME} if model else {})}
        with self._changed:
            self._entered.append((boundary, copies))
            self._changed.notify_all()

    def check(self) -> None:
        """Report a failure to rank 0."""
        if (text := self._board.failure) and not self._reported:
            self._reported = True
            self._relay.send(Message(Kind.FAILED, data=text.encode()))

    def close(self) -> None:
        """The ranks of this machine leave the job, or have failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.check()
        if not self._reported:
            self._send_rows()
            self._relay.send(Message(Kind.LEFT))
        self._relay.close()

    # ------------------------------------------------------------ rows and copies

    def _report(self) -> None:
        copied: deque[tuple[int, Mapping[int, int]]] = deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entered or self._closed)
                if self._closed:
                    return
                boundary, copies = self._entered.pop(0)
            if self._await_ranks(boundary):
                self._send_rows()
                copied.append((boundary, copies))
                finished = self._board.finished(self._shares.ranks)
                while copied and copied[0][0] <= finished:
                    self._relay.send_bulk(self._copies(*copied.popleft()))

    def _await_ranks(self, boundary: int) -> bool:
        """The ranks of this machine have followed a plan; False: this rank leaves."""
        due = time.monotonic() + ROWS_SECONDS
        while not set(self._board.behind(boundary)).isdisjoint(self._shares.ranks):
            if self._closed:
                return False
            if time.monotonic() > due:
                due = time.monotonic() + ROWS_SECONDS
                self._send_rows()
            time.sleep(ROWS_POLL_SECONDS)
        return True

    def _send_rows(self) -> None:
        self._relay.send(Message(Kind.ROWS, data=self._board.rows_of(self._shares.ranks)))

    def _copies(self, boundary: int, copies: Mapping[int, int]) -> Iterator[Message]:
        for unit, where in copies.items():
            memory = _copy(self._shared, unit, where)
            for place, part in enumerate(self._shares.copied[unit]):
                yield Message(Kind.PART, (boundary, unit, place), part.view(memory).tobytes())
        if self._constants in copies:
            # Until copies of fragments are made there.
            self._shared.forget_host_copies()

    # ------------------------------------------------------------ messages

    def _handle(self, message: Message) -> None:
        generation, unit, place = message.numbers
        match message.kind:
            case Kind.PLAN:
                self._board.take(bytes(message.data))
            case Kind.BEAT:
                if message.data:
                    self._take_rows(bytes(message.data))
            case Kind.RESULT:
                self._result(generation, unit, place, message.data)
            case Kind.FAILED:
                self._board.fail(bytes(message.data).decode(errors="replace"))
            case Kind.LEFT:
                for rank in self._others:
                    self._board.leave(rank)
            case _:
                raise ValueError(f"a message of kind {message.kind.name}")

    def _take_rows(self, rows: bytes) -> None:
        size = len(rows) // (len(self._others) + len(self._shares.ranks))
        own = b"".join(rows[size * rank : size * (rank + 1)] for rank in self._others)
        self._board.take_rows(self._others, own)

    def _result(self, generation: int, unit: int, place: int, data: bytes | bytearray) -> None:
        current, found = self._stored.get(unit, (0, 0))
        expected = found if current == generation else 0
        if place != expected or generation < current:
            raise ValueError(f"part {place} of generation {generation} of unit {unit}")
        _write(self._shares.held[unit][place], _inbox(self._shared, unit), data)
        self._stored[unit] = generation, place + 1
        if place + 1 == len(self._shares.held[unit]):
            self._relay.send(Message(Kind.STORED, (generation, unit, 0)))


def _copy(shared: SharedMemory, unit: int, place: int) -> U8:
    if unit == len(shared.layout.fragments):
        return shared.constants
    return shared.place(unit, place).view(np.uint8)


def _inbox(shared: SharedMemory, unit: int) -> U8:
    if unit == len(shared.layout.fragments):
        return shared.constants
    return shared.inbox(unit).view(np.uint8)


def _write(part: Part, memory: U8, data: bytes | bytearray) -> None:
    if len(data) != part.size_bytes:
        raise ValueError(f"{len(data)} bytes of {part.name}, expected {part.size_bytes}")
    part.view(memory)[...] = np.frombuffer(data, np.uint8).reshape(part.box.shape)


def _round(part: Part, memory: U8) -> None:
    """Let the fp32 values of a part be those that its parameter can hold."""
    dtype = getattr(torch, part.dtype)
    if dtype.is_floating_point and dtype not in (torch.float32, torch.float64):
        values = torch.from_numpy(part.view(memory).view(np.float32))
        values.copy_(values.to(dtype))
