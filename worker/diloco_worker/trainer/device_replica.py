"""
The model of a learner on a device, and its copies in the memory that it shares with the link.

As `Replica`, but no step waits for the device: `core.device_work` decides what is under way and what the link may
know. A fragment is gathered in a buffer on the device by the stream that trains, and copied to the host from there by
another one; results take the same way back (docs/adr/0029). Until it has joined, and when the whole model is
requested, it copies as `Replica` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from diloco.codec import formats
from diloco.spec import RunSpec
from diloco_worker.core.agreement import HOME
from diloco_worker.core.device_work import DeviceWork, Incoming, Outgoing
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.core.rooms import Rooms
from diloco_worker.trainer import device_codec
from diloco_worker.trainer.buffers import WatchBeside
from diloco_worker.trainer.device import U8, CudaDevice, Device, Event, devices_of
from diloco_worker.trainer.layout import F32
from diloco_worker.trainer.replica import Replica
from diloco_worker.trainer.undone import UndoneBeside

log = logging.getLogger(__name__)

NOTHING = HostCopy(local_step=0, steps=0, tokens=0, base=0)


def replica_of(model: nn.Module, spec: RunSpec, *, encode: bool = False) -> Replica:
    """
    The replica that fits the model's device.

    Args:
        model: on its device.
        spec: defines how to cut it.
        encode: whether a GPU encodes deltas, if the format of the job is shorter than fp32.

    Raises:
        ConfigError, OSError: see `Replica`.
    """
    trained, others = devices_of(model)
    if not any(device.type == "cuda" for device in trained):
        return Replica(model, spec)
    if len(trained | others) > 1:
        why = (
            f"trained parameters and buffers are on {', '.join(sorted(map(str, trained | others)))}"
        )
    else:
        try:
            return DeviceReplica(model, spec, CudaDevice(*trained), encode=encode)
        except RuntimeError as error:
            why = f"there is no memory for copies beside the training: {error}"
    log.warning("%s; each step waits until its fragments are copied", why)
    return Replica(model, spec)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


class DeviceReplica(Replica):
    """
    A model on a device, cut into the job's fragments.

    Args:
        model: on its device.
        spec: defines how to cut it.
        device: where the model is.
        encode: see `replica_of`.

    Raises:
        ConfigError, OSError: see `Replica`.
        RuntimeError: device or host have too little memory for copies beside the training.
    """

    def __init__(
        self, model: nn.Module, spec: RunSpec, device: Device, *, encode: bool = False
    ) -> None:
        # Reports are one or two steps late, so announcements reach further than τ + 1.
        announced = spec.overlap + 3
        super().__init__(model, spec, spares=2 * announced)
        sizes = [f.elements for f in self.layout.fragments]
        rooms = Rooms.of(sizes, announced=announced)
        self._work = DeviceWork(sizes, rooms)
        self._device = device
        self._event: Event | None = None
        self._counted = False
        """Whether the copies under way have the number of results that were undone."""
        self._link_state: LinkState | None = None
        self._checks = WatchBeside(self._watch, device, partial(log.warning, "%s"))
        self._reported = False
        """Whether a state after a step was reported: the agent waits for the first one of a process."""
        self._formats = [formats.of_fragment(spec.wire_up, f) for f in self.layout.fragments]
        self._bases: dict[int, torch.Tensor] = {}
        """By fragment, on the device, what its parameters received last, if deltas are encoded there."""
        self._based: set[int] = set()
        """Fragments whose base is that of the next delta; the others are copied in fp32."""
        self._old_bases: Sequence[torch.Tensor] = ()
        """No longer needed, but the device may read them until the event of this boundary."""
        self._rounded: list[Incoming] = []
        """Results whose rounding goes back to the inbox at this boundary."""
        self._pinned_out: list[torch.Tensor] = []
        self._pinned_in: list[torch.Tensor] = []
        """Between device and shared memory, if that cannot be registered."""
        try:
            self._reserve(rooms)
            self._undone = self._undone_beside = UndoneBeside(device)
            if encode:
                self._reserve_bases(error_feedback=spec.error_feedback)
        except RuntimeError:
            device.unregister()
            self.shared.close()
            raise

    def _reserve(self, rooms: Rooms) -> None:
        """
        The buffers, and memory of the host that the device copies from and to.

        Raises:
            RuntimeError: there is too little of either.
        """
        self._out = [self._device.empty(n) for n in rooms.outgoing]
        self._in = [self._device.empty(n) for n in rooms.incoming]
        areas = self.shared.device_areas(rooms.spares)
        problem = next((p for area in areas if (p := self._device.register(area))), "")
        if not problem:
            return
        self._device.unregister()
        self._pinned_out = [self._device.pinned(n) for n in rooms.outgoing]
        self._pinned_in = [self._device.pinned(n) for n in rooms.incoming]
        log.warning(
            "%s: copies go through %d MiB of pinned memory instead, and each step copies its fragments once more; "
            "raise the limit of locked memory, or give the container the capability IPC_LOCK",
            problem, 4 * sum((*rooms.outgoing, *rooms.incoming)) >> 20,
        )  # fmt: skip

    def _reserve_bases(self, *, error_feedback: bool) -> None:
        """
        Memory for the bases of deltas, unless these are encoded on the host.

        Each is encoded once, so that the allocator has memory for that as well, and keeps it while there is enough.
        """
        encoded = [p for p, fmt in enumerate(self._formats) if fmt != formats.FP32]
        if error_feedback and encoded:
            log.warning(
                "DILOCO_ENCODE_ON: deltas are encoded on the host, which keeps what rounding lost (errorFeedback)"
            )
            return
        try:
            for fragment in encoded:
                elements = self.layout.fragments[fragment].elements
                self._bases[fragment] = self._device.empty(elements)
            self._device.after_training()
            for fragment, base_N in self._bases.items():
                self._encode(fragment, self._out[0][: base_N.numel()])
        except RuntimeError as error:
            self._encode_on_host(error)
        self._device.record().wait()
        self._old_bases = ()

    def _encode(self, fragment: int, buffer_N: torch.Tensor) -> None:
        encode = device_codec.encode_delta
        work = partial(encode, self._formats[fragment], self._bases[fragment], buffer_N)
        self._device.before_copies(work)

    def _encode_on_host(self, why: RuntimeError) -> None:
        """For good: the memory that the device lacked may be lacking again in any step."""
        self._old_bases, self._bases = [*self._bases.values()], {}
        self._based.clear()
        log.warning("DILOCO_ENCODE_ON: deltas are encoded on the host from now on: %s", why)

    # ------------------------------------------------------------ what trainer and link know of each other

    def shown(self, state: LinkState | None) -> LinkState | None:
        """See `Replica.shown`."""
        self._link_state = state or self._link_state
        if self._event is not None and self._event.done():
            self._settle()
        return self._work.shown(self._link_state) if self._link_state is not None else None

    def known(self, state: TrainerState) -> TrainerState:
        """See `Replica.known`."""
        return self._work.known(state)

    def report(self, state: TrainerState) -> TrainerState | None:
        """See `Replica.report`; the copies of this boundary begin here, but none before the first step is reported."""
        if self._work.busy:
            return None
        ready = self._link_state.ready if self._reported and self._link_state is not None else ()
        self._reported = self._reported or state.stepped
        fetched = self._work.fetch(ready, state.applied)
        copies = self._work.copies
        known = self._work.close(state)
        if self._work.busy:
            self._begin(copies, fetched)
        return known

    def _begin(self, copies: Sequence[Outgoing], fetched: Sequence[Incoming]) -> None:
        device = self._device
        device.after_training()
        for out in copies:
            buffer_N = self._buffer(out)
            if out.copy.format and not self._try_to_encode(out, buffer_N):
                self._work.lost(out)
                continue
            source, target = buffer_N.view(torch.uint8), self._host_out(out).view(torch.uint8)
            size_bytes = self._bytes(out)
            device.copy(source[:size_bytes], target[:size_bytes])
        for result in self._rounded:
            device.copy(self._buffer(result), self._host_in(result))
        for result in fetched:
            target = self._host_in(result)
            if self._pinned_in:
                target.numpy()[:] = self.shared.inbox(result.fragment)
            device.copy(target, self._buffer(result))
        self._counted = self._undone_beside.copy()
        self._event = device.record()

    def _try_to_encode(self, out: Outgoing, buffer_N: torch.Tensor) -> bool:
        """False: the device has no memory for it, and the buffer may hold neither values nor payloads."""
        if out.fragment not in self._bases:  # of a boundary at which another one was not encoded
            return False
        try:
            self._encode(out.fragment, buffer_N)
        except RuntimeError as error:
            self._encode_on_host(error)
            return False
        return True

    def _settle(self) -> None:
        """The copies of the last boundary are complete: the link can read them."""
        installed = []
        for out in self._work.copies:
            if self._pinned_out:
                place: U8 = self.shared.place(out.fragment, out.place).view(np.uint8)
                size_bytes = self._bytes(out)
                np.copyto(
                    place[:size_bytes], self._host_out(out).numpy().view(np.uint8)[:size_bytes]
                )
            with self.shared.try_lock(out.fragment) as held:
                if held:
                    self.shared.set_host_copy(out.fragment, out.copy, place=out.place)
                    installed.append(out)
        if self._pinned_in:
            for result in self._rounded:
                np.copyto(self.shared.inbox(result.fragment), self._host_in(result).numpy())
        self._rounded, self._event, self._old_bases = [], None, ()
        self._work.settle(installed)
        if self._counted and self._undone_beside.copied():
            log.warning("%s", self._undone.problem)

    # ------------------------------------------------------------ fragments

    def try_copy(self, fragment: int, copy: HostCopy) -> bool:
        """See `Replica.try_copy`; the link can read the copy after a later boundary."""
        if fragment == 0:
            self._notice_changes()
        if not self._reported:
            return False
        if fragment in self._based:
            copy = dataclasses.replace(copy, format=self._formats[fragment])
        out = self._work.copy_out(fragment, copy)
        if out is None and self._release_place(fragment):
            out = self._work.copy_out(fragment, copy)
        if out is None:
            return False
        buffer_N = self._buffer(out)
        self._device.train(lambda: self._copier.stage_out(fragment, buffer_N))
        return True

    def apply(self, fragment: int) -> None:
        """Overwrite a fragment from its result on the device, which `shown` stated as ready."""
        result = self._work.apply(fragment)
        buffer_N = self._buffer(result)
        overwrite = partial(self._copier.stage_in, fragment, buffer_N)
        self._undone.apply(self._compared(fragment), overwrite)
        if self._copier.rounds(fragment):
            self._rounded.append(result)
        if (base_N := self._bases.get(fragment)) is not None:
            self._device.train(partial(_copy, base_N, buffer_N))
            self._based.add(fragment)

    def _release_place(self, fragment: int) -> bool:
        """Release a place for this fragment: that of the oldest copy that is not announced; False: there is none."""
        announced = self._link_state.open if self._link_state is not None else ()
        idle = self._work.idle(announced, fragment)
        for other in sorted(idle, key=lambda p: self.shared.host_copy(p).local_step):
            with self.shared.try_lock(other) as held:
                if held:
                    self.shared.set_host_copy(other, NOTHING)
                    self._work.current[other] = HOME
                    return True
        return False

    # ------------------------------------------------------------ the whole model

    def apply_model(self, fragments: Sequence[int]) -> None:
        """See `Replica.apply_model`; the bases of deltas are what was applied."""
        super().apply_model(fragments)
        for fragment in fragments:
            if (base_N := self._bases.get(fragment)) is not None:
                base_N.copy_(torch.from_numpy(self.shared.inbox(fragment)))
                self._based.add(fragment)

    def try_copy_model(self, copies: Sequence[HostCopy]) -> bool:
        """See `Replica.try_copy_model`; not while copies are under way."""
        return not self._work.busy and super().try_copy_model(copies)

    def _copy(self, fragment: int, copy: HostCopy) -> None:
        super()._copy(fragment, copy)
        self._work.current[fragment] = HOME
        self._based.discard(
            fragment
        )  # the syncer has nothing yet: no copy before its first result is a delta

    def close(self) -> None:
        """Release the shared memory, after the copies that are under way."""
        self._checks.close()
        # After an error of the device every call raises; the shared memory is still released.
        with contextlib.suppress(RuntimeError):
            if self._event is not None:
                self._event.wait()
        with contextlib.suppress(RuntimeError):
            self._device.unregister()
        super().close()

    # ------------------------------------------------------------ common

    def _notice_changes(self) -> None:
        self._checks.begin()

    def _buffer(self, transfer: Outgoing | Incoming) -> torch.Tensor:
        buffers = self._out if isinstance(transfer, Outgoing) else self._in
        return buffers[transfer.buffer][: self.layout.fragments[transfer.fragment].elements]

    def _bytes(self, out: Outgoing) -> int:
        """Of a host copy."""
        elements, fmt = self.layout.fragments[out.fragment].elements, out.copy.format
        return device_codec.encoded_bytes(fmt, elements) if fmt else 4 * elements

    def _host_out(self, out: Outgoing) -> torch.Tensor:
        return self._host(out, self._pinned_out, self.shared.place(out.fragment, out.place))

    def _host_in(self, result: Incoming) -> torch.Tensor:
        return self._host(result, self._pinned_in, self.shared.inbox(result.fragment))

    def _host(
        self, transfer: Outgoing | Incoming, pinned: Sequence[torch.Tensor], memory_N: F32
    ) -> torch.Tensor:
        """What the device copies from or to: shared memory, or what stands in for it."""
        if not pinned:
            return torch.from_numpy(memory_N)
        return pinned[transfer.buffer][: memory_N.size]
