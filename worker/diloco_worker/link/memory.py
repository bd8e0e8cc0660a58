"""What encoding and placing need of the memory that the link shares with the trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from diloco.model.fragments import Layout
from diloco_worker.core.ledger import HostCopy
from diloco_worker.ipc.shared_memory import InboxState


class Memory(Protocol):
    """
    The link's side of `SharedMemory`; anything with these members does, plain arrays included.

    Every method but `lock` is called under the lock of its fragment.
    """

    @property
    def layout(self) -> Layout:
        """The fragments."""

    @property
    def constants(self) -> npt.NDArray[np.uint8]:
        """The constants as a safetensors file, writable; empty if the model has none."""

    def lock(self, fragment: int) -> AbstractContextManager[None]:
        """Hold the lock of a fragment."""

    def host(self, fragment: int) -> npt.NDArray[np.float32]:
        """The host copy of a fragment, shape (elements,)."""

    def host_copy(self, fragment: int) -> HostCopy:
        """The counters of the host copy; local_step 0: there is no copy yet."""

    def inbox(self, fragment: int) -> npt.NDArray[np.float32]:
        """The inbox of a fragment, shape (elements,)."""

    def inbox_state(self, fragment: int) -> InboxState:
        """What the inbox holds."""

    def invalidate_inbox(self, fragment: int) -> None:
        """Mark the inbox as incomplete."""

    def publish(self, fragment: int, generation: int, version: tuple[int, int]) -> None:
        """The inbox holds this version completely."""
