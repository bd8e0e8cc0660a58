"""Streams of untrusted peers: how many wait, how long, and how many a learner may hold."""

import threading
import time
from types import SimpleNamespace

import pytest

from diloco.errors import UnavailableError
from diloco.spec import RunSpec
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.call_limits import (
    JOINS_PER_MINUTE,
    OBSERVER_STREAMS,
    REPLY_SECONDS,
    CallLimits,
    Pool,
    address_of,
)
from diloco_testing.threads import refused_threads

SPEC = RunSpec(job="j", steps=10, fragments=2, interval=2, overlap=1, learners={"eu": 2})


class Silent:
    """A stream whose first message never comes: it ends when its call is cancelled."""

    def __init__(self, peer):
        self.entered, self.cancelled = threading.Event(), threading.Event()
        self.context = SimpleNamespace(peer=lambda: peer, cancel=self.cancelled.set)

    def __iter__(self):
        return self

    def __next__(self):
        self.entered.set()
        assert self.cancelled.wait(30), "the call was not cancelled"
        raise RuntimeError("cancelled")


class Waiting:
    """Streams that have not sent a message yet, each in a thread of its own."""

    def __init__(self, first_seconds):
        self.lines = []
        refusals = RefusalLog(lambda event, **fields: self.lines.append(fields))
        self.limits = CallLimits(SPEC, refusals, first_seconds=first_seconds)
        self.pool = Pool("test", 16)
        self.threads = []

    def enter(self, peer):
        stream = Silent(peer)

        def wait():
            with pytest.raises(RuntimeError, match="cancelled"):
                self.limits.first(self.pool, stream, stream.context)

        thread = threading.Thread(target=wait)
        thread.start()
        self.threads.append(thread)
        assert stream.entered.wait(30)
        return stream

    def end(self, streams):
        for stream in streams:
            stream.cancelled.set()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def test_a_stream_without_a_message_is_cancelled_after_the_deadline():
    waiting = Waiting(first_seconds=0.05)
    streams = [waiting.enter(f"ipv4:10.0.0.{n}:1") for n in range(3)]
    for stream in streams:
        assert stream.cancelled.wait(30)
    waiting.end(streams)
    assert waiting.pool.waiting == {}
    assert {line["detail"] for line in waiting.lines} == {"no message within 0.05 s"}


def test_the_oldest_stream_of_an_address_makes_room_for_the_newest():
    waiting = Waiting(first_seconds=1000.0)
    streams = [waiting.enter(f"ipv4:10.0.0.1:{port}") for port in range(6)]
    assert [s.cancelled.wait(0 if n >= 2 else 30) for n, s in enumerate(streams)] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    other = waiting.enter("ipv4:10.0.0.2:1")
    assert not other.cancelled.is_set()
    waiting.end([*streams, other])
    assert waiting.pool.waiting == {}


def test_streams_of_many_addresses_leave_half_of_the_threads_free():
    waiting = Waiting(first_seconds=1000.0)
    streams = [waiting.enter(f"ipv4:10.0.0.{n}:1") for n in range(8)]
    assert not any(s.cancelled.is_set() for s in streams)
    more = waiting.enter("ipv4:10.0.1.1:1")
    assert streams[0].cancelled.wait(30)
    assert not more.cancelled.is_set()
    waiting.end([*streams, more])


def test_a_first_message_is_returned_and_nothing_waits_afterwards():
    waiting = Waiting(first_seconds=1000.0)
    context = SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:1")
    assert waiting.limits.first(waiting.pool, iter([b"hello", b"more"]), context) == b"hello"
    assert waiting.limits.first(waiting.pool, iter([]), context) is None
    assert waiting.pool.waiting == {}


@pytest.mark.parametrize(("learner", "most"), [("eu/0", 12), ("", OBSERVER_STREAMS)])
def test_a_learner_may_hold_only_so_many_transfers(learner, most):
    limits = Waiting(first_seconds=1000.0).limits
    slots = [limits.slot(learner) for _ in range(most)]
    for slot in slots:
        slot.__enter__()
    with pytest.raises(UnavailableError, match=f"{most} transfers are open"), limits.slot(learner):
        pass
    with limits.slot("eu/1"):
        pass
    slots[0].__exit__(None, None, None)
    with limits.slot(learner):
        pass


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41820", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:41820", "ipv6:%5B::1%5D"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_the_port_of_a_peer_does_not_make_it_another_one(peer, address):
    assert address_of(peer) == address


def test_a_learner_that_joins_in_a_tight_loop_is_refused_until_a_minute_is_over():
    limits = CallLimits(SPEC, RefusalLog(lambda *given, **named: None))
    for count in range(JOINS_PER_MINUTE):
        limits.join("eu/0", 100.0 + count / 10)
    with pytest.raises(UnavailableError, match="eu/0 began 120 sessions within a minute"):
        limits.join("eu/0", 159.9)
    limits.join("eu/1", 159.9)
    limits.join("eu/0", 160.0)
    with pytest.raises(UnavailableError):
        limits.join("eu/0", 160.05)


def test_the_times_to_read_suffice_for_the_slowest_link():
    """docs/security.md states them: 4 MiB, and a chunk in each of the streams of a learner, at 128 KiB/s."""
    assert REPLY_SECONDS == 10 + 32
    limits = CallLimits(SPEC, RefusalLog(lambda *given, **named: None))
    assert 131.5 < limits._frame_seconds < 132.5


def test_more_learners_get_more_threads_and_fewer_remove_none():
    limits = CallLimits(SPEC, RefusalLog(lambda *given, **named: None))
    sizes, slots = [], []
    for learners in ({"eu": 30}, {"eu": 200, "us": 100}, {"eu": 1}):
        limits.provide(learners)
        sizes.append((limits.sessions.threads, limits.bulk.threads, limits.queries.threads))
        slots.append(limits.bulk.slots)
    assert sizes == [(128, 128, 16), (1200, 1200, 16), (1200, 1200, 16)]
    assert slots == [30 * 12 + 32, 300 * 12 + 32, 300 * 12 + 32], "all that may be open"
    assert limits.bulk.executor._max_workers == 1200 + slots[-1]


def test_streams_that_begin_after_a_pool_has_grown_get_its_new_threads():
    """Those of before keep theirs: the old pool is full, and still the next stream runs."""
    pool, held, ran = Pool("test", 1), threading.Event(), threading.Event()
    method = pool.handler(lambda requests, context: iter(()))
    before = method.stream_stream.experimental_thread_pool
    before.submit(held.wait, 30)
    pool.grow(2)
    method.stream_stream.experimental_thread_pool.submit(ran.set)
    assert ran.wait(30)
    held.set()
    assert before is not method.stream_stream.experimental_thread_pool
    pool.grow(1)
    assert pool.threads == 2


def test_missing_threads_are_started_although_no_further_call_comes(monkeypatch):
    monkeypatch.setattr("diloco_syncer.rpc.call_limits.WATCH_SECONDS", 0.01)
    limits = CallLimits(SPEC, RefusalLog(lambda *given, **named: None))
    limits.queries = Pool("test", 4)
    refused_threads(monkeypatch)[0] = 1
    assert limits.queries.executor.submit(pow, 2, 3).result(30) == 8


def test_a_stream_that_the_syncer_ended_is_cancelled_after_the_deadline_if_it_is_not_read():
    limits = Waiting(first_seconds=0.2).limits
    stream, begun = Silent("ipv4:10.0.0.1:1"), time.monotonic()
    limits.cancel_later(stream.context)
    assert stream.cancelled.wait(30)
    assert time.monotonic() - begun >= 0.2
