"""What the link needs of shared memory, as plain arrays of one process."""

from diloco_sim.memory import EMPTY, NO_COPY, PlainMemory

__all__ = ["EMPTY", "NO_COPY", "PlainMemory"]
