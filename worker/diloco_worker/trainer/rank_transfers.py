"""
Copies of one rank of several between its device and the memory that the ranks share, for which no step waits.

As in `device_replica`: the stream that trains gathers this rank's parts of a fragment in a buffer on the device, from
where another one copies them to the host, and results take the same way back. What is copied and applied when is in the
plans, which are the same in all ranks (core/agreement.py); this rank only states up to which boundary its device has
finished.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from diloco_worker.core.fetches import Fetch
from diloco_worker.core.rooms import UNDER_WAY, Devices, smallest
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.trainer import digits
from diloco_worker.trainer.device import Device, Event
from diloco_worker.trainer.layout import Copier, Pair
from diloco_worker.trainer.undone import UndoneBeside

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor on its way: in the model and in memory, in a buffer, and perhaps in pinned memory between."""

    pair: Pair
    buffer: torch.Tensor
    pinned: torch.Tensor | None

    @property
    def host(self) -> torch.Tensor:
        """What the device copies from or to."""
        return self.pair.view if self.pinned is None else self.pinned


@dataclass(slots=True)
class _Boundary:
    """What was begun at one boundary."""

    number: int = 0
    event: Event | None = None
    copies: list[list[_Part]] = field(default_factory=list)
    buffers: int | None = None
    """The set of buffers of these copies."""
    used: set[int] = field(default_factory=set)
    """Which of the set."""
    rounded: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Values in a buffer that go back to an inbox."""
    counted: bool = False
    """The host gets the number of results that were undone."""


class RankTransfers:
    """
    The copies of one rank.

    Args:
        device: of the model.
        copier: of this rank, with its places and inboxes attached.
        shared: the memory.
        devices: what all ranks agreed on.

    Raises:
        RuntimeError: device or host have too little memory.
    """

    def __init__(
        self, device: Device, copier: Copier, shared: SharedMemory, devices: Devices
    ) -> None:
        self._device, self._copier = device, copier
        self._open = _Boundary()
        self._under_way: list[_Boundary] = []
        """The oldest first."""
        self._fetched: dict[int, Fetch] = {}
        """By fragment, the results that are on the device, or on their way to it, and not applied."""
        out = sorted((_elements(places[0]) for places in copier.out), reverse=True)
        self._rooms = out[: devices.announced]
        incoming = [
            max(_elements(held) for held, n in zip(copier.held, devices.fragments, strict=True) if n <= room)
            for room in devices.rooms.incoming
        ]  # fmt: skip
        problem = next(
            (p for area in shared.device_areas(devices.rooms.spares) if (p := device.register(area))), ""
        )  # fmt: skip
        self._registered = not problem
        if problem:
            device.unregister()
        try:
            self._out = [[device.empty(n) for n in self._rooms] for _ in range(UNDER_WAY)]
            self._in = [device.empty(n) for n in incoming]
            self._pinned_out: list[list[torch.Tensor]] = []
            self._pinned_in: list[torch.Tensor] = []
            everything = [*(places[0] for places in copier.out), *copier.held]
            if not all(self._is_direct(pair) for pairs in everything for pair in pairs):
                self._pinned_out = [
                    [device.pinned(n) for n in self._rooms] for _ in range(UNDER_WAY)
                ]
                self._pinned_in = [device.pinned(n) for n in incoming]
            self.undone = UndoneBeside(device)
        except RuntimeError:
            device.unregister()
            raise
        if problem:
            pinned_bytes = 4 * (UNDER_WAY * sum(self._rooms) + sum(incoming))
            log.warning(
                "%s: copies go through %d MiB of pinned memory instead, and each step copies its fragments once more; "
                "raise the limit of locked memory, or give the container the capability IPC_LOCK",
                problem, pinned_bytes >> 20,
            )  # fmt: skip

    def copy_out(self, fragment: int, place: int) -> None:
        """Gather this rank's parts of a fragment; they are copied to the place from `end` on."""
        opened, pairs = self._open, self._copier.out[fragment][place]
        if opened.buffers is None:
            busy = {boundary.buffers for boundary in self._under_way}
            opened.buffers = min(set(range(UNDER_WAY)) - busy)
        room = smallest(self._rooms, _elements(pairs), opened.used)
        if room is None:
            raise AssertionError(f"no buffer for fragment {fragment}: a plan has too many copies")
        opened.used.add(room)
        pinned = self._pinned_out[opened.buffers][room] if self._pinned_out else None
        parts = self._parts(pairs, self._out[opened.buffers][room], pinned)
        self._device.train(lambda: _gather(parts))
        opened.copies.append(parts)

    def apply(self, fragment: int, compared: torch.Tensor | None) -> None:
        """
        Overwrite what this rank holds of a fragment with its result on the device.

        Args:
            fragment: of which the result was fetched.
            compared: see `Undone.apply`.
        """
        parts = self._incoming(self._fetched.pop(fragment))
        self.undone.apply(compared, lambda: _scatter(parts))
        by_tensor = {id(part.pair.tensor): part for part in parts}
        for pair in self._copier.back[fragment]:
            part = by_tensor[id(pair.tensor)]
            values = part.buffer if pair.part is None else part.buffer[pair.part]
            if self._is_direct(pair) and values.is_contiguous():
                self._open.rounded.append((values, pair.view))
            else:  # all ranks have the result on their devices: here alone is it rounded by the host
                pair.view.copy_(pair.view.to(pair.tensor.dtype))

    def end(self, boundary: int, fetches: Sequence[Fetch]) -> int:
        """
        Begin the copies of this boundary.

        Args:
            boundary: that this rank is at.
            fetches: results to copy to the device, after what is applied at this boundary.

        Returns:
            The newest boundary of which the device has finished everything.
        """
        self._settle()
        opened, self._open = self._open, _Boundary()
        if opened.copies or opened.rounded or fetches:
            device = self._device
            # The buffer of a result that is being applied may get the next one: the copy comes after that as well.
            device.after_training()
            for part in (part for parts in opened.copies for part in parts):
                device.copy(part.buffer, part.host)
            for values, memory in opened.rounded:
                device.copy(values, memory)
            for fetch in fetches:
                self._fetched[fetch.fragment] = fetch
                for part in self._incoming(fetch):
                    if part.pinned is not None:
                        part.pinned.copy_(part.pair.view)
                    device.copy(part.host, part.buffer)
            opened.counted = self.undone.copy()
            opened.number, opened.event = boundary, device.record()
            self._under_way.append(opened)
        return self._under_way[0].number - 1 if self._under_way else boundary

    def close(self) -> None:
        """Wait for the copies that are under way, and release the memory."""
        # After an error of the device every call raises.
        with contextlib.suppress(RuntimeError):
            for boundary in self._under_way:
                if boundary.event is not None:
                    boundary.event.wait()
        with contextlib.suppress(RuntimeError):
            self._device.unregister()

    # ------------------------------------------------------------ common

    def _settle(self) -> None:
        """Forget the boundaries that the device has finished; their buffers are free."""
        while self._under_way and (event := self._under_way[0].event) is not None and event.done():
            finished = self._under_way.pop(0)
            for part in (part for parts in finished.copies for part in parts):
                if part.pinned is not None:
                    part.pair.view.copy_(part.pinned)
            if finished.counted:
                self.undone.copied()

    def _incoming(self, fetch: Fetch) -> list[_Part]:
        pinned = self._pinned_in[fetch.buffer] if self._pinned_in else None
        return self._parts(self._copier.held[fetch.fragment], self._in[fetch.buffer], pinned)

    def _parts(
        self, pairs: Iterable[Pair], buffer_N: torch.Tensor, pinned_N: torch.Tensor | None
    ) -> list[_Part]:
        """The parts of a fragment, one after the other in a buffer."""
        found, begin = [], 0
        for pair in pairs:
            shape, end = pair.view.shape, begin + pair.view.numel()
            between = None if pinned_N is None or self._is_direct(pair) else pinned_N[begin:end]
            found.append(
                _Part(
                    pair, buffer_N[begin:end].view(shape), None if between is None else between.view(shape)
                )
            )  # fmt: skip
            begin = end
        return found

    def _is_direct(self, pair: Pair) -> bool:
        """Whether the device can copy a part from or to its memory."""
        return self._registered and pair.view.is_contiguous()


def _elements(pairs: Iterable[Pair]) -> int:
    return sum(pair.view.numel() for pair in pairs)


def _gather(parts: Iterable[_Part]) -> None:
    with torch.no_grad():
        for part in parts:
            values = part.pair.values
            part.buffer.copy_(values if values.is_floating_point() else digits.to_digits(values))


def _scatter(parts: Iterable[_Part]) -> None:
    """Overwrite the tensors; the buffers get the values as these round them."""
    with torch.no_grad():
        for part in parts:
            values = part.pair.values
            if values.is_floating_point():
                values.copy_(part.buffer)
                if values.dtype is not torch.float32:
                    part.buffer.copy_(values)
            else:
                values.copy_(digits.to_integers(part.buffer).view(values.shape))
