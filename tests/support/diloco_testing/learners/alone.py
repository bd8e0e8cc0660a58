"""A process group of this process alone: its DTensors are real, and hold whole tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


@contextmanager
def alone() -> Iterator[None]:
    """The default process group, with gloo."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
