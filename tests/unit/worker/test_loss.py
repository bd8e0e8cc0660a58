"""The loss of a step, and the steps of the optimizers."""

from __future__ import annotations

import math

import pytest
import torch

from diloco_worker.standalone import StandaloneTrainer
from diloco_worker.trainer import loss
from diloco_worker.trainer.loss import LossReader
from diloco_worker.trainer.optimizer_steps import OptimizerSteps


@pytest.mark.parametrize(
    ("given", "value", "finite"),
    [
        (1.5, 1.5, True),
        (torch.tensor(2.5), 2.5, True),
        (torch.tensor([[3.5]], requires_grad=True), 3.5, True),
        (None, None, True),
        (math.nan, None, False),
        (torch.tensor(math.inf), None, False),
    ],
)
def test_a_loss_is_a_number_or_a_tensor_with_one_element(given, value, finite):
    reader = LossReader()
    reader.read(given)
    assert (reader.value, reader.finite) == (value, finite)


def test_a_loss_per_sample_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"shape \(8, 2\), expected one number.*loss\.mean\(\)"):
        LossReader().read(torch.zeros(8, 2))


def test_what_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="loss: 'high' is not a number"):
        LossReader().read("high")


class OnDevice(torch.Tensor):
    """A loss that states that it is on a GPU."""

    device = property(lambda self: torch.device("cuda"))


class Late:
    """The end of a copy, which is over when it is asked for the third time."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked >= 3


def test_a_loss_is_read_though_the_device_is_always_steps_behind(monkeypatch):
    monkeypatch.setattr(
        loss, "_start_copy", lambda given: (given.as_subclass(torch.Tensor), Late())
    )
    reader, seen, new = LossReader(), [], []
    for value in (1.5, 2.0, 2.5, 3.5, 4.0, 4.5, math.nan, math.nan, math.nan, math.nan):
        reader.read(torch.tensor(value).as_subclass(OnDevice))
        seen.append((reader.value, reader.finite))
        new.append(reader.newly_finite)
    # Each third one is read, when it is three steps old.
    assert seen == [(None, True)] * 3 + [(1.5, True)] * 3 + [(3.5, True)] * 3 + [(None, False)]
    assert new == [None] * 3 + [True, None, None] * 2 + [False], "one NaN is counted once"


def test_without_a_job_the_same_loss_is_refused():
    trainer = StandaloneTrainer(steps=None)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        trainer.step(tokens=1, loss=torch.zeros(4))
    assert trainer.local_step == 0


def test_the_steps_of_all_optimizers_are_counted_between_two_calls():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight], lr=0.1)]
    steps = OptimizerSteps(optimizers)
    assert steps.taken() == 0
    weight.grad = torch.ones(2)
    for optimizer in optimizers:
        optimizer.step()
    assert (steps.taken(), steps.taken()) == (2, 0)


def test_the_learning_rate_is_the_one_of_the_last_step_of_the_first_optimizer():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.2}, {"params": weights[1:], "lr": torch.tensor(0.5)}]
    first, second = torch.optim.AdamW(groups), torch.optim.SGD(weights, lr=3.0)
    steps = OptimizerSteps([first, second])
    assert steps.learning_rate is None
    first.step()
    first.param_groups[1]["lr"] = 0.1  # as a scheduler does before learner.step()
    second.step()
    assert steps.learning_rate == 0.5
    first.step()
    assert steps.learning_rate == 0.2
    for unknown in (None, torch.ones(2), torch.tensor(0.1, device="meta")):
        first.param_groups[0]["lr"] = unknown
        steps._first_stepped(first, (), {})
        assert steps.learning_rate is None


def test_a_complex_loss_is_refused_by_its_type():
    with pytest.raises(ValueError, match=r"loss: a tensor of torch\.complex64, expected a real"):
        LossReader().read(torch.tensor(1j))
