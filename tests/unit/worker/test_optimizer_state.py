"""The state of optimizers in a local checkpoint: only what fits is loaded, and nothing changes otherwise."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco_worker.trainer import optimizer_state
from diloco_worker.trainer.checkpoint import Checkpoints
from diloco_worker.trainer.trees import pack

FACTS = {"local_step": 1, "total_tokens": 2, "steps": [1], "tokens": [2]}


def trained(kind=torch.optim.AdamW, *, seed=0, steps=3, groups=None, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(groups(model) if groups else model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def saved(directory, model, *optimizers):
    store = Checkpoints(directory, keep=2, digest="d")
    assert store.start(model, optimizers, local_step=1, global_step=2, facts=FACTS, run="r")
    store.finish()
    return store


def assert_equal(found, expected):
    tensors, others = {}, {}
    assert pack(found, tensors) == pack(expected, others)
    assert all(torch.equal(tensors[name], others[name]) for name in others)


def assert_refused(directory, model, optimizers, match, *, whole=False):
    """Of the checkpoint in the directory, nothing is loaded."""
    store = Checkpoints(directory, keep=2, digest="d")
    own = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    before = [p.detach().clone() for p in model.parameters()]
    load = store.load if whole else store.load_optimizers
    with pytest.raises(ConfigError, match=match):
        load(store.newest(), model, optimizers)
    for optimizer, state in zip(optimizers, own, strict=True):
        assert_equal(optimizer.state_dict(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_optimizers_alone_are_restored_into_a_model_that_is_newer(tmp_path):
    model, optimizer = trained()
    store = saved(tmp_path, model, optimizer)
    assert store.newest().run == "r"
    other, other_optimizer = trained(seed=9, steps=1)
    before = [p.detach().clone() for p in other.parameters()]
    store.load_optimizers(store.newest(), other, [other_optimizer])
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_of_a_peer_the_moments_are_taken_and_not_the_options_that_its_config_may_choose(tmp_path):
    model, optimizer = trained(weight_decay=0.01)
    store = saved(tmp_path, model, optimizer)
    other, own = trained(seed=9, steps=1, weight_decay=0.1)
    own.param_groups[0].update(lr=0.3, betas=(0.8, 0.9))
    store.load_optimizers(store.newest(), other, [own], of_peer=True)
    [group] = own.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.3, (0.8, 0.9), 0.1)
    assert_equal(own.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_state_of_another_class_is_refused(tmp_path, whole, steps):
    saved(tmp_path, *trained(torch.optim.Adam, weight_decay=0.01))
    model, optimizer = trained(seed=1, steps=steps)
    match = "has a torch.optim.adam.Adam, this run a torch.optim.adamw.AdamW"
    assert_refused(tmp_path, model, [optimizer], match, whole=whole)


def test_the_state_of_parameters_in_another_order_is_refused(tmp_path):
    saved(tmp_path, *trained())
    model, optimizer = trained(groups=lambda m: [*m[1].parameters(), *m[0].parameters()])
    assert_refused(
        tmp_path, model, [optimizer], r"parameter 0 of group 0 is 0.weight \(float32, shape \[4, 4\]\)"
    )  # fmt: skip


def test_the_state_of_other_groups_is_refused(tmp_path):
    saved(tmp_path, *trained())
    model, optimizer = trained(
        groups=lambda m: [{"params": m[0].parameters()}, {"params": m[1].parameters()}]
    )
    assert_refused(tmp_path, model, [optimizer], r"\[4\] parameters in the checkpoint, \[2, 2\]")


def test_another_number_of_optimizers_is_refused(tmp_path):
    model, optimizer = trained()
    saved(tmp_path, model, optimizer, optimizer)
    assert_refused(tmp_path, model, [optimizer], "has 2 optimizers, this run 1")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("whole", [False, True])
def test_state_that_is_not_finite_is_refused(tmp_path, value, whole):
    model, optimizer = trained()
    optimizer.state[model[1].weight]["exp_avg_sq"][2, 3] = value
    saved(tmp_path, model, optimizer)
    other, own = trained(seed=1)
    match = "AdamW/state/2/exp_avg_sq is not finite"
    assert_refused(tmp_path, other, [own], match, whole=whole)


class Limited(torch.optim.SGD):
    """Has an option that is infinite by design, as Prodigy's growth_rate, and one that grows."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group.update(growth_rate=math.inf, bounds=(0.0, math.inf), d=1.0)


@pytest.mark.parametrize("whole", [False, True])
def test_an_option_may_be_infinite_where_the_programs_own_is(tmp_path, whole):
    model, optimizer = trained(Limited, momentum=0.9)
    optimizer.param_groups[0]["d"] = 3.0
    store = saved(tmp_path / "a", model, optimizer)
    other, own = trained(Limited, seed=1, momentum=0.9)
    load = store.load if whole else store.load_optimizers
    load(store.newest(), other, [own])
    assert_equal(own.state_dict(), optimizer.state_dict())
    optimizer.param_groups[0]["d"] = math.nan
    saved(tmp_path / "b", model, optimizer)
    other, own = trained(Limited, seed=1, momentum=0.9)
    match = "Limited/param_groups/0/d is not finite"
    assert_refused(tmp_path / "b", other, [own], match, whole=whole)


@pytest.mark.parametrize("whole", [False, True])
def test_options_that_only_one_side_has_do_not_matter(tmp_path, whole):
    """A scheduler made after `connect` adds some (SWALR), and so do new releases of torch."""
    model, optimizer = trained()
    torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    del optimizer.param_groups[0]["foreach"]
    store = saved(tmp_path, model, optimizer)
    other, own = trained(steps=0, foreach=False)
    load = store.load if whole else store.load_optimizers
    load(store.newest(), other, [own])
    assert own.param_groups[0]["foreach"] is False
    assert_equal(own.state_dict()["state"], optimizer.state_dict()["state"])
    torch.optim.swa_utils.SWALR(own, swa_lr=0.01)
    assert own.param_groups[0]["swa_lr"] == 0.01
    other.requires_grad_(True)(torch.ones(1, 4)).sum().backward()
    own.step()


def without_description(directory):
    """The checkpoint, as an earlier release wrote it."""
    [path] = directory.glob("*.json")
    data = json.loads(path.read_text())
    del data["optimizers"], data["run"], data["manifestSha256"]
    path.write_text(json.dumps(data))


def test_of_an_earlier_release_options_and_shapes_are_compared(tmp_path):
    model, optimizer = trained()
    saved(tmp_path / "a", model, optimizer)
    without_description(tmp_path / "a")
    other, own = trained(torch.optim.SGD, momentum=0.9)
    assert_refused(tmp_path / "a", other, [own], "options amsgrad, betas")
    optimizer.state[model[0].bias]["exp_avg"] = torch.zeros(7)
    saved(tmp_path / "b", model, optimizer)
    without_description(tmp_path / "b")
    for steps in (0, 2):
        other, own = trained(steps=steps)
        match = r"exp_avg of parameter 1 has shape \[7\] and dtype float32 in the checkpoint, expected \[4\]"
        assert_refused(tmp_path / "b", other, [own], match)
    optimizer.state[model[0].bias]["exp_avg"] = torch.zeros(4, dtype=torch.int64)
    saved(tmp_path / "c", model, optimizer)
    assert_refused(tmp_path / "c", *refreshed(), "dtype int64 in the checkpoint")


def refreshed():
    model, optimizer = trained(steps=0)
    return model, [optimizer]


class Refusing(torch.optim.AdamW):
    """Refuses a state after it has taken over half of it."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        if getattr(self, "refuses", False):
            self.refuses = False
            raise AttributeError("no such thing")


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_failing_load_has_changed_is_rolled_back(tmp_path, whole):
    model, first = trained(Refusing)
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved(tmp_path, model, second, first)
    other, own = trained(Refusing, seed=1)
    own.refuses = True
    other_second = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)
    match = "Refusing refuses the state of the checkpoint: AttributeError"
    assert_refused(tmp_path, other, [other_second, own], match, whole=whole)
    assert other_second.param_groups[0]["lr"] == 0.2


def test_the_learning_rate_of_a_group_with_a_scheduler_stays_the_programs(tmp_path):
    model, optimizer = trained()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    saved(tmp_path, model, optimizer)
    store = Checkpoints(tmp_path, keep=2, digest="d")
    other, own = trained(steps=0)
    store.load_optimizers(store.newest(), other, [own])
    assert own.param_groups[0]["lr"] == 0.1
    assert "initial_lr" not in own.param_groups[0]
    torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.25)
    store.load_optimizers(store.newest(), other, [own])
    assert own.param_groups[0]["lr"] == 0.025
    assert own.param_groups[0]["initial_lr"] == 0.1


def test_a_learning_rate_without_a_scheduler_is_that_of_the_checkpoint(tmp_path):
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.03
    store = saved(tmp_path, model, optimizer)
    other, own = trained(steps=0)
    store.load_optimizers(store.newest(), other, [own])
    assert own.param_groups[0]["lr"] == 0.03


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.RMSprop]
)
def test_the_state_of_the_same_optimizer_always_fits(tmp_path, kind):
    model, optimizer = trained(kind)
    store = saved(tmp_path, model, optimizer)
    for steps in (0, 2):
        other, own = trained(kind, seed=1, steps=steps)
        store.load_optimizers(store.newest(), other, [own])
        assert_equal(own.state_dict(), optimizer.state_dict())


def test_parameters_outside_the_model_are_described_without_a_name():
    outside = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    [found] = optimizer_state.describe(nn.Linear(1, 1), [outside])
    assert found == {"class": "torch.optim.sgd.SGD", "groups": [[["", [2], "float32"]]]}


@pytest.mark.parametrize("whole", [False, True])
def test_how_a_step_is_computed_is_decided_by_the_program(tmp_path, whole):
    """The next machine may have another device, for which the kernel of the checkpoint does not exist."""
    store = saved(tmp_path, *trained(foreach=True, weight_decay=0.3))
    other, own = trained(seed=1, steps=0, fused=True, weight_decay=0.1)
    load = store.load if whole else store.load_optimizers
    load(store.newest(), other, [own])
    group = own.param_groups[0]
    assert (group["fused"], group["foreach"], group["weight_decay"]) == (True, None, 0.3)
    before = own.state[other[0].weight]["step"].item()
    other(torch.randn(6, 4)).square().mean().backward()
    own.step()
    assert own.state[other[0].weight]["step"].item() == before + 1


def compiled_part(model):
    model[0] = torch.compile(model[0])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [torch.compile, compiled_part], ids=["whole", "part"])
@pytest.mark.parametrize("first", [False, True])
def test_state_of_a_compiled_model_continues_in_a_plain_one_and_the_other_way(
    tmp_path, wrap, first
):
    model, optimizer = trained()
    store = saved(tmp_path, wrap(model) if first else model, optimizer)
    other, own = trained(seed=1)
    store.load(store.newest(), other if first else wrap(other), [own])
    assert_equal(own.state_dict(), optimizer.state_dict())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(saved_at, found) for saved_at, found in pairs)
