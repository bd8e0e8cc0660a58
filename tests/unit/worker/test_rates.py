"""Learning rates at the job's global step, whatever scheduler a trainer has."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim import lr_scheduler

from diloco_worker.integrations.rates import Rates, depends_on_steps

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "steps": lambda o: lr_scheduler.StepLR(o, 7),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=60),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 40)],
        milestones=[10],
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=10), lr_scheduler.StepLR(o, 5)]
    ),
}


def groups() -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    return torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.3}], lr=0.1)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def stepped(kind: str) -> list[list[float]]:
    """The rates of a run without restarts."""
    optimizer = groups()
    scheduler, found = SCHEDULERS[kind](optimizer), []
    for _ in range(50):
        found.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_learner_that_rejoins_has_the_rates_of_the_global_step(kind):
    expected = stepped(kind)
    optimizer = groups()
    scheduler = SCHEDULERS[kind](optimizer)
    followed = Rates(scheduler)
    for step in (20, 20, 21, 24, 48):
        followed.follow(step)
        assert rates(optimizer) == pytest.approx(expected[step])
        assert scheduler.get_last_lr() == pytest.approx(expected[step])
        optimizer.step()
        scheduler.step()  # as its trainer does


def test_the_model_is_not_copied():
    optimizer = groups()
    followed = Rates(SCHEDULERS["sequence"](optimizer))
    assert sum(p.numel() for g in followed._stand_in.param_groups for p in g["params"]) == 0


def test_a_schedule_can_be_replaced_when_the_job_becomes_longer():
    optimizer = groups()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for total, expected in ((100, 0.05), (200, 0.075)):
        made = lambda o, total=total: lr_scheduler.LambdaLR(o, lambda step: 1 - step / total)  # noqa: E731
        Rates(scheduler, made).follow(50)
        assert rates(optimizer) == pytest.approx([expected, 3 * expected])


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], lr=rate, capturable=False)
    followed = Rates(lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    kept = optimizer.param_groups[0]["lr"]
    followed.follow(4)
    assert optimizer.param_groups[0]["lr"] is kept
    assert float(kept) == pytest.approx(0.02)


class Module(torch.nn.Module):
    """As a LightningModule whose method is the schedule."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def schedule(self, step, half=2):
        return 1 / (1 + step / half)

    def __deepcopy__(self, memo):
        raise AssertionError("the model is copied")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_whose_method_is_the_schedule_is_not_copied(wrapped):
    module, optimizer = Module(), groups()
    schedule = functools.partial(module.schedule, half=2) if wrapped else module.schedule
    inner = lr_scheduler.LambdaLR(optimizer, schedule)
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [inner, lr_scheduler.StepLR(optimizer, 5)], milestones=[30]
    )
    Rates(scheduler).follow(2)
    assert rates(optimizer) == pytest.approx([0.05, 0.15])


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_rates_go_back_with_the_global_step(kind):
    expected = stepped(kind)
    optimizer = groups()
    followed = Rates(SCHEDULERS[kind](optimizer))
    for step in (40, 15, 16):
        followed.follow(step)
        assert rates(optimizer) == pytest.approx(expected[step])


def test_a_schedule_that_ends_before_the_job_keeps_its_last_rate(caplog):
    optimizer = groups()
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20)
    followed = Rates(scheduler)
    followed.follow(20)
    last = rates(optimizer)
    for step in range(21, 50):
        followed.follow(step)
        assert rates(optimizer) == last
        optimizer.step()
        scheduler.step()  # as its trainer does, more often than it may
    assert caplog.text.count("stays as of step 20, because OneCycleLR ends there") == 1
    followed.follow(5)
    assert rates(optimizer) != last


def momentum(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["momentum"] for group in optimizer.param_groups]


def test_a_momentum_that_the_schedule_changes_is_the_one_of_the_global_step():
    made = [
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9) for _ in "ab"
    ]
    schedulers = [lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=60) for optimizer in made]
    for _ in range(20):
        made[0].step()
        schedulers[0].step()
    assert momentum(made[0]) != [0.95]
    followed = Rates(schedulers[1])
    for _ in range(2):
        followed.follow(20)
        assert momentum(made[1]) == pytest.approx(momentum(made[0]))
        made[1].step()
        schedulers[1].step()  # as its trainer does


def test_an_option_that_the_schedule_leaves_alone_is_the_programs():
    optimizer = groups()
    followed = Rates(SCHEDULERS["steps"](optimizer))
    followed.follow(8)
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    followed.follow(9)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_a_schedule_of_a_metric_does_not_depend_on_steps():
    optimizer = groups()
    assert depends_on_steps(SCHEDULERS["chain"](optimizer))
    assert not depends_on_steps(lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not depends_on_steps(None)
