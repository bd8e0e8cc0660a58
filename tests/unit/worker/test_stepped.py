"""Trained parameters that no optimizer has: a merge of them would be undone, and nothing would show it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from diloco.errors import ConfigError
from diloco_testing.learners.alone import alone
from diloco_worker.trainer.stepped import not_stepped


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def sgd(*parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_over_copies_is_refused_with_the_names(model):
    """Copies in fp32 of a model in bf16, for example."""
    copies = [p.detach().float().clone() for p in model.parameters()]
    with pytest.raises(
        ConfigError, match=r"none of the 4 trained parameters of the model \(0\.weight, 0\.bias"
    ):
        not_stepped(model, [sgd(*copies)])


def test_an_optimizer_of_a_made_up_tensor_is_warned_about_and_not_refused(model):
    """Hugging Face's layer-wise optimizers step in hooks, and give the Trainer such a one."""
    dummy = sgd(torch.zeros(1, 7))
    assert not_stepped(model, [dummy]).startswith("4 of 4 trained parameters are in no optimizer")


def test_parameters_that_were_replaced_after_the_optimizer_was_made_are_named(model):
    optimizer = sgd(*model.parameters())
    model[1] = nn.Linear(3, 1)
    text = not_stepped(model, [optimizer])
    assert text.startswith("2 of 4 trained parameters are in no optimizer")
    assert "was given: 1.weight, 1.bias; what steps them" in text


def test_parameters_that_only_an_optimizer_has_are_counted_with_their_shapes(model):
    """Those of a loss, of a second network, or of layers in a list of Python."""
    model.more = [nn.Linear(3, 5), nn.Linear(5, 7)]
    criterion = nn.Linear(4, 1, bias=False)
    others = [p for layer in (*model.more, criterion) for p in layer.parameters()]
    text = not_stepped(model, [sgd(*model.parameters(), *others[:4]), sgd(others[4])])
    assert text.startswith(
        "5 of 9 parameters of the optimizers are not in the model that Learner.connect was given "
        "(shapes [5, 3], [5], [7, 5], [7], [1, 4]), so that they are trained here alone"
    )
    many = [torch.zeros(1, requires_grad=True) for _ in range(10)]
    assert "[1] and 2 more)" in not_stepped(model, [sgd(*model.parameters(), *many)])


def test_of_many_parameters_some_are_named():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
    text = not_stepped(model, [sgd(model[0].weight)])
    assert "15 of 16 trained parameters" in text
    assert "4.weight and 7 more; what" in text


def test_several_optimizers_groups_and_frozen_parameters_are_right(model):
    model[0].bias.requires_grad_(False)
    groups = torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[1].bias]}])
    assert not_stepped(model, [groups, sgd(model[1].weight)]) == ""
    assert not_stepped(model, []) == "", "a loop that steps by itself"


def test_parameters_that_are_parts_of_one_flat_tensor_are_its_own(model):
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    assert not_stepped(model, [sgd(flat.requires_grad_())]) == ""


def test_wrapped_and_sharded_parameters_are_the_models(model):
    with alone():
        sharded = fully_shard(model)
        assert not_stepped(sharded, [sgd(*sharded.parameters())]) == ""
        text = not_stepped(nn.DataParallel(model), [sgd(model[0].weight)])
    assert "0.bias, 1.weight, 1.bias;" in text
