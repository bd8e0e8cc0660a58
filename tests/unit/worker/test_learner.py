"""How `Learner.connect` ends where the job cannot be joined, and what it knows of the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import UnavailableError
from diloco.spec import RunSpec
from diloco_agent.causes import cause_of, code_of
from diloco_local.doctor import NO_SYNCER
from diloco_testing.learners.alone import alone
from diloco_testing.learners.rejoined import Rejoined
from diloco_worker import Learner, attach, identity, learner
from diloco_worker.trainer.rank_group import RankGroup


def test_a_state_directory_that_cannot_be_written_is_not_a_permanent_refusal(
    tmp_path, monkeypatch, capsys
):
    spec = RunSpec(job="j", steps=1, fragments=1, interval=1, overlap=1, learners={"eu": 1})
    (tmp_path / "spec.json").write_text(spec.to_json())
    (tmp_path / "state" / "steps.jsonl").mkdir(parents=True)
    for name, value in {
        "DILOCO_JOB": "j",
        "DILOCO_LEARNER": "eu/0",
        "DILOCO_SYNCER": "127.0.0.1:1",
        "DILOCO_SPEC": str(tmp_path / "spec.json"),
        "DILOCO_STATE": str(tmp_path / "state"),
    }.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    with pytest.raises(SystemExit) as ended:
        Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ended.value.code == 1, "the supervisor restarts it"
    assert "steps.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_that_imports_the_program_does_not_join_and_its_refusal_is_the_programs(
    job, tmp_path
):
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\n"
        "from diloco_worker import Learner\n"
        "if __name__ == '__main__':\n"
        "    print(*torch.utils.data.DataLoader(range(9), num_workers=1, multiprocessing_context='spawn'))\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "Learner.connect(model, optimizer, connect_timeout_seconds=0.1)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert 'below `if __name__ == "__main__":`' in cause_of(done.stderr)
    assert (done.returncode, code_of(done.stderr, done.returncode)) == (1, 78)


@pytest.mark.parametrize("in_job", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, o: ([m], o), "model is a list, expected one torch.nn.Module.*ModuleList"),
        (lambda m, o: (m, m), "optimizer is a Linear, expected one torch.optim.Optimizer or a list"),
        (lambda m, o: (m, [o, None]), r"optimizer is \['SGD', 'NoneType'\], expected"),
    ],
)  # fmt: skip
def test_what_is_no_model_or_optimizer_is_refused_with_and_without_a_job(
    request, monkeypatch, in_job, change, reason
):
    request.getfixturevalue("job") if in_job else monkeypatch.delenv("DILOCO_SYNCER", False)
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=reason):
        Learner.connect(*change(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_an_optimizer_without_hooks_around_none_of_torch_is_refused():
    class Engine(torch.optim.Optimizer):
        """As DeepSpeedOptimizerWrapper: what it wraps is no optimizer of torch."""

        def __init__(self):
            self.optimizer = object()

    with pytest.raises(
        TypeError, match=r"a Engine around a object.*no hooks.*pass Learner.connect an empty list"
    ):
        Learner.connect(nn.Linear(2, 2), Engine())


def test_a_number_of_numpy_is_a_number_of_tokens():
    job = Rejoined()
    Learner(job).step(tokens=np.int64(3))
    assert job.tokens == [3]
    assert type(job.tokens[0]) is int, "it is written to a journal"
    with pytest.raises(ValueError, match=r"tokens: np\.True_ is not a whole number"):
        Learner(job).step(tokens=np.True_)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The environment of a learner of a job without a syncer."""
    learner._connected.clear()  # each test is a process
    spec = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1, learners={"eu": 1})
    (tmp_path / "spec.json").write_text(spec.to_json())
    for name, value in {
        "DILOCO_JOB": "j",
        "DILOCO_LEARNER": "eu/0",
        "DILOCO_SYNCER": NO_SYNCER,
        "DILOCO_SPEC": str(tmp_path / "spec.json"),
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("wrap", "every_rank", "expected"),
    [
        (lambda model: model, None, (True, None)),
        (DistributedDataParallel, None, (True, 50)),
        (lambda model: model, True, (False, None)),
    ],
    ids=["plain", "DDP", "every rank"],
)
@pytest.mark.parametrize(
    "connect", [Learner.connect, partial(attach, tokens=1)], ids=["connect", "attach"]
)
@pytest.mark.parametrize("whole", [False, True])
def test_rank_0_waits_longer_for_another_rank_of_a_model_that_averages_over_ranks(
    job, wrap, every_rank, expected, connect, whole
):
    asked = []

    def asks(group: RankGroup, *, may_be: bool, seconds: float | None) -> bool:
        asked.append((may_be, seconds))
        raise UnavailableError("enough")

    job.setenv("WORLD_SIZE", "2")
    job.setattr(learner, "_compare_ranks", lambda config: None)
    job.setattr(RankGroup, "alone", asks)
    with alone():
        model = wrap(nn.Linear(2, 2))
        model = model if whole else nn.Sequential(model)  # also inside of another module
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(SystemExit) as ended:
            connect(model, optimizer, connect_timeout_seconds=50, every_rank=every_rank)
    assert ended.value.code == 75
    assert asked == [expected]


def test_ranks_of_multiprocessing_spawn_connect_as_one_learner(job):
    """The environment states no ranks: each would connect as the whole learner, and replace the others."""
    asked = []

    def asks(group: RankGroup, **kwargs: object) -> bool:
        asked.append((group.rank, group.size))
        raise UnavailableError("enough")

    job.setattr(RankGroup, "alone", asks)
    with alone():
        model = DistributedDataParallel(nn.Linear(2, 2))
        job.setattr(torch.distributed, "get_rank", lambda: 1)
        job.setattr(torch.distributed, "get_world_size", lambda: 2)
        assert identity().process == 1, "its seeds are its own"
        with pytest.raises(SystemExit) as ended:
            Learner.connect(model, torch.optim.SGD(model.parameters()))
    assert ended.value.code == 75
    assert asked == [(1, 2)]


def test_an_optimizer_of_other_parameters_than_the_models_is_refused(job, capsys):
    model = nn.Linear(2, 2)
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    with pytest.raises(SystemExit) as ended:
        Learner.connect(model, torch.optim.SGD(copies))
    assert ended.value.code == 78
    assert (
        "it has none of the 2 trained parameters of the model (weight, bias)"
        in capsys.readouterr().err
    )


def test_wrappers_of_an_optimizer_are_removed(job, tmp_path):
    class Wrapper(torch.optim.Optimizer):
        """As AcceleratedOptimizer and LightningOptimizer: it has no hooks."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.step()

    job.setenv("DILOCO_EXAMINATION", str(tmp_path / "record.json"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = Wrapper(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    examined = Learner.connect(model, optimizer)
    while not examined.done:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        examined.step(tokens=1)
    record = json.loads((tmp_path / "record.json").read_text())
    assert [step["optimizerSteps"] for step in record["steps"]] == [1, 1, 1]


def test_a_sharded_model_is_examined_as_the_job_reads_it(job, tmp_path):
    job.setenv("DILOCO_EXAMINATION", str(tmp_path / "record.json"))
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    base[0].requires_grad_(False)
    with alone():
        model = fully_shard(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        examined = Learner.connect(model, optimizer)
        while not examined.done:
            loss = model(torch.ones(1, 3)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            examined.step(tokens=1, loss=loss)
    record = json.loads((tmp_path / "record.json").read_text())
    assert [step["optimizerSteps"] for step in record["steps"]] == [1, 1, 1]
    assert record["trained"] is True
    assert (record["elements"], record["frozen"]["tensors"]) == (10, 2)
    assert all(step["inputs"] for step in record["steps"])
    assert record["checkpointBytes"] == 4 * 10, "of the whole tensors"


def test_an_examination_refuses_ranks_that_the_job_refuses(job, tmp_path, capsys):
    job.setenv("DILOCO_EXAMINATION", str(tmp_path / "record.json"))
    job.setenv("WORLD_SIZE", "2")
    job.setenv("RANK", "1")
    model = nn.Linear(2, 2)
    with pytest.raises(SystemExit) as ended:
        Learner.connect(model, torch.optim.SGD(model.parameters()))
    assert ended.value.code == 78
    assert "only rank 0 connects if torch.distributed is not initialized" in capsys.readouterr().err
