"""A learner of several processes: rank 0 joins the job, the others get its parameters."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_testing.learners.linked import connected, job_environment, make_model, make_spec
from diloco_testing.local.fake_run import until
from diloco_testing.syncers.process import RealSyncer
from diloco_testing.syncers.process import make_spec as make_fast_spec
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 180.0


def test_another_rank_is_refused_with_what_to_do_instead(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ScriptedSyncer(make_spec()) as syncer:
        with pytest.raises(SystemExit) as stopped:
            connected(syncer, job_environment(monkeypatch, tmp_path))
        assert syncer.hellos == []
    assert stopped.value.code == 78
    assert capfd.readouterr().err == (
        "diloco: RANK: 1, expected 0: of the 2 processes of learner eu/0 only rank 0 connects if torch.distributed is "
        "not initialized or every_rank is False; call init_process_group before Learner.connect in every rank, or let "
        "the others take the parameters of rank 0, for example by torch.distributed.broadcast after its "
        "learner.step()\n"
    )


def test_every_rank_without_other_ranks_is_refused(monkeypatch, tmp_path, capfd):
    with ScriptedSyncer(make_spec()) as syncer:
        job_environment(monkeypatch, tmp_path)(syncer.spec, syncer.port)
        model = make_model()
        with pytest.raises(SystemExit) as stopped:
            Learner.connect(model, torch.optim.SGD(model.parameters()), every_rank=True)
    assert stopped.value.code == 78
    assert "torch.distributed.init_process_group" in capfd.readouterr().err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def start_ranks(folder: Path, syncer: RealSyncer, size: int) -> list[subprocess.Popen[str]]:
    """Start the processes of learner eu/0 with the environment of their pods."""
    spec = folder / "learner-spec.json"
    spec.write_text(syncer.spec.to_json())
    environment = {
        **os.environ, "PYTHONPATH": str(SUPPORT), "DILOCO_JOB": "j", "DILOCO_LEARNER": "eu/0",
        "DILOCO_SYNCER": syncer.endpoint, "DILOCO_SPEC": str(spec), "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-m", "diloco_testing.learners.ranks"],
            env={**environment, "RANK": str(rank), "DILOCO_STATE": str(folder / str(rank))},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.fixture
def pair(tmp_path):
    """A syncer and the two processes of its learner; all are stopped afterwards."""
    started: list[subprocess.Popen[str]] = []
    spec = make_fast_spec(learners={"eu": 1}, steps=60)
    with RealSyncer(tmp_path / "syncer", spec) as syncer:
        started += start_ranks(tmp_path, syncer, 2)
        yield syncer, started
        for process in started:
            process.kill()
            process.communicate()


def results(ranks: list[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """The JSON that each process prints at its end."""
    outputs = [process.communicate(timeout=SECONDS) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], [error for _, error in outputs]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_of_a_learner_end_with_the_same_model(pair):
    syncer, ranks = pair
    first, second = results(ranks)
    assert first["model"] == second["model"]
    assert first["steps"] == second["steps"] > 30
    members = [member["learner"] for merge in syncer.events("merge") for member in merge["members"]]
    assert len(members) > 30
    assert set(members) == {"eu/0"}
    assert [join["incarnation"] for join in syncer.events("join")] == [1]
    syncer.assert_audit()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.slow_tier
def test_pods_that_receive_sigterm_leave_together(pair):
    syncer, ranks = pair
    until(lambda: len(syncer.events("merge")) > 5, "a few merges", seconds=SECONDS)
    for process in reversed(ranks):
        process.terminate()
    first, second = results(ranks)
    assert first["model"] == second["model"]
    until(lambda: syncer.events("leave"), "the learner's goodbye", seconds=SECONDS)
    assert syncer.events("leave")[-1]["reason"] == "SIGTERM"
