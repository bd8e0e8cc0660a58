"""The work queue, on real threads."""

import threading
import time
from contextlib import contextmanager

import pytest

from diloco_operator import workqueue
from diloco_operator.workqueue import Key, RetryError, WorkQueue

A, B = Key("ns", "a"), Key("ns", "b")


@contextmanager
def running(work, *, threads=2, pause_seconds=0.0):
    queue = WorkQueue(work, threads=threads, pause_seconds=pause_seconds)
    queue.start()
    try:
        yield queue
    finally:
        assert queue.stop(10)


def wait(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_key_never_runs_on_two_threads_and_runs_again_if_added_meanwhile():
    gate, active, most, runs = threading.Event(), 0, 0, 0
    lock = threading.Lock()

    def work(key):
        nonlocal active, most, runs
        with lock:
            active, runs = active + 1, runs + 1
            most = max(most, active)
        gate.wait(10)
        with lock:
            active -= 1

    with running(work, threads=4) as queue:
        queue.add(A)
        wait(lambda: runs == 1)
        for _ in range(50):
            queue.add(A)
        gate.set()
        wait(lambda: not queue.keys())
    assert (most, runs) == (1, 2)


def test_different_keys_run_side_by_side():
    both = threading.Barrier(2)

    def work(key):
        both.wait(10)

    with running(work) as queue:
        queue.add(A)
        queue.add(B)
        wait(lambda: not queue.keys())


def test_adding_a_waiting_key_moves_it_forward_never_back():
    ran = threading.Event()
    with running(lambda key: ran.set()) as queue:
        queue.add(A, 3600)
        queue.add(A, 0)
        queue.add(A, 3600)
        assert ran.wait(10)


def test_the_work_decides_when_to_requeue_and_when_to_forget():
    answers = [0.01, 0.01, None]
    with running(lambda key: answers.pop(0)) as queue:
        queue.add(A)
        wait(lambda: not answers and not queue.keys())


@pytest.mark.parametrize("error", [RetryError("no answer"), ValueError("a defect")])
def test_failures_are_repeated_with_pauses_and_do_not_end_the_thread(error, monkeypatch, caplog):
    monkeypatch.setattr(workqueue, "BACKOFF_SECONDS", (0.05, 0.1))
    runs = []

    def work(key):
        runs.append(time.monotonic())
        if len(runs) < 4:
            raise error

    with running(work, threads=1) as queue:
        queue.add(A)
        wait(lambda: not queue.keys())
        assert queue.alive()
    assert len(runs) == 4
    traces = [record for record in caplog.records if record.exc_info]
    assert bool(traces) == isinstance(error, ValueError)
    assert {record.job for record in caplog.records} == {"ns/a"}


def test_a_failing_key_waits_its_pause_unless_an_event_is_urgent(monkeypatch):
    class Long:
        def __init__(self, *_):
            pass

        def next(self):
            return 3600.0

        def reset(self):
            pass

    monkeypatch.setattr(workqueue, "Backoff", Long)
    runs = []

    def work(key):
        runs.append(key)
        if len(runs) == 1:
            raise RetryError("refused")

    with running(work) as queue:
        queue.add(A)
        wait(lambda: runs and not queue.stalled_seconds())
        queue.add(A)
        queue.add(B)
        wait(lambda: B in runs)
        assert runs == [A, B]
        queue.add(A, urgent=True)
        wait(lambda: not queue.keys())
    assert runs == [A, B, A]


def test_events_that_follow_a_run_wait_for_each_other():
    runs = []

    def work(key):
        runs.append(time.monotonic())
        return 3600.0 if len(runs) == 1 else None

    with running(work, pause_seconds=0.2) as queue:
        queue.add(A)
        wait(lambda: runs and not queue.stalled_seconds())
        for _ in range(20):
            queue.add(A)
        wait(lambda: not queue.keys())
    assert len(runs) == 2
    assert runs[1] - runs[0] >= 0.2


def test_the_depth_counts_keys_that_are_due_and_their_wait_is_reported():
    gate, waits = threading.Event(), []
    queue = WorkQueue(lambda key: gate.wait(30) and None, threads=1, waited=waits.append)
    queue.start()
    queue.add(A)
    wait(lambda: queue.stalled_seconds() > 0)
    queue.add(B)
    queue.add(Key("ns", "later"), 3600.0)
    assert queue.depth() == 1
    wait(lambda: queue.stalled_seconds() > 0.1)
    gate.set()
    wait(lambda: len(waits) == 2)
    assert queue.depth() == 0
    assert 0 <= waits[0] < waits[1]
    assert waits[1] > 0.05
    assert queue.stop(10)


def test_b07_the_job_of_another_namespace_does_not_wait_for_a_thousand_of_one():
    gate, order = threading.Event(), []

    def work(key):
        order.append(key)
        gate.wait(10)

    with running(work, threads=2) as queue:
        for number in range(1000):
            queue.add(Key("many", str(number)))
        wait(lambda: len(order) == 2)
        queue.add(Key("few", "a"))
        gate.set()
        wait(lambda: not queue.keys())
    assert order.index(Key("few", "a")) <= 3
    assert len(order) == 1001


def test_namespaces_that_are_due_take_turns():
    gate, order = threading.Event(), []

    def work(key):
        order.append(key.namespace)
        gate.wait(10)

    with running(work, threads=1) as queue:
        queue.add(Key("first", "a"))
        wait(lambda: order)
        for namespace in ("a", "b", "c"):
            for name in "xyz":
                queue.add(Key(namespace, name))
        gate.set()
        wait(lambda: not queue.keys())
    turns = [set(order[1 + 3 * turn : 4 + 3 * turn]) for turn in range(3)]
    assert turns == [{"a", "b", "c"}] * 3


def test_within_a_namespace_the_key_that_is_due_first_comes_first():
    gate, order = threading.Event(), []

    def work(key):
        order.append(key.name)
        gate.wait(10)

    with running(work, threads=1) as queue:
        queue.add(Key("ns", "first"))
        wait(lambda: order)
        for name in "zyx":
            queue.add(Key("ns", name))
        gate.set()
        wait(lambda: not queue.keys())
    assert order == ["first", "z", "y", "x"]


def test_a_paused_queue_forgets_its_keys_and_accepts_none_until_it_resumes():
    gate, runs = threading.Event(), []

    def work(key):
        runs.append(key)
        gate.wait(10)
        return 0.0

    with running(work, threads=1) as queue:
        queue.add(A)
        wait(lambda: runs == [A])
        queue.add(B)
        queue.pause()
        queue.add(B, urgent=True)
        assert queue.keys() == {A}, "it still runs"
        gate.set()
        wait(lambda: not queue.keys())
        queue.resume()
        queue.add(B)
        wait(lambda: len(runs) > 2)
        assert set(runs[1:]) == {B}


def test_a_long_run_that_makes_progress_is_not_stuck():
    gate = threading.Event()
    queue = WorkQueue(lambda key: gate.wait(30) and None, threads=1)
    queue.start()
    queue.add(A)
    wait(lambda: queue.stalled_seconds() > 0.05)
    before = time.monotonic()
    queue.progressed(A)
    assert queue.stalled_seconds() <= time.monotonic() - before
    queue.progressed(B)
    assert queue.keys() == {A}
    gate.set()
    assert queue.stop(10)


def test_a_run_that_does_not_end_is_detected_and_reported_by_stop():
    gate = threading.Event()
    queue = WorkQueue(lambda key: gate.wait(30) and None, threads=1)
    queue.start()
    queue.add(A)
    wait(lambda: queue.stalled_seconds() > 0.05)
    assert not queue.stop(0.05)
    gate.set()
    assert queue.stop(10)
