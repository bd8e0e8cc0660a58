"""
The model of this learner and its copies in the memory that it shares with the link.

It only copies: `core.trainer` decides what to copy, and with which counters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from diloco.model.digests import digests
from diloco.model.fragments import cut
from diloco.rpc.tensor_info import pack_frozen
from diloco.spec import RunSpec
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.trainer.buffers import Watch, log_unmatched
from diloco_worker.trainer.frozen import with_digests
from diloco_worker.trainer.layout import Copier, describe
from diloco_worker.trainer.undone import Undone, compared

log = logging.getLogger(__name__)


class Replica:
    """
    A model, cut into the job's fragments.

    Args:
        model: on its device.
        spec: defines how to cut it.
        spares: spare places for host copies.

    Raises:
        ConfigError: the model cannot be cut this way, has a tensor that cannot be merged, or more frozen
            parameters than a Hello can describe.
        OSError: the machine has too little memory for the copies.
    """

    def __init__(self, model: nn.Module, spec: RunSpec, *, spares: int = 0) -> None:
        kept = spec.buffers == "Initial"
        tensors = describe(model, moving=None if kept else spec.moving_buffers)
        ship = spec.frozen == "Ship"
        self.layout = cut(
            [n.info for n in tensors.merged],
            num_fragments=spec.fragments,
            constants=[n.info for n in tensors.constants(ship_frozen=ship)],
            frozen=() if ship else with_digests(tensors.frozen),
            average=spec.average_parameters,
        )
        pack_frozen(
            self.layout.frozen
        )  # here, not in each session of the link, that they fit is checked
        log_unmatched(tensors, () if kept else spec.moving_buffers)
        self._watch = Watch(
            model, constant=() if kept else tensors.buffers, moving=tensors.moving, frozen=tensors.frozen,
            trained=tensors.trained,
        )  # fmt: skip
        self._undone = Undone()
        fragments = range(len(self.layout.fragments))
        self._copier = Copier(tensors, self.layout)
        self.shared = SharedMemory.create(
            self.layout, constants_bytes=self._copier.constants_bytes(), spares=spares
        )
        self._copier.attach(
            [[self.shared.host(p)] for p in fragments], [self.shared.inbox(p) for p in fragments]
        )

    @property
    def refused(self) -> str:
        """Why the learner cannot continue with its model: see `Watch.refused`."""
        return self._watch.refused

    @property
    def problem(self) -> str:
        """What the program trains that the job does not, or the other way round; "": nothing was seen."""
        return self._watch.problem or self._undone.problem

    # ------------------------------------------------------------ what trainer and link know of each other

    def shown(self, state: LinkState | None) -> LinkState | None:
        """What the trainer may act on at this step boundary: the link's newest state; None: no new one."""
        return state

    def known(self, state: TrainerState) -> TrainerState:
        """What a new link may know at first, if this is the trainer's state now."""
        return state

    def report(self, state: TrainerState) -> TrainerState | None:
        """
        The boundary is over: what the link may know; None: nothing new.

        Args:
            state: of the trainer, whose `offers` were copied at this boundary.
        """
        return state

    # ------------------------------------------------------------ copies

    def apply_model(self, fragments: Sequence[int]) -> None:
        """Overwrite the constants, and these fragments from their inboxes."""
        self._copier.constants_in(self.shared.constants)
        self._watch.reset()
        for fragment in fragments:
            self._copier.copy_in(fragment)

    def loaded(self) -> None:
        """The model was loaded from a local checkpoint: its buffers are as they were, not changed."""
        self._watch.reset()

    def apply(self, fragment: int) -> None:
        """Overwrite a fragment from its inbox."""
        self._undone.apply(self._compared(fragment), partial(self._copier.copy_in, fragment))

    def stepped(self) -> None:
        """The program has made a step."""
        if self._undone.stepped():
            log.warning("%s", self._undone.problem)

    def copy_model(self, copies: Sequence[HostCopy]) -> None:
        """
        Write every host copy and the constants; waits for the link where it holds a lock.

        Args:
            copies: by fragment.
        """
        self._notice_changes()
        for fragment, copy in enumerate(copies):
            # One at a time: who holds a lock and waits for another can get EDEADLK from the kernel, which
            # does not distinguish the threads of the link.
            with self.shared.lock(fragment):
                self._copy(fragment, copy)
        self._copier.constants_out(self.shared.constants)

    def try_copy_model(self, copies: Sequence[HostCopy]) -> bool:
        """As `copy_model`; False, without an effect and without waiting, while the link holds a lock."""
        self._notice_changes()
        with contextlib.ExitStack() as locks:
            for fragment in range(len(copies)):
                if not locks.enter_context(self.shared.try_lock(fragment)):
                    return False
            for fragment, copy in enumerate(copies):
                self._copy(fragment, copy)
            self._copier.constants_out(self.shared.constants)
        return True

    def try_copy(self, fragment: int, copy: HostCopy) -> bool:
        """Write one host copy; False, without waiting, while the link holds its lock."""
        if fragment == 0:
            self._notice_changes()
        with self.shared.try_lock(fragment) as held:
            if held:
                self._copy(fragment, copy)
        return held

    def digests(self) -> list[bytes]:
        """Digests of the values of each fragment (diloco/model/digests.py); takes a pass over the model."""
        found = []
        for fragment in self.layout.fragments:
            values = torch.zeros(fragment.elements, dtype=torch.float32, device="cpu")
            self._copier.stage_out(fragment.index, values)
            found.append(digests(fragment, values.numpy()))
        return found

    def close(self) -> None:
        """Release the shared memory."""
        self.shared.close()

    def _notice_changes(self) -> None:
        """Without a lock: to read buffers that were written can take long, and the link would wait."""
        if changed := self._watch.changed():
            log.warning("%s", changed)

    def _compared(self, fragment: int) -> torch.Tensor | None:
        return compared(self.layout.fragments[fragment], self._copier.held[fragment])

    def _copy(self, fragment: int, copy: HostCopy) -> None:
        self._copier.copy_out(fragment)
        self.shared.set_host_copy(fragment, copy)
