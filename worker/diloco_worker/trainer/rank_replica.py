"""
What one rank of a learner holds of the model, and the memory that it shares with the other ranks and the link.

It only copies: `core.trainer` decides what to copy, and `core.agreement` when and where.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from diloco.errors import ConfigError, DilocoError, UnavailableError
from diloco.model.fragments import Layout, cut
from diloco.rpc.tensor_info import pack_frozen
from diloco.spec import RunSpec
from diloco_worker.core import machine_parts as parts
from diloco_worker.core.agreement import HOME, board_bytes
from diloco_worker.core.fetches import Fetch
from diloco_worker.core.findings import NONE, Finding
from diloco_worker.core.rooms import Devices
from diloco_worker.core.shard_slices import Box
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.trainer.buffers import Watch, WatchBeside, log_unmatched
from diloco_worker.trainer.device import CudaDevice, Device, devices_of
from diloco_worker.trainer.frozen import with_digests
from diloco_worker.trainer.layout import Copier, ModelTensors, Share
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_transfers import RankTransfers
from diloco_worker.trainer.sharded_digests import digests
from diloco_worker.trainer.shards import described, plain_digests, shares, to_text
from diloco_worker.trainer.undone import Undone, compared

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
"""At the end of the control area: proves that a rank has mapped the memory of its own rank 0."""


def replica_of(model: nn.Module, spec: RunSpec, group: RankGroup) -> RankReplica:
    """
    The replica that fits the device of this rank; for arguments and errors, see `RankReplica`.
    """
    trained, others = devices_of(model)
    device = None
    if any(where.type == "cuda" for where in trained):
        if len(trained | others) == 1:
            device = CudaDevice(*trained)
        else:
            log.warning(
                "trained parameters and buffers are on %s; each step waits until its fragments are copied",
                ", ".join(sorted(map(str, trained | others))),
            )
    return RankReplica(model, spec, group, device=device)


class RankReplica:
    """
    This rank's part of a model, which is cut into the job's fragments.

    Args:
        model: on its device; of the same architecture in all ranks.
        spec: defines how to cut it.
        group: the ranks.
        device: of this rank's tensors, if it copies beside the training; None: copies are made at once.

    Raises:
        ConfigError: the model cannot be cut this way, or the ranks do not fit together.
        UnavailableError: the machine has too little memory for the copies.
    """

    def __init__(
        self, model: nn.Module, spec: RunSpec, group: RankGroup, *, device: Device | None = None
    ) -> None:
        self.rank, self.ranks = group.rank, group.size
        tensors, found, plain = _agreed(model, spec, group)
        own = found[self.rank]
        self.layout = _cut(tensors, spec, group, own, plain)
        kept = spec.buffers == "Initial"
        if self.rank == 0:
            log_unmatched(tensors, () if kept else spec.moving_buffers)
        self._watch = Watch(
            model, constant=() if kept else tensors.buffers, moving=tensors.moving, frozen=tensors.frozen,
            trained=tensors.trained,
        )  # fmt: skip
        self._checks = (
            None if device is None else WatchBeside(self._watch, device, self._show_changed)
        )
        self._copier = Copier(tensors, self.layout, shares=own)
        named = (*tensors.merged, *tensors.frozen, *tensors.buffers)
        self.held = {n.info.name: (n.tensor, own[n.info.name]) for n in named}
        """By name, each tensor of the model and what this rank holds of it."""
        fragments = range(len(self.layout.fragments))
        self.devices: Devices | None = None
        """How the ranks copy, if their devices copy beside the training: all of them, or none."""
        # Paper leaves this open: two spare places for each of the τ + 1 fragments that are announced: one that is
        # being written while another waits for the last rank.
        self.spares = 2 * (spec.overlap + 1)
        if all(group.agree("" if device is None else "a device", None)):
            sizes = [f.elements for f in self.layout.fragments]
            self.devices = Devices.of(sizes, overlap=spec.overlap)
            self.spares = len(self.devices.rooms.spares)
        self.shared = self._map(group)
        self.machines = [
            MachineShares(
                ranks=ranks,
                held=parts.held(
                    self.layout, _boxes(found, ranks, "held"), constants_bytes=self.shared.constants.size
                ),
                copied=parts.copied(self.layout, _boxes(found, ranks, "copied")),
            )
            for ranks in group.machines[1:]
            if all(rank in found for rank in ranks)
        ]  # fmt: skip
        """Of the machines other than that of rank 0: all of them in rank 0, and in the first rank of each its own."""
        places = range(self.spares + 1)
        self._copier.attach(
            [[self.shared.place(p, place) for place in places] for p in fragments],
            [self.shared.inbox(p) for p in fragments],
        )
        self._transfers = self._agree_on_transfers(device, group)
        self._undone = Undone() if self._transfers is None else self._transfers.undone
        self.problem_of_ranks = ""
        """Rank 0: a sentence, once any rank has stated what `problem` is about."""

    def _agree_on_transfers(self, device: Device | None, group: RankGroup) -> RankTransfers | None:
        """
        Those of this rank, if all ranks have them; None: each step waits for its copies.

        While a rank reads an inbox late, the devices of others may be writing rounded values to it.
        """
        transfers, why = None, ""
        if device is not None and self.devices is not None:
            try:
                transfers = RankTransfers(device, self._copier, self.shared, self.devices)
            except RuntimeError as error:
                why = f"there is no memory for copies beside the training: {error}"
        elif device is not None:
            why = "other ranks train on the CPU, or on several devices each"
        found = {rank: text for rank, text in enumerate(group.agree(why, None)) if text}
        if not found:
            return transfers
        self.devices = None
        if transfers is not None:
            transfers.close()
        rank, text = next(iter(found.items()))
        log.warning("rank %d: %s; each step waits until its fragments are copied", rank, text)
        return None

    def _map(self, group: RankGroup) -> SharedMemory:
        """Create the memory in the first rank of each machine, and map it in the others."""
        size = board_bytes(ranks=group.size, fragments=len(self.layout.fragments))
        error: DilocoError | None = None
        shared, token, place = None, secrets.token_bytes(TOKEN_BYTES), ""
        if group.rank == group.leader:
            try:
                shared = SharedMemory.create(
                    self.layout, constants_bytes=self._copier.constants_bytes(), spares=self.spares,
                    control_bytes=size + TOKEN_BYTES,
                )  # fmt: skip
                shared.write_control(size, token)
                place = json.dumps([os.getpid(), shared.fd, token.hex()])
            except OSError as problem:
                error = UnavailableError(f"the memory that the ranks share: {problem}")
        pid, fd, found = json.loads(group.agree(place, error)[group.leader])
        if shared is None:
            try:
                shared = SharedMemory.of_process(pid, fd)
                if shared.read_control(size, TOKEN_BYTES) != bytes.fromhex(found):
                    raise ValueError("it is not the memory of this learner")
            except (OSError, ValueError, DilocoError) as problem:
                error = ConfigError(
                    f"rank {group.rank} cannot map the memory of rank {group.leader} (process {pid}): {problem}; "
                    "expected all ranks of a container to run as the same user"
                )
        group.agree("", error)  # the creators keep their files open until all have them
        if shared is None:
            raise AssertionError("the error was raised")
        return shared

    @property
    def refused(self) -> str:
        """Why the learner cannot continue with its model: see `Watch.refused`."""
        return self._watch.refused

    @property
    def problem(self) -> str:
        """See `Replica.problem`; in rank 0, of all ranks."""
        return self._watch.problem or self.problem_of_ranks

    @property
    def findings(self) -> Finding:
        """What the program has done to what this rank holds."""
        found = {
            Finding.UNDONE: self._undone.problem, Finding.CHANGED: self._watch.has_changed,
            Finding.OTHER_MODEL: self._watch.problem,
        }  # fmt: skip
        return functools.reduce(operator.or_, (f for f, is_so in found.items() if is_so), NONE)

    def _show_changed(self, text: str) -> None:
        """What several ranks find is a warning of rank 0; of the others, it has the names of what they hold."""
        if self.rank == 0:
            log.warning("%s", text)
        else:
            log.info("rank %d: %s", self.rank, text)

    def stepped(self) -> None:
        """The program has made a step."""
        self._undone.stepped()

    def copy_out(self, fragment: int, place: int) -> None:
        """Write this rank's part of a host copy; beside the training, if `end` states that it is not finished."""
        if fragment == 0:
            if self._checks is not None:
                self._checks.begin()
            elif changed := self._watch.changed():
                self._show_changed(changed)
        self._clear_padding(fragment, place)
        if self._transfers is None:
            self._copier.copy_out(fragment, place)
        else:
            self._transfers.copy_out(fragment, place)

    def _clear_padding(self, fragment: int, place: int) -> None:
        if self.rank == 0 and place != HOME:
            # Another fragment may have been there, with values where this one is padded.
            memory_N = self.shared.place(fragment, place)
            for slot in self.layout.fragments[fragment].slots:
                memory_N[slot.offset + slot.tensor.length : slot.end] = 0

    def copy_model(self, places: Mapping[int, int]) -> None:
        """Write this rank's part of every host copy and of the constants; `places` by fragment."""
        # Without a check of changed buffers, which can take long: rank 0 holds the locks.
        for fragment in range(len(self.layout.fragments)):
            self._clear_padding(fragment, places[fragment])
            self._copier.copy_out(fragment, places[fragment])
        self._copier.constants_out(self.shared.constants)

    def loaded(self) -> None:
        """The model was loaded from a local checkpoint: its buffers are as they were, not changed."""
        self._watch.reset()

    def apply(self, fragment: int) -> None:
        """Overwrite this rank's part of a fragment from its inbox, or from where it was fetched to."""
        tensor = compared(self.layout.fragments[fragment], self._copier.held[fragment])
        if self._transfers is None:
            self._undone.apply(tensor, functools.partial(self._copier.copy_in, fragment))
        else:
            self._transfers.apply(fragment, tensor)

    def end(self, boundary: int, fetches: Sequence[Fetch]) -> int:
        """
        This rank has followed a plan.

        Args:
            boundary: of the plan.
            fetches: of the plan.

        Returns:
            The newest boundary of which everything is copied.
        """
        return boundary if self._transfers is None else self._transfers.end(boundary, fetches)

    def apply_model(self, fragments: Sequence[int]) -> None:
        """Overwrite this rank's part of the constants, and of these fragments."""
        self._copier.constants_in(self.shared.constants)
        self._watch.reset()
        for fragment in fragments:
            self._copier.copy_in(fragment)

    def give_up(self) -> None:
        """The learner has failed: `close` must not wait for a device that may be in a collective without an end."""
        self._transfers = None

    def close(self) -> None:
        """Release the shared memory, after the copies that are under way."""
        if self._checks is not None:
            self._checks.close()
        if self._transfers is not None:
            self._transfers.close()
        self.shared.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShares:
    """What the ranks of one machine hold and copy, per unit (core/machine_parts.py)."""

    ranks: Sequence[int]
    held: Sequence[Sequence[parts.Part]]
    copied: Sequence[Sequence[parts.Part]]


def _boxes(
    found: Mapping[int, Mapping[str, Share]], ranks: Sequence[int], which: str
) -> dict[str, set[Box]]:
    """By name, the boxes that these ranks hold or copy."""
    boxes: dict[str, set[Box]] = {}
    for rank in ranks:
        for name, share in found[rank].items():
            box = share.held if which == "held" else share.copied
            if box is not None:
                boxes.setdefault(name, set()).add(box)
    return boxes


def _agreed(
    model: nn.Module, spec: RunSpec, group: RankGroup
) -> tuple[ModelTensors, dict[int, dict[str, Share]], dict[str, str]]:
    """
    The tensors of this rank; by rank what it holds of each, of this rank and of those that it speaks for; digests
    of the tensors that all ranks have whole.
    """
    moving = None if spec.buffers == "Initial" else spec.moving_buffers
    text, error, tensors, plain = "", None, None, {}
    try:
        tensors = described(model, moving=moving)
        tensors.constants(ship_frozen=spec.frozen == "Ship")
        plain = plain_digests(tensors, show=group.rank == 0)
        text = to_text(tensors, plain)
    except DilocoError as problem:
        error = problem
    texts = group.agree(text, error)
    several = len(group.machines) > 1
    ranks: Sequence[int] = [group.rank]
    if several and group.rank == group.leader:
        ranks = range(group.size) if group.rank == 0 else group.machines[group.machine]
    # The same error in all ranks.
    found = shares(texts, ranks, first=group.machines[0] if several else None)
    if tensors is None:
        raise AssertionError("the error was raised")
    return tensors, found, plain


def _cut(
    tensors: ModelTensors, spec: RunSpec, group: RankGroup, own: Mapping[str, Share],
    plain: Mapping[str, str],
) -> Layout:  # fmt: skip
    ship = spec.frozen == "Ship"
    layout, error = None, None
    known = {} if ship else {**plain, **digests(tensors.frozen, own, group)}
    try:
        layout = cut(
            [n.info for n in tensors.merged],
            num_fragments=spec.fragments,
            constants=[n.info for n in tensors.constants(ship_frozen=ship)],
            frozen=()
            if ship
            else with_digests(tensors.frozen, known=known, needed=group.rank == 0),
            average=spec.average_parameters,
        )
        pack_frozen(
            layout.frozen
        )  # here, not in each session of the link, that they fit is checked
    except DilocoError as problem:
        error = problem
    group.agree("", error)
    if layout is None:
        raise AssertionError("the error was raised")
    return layout
