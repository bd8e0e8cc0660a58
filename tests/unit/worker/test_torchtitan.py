"""The parts of `DiLoCoTrainer` for torchtitan: its config in a job, its data, and its learning rates."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.errors import ConfigError
from diloco_worker.identities import Identity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # of the library
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
    ),
]

OWN = Identity(name="us/1", learners={"eu": 2, "us": 3})


@pytest.fixture(scope="module")
def titan() -> SimpleNamespace:
    """The library, imported here: that takes seconds of each run that only collects."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    from diloco_worker.integrations import torchtitan

    class Loader(BaseDataLoader):
        """Records what it is built with."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            """Nothing more."""

        def __init__(self, config: Config, **kwargs: Any) -> None:
            self.kwargs = kwargs

        def __iter__(self):
            return iter(())

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def config(**changes: Any) -> Trainer.Config:
        training = TrainingConfig(steps=7, disable_cuda_graphs=True)
        data = Loader.Config(dataset="d")
        return Trainer.Config(training=training, dataloader=data, dump_folder="out", **changes)

    return SimpleNamespace(
        config=config, ours=torchtitan, schedule=LRSchedulersContainer.Config, parallelism=ParallelismConfig
    )  # fmt: skip


class Stateful:
    def __init__(self, parts: int) -> None:
        self.dp_world_size, self.at = parts, b"\x00\xff at 3"

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": self.at, "world_size": self.dp_world_size}

    def load_state_dict(self, state) -> None:
        self.at = state["dp_rank_0"]


@pytest.fixture
def in_job(titan, monkeypatch):
    monkeypatch.setattr(titan.ours, "planned_steps", lambda: 40)


def test_a_learner_has_the_steps_of_the_job_a_folder_and_a_part_of_the_data(titan, in_job):
    given = titan.config()
    made = titan.ours._of_learner(given, OWN, None)
    assert (made.training.steps, made.dump_folder) == (40, "out/us-1")
    loader = made.dataloader.build(
        dp_world_size=2, dp_rank=1, seq_len=8, snapshot_every_n_steps=None
    )
    # The fourth of five learners, and the second of its two ranks.
    assert loader.kwargs == {
        "dp_world_size": 10,
        "dp_rank": 7,
        "seq_len": 8,
        "snapshot_every_n_steps": 1,
    }
    assert (given.training.steps, given.dataloader.dataset) == (7, "d")


def test_parts_of_a_region_may_be_given(titan, in_job):
    made = titan.ours._of_learner(titan.config(), OWN, {"eu": 4, "us": 4})
    assert (made.dataloader.number, made.dataloader.parts) == (5, 8)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        (
            "parallelism",
            {"pipeline_parallel_degree": 2},
            "pipeline_parallel_degree is 2, expected 1",
        ),
        (
            "schedule",
            {"total_steps": 39},
            "total_steps is 39, expected None, or at least the 40 steps",
        ),
    ],
)
def test_what_no_learner_can_do_is_refused(titan, in_job, name, values, why):
    field = {"schedule": "lr_scheduler"}.get(name, name)
    changes = {field: getattr(titan, name)(**values)}
    with pytest.raises(ConfigError, match=why):
        titan.ours._of_learner(titan.config(**changes), OWN, None)


def test_the_state_of_a_loader_is_kept_without_bytes_and_comes_back(titan):
    before = titan.ours._Loader(Stateful(2)).state_dict()
    assert isinstance(before["dp_rank_0"], torch.Tensor)
    loader = Stateful(2)
    loader.at = b""
    titan.ours._Loader(loader).load_state_dict(before)
    assert loader.at == b"\x00\xff at 3"


def test_a_loader_of_another_division_begins_anew(titan, caplog):
    before = titan.ours._Loader(Stateful(2)).state_dict()
    loader = Stateful(3)
    loader.at = b"new"
    titan.ours._Loader(loader).load_state_dict(before)
    assert loader.at == b"new"
    assert "starts over: its data has 3 parts, and had 2" in caplog.text


def test_rates_of_torchtitans_schedule_follow_the_global_step_of_a_longer_job(titan):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    schedule = titan.schedule(warmup_steps=4)
    trainer = titan.ours.DiLoCoTrainer.__new__(titan.ours.DiLoCoTrainer)
    trainer.config = titan.config(lr_scheduler=schedule)
    trainer.lr_schedulers = schedule.build(optimizers=[optimizer], training_steps=10)
    trainer._rates, trainer._rates_steps = [], None

    @dataclasses.dataclass
    class Learner:
        step_index: int
        total_steps: int

    seen = []
    for step, steps in ((0, 10), (9, 10), (9, 100), (99, 100)):
        trainer._follow(Learner(step, steps))
        seen.append(optimizer.param_groups[0]["lr"])
        trainer.lr_schedulers.step()
    assert seen == pytest.approx([0.25, 1 - 5 / 6, 1 - 5 / 96, 1 - 95 / 96], abs=1e-6)
