"""Metrics of a learner, from any subset of its states."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from diloco_worker.core.messages import TrainerState
from diloco_worker.link.metrics import Metrics


@pytest.fixture(scope="module")
def scrape():
    """Metrics after two restarts, and a function that reads a metric as Prometheus does."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    metrics = Metrics(port, restarts=2)

    def value(name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return float(next(x.split()[1] for x in lines if x.startswith(name + " ")))

    return metrics, value


def state(step, *, stepped=True):
    return TrainerState(
        model_loaded=True, stepped=stepped, local_step=step, total_tokens=10 * step, start_local_step=100,
        start_total_tokens=1000, total_sync_seconds=0.5 * (step - 100), step_seconds=1.0, loss=2.5,
    )  # fmt: skip


def test_counters_are_exact_even_if_states_were_missed(scrape):
    metrics, value = scrape
    assert value("diloco_learner_restarts_total") == 2
    metrics.observe(TrainerState())
    metrics.observe(state(100, stepped=False))
    assert value("diloco_learner_steps_total") == 0
    for step in (103, 103, 104, 110):  # 101, 102 and others were missed
        metrics.observe(state(step))
    assert value("diloco_learner_steps_total") == 10
    assert value("diloco_learner_tokens_total") == 100
    assert value("diloco_learner_sync_seconds_total") == 5
    assert value("diloco_learner_step_seconds_count") == 3
    assert value("diloco_learner_loss") == 2.5


def test_without_a_port_nothing_is_counted():
    Metrics(0, restarts=2).observe(state(103))
