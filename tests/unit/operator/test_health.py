"""When the operator is unhealthy, and when it is not."""

import threading
import time
import urllib.error
import urllib.request

import pytest

from diloco_operator.watch.health import Health, HealthServer
from diloco_operator.workqueue import Key, WorkQueue


class Queue:
    def __init__(self):
        self.seconds, self.running = 0.0, True

    def alive(self):
        return self.running

    def stalled_seconds(self):
        return self.seconds


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def health(queue, clock):
    return Health(queue, clock=clock)


def test_an_operator_that_just_started_is_healthy_and_not_ready(health):
    assert health.problem() == ""
    assert not health.ready()
    health.heartbeat()
    health.listed([])
    assert health.ready()


def test_a_reconcile_without_progress_for_more_than_five_minutes_is_a_problem(health, queue):
    queue.seconds = 299.0
    assert health.problem() == ""
    queue.seconds = 301.0
    assert "301 s" in health.problem()


def test_a_dead_thread_is_a_problem(health, queue):
    queue.running = False
    assert "thread" in health.problem()


def test_a_stalled_loop_is_a_problem(health, clock):
    health.heartbeat()
    clock.now += 59
    assert health.problem() == ""
    clock.now += 2
    assert "event loop" in health.problem()
    health.heartbeat()
    assert health.problem() == ""


def test_a_watch_that_does_not_bring_a_generation_within_two_minutes_is_a_problem(health, clock):
    health.delivered("uid", 1)
    health.listed([("uid", 2, "ns/a")])
    clock.now += 119
    health.listed([("uid", 2, "ns/a")])
    assert health.problem() == ""
    clock.now += 2
    health.listed([("uid", 2, "ns/a")])
    assert "ns/a" in health.problem()
    health.delivered("uid", 2)
    assert health.problem() == ""


def test_a_job_that_the_watch_never_brought_is_a_problem(health, clock):
    health.listed([("uid", 1, "ns/a")])
    clock.now += 121
    health.listed([("uid", 1, "ns/a")])
    assert "ns/a" in health.problem()


def test_a_job_that_changes_all_the_time_is_no_problem_while_the_watch_follows(health, clock):
    """Each list sees a generation that the watch delivers a moment later."""
    for generation in range(1, 20):
        health.listed([("uid", generation, "ns/a")])
        health.delivered("uid", generation)
        clock.now += 30
        assert health.problem() == ""


def test_a_deleted_job_is_forgotten(health, clock):
    health.listed([("uid", 1, "ns/a")])
    clock.now += 60
    health.listed([])
    clock.now += 3600
    assert health.problem() == ""


def test_a_job_that_was_created_while_the_list_was_read_stays_delivered(health, clock):
    health.delivered("uid", 1)
    health.listed([])  # as of before the job
    for _ in range(10):
        clock.now += 30
        health.listed([("uid", 1, "ns/a")])
        assert health.problem() == ""


def test_deleted_jobs_do_not_fill_the_memory(health):
    for number in range(100):
        health.delivered(str(number), 1)
        health.listed([])
    health.listed([])
    assert not health._delivered
    assert not health._absent


def test_an_unavailable_api_server_is_no_problem(health, clock):
    """No list, no events, only heartbeats of the loop: a restart does not help."""
    health.listed([("uid", 1, "ns/a")])
    health.delivered("uid", 1)
    for _ in range(1000):
        clock.now += 10
        health.heartbeat()
    assert health.problem() == ""


def test_an_api_server_that_goes_before_the_watch_brings_a_job_is_no_problem(health, clock):
    health.listed([("uid", 1, "ns/a")])
    for _ in range(100):
        clock.now += 30
        health.heartbeat()
        health.unlisted()
        assert health.problem() == ""
    # The server is back, and the watch has as long as ever.
    for _ in range(5):
        health.listed([("uid", 1, "ns/a")])
        assert health.problem() == ""
        clock.now += 30
        health.heartbeat()
    health.listed([("uid", 1, "ns/a")])
    assert "ns/a" in health.problem()


def test_a_list_names_what_the_watch_has_not_delivered(health):
    health.delivered("a", 1)
    assert health.listed([("a", 1, "ns/a"), ("b", 1, "ns/b")]) == {"b"}
    assert health.listed([("a", 2, "ns/a")]) == {"a"}


def test_the_endpoint_returns_200_or_503_with_the_reason(health, queue):
    server = HealthServer(health, 0)
    try:
        url = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(url + "/healthz", timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url + "/readyz", timeout=10)
        assert refused.value.code == 503
        refused.value.close()
        queue.running = False
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url + "/healthz", timeout=10)
        assert refused.value.code == 503
        assert b"thread" in refused.value.read()
        refused.value.close()
    finally:
        server.close()


def test_readiness_names_the_namespaces_that_cannot_be_listed(health):
    server = HealthServer(health, 0)
    health.heartbeat()
    try:
        url = f"http://127.0.0.1:{server.port}/readyz"
        for unread, text in ((["b", "a"], b"ok, but cannot list jobs in a, b\n"), ([], b"ok\n")):
            health.listed([], unread=unread)
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert (answer.status, answer.read()) == (200, text)
    finally:
        server.close()


def test_an_ended_thread_of_a_real_queue_is_detected(clock, monkeypatch):
    queue = WorkQueue(lambda key: None, threads=1)
    health = Health(queue, clock=clock)
    queue.start()
    assert health.problem() == ""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(queue, "_work_on", None)  # a defect of the queue itself
    queue.add(Key("ns", "a"))
    deadline = time.monotonic() + 10
    while not health.problem():
        assert time.monotonic() < deadline
        time.sleep(0.005)
