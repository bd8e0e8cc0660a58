"""What makes the operator unhealthy, and what must not."""

import threading
import time
import urllib.error
import urllib.request

import pytest

from diloco_operator.health import Health, HealthServer
from diloco_operator.workqueue import Key, WorkQueue


class Queue:
    def __init__(self):
        self.seconds, self.lives = 0.0, True

    def alive(self):
        return self.lives

    def longest_seconds(self):
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
    health.turned()
    health.listed([])
    assert health.ready()


def test_a_reconcile_of_more_than_five_minutes_is_a_problem(health, queue):
    queue.seconds = 299.0
    assert health.problem() == ""
    queue.seconds = 301.0
    assert "301 s" in health.problem()


def test_a_dead_thread_is_a_problem(health, queue):
    queue.lives = False
    assert "thread" in health.problem()


def test_a_loop_that_stands_is_a_problem(health, clock):
    health.turned()
    clock.now += 59
    assert health.problem() == ""
    clock.now += 2
    assert "event loop" in health.problem()
    health.turned()
    assert health.problem() == ""


def test_a_watch_that_does_not_bring_a_generation_within_two_minutes_is_a_problem(health, clock):
    health.delivered("uid", 1)
    health.listed([("uid", 2, "ns/a")])
    clock.now += 119
    health.listed([("uid", 2, "ns/a")])
    assert health.problem() == ""
    clock.now += 2
    assert "ns/a" in health.problem()
    health.delivered("uid", 2)
    assert health.problem() == ""


def test_a_job_that_the_watch_never_brought_is_a_problem(health, clock):
    health.listed([("uid", 1, "ns/a")])
    clock.now += 121
    assert "ns/a" in health.problem()


def test_a_job_that_changes_all_the_time_is_no_problem_while_the_watch_follows(health, clock):
    """Each list sees a generation that the watch brings a moment later."""
    for generation in range(1, 20):
        health.listed([("uid", generation, "ns/a")])
        health.delivered("uid", generation)
        clock.now += 30
        assert health.problem() == ""


def test_a_job_that_went_away_is_forgotten(health, clock):
    health.listed([("uid", 1, "ns/a")])
    clock.now += 60
    health.listed([])
    clock.now += 3600
    assert health.problem() == ""


def test_an_api_server_that_is_away_is_no_problem(health, clock):
    """No list, no events, nothing but the loop that turns: a restart would not help."""
    health.listed([("uid", 1, "ns/a")])
    health.delivered("uid", 1)
    for _ in range(1000):
        clock.now += 10
        health.turned()
    assert health.problem() == ""


def test_the_endpoint_says_200_or_503_with_the_reason(health, queue):
    server = HealthServer(health, 0, "127.0.0.1")
    try:
        url = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(url + "/healthz", timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url + "/readyz", timeout=10)
        assert refused.value.code == 503
        refused.value.close()
        queue.lives = False
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url + "/healthz", timeout=10)
        assert refused.value.code == 503
        assert b"thread" in refused.value.read()
        refused.value.close()
    finally:
        server.close()


def test_a_real_queue_whose_thread_ended_is_seen(clock, monkeypatch):
    queue = WorkQueue(lambda key: None, threads=1)
    health = Health(queue, clock=clock)
    queue.start()
    assert health.problem() == ""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(queue, "_once", None)  # a defect of the queue itself
    queue.add(Key("ns", "a"))
    deadline = time.monotonic() + 10
    while not health.problem():
        assert time.monotonic() < deadline
        time.sleep(0.005)
