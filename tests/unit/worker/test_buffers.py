"""The pool of the link's buffers: what is reused, what is freed."""

from __future__ import annotations

import pytest

from diloco_worker.link.buffers import BufferPool


def test_a_buffer_is_reused_for_payloads_of_about_its_size():
    pool = BufferPool(most_idle_bytes=1000)
    buffer = pool.acquire(100)
    pool.release(buffer)
    assert pool.acquire(80) is buffer
    pool.release(buffer)
    assert pool.acquire(79) is not buffer
    assert pool.acquire(101) is not buffer
    assert (pool.used_bytes, pool.held_bytes) == (180, 280)


def test_the_best_fit_is_taken():
    pool = BufferPool(most_idle_bytes=1000)
    buffers = [pool.acquire(n) for n in (120, 100, 110)]
    for buffer in buffers:
        pool.release(buffer)
    assert pool.acquire(100) is buffers[1]


def test_16_unused_buffers_beyond_a_steady_state_are_freed():
    pool = BufferPool(most_idle_bytes=250)
    for buffer in [pool.acquire(100) for _ in range(5)]:
        pool.release(buffer)
    assert pool.held_bytes == 200
    newest = pool.acquire(240)
    pool.release(newest)
    assert pool.held_bytes == 240  # the others were unused for longer
    assert pool.acquire(240) is newest
    pool.release(pool.acquire(300))
    assert pool.held_bytes == 240


def test_16_unused_buffers_are_freed_after_a_pause():
    pool = BufferPool(most_idle_bytes=1000)
    used = pool.acquire(50)
    pool.release(pool.acquire(100))
    pool.sweep()
    assert pool.held_bytes == 150
    pool.sweep()
    assert pool.held_bytes == pool.used_bytes == 50
    pool.release(used)


def test_a_buffer_is_released_once():
    pool = BufferPool(most_idle_bytes=1000)
    buffer = pool.acquire(10)
    pool.release(buffer)
    with pytest.raises(KeyError):
        pool.release(buffer)
