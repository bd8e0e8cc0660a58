"""What a link shares with its trainer, as plain arrays; what a learner trains, and a model without gradients."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.model.fragments import Layout
from diloco_worker.core.ledger import HostCopy
from diloco_worker.ipc.shared_memory import InboxState

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]

Received = dict[int, tuple[tuple[int, int], F32]]
"""Fragment → the version that a learner received last, and its values."""
NOT_KNOWN = ((0, 0), np.empty(0, np.float32))
"""In place of both."""

NO_COPY = HostCopy(local_step=0, steps=0, tokens=0, base=0)
EMPTY = InboxState(generation=0, version=None)


class PlainMemory:
    """As `diloco_worker.ipc.shared_memory.SharedMemory`, in one process and without locks."""

    def __init__(self, layout: Layout, *, constants_bytes: int = 0) -> None:
        self.layout = layout
        self.constants = np.zeros(constants_bytes, np.uint8)
        self.copies = [NO_COPY for _ in layout.fragments]
        self.inboxes = [EMPTY for _ in layout.fragments]
        self.loaded: Received = {}
        """Of the fragments that a local checkpoint gave the model and that were not received since."""
        self._hosts = [np.zeros(f.elements, np.float32) for f in layout.fragments]
        self._values = [np.zeros(f.elements, np.float32) for f in layout.fragments]

    def lock(self, fragment: int) -> contextlib.AbstractContextManager[None]:
        """See `Memory`."""
        return contextlib.nullcontext()

    def host(self, fragment: int) -> F32:
        """See `Memory`."""
        return self._hosts[fragment]

    def host_copy(self, fragment: int) -> HostCopy:
        """See `Memory`."""
        return self.copies[fragment]

    def inbox(self, fragment: int) -> F32:
        """See `Memory`."""
        return self._values[fragment]

    def inbox_state(self, fragment: int) -> InboxState:
        """See `Memory`."""
        return self.inboxes[fragment]

    def invalidate_inbox(self, fragment: int) -> None:
        """See `Memory`."""
        state = self.inboxes[fragment]
        self.inboxes[fragment] = InboxState(generation=state.generation, version=None)

    def publish(self, fragment: int, generation: int, version: tuple[int, int]) -> None:
        """See `Memory`."""
        self.inboxes[fragment] = InboxState(generation=generation, version=version)

    def received(self, applied: Sequence[int]) -> Received:
        """
        What the trainer's parameters began from.

        Args:
            applied: per fragment, the generation that they hold.
        """
        found = {**self.loaded}
        for fragment, inbox in enumerate(self.inboxes):
            if inbox.version is not None and inbox.generation == applied[fragment]:
                found[fragment] = inbox.version, self._values[fragment].copy()
        return found


class Model(Protocol):
    """What a simulated learner trains: a model, its optimizers and its data."""

    @property
    def values(self) -> Sequence[F32]:
        """Per fragment, a view of its values; what is written there is trained from then on."""

    def begin(self, *, local_step: int, global_step: int) -> None:
        """
        A step begins: until `step`, which ends it, neither reads nor writes `values`.

        Args:
            local_step: where the learner is in its data.
            global_step: for the schedule.
        """

    def step(self) -> float:
        """Make the optimizer's step; returns the loss."""

    def copied(self, fragment: int, local_step: int) -> None:
        """The values of a fragment were copied for the link."""

    def received(self, fragment: int, version: tuple[int, int]) -> None:
        """The values of a fragment are those of this merge."""

    def copy(self) -> Any:
        """The content of a local checkpoint."""

    def load(self, saved: Any) -> None:
        """Replace values and optimizers with those of a checkpoint."""

    def load_optimizers(self, saved: Any) -> None:
        """Replace the optimizers with those of a checkpoint."""


class ToyModel:
    """
    Tensors that each step moves towards a target of its learner, as training on its data would.

    The state of its optimizers has no effect on them. It is a function of the state before, the learner and the
    local step, and no two of these have the same.

    Args:
        layout: the tensors.
        start: seed of the initial values, the same for all learners.
        target: seed of the target.
        moments: elements of the state of its optimizers.
    """

    RATE = np.float32(0.02)
    """Share of the way to the target of one step."""

    FACTOR = np.uint64(6364136223846793005)
    OF_STEP = 11400714819323198485
    """Of the moments and of the local step that is added to them, modulo 2⁶⁴."""

    def __init__(self, layout: Layout, *, start: int, target: int, moments: int = 0) -> None:
        self._flat, self.values = _random(layout, start)
        """Per fragment, a view of its values."""
        self._target, _ = _random(layout, target)
        self.moments: U64 = np.zeros(moments, np.uint64)
        self._added: U64 = np.arange(moments, dtype=np.uint64) + np.uint64((target << 20) + 1)
        self._local_step = 0

    def begin(self, *, local_step: int, global_step: int) -> None:
        """See `Model`."""
        self._local_step = local_step

    def step(self) -> float:
        """See `Model`."""
        self._flat += self.RATE * (self._target - self._flat)
        if len(self.moments):
            self.moments *= self.FACTOR
            self.moments += self._added + np.uint64(self._local_step * self.OF_STEP % (1 << 64))
        return 1.0

    def copied(self, fragment: int, local_step: int) -> None:
        """See `Model`: it has nothing else."""

    def received(self, fragment: int, version: tuple[int, int]) -> None:
        """See `Model`: it has nothing else."""

    def copy(self) -> tuple[F32, U64]:
        """See `Model`."""
        return self._flat.copy(), self.moments.copy()

    def load(self, saved: tuple[F32, U64]) -> None:
        """See `Model`."""
        self._flat[:], self.moments[:] = saved

    def load_optimizers(self, saved: tuple[F32, U64]) -> None:
        """See `Model`."""
        self.moments[:] = saved[1]


def _random(layout: Layout, seed: int) -> tuple[F32, Sequence[F32]]:
    """Normal values with zeros in the padding: flat, and a view for each fragment."""
    source = np.random.default_rng(seed)
    flat = np.zeros(sum(f.elements for f in layout.fragments), np.float32)
    views, at = [], 0
    for fragment in layout.fragments:
        view = flat[at : at + fragment.elements]
        for slot in fragment.slots:
            end = slot.offset + slot.tensor.length
            view[slot.offset : end] = source.standard_normal(slot.tensor.length)
        views.append(view)
        at += fragment.elements
    return flat, views


def seed_of(source: random.Random) -> int:
    """A seed for a `ToyModel`."""
    return source.getrandbits(32)
