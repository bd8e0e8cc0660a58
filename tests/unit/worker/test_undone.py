"""A program that writes its own parameters over the results of merges is noticed, and no other one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco_testing.learners.alone import alone
from diloco_worker.trainer.layout import local
from diloco_worker.trainer.undone import Undone, compared


def results(step, model, *, count=40, size=0.02):
    """Sentences about a program that makes two steps after each result; a result moves all parameters a little."""
    undone, found = Undone(), []
    generator = torch.Generator().manual_seed(1)

    def overwrite():
        with torch.no_grad():
            for parameter in model.parameters():
                held = local(parameter)
                held.add_(size * torch.randn(held.shape, generator=generator))

    for _ in range(count):
        undone.apply(model.weight, overwrite)
        for _ in range(2):
            step()
            if undone.stepped():
                found.append(undone.problem)
    return found


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def test_a_vector_that_is_written_to_the_model_undoes_each_result(model):
    """As evolution strategies, or master weights in a flat buffer, do."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()

    def step():
        nonlocal vector
        vector = vector + 1e-4 * torch.randn(vector.shape)
        nn.utils.vector_to_parameters(vector.clone(), model.parameters())

    [text] = results(step, model)
    assert text.startswith("the last 4 results of merges were undone in the next step, so that")


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.1, 1.0])
def test_steps_of_an_optimizer_undo_nothing_however_long_they_are(model, rate):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()

    assert results(step, model) == []


def steady(model, *, back):
    """Sentences about an optimizer whose steps all go the same way, with results that take back so many of them."""
    undone, found = Undone(), []

    def move(steps):
        with torch.no_grad():
            model.weight.add_(0.01 * steps)

    for _ in range(20):
        undone.apply(model.weight, lambda: move(-back))
        for _ in range(4):
            move(1)
            if undone.stepped():
                found.append(undone.problem)
    return found


@pytest.mark.parametrize("back", [0.6, 1, 1.5, 2, 3])
def test_a_step_that_returns_to_where_the_parameters_were_by_itself_undoes_nothing(model, back):
    """Early in a training, Adam goes the same way in all learners; a result is that of a step or two before."""
    assert steady(model, back=back) == []


def test_long_steps_that_short_ones_follow_undo_nothing(model):
    """Such as those of two optimizers in turn."""
    rates = itertools.cycle((1.0, 1e-3))

    def step():
        with torch.no_grad():
            model.weight.add_(next(rates) * torch.randn(model.weight.shape))

    assert results(step, model) == []


def test_of_results_in_two_steps_in_a_row_the_first_shows_nothing(model):
    undone = Undone()
    for _ in range(20):
        undone.apply(model.weight, lambda: model.weight.detach().add_(-0.01))
        with torch.no_grad():
            model.weight.add_(0.01)
        assert not undone.stepped()


def test_results_without_a_change_are_undone_by_nothing(model):
    assert results(lambda: None, model, size=0.0) == []


def test_parameters_of_every_shape_can_be_compared():
    for shape in ((), (0,), (3, 4)):
        parameter = nn.Parameter(torch.ones(shape))
        undone = Undone()
        undone.apply(parameter, lambda: None)
        undone.apply(nn.Parameter(torch.ones(4, 3).t()), lambda: None)
        assert not undone.stepped()


def test_the_shard_that_a_rank_holds_is_compared(model):
    """Master weights in fp32, which a program keeps of its shards, are written to them after each step."""
    with alone():
        fully_shard(model)
        assert isinstance(model.weight, DTensor)
        kept = [p.to_local().detach().clone() for p in model.parameters()]

        def step():
            for parameter, values in zip(model.parameters(), kept, strict=True):
                values.add_(1e-4 * torch.randn(values.shape))
                parameter.to_local().detach().copy_(values)

        [text] = results(step, model)
        assert text.startswith("the last 4 results of merges were undone in the next step")
        assert results(lambda: None, model) == []


@pytest.mark.parametrize("values", [1, 7])
def test_a_few_values_that_a_rank_holds_show_nothing(values):
    """A step ends near where one value was before by chance, again and again."""
    part = nn.Linear(values, 1, bias=False)
    kept = part.weight.detach().clone()

    def step():
        with torch.no_grad():
            part.weight.copy_(kept)

    assert results(step, part) == []


def test_the_tensor_that_is_compared_is_the_one_of_which_this_process_holds_most():
    fragment, buffers = SimpleNamespace(buffers=False), SimpleNamespace(buffers=True)
    small, large = (
        SimpleNamespace(tensor=torch.ones(rows, 8), view=torch.ones(held, 8))
        for rows, held in ((9, 1), (2, 2))
    )
    assert compared(fragment, [small, large]) is large.tensor
    assert compared(fragment, []) is None, "another rank holds it"
    assert compared(buffers, [small]) is None, "a forward pass changes it"
