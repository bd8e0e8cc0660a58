"""What the loop of `diloco run` remembers of its processes. No processes."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.errors import ConfigError
from diloco.runtime.health import Health, HealthFile
from diloco_local.policy import Policy
from diloco_local.problems import Problems
from diloco_local.run_directory import RunDir
from diloco_local.supervisor import Supervisor, stuck_seconds


def test_that_a_learner_joined_is_not_forgotten_when_its_link_restarts(tmp_path):
    run_dir, policy = RunDir(tmp_path), Policy(learners=("eu/0", "us/0"))
    supervisor = SimpleNamespace(run_dir=run_dir, policy=policy, _problems=Problems(["eu/0"]))
    path = run_dir.health_of("eu/0")
    path.parent.mkdir(parents=True)
    for joined in (False, True, False):
        health = Health(at=1.0, ready=False, why="", progress_at=1.0, joined=joined)
        HealthFile(path).write(health)
        Supervisor._observe_problems(supervisor, ["eu/0", "us/0"], 1.0)
    assert policy.processes["eu/0"].joined
    assert not policy.processes["us/0"].joined


def test_the_time_without_a_step_is_that_of_the_environment_of_learners():
    def plan(**env):
        return SimpleNamespace(learners=[SimpleNamespace(env=tuple(env.items()))])

    assert stuck_seconds(plan()) == 900
    assert stuck_seconds(plan(DILOCO_STUCK_SECONDS="3600")) == 3600
    with pytest.raises(ConfigError, match="DILOCO_STUCK_SECONDS"):
        stuck_seconds(plan(DILOCO_STUCK_SECONDS="soon"))


def test_a_file_system_that_became_read_only_does_not_end_the_run(tmp_path, monkeypatch):
    def refuse(path, *, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    notes = []
    supervisor = SimpleNamespace(_warned=set(), _display=SimpleNamespace(note=notes.append))
    supervisor._warn_once = lambda path: Supervisor._warn_once(supervisor, path)
    for _ in range(2):
        Supervisor._remove(supervisor, tmp_path / "health.json")
    assert len(notes) == 1
    assert "Read-only file system; the run continues" in notes[0]
