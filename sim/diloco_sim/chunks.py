"""
The size of chunks while a world runs.

A fragment of the real chunk size has a million values, which no world can afford. So the models of some
worlds are small and their chunks smaller: windows, gaps and repeats are those of a large model. Both ends of
a world are in this process, so they agree as they do on the constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.model import fragments
from diloco_syncer import coordinator


@contextmanager
def small_chunks(elements: int, window_bytes: int) -> Iterator[None]:
    """
    Set both for everything in this process, and restore them at the end.

    Args:
        elements: of a chunk, a multiple of BLOCK.
        window_bytes: `MERGE_WINDOW_BYTES`, which counts chunks of the real size.
    """
    before = fragments.CHUNK, coordinator.MERGE_WINDOW_BYTES
    _set(elements, window_bytes)
    try:
        yield
    finally:
        _set(*before)


def _set(elements: int, window_bytes: int) -> None:
    fragments.CHUNK, coordinator.MERGE_WINDOW_BYTES = elements, window_bytes
