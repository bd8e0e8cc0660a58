"""`attach`: the optimizer's steps are the learner's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco_testing.learners.alone import alone
from diloco_testing.learners.rejoined import Rejoined
from diloco_worker import StopTraining, attach
from diloco_worker.attachment import every_rank_of


@pytest.fixture
def job(monkeypatch):
    """A job that is complete after 10 steps."""
    return Rejoined().join(monkeypatch)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def sgd(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(3, 2)).square().mean()
    loss.backward()
    return loss


def test_each_step_of_the_optimizer_counts_with_its_tokens(job, model):
    optimizer, loss = sgd(model), [0.5]
    learner = attach(model, optimizer, tokens=6, loss=lambda: loss[0])
    for _ in range(3):
        for _ in range(4):  # gradient accumulation
            backward(model)
        optimizer.step()
        loss[0] += 1
    assert (learner.local_step, job.tokens, job.losses) == (3, [6, 6, 6], [0.5, 1.5, 2.5])


def test_a_step_of_the_micro_batches_that_are_left_counts_with_their_tokens(job, model):
    optimizer, rows = sgd(model), [0]

    def tokens() -> int:
        taken, rows[0] = rows[0], 0
        return taken

    attach(model, optimizer, tokens=tokens)
    sizes = [4, 4, 4, 4, 2]  # the last one is smaller, and a step alone
    for index, size in enumerate(sizes, start=1):
        model(torch.ones(size, 2)).square().sum().backward()
        rows[0] += size
        if index % 2 == 0 or index == len(sizes):
            optimizer.step()
            optimizer.zero_grad()
    assert job.tokens == [8, 8, 2]


def test_tokens_may_come_from_a_function(job, model):
    optimizer, counts = sgd(model), iter([5, 7])
    attach(model, optimizer, tokens=lambda: next(counts))
    optimizer.step()
    optimizer.step()
    assert job.tokens == [5, 7]


def test_a_closure_that_is_called_often_is_one_step(job, model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    attach(model, optimizer, tokens=1)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        return backward(model)

    calls: list[int] = []
    optimizer.step(closure)
    assert len(calls) > 1
    assert job.local_step == 1


def test_of_several_optimizers_each_step_of_the_last_counts(job, model):
    first, last = sgd(model), sgd(model)
    attach(model, [first, last], tokens=1)
    for _ in range(2):
        first.step()
        first.step()
        last.step()
    assert job.local_step == 2
    assert job.connected[1] == [first, last]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(job, model, fused):
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    attach(model, optimizer, tokens=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflow in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 2)).square().mean()).backward()
        if overflow:
            model.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    assert job.local_step == 2


def test_a_loop_that_asks_ends_by_itself(job, model):
    optimizer = sgd(model)
    learner = attach(model, optimizer, tokens=1)
    while not learner.done:
        optimizer.step()
    assert job.local_step == 10


def test_a_loop_that_does_not_ask_ends_with_its_block(job, model):
    optimizer, made = sgd(model), 0
    with attach(model, optimizer, tokens=1) as learner:
        while True:
            try:
                made += 1
                optimizer.step()
            except Exception:
                pass
    assert (made, job.local_step, job.closed, learner.done) == (10, 10, True, True)


def test_a_block_that_ends_before_the_job_leaves_it(job, model):
    with attach(model, sgd(model), tokens=1):
        pass
    assert job.closed


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_is_not_suppressed(job, model, error):
    with pytest.raises(error), attach(model, sgd(model), tokens=1):
        raise error
    assert job.closed


def test_a_loop_that_continues_after_the_end_is_warned_once(job, model, caplog):
    optimizer = sgd(model)
    attach(model, optimizer, tokens=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            optimizer.step()
    assert job.local_step == 10
    (line,) = caplog.messages
    assert "eu/0 has left the job, and the loop continues" in line


def test_a_loop_that_ends_at_the_next_question_is_not_warned(job, model, caplog):
    """The job may become complete while a step runs: the hook is then the first to notice."""
    optimizer = sgd(model)
    learner = attach(model, optimizer, tokens=1)
    optimizer.step()
    job.close()
    optimizer.step()
    assert learner.done
    assert not caplog.messages


@pytest.mark.parametrize(("steps", "warned"), [(10, False), (9, True)])
def test_a_trainer_that_ends_before_the_job_is_warned_about(job, model, caplog, steps, warned):
    optimizer = sgd(model)
    learner = attach(model, optimizer, tokens=1)
    for _ in range(steps):
        optimizer.step()
    learner.end_training()
    assert job.closed
    assert ("leaves the job at global step 9 of 100: something else" in caplog.text) is warned


def test_a_trainer_without_a_job_ends_without_a_warning(monkeypatch, model, caplog):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    attach(model, sgd(model), tokens=1).end_training()
    assert not caplog.messages


def test_wrappers_of_an_optimizer_are_removed_and_the_model_is_handed_over_as_given(job, model):
    class Wrapper(torch.optim.Optimizer):
        """As AcceleratedOptimizer and LightningOptimizer: it has no hooks."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = sgd(model)
    with alone():
        parallel = DistributedDataParallel(model)
        attach(parallel, Wrapper(Wrapper(optimizer)), tokens=1, every_rank=True)
    assert job.connected == (parallel, [optimizer])
    assert job.every_rank is True
    optimizer.step()
    assert job.local_step == 1


def test_an_optimizer_around_another_that_has_hooks_itself_is_the_one_that_counts(job, model):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

        def step(self):
            self.optimizer.step()
            self.optimizer.step()

    optimizer = Lookahead(sgd(model))
    attach(model, optimizer, tokens=1)
    optimizer.step()
    assert job.connected == (model, [optimizer])
    assert job.local_step == 1


@pytest.mark.parametrize(("processes", "expected"), [(1, None), (2, True)])
def test_a_trainer_of_several_processes_waits_for_all_of_them(processes, expected):
    assert every_rank_of(processes) is expected


@pytest.mark.parametrize(
    ("optimizer", "tokens", "reason"),
    [
        (None, 1.5, "tokens is 1.5, expected the number of tokens"),
        (None, True, "tokens is True"),
        ([], 1, "optimizer is \\[\\], expected one torch.optim.Optimizer or several"),
        (["adam"], 1, "optimizer is \\['str'\\]"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_at_once(job, model, optimizer, tokens, reason):
    with pytest.raises(TypeError, match=reason):
        attach(model, sgd(model) if optimizer is None else optimizer, tokens=tokens)
    assert job.connected is None


def test_without_a_job_the_steps_are_counted(monkeypatch, model):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    optimizer = sgd(model)
    with attach(model, optimizer, tokens=1, standalone_steps=4) as learner:
        while True:
            optimizer.step()
    assert learner.local_step == 4
    assert issubclass(StopTraining, BaseException)
    assert not issubclass(StopTraining, Exception)
