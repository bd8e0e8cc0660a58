"""The threads of servers: each call gets one, whatever the system or the executor of the standard library does."""

import queue
import sys
import threading
from concurrent.futures import wait

from diloco.rpc.threads import Threads
from diloco_testing.threads import refused_threads


def test_a_call_whose_thread_cannot_be_started_waits_until_it_can(monkeypatch, caplog):
    """gRPC's only thread that serves submits it: an error there would end all service for good."""
    threads = Threads(4, thread_name_prefix="test")
    refused_threads(monkeypatch)[0] = 3
    futures = [threads.submit(pow, 2, n) for n in range(2)]
    threads.recover()
    assert threads.missing == 2, "refused again"
    assert not any(future.done() for future in futures)
    threads.recover()
    assert [future.result(30) for future in futures] == [1, 2]
    assert threads.missing == 0
    assert caplog.text.count("a call waits, its thread cannot be started") == 2, "once per attempt"


def test_a_call_without_a_thread_does_not_wait_for_one_that_stays_busy(monkeypatch):
    threads, held = Threads(4, thread_name_prefix="test"), threading.Event()
    busy = threads.submit(held.wait, 30)
    refused_threads(monkeypatch)[0] = 1
    waiting = threads.submit(pow, 2, 3)
    assert not wait([waiting], 0.05).done
    threads.recover()
    assert waiting.result(30) == 8
    held.set()
    assert busy.result(30)


class SlowThreads(queue.SimpleQueue):
    """
    The calls of a pool whose first thread is delayed when it finds none, and the second before it looks.

    So from Python 3.12 on, the first takes a call that came meanwhile, and is counted as idle as well.
    """

    def __init__(self):
        super().__init__()
        self.found_none = {"test_0": threading.Event(), "test_1": threading.Event()}
        self.submitted, self.taken = threading.Event(), threading.Event()

    def get_nowait(self):
        name = threading.current_thread().name
        if name == "test_1":
            assert self.taken.wait(30)
        try:
            return super().get_nowait()
        except queue.Empty:
            if name in self.found_none:
                self.found_none[name].set()
            if name == "test_0":
                assert self.submitted.wait(30)
            raise

    def get(self, block=True, timeout=None):
        call = super().get(block, timeout)
        self.taken.set()
        return call


def test_every_call_gets_a_thread_however_slow_those_before_it_are():
    """A session may last as long as the job: none may wait for the end of another."""
    threads, held = Threads(64, thread_name_prefix="test"), threading.Event()
    threads._work_queue = calls = SlowThreads()
    begun = [threading.Event() for _ in range(8)]

    def hold(own):
        own.set()
        assert held.wait(30)

    threads.submit(pow, 2, 3)
    if sys.version_info >= (3, 12):  # earlier versions wait for a call at once
        assert calls.found_none["test_0"].wait(30)
    threads.submit(hold, begun[0])
    calls.submitted.set()
    assert begun[0].wait(30)
    if sys.version_info >= (3, 12) and len(threads._threads) > 1:
        assert calls.found_none["test_1"].wait(30)
    for own in begun[1:]:
        threads.submit(hold, own)
    assert all(own.wait(10) for own in begun), "a call waits for the end of another one"
    held.set()
    threads.shutdown()


def test_a_thread_that_is_counted_as_idle_and_is_not_keeps_no_call_waiting():
    threads, held = Threads(4, thread_name_prefix="test"), threading.Event()
    busy = threads.submit(held.wait, 30)
    threads._idle_semaphore.release()  # as from Python 3.12 on, see above
    assert threads.submit(pow, 2, 3).result(10) == 8
    held.set()
    assert busy.result(30)


def test_threads_are_used_again_and_no_more_are_started_than_there_are_calls():
    threads = Threads(8, thread_name_prefix="test")
    for _ in range(20):
        wait([threads.submit(pow, 2, 3)])
    assert len(threads._threads) <= 2, "one may not have ended its call when the next one came"
