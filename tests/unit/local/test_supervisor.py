"""What the loop of `diloco run` remembers of its processes. No processes."""

from __future__ import annotations

from types import SimpleNamespace

from diloco.runtime.health import Health, HealthFile
from diloco_local.policy import Policy
from diloco_local.problems import Problems
from diloco_local.run_directory import RunDir
from diloco_local.supervisor import Supervisor


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
