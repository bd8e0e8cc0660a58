"""`Learner.scheduler`: the learning rate is that of the global step, however a learner came to it."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from diloco.errors import ConfigError
from diloco.spec import RunSpec
from diloco_worker import Learner
from diloco_worker.attachment import AttachedLearner
from diloco_worker.identities import Identity
from diloco_worker.integrations.rates import Rates
from diloco_worker.standalone import StandaloneTrainer
from diloco_worker.trainer import learning_rate
from diloco_worker.trainer.learning_rate import GlobalStepScheduler

STEPS = 150


def sequential(optimizer):
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 20),
        ],
        milestones=[20],
    )


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=20),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
        ]
    )


KINDS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 20)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.99),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 30, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=40),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=STEPS),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.01, max_lr=0.1, step_size_up=13, cycle_momentum=False
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS, power=2.0),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}


def make_optimizer():
    layers = nn.Linear(2, 2)
    groups = [{"params": [layers.weight], "lr": 0.2}, {"params": [layers.bias], "lr": 0.05}]
    return torch.optim.AdamW(groups)


def schedule(kind, step):
    """Learning rates and betas at a step, of a loop that was never interrupted."""
    optimizer = make_optimizer()
    made = KINDS[kind](optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(step):
            optimizer.step()
            made.step()
    return options(optimizer)


def options(optimizer):
    return [(group["lr"], group["betas"]) for group in optimizer.param_groups]


class Steps:
    """A global step that the test sets."""

    def __init__(self, step=0):
        self.step = step

    def __call__(self):
        return self.step


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_joins_late_has_the_learning_rate_of_the_global_step(kind, recwarn):
    optimizer = make_optimizer()
    GlobalStepScheduler(KINDS[kind](optimizer), Steps(121))
    assert options(optimizer) == schedule(kind, 121)
    assert not recwarn.list, "it has not seen the steps of others"


@pytest.mark.parametrize("kind", KINDS)
def test_jumps_of_several_steps_are_followed_and_a_second_call_changes_nothing(kind):
    optimizer, steps = make_optimizer(), Steps()
    followed = GlobalStepScheduler(KINDS[kind](optimizer), steps)
    assert options(optimizer) == schedule(kind, 0)
    for steps.step in (1, 2, 7, 19, 24, 24, 60, STEPS - 1):
        optimizer.step()
        for _ in range(2):
            followed.step()
            assert options(optimizer) == schedule(kind, steps.step)
    assert followed.get_last_lr() == [lr for lr, _ in options(optimizer)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_syncer_that_returns_to_an_older_snapshot_takes_the_learning_rate_back(kind):
    optimizer, steps = make_optimizer(), Steps(100)
    followed = GlobalStepScheduler(KINDS[kind](optimizer), steps)
    for steps.step in (48, 49, 0, 60):
        followed.step()
        assert options(optimizer) == schedule(kind, steps.step)


def test_a_learning_rate_in_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.2)
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate)
    steps = Steps(5)
    followed = GlobalStepScheduler(lr_scheduler.ExponentialLR(optimizer, gamma=0.5), steps)
    assert torch.allclose(optimizer.param_groups[0]["lr"], torch.tensor(0.2 * 0.5**5))
    held = optimizer.param_groups[0]["lr"]
    steps.step = 1
    followed.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert torch.allclose(held, torch.tensor(0.1))


def test_a_scheduler_that_has_stepped_already_continues_from_there():
    optimizer = make_optimizer()
    made = KINDS["StepLR"](optimizer)
    optimizer.step()
    for _ in range(40):
        made.step()
    GlobalStepScheduler(made, Steps(70))
    assert options(optimizer) == schedule("StepLR", 70)


def test_a_schedule_that_ends_before_the_job_keeps_its_last_rate(caplog):
    """T was raised: an exception would end every learner."""
    optimizer, steps = make_optimizer(), Steps(STEPS - 1)
    followed = GlobalStepScheduler(KINDS["OneCycleLR"](optimizer), steps)
    for steps.step in (STEPS, STEPS + 1, STEPS + 40):
        followed.step()
        assert options(optimizer) == schedule("OneCycleLR", STEPS)
    [record] = caplog.records
    assert f"as of step {STEPS}, because OneCycleLR ends there: Tried" in record.getMessage()
    steps.step = 70
    followed.step()
    assert options(optimizer) == schedule("OneCycleLR", 70)


class Model(nn.Linear):
    def __deepcopy__(self, memo):
        raise AssertionError("the model is copied")


def test_a_model_that_a_schedule_has_is_not_copied():
    class OfModel(lr_scheduler.LambdaLR):
        def __init__(self, optimizer):
            self.model = Model(2, 2)
            super().__init__(optimizer, lambda step: 1 / (1 + step))

    optimizer, steps = make_optimizer(), Steps(3)
    followed = GlobalStepScheduler(OfModel(optimizer), steps)
    for steps.step in (0, 1):  # back, and on
        followed.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 / (1 + steps.step))


class Decay:
    """Computes a schedule, with something that cannot be copied."""

    def __init__(self):
        self.lock, self.rate = threading.Lock(), 0.5

    def __call__(self, step):
        with self.lock:
            return self.rate**step


def test_what_a_schedule_is_computed_by_need_not_be_possible_to_copy():
    optimizer, steps = make_optimizer(), Steps(3)
    lambdas = lr_scheduler.LambdaLR(optimizer, Decay())
    followed = GlobalStepScheduler(
        lr_scheduler.SequentialLR(optimizer, [lambdas, lr_scheduler.ConstantLR(optimizer)], [90]),
        steps,
    )
    for steps.step in (3, 0, 2):  # back, and on
        followed.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**steps.step)
    optimizer = make_optimizer()
    rates = Rates(lr_scheduler.LambdaLR(optimizer, Decay()))
    rates.follow(2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_only_the_first_steps_change_the_filters_of_warnings(monkeypatch):
    """Each change lets Python show again what it shows once."""
    steps = Steps(5)
    followed = GlobalStepScheduler(KINDS["StepLR"](make_optimizer()), steps)
    steps.step = 6
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", None)
        followed.step()
    assert followed.scheduler.last_epoch == 6


def test_its_state_is_the_global_step_alone():
    optimizer, steps = make_optimizer(), Steps(30)
    followed = GlobalStepScheduler(KINDS["CosineAnnealingLR"](optimizer), steps)
    assert followed.state_dict() == {}
    followed.load_state_dict({"last_epoch": 3})
    steps.step = 31
    followed.step()
    assert options(optimizer) == schedule("CosineAnnealingLR", 31)


def test_a_schedule_of_a_metric_is_refused():
    optimizer = make_optimizer()
    with pytest.raises(TypeError, match="ReduceLROnPlateau follows a metric of one learner"):
        GlobalStepScheduler(lr_scheduler.ReduceLROnPlateau(optimizer), Steps())
    inner = KINDS["StepLR"](optimizer)
    nested = lr_scheduler.ChainedScheduler([inner])
    nested._schedulers = [inner, lr_scheduler.ReduceLROnPlateau(optimizer)]
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        GlobalStepScheduler(nested, Steps())


@pytest.mark.parametrize("other", [None, lambda step: 0.1, make_optimizer()])
def test_what_is_no_scheduler_of_torch_is_refused(other):
    with pytest.raises(TypeError, match=r"expected a scheduler of torch\.optim\.lr_scheduler"):
        GlobalStepScheduler(other, Steps())


def test_a_global_step_that_is_too_far_ahead_is_refused(monkeypatch):
    monkeypatch.setattr(learning_rate, "MAX_STEPS", 10)
    with pytest.raises(ConfigError, match="the global step is 11, and StepLR is at 0"):
        GlobalStepScheduler(KINDS["StepLR"](make_optimizer()), Steps(11))


def test_without_a_job_the_scheduler_follows_the_local_step():
    optimizer = make_optimizer()
    learner = Learner.connect(nn.Linear(1, 1), optimizer, standalone_steps=40)
    made = KINDS["LambdaLR"](optimizer)
    scheduler = learner.scheduler(made)
    assert learner.scheduler(made) is scheduler
    while not learner.done:
        assert options(optimizer) == schedule("LambdaLR", learner.step_index)
        optimizer.step()
        scheduler.step()  # a loop that was written for torch's
        learner.step(tokens=1)
    assert scheduler.scheduler.last_epoch == 40


@pytest.mark.parametrize("kind", ["ChainedScheduler", "ExponentialLR"])
def test_a_second_scheduler_of_an_optimizer_is_refused(monkeypatch, kind):
    """It would go back to what the first one had made of the rates when it was created."""
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    optimizer = make_optimizer()
    learner = Learner.connect(nn.Linear(2, 2), optimizer)
    first = lr_scheduler.LinearLR(optimizer)
    followed = learner.scheduler(first)
    second = {**KINDS, "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9)}[kind](
        optimizer
    )
    with pytest.raises(ConfigError, match=f"LinearLR and {kind} have the same optimizer"):
        learner.scheduler(second)
    assert learner.scheduler(first) is followed
    learner.scheduler(lr_scheduler.LinearLR(make_optimizer()))  # of another optimizer


class Rejoined(StandaloneTrainer):
    """A process that begins at a global step of its job."""

    def __init__(self, step: int) -> None:
        super().__init__(steps=1000)
        self.step_at, self.spec = step, RunSpec(job="j", steps=1000, interval=24)

    @property
    def step_index(self) -> int:
        return self.step_at


def warned(caplog, make, *, at, follow=lambda learner, scheduler: None, made=0) -> str:
    """What a process that begins at a step logs about the schedule of its optimizer in its first two steps."""
    caplog.clear()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    learner = Learner(Rejoined(at), optimizers=[optimizer])
    scheduler = make(optimizer)
    follow(learner, scheduler)
    for _ in range(made):
        optimizer.step()
        scheduler.step()
    for _ in range(2):
        learner.step(tokens=1)
    return caplog.text


MAKE = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=1000),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 40)],
        milestones=[10],
    ),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "none": lambda o: None,
}


def test_a_schedule_that_starts_over_with_the_process_is_named_once(caplog):
    text = warned(caplog, MAKE["one cycle"], at=648)
    assert text.count("the schedule of the learning rate (OneCycleLR) starts over, because") == 1
    assert "which began at global step 648; let learner.scheduler(scheduler) follow" in text
    assert "(CosineAnnealingLR, LinearLR, SequentialLR) starts over" in warned(
        caplog, MAKE["sequence"], at=648
    )


def test_of_several_ranks_the_first_alone_names_a_schedule_that_starts_over(caplog):
    for rank in (0, 1):
        caplog.clear()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        learner = Learner(Rejoined(648), identity=Identity(process=rank), optimizers=[optimizer])
        scheduler = MAKE["one cycle"](optimizer)
        optimizer.step()
        scheduler.step()
        learner.step(tokens=1)
        assert caplog.text.count("starts over, because") == (rank == 0)


def test_a_schedule_of_an_attached_loop_that_starts_over_is_named_too(caplog):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    learner = Learner(Rejoined(648), optimizers=[optimizer])
    AttachedLearner(learner, optimizer, tokens=1, loss=None)
    scheduler = MAKE["one cycle"](optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert caplog.text.count("starts over, because") == 1


def test_no_other_schedule_is_named(caplog):
    for kind, make in MAKE.items():
        assert warned(caplog, make, at=24) == "", f"{kind}, at the beginning of the job"
    for kind in ("plateau", "none"):
        assert warned(caplog, MAKE[kind], at=648) == "", kind
    for kind in ("one cycle", "sequence"):
        assert warned(caplog, MAKE[kind], at=648, made=20) == "", (
            f"{kind}, continued by the program"
        )
        followed = warned(
            caplog, MAKE[kind], at=648, follow=lambda learner, s: learner.scheduler(s)
        )
        assert followed == "", kind
        assert warned(caplog, MAKE[kind], at=648, follow=lambda _, s: Rates(s)) == "", kind
