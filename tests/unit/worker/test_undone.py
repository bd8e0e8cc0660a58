"""A program that writes its own parameters over the results of merges is noticed, and no other one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_worker.trainer.undone import Undone


def results(step, model, *, count=40, size=0.02):
    """Sentences about a program that makes a step after each result; a result moves all parameters a little."""
    undone, found = Undone(), []
    generator = torch.Generator().manual_seed(1)

    def overwrite():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    for _ in range(count):
        undone.apply(model.weight, overwrite)
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


def test_results_without_a_change_are_undone_by_nothing(model):
    assert results(lambda: None, model, size=0.0) == []


def test_parameters_of_every_shape_can_be_compared():
    for shape in ((), (0,), (3, 4)):
        parameter = nn.Parameter(torch.ones(shape))
        undone = Undone()
        undone.apply(parameter, lambda: None)
        undone.apply(nn.Parameter(torch.ones(4, 3).t()), lambda: None)
        assert not undone.stepped()
