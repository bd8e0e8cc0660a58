"""Fixtures of several files here."""

import os
from pathlib import Path

import pytest

from diloco_testing.local.run_process import LocalRun


@pytest.fixture
def enter(monkeypatch, tmp_path):
    """Sets the environment of a learner (`linked.job_environment`)."""
    from diloco_testing.learners.linked import job_environment  # torch

    return job_environment(monkeypatch, tmp_path)


@pytest.fixture
def run_ranks(monkeypatch):
    """Starts `diloco run` for a job whose learners may have several ranks; stopped afterwards."""
    support = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
    }.items():
        monkeypatch.setenv(name, value)
    runs = []

    def start(folder: Path, job: dict) -> LocalRun:
        runs.append(LocalRun(folder, job))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
