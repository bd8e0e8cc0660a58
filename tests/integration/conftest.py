"""Fixtures of several files here."""

import pytest


@pytest.fixture
def enter(monkeypatch, tmp_path):
    """Sets the environment of a learner (`linked.job_environment`)."""
    from diloco_testing.learners.linked import job_environment  # torch

    return job_environment(monkeypatch, tmp_path)
