"""Buffers are reused automatically, and never while they are referenced."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from diloco_syncer.merging.buffers import SLACK, Buffers


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_buffer_without_references_is_reused():
    buffers = Buffers()
    first = buffers.take(1000)
    where = address(first)
    del first
    again = buffers.take(900)
    assert address(again) == where
    assert again.shape == (900,)
    assert again.dtype == np.float32


@pytest.mark.parametrize(
    "look",
    [
        lambda a: a,
        lambda a: a[10:20][2:4],
        lambda a: a.reshape(10, 100)[3],
        lambda a: a.view(np.uint8),
        lambda a: memoryview(a)[4:8],
        lambda a: np.frombuffer(memoryview(a).cast("B"), np.uint8),
    ],
    ids=["itself", "slice", "shape", "bytes", "memoryview", "frombuffer"],
)
def test_a_referenced_buffer_is_not_reused(look):
    buffers = Buffers()
    seen = look(buffers.take(1000))
    others = [buffers.take(1000) for _ in range(3)]
    assert not any(np.shares_memory(np.asarray(seen), other) for other in others)


def test_a_buffer_much_longer_than_needed_is_left_alone():
    buffers = Buffers()
    long = buffers.take(1000)
    where = address(long)
    del long
    assert address(buffers.take(700)) != where


def test_unused_buffers_are_freed_when_a_new_one_must_be_made():
    buffers = Buffers(most_idle=2)
    sizes = [1000 * 2**n for n in range(6)]
    taken = [buffers.take(size) for size in sizes]
    assert len(buffers._owners) == 6
    taken.clear()
    buffers.take(5)
    assert sorted(a.size for a in buffers._owners) == [5, *sizes[-2:]]


def test_threads_never_get_the_same_buffer():
    buffers = Buffers()
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        start.wait(60)
        for _ in range(200):
            mine = buffers.take(64)
            mine.fill(number)
            if not (mine == number).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def idle(buffers, *sizes):
    """Unused buffers of these sizes; their addresses by size."""
    taken = [buffers.take(size) for size in sizes]
    return {array.size: address(array) for array in taken}


def test_of_several_that_fit_the_shortest_is_reused():
    buffers = Buffers()
    where = idle(buffers, 1200, 1000, 1100)
    assert address(buffers.take(1000)) == where[1000]
    assert address(buffers.take(1050)) != where[1000]


@pytest.mark.parametrize(("elements", "reused"), [(1000, True), (800, True), (799, False)])
def test_a_buffer_serves_a_vector_that_is_shorter_by_the_slack_and_no_more(elements, reused):
    assert SLACK == 1.25
    buffers = Buffers()
    where = idle(buffers, 1000)
    again = buffers.take(elements)
    assert (address(again) == where[1000]) is reused
    assert again.size == elements


def test_a_longer_vector_needs_a_new_buffer():
    buffers = Buffers()
    where = idle(buffers, 1000)
    assert address(buffers.take(1001)) != where[1000]


def test_the_four_newest_unused_buffers_are_kept():
    buffers = Buffers()
    taken = [buffers.take(10 ** (n + 1)) for n in range(6)]
    taken.clear()
    buffers.take(1)
    assert sorted(owner.size for owner in buffers._owners) == [1, 10**3, 10**4, 10**5, 10**6]
