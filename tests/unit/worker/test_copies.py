"""Copies for a checkpoint are of one step, although most of them are made while training continues."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from diloco_worker.trainer.checkpoint import Checkpoints, pack
from diloco_worker.trainer.copies import Copies

SECONDS = 60.0
SIDE = 160
"""A weight of this side is large enough to be deferred."""


class Watched(threading.Event):
    """`entered` is set when a thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.entered.set()
        return super().wait(timeout or SECONDS)


class Training:
    """A model with two trained layers, one optimizer each, and a frozen layer."""

    def __init__(self, optimizers: int = 1, *, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3))).to(device)
        self.model[2].requires_grad_(False)
        parameters = [[*self.model[0].parameters()], [*self.model[1].parameters()]]
        if optimizers == 1:
            parameters = [parameters[0] + parameters[1]]
        self.optimizers = [torch.optim.AdamW(p, lr=0.1) for p in parameters]
        self.copies = Copies()

    def step(self, *indexes: int) -> None:
        loss = self.model(torch.ones(2, SIDE, device=self.device)).square().mean()
        loss.backward()
        for index in indexes or range(len(self.optimizers)):
            self.optimizers[index].step()
        self.model.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        state = [optimizer.state_dict() for optimizer in self.optimizers]
        pack({"model": dict(self.model.named_parameters()), "optimizers": state}, found)
        return found

    def begin(self):
        return self.copies.begin(self.tensors(), self.model, self.optimizers)


def values(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def training() -> Training:
    """One guarded step was made."""
    training = Training()
    training.copies.watch(training.optimizers)
    training.step()
    training.copies.boundary()
    return training


def test_the_next_optimizer_step_waits_for_copies_that_are_not_made_yet(training):
    before = values(training.tensors())
    copy = training.begin()
    copy.copied = Watched()
    stepping = threading.Thread(target=training.step)
    stepping.start()
    assert copy.copied.entered.wait(SECONDS)
    assert same(values(training.tensors()), before), "the step did not begin"
    assert copy.complete()
    stepping.join(SECONDS)
    training.copies.boundary()
    assert copy.guarded()
    assert same(copy.tensors, before)
    assert not same(values(training.tensors()), before)


def test_parameters_and_moments_are_deferred_and_nothing_else(training):
    copy = training.begin()
    for tensor in copy.tensors.values():
        if tensor.numel() == SIDE * SIDE:
            tensor.fill_(9)  # what `complete` copies is overwritten
    assert copy.complete()
    deferred = {n for n, t in copy.tensors.items() if t.numel() > 1 and not (t == 9).all()}
    kept = {n for n, t in copy.tensors.items() if (t == 9).all()}
    assert kept == {"/model/2.weight"}, "nothing guards a parameter that no optimizer has"
    assert {"/model/0.weight", "/optimizers/0/state/0/exp_avg"} <= deferred


@pytest.mark.parametrize("change", ["in place", "another memory"])
def test_a_change_that_no_optimizer_made_is_found(training, change):
    copy = training.begin()
    weight = training.model[0].weight
    if change == "in place":
        with torch.no_grad():
            weight.add_(1)
    else:
        weight.data = weight.data + 1
    assert not copy.complete()


def test_a_step_without_the_optimizers_hook_is_found(training):
    copy = training.begin()
    assert copy.complete()
    training.copies.boundary()
    assert not copy.guarded()


def test_leaving_completes_the_copy(training):
    before = values(training.tensors())
    copy = training.begin()
    finishing = threading.Thread(target=training.copies.finish)
    finishing.start()
    assert copy.complete()
    assert copy.guarded()
    finishing.join(SECONDS)
    assert same(copy.tensors, before)


def copied_at_once(training) -> bool:
    before = values(training.tensors())
    copy = training.begin()
    at_once = copy.copied.is_set() and same(copy.tensors, before)
    copy.complete()
    training.copies.finish()
    return at_once


def test_without_hooks_everything_is_copied_at_once():
    training = Training()
    training.step()
    training.copies.boundary()
    assert copied_at_once(training)


def test_until_the_hooks_of_all_optimizers_ran_everything_is_copied_at_once():
    training = Training(optimizers=2)
    training.copies.watch(training.optimizers)
    for indexes, at_once in [((0,), True), ((0, 1), False), ((1,), True), ((0, 1), False)]:
        training.step(*indexes)
        training.copies.boundary()
        assert copied_at_once(training) == at_once
    training.copies.distrust()
    assert copied_at_once(training)


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_checkpoints_that_are_written_beside_training_hold_the_state_of_their_step(
    tmp_path, device
):
    training = Training(device=device)
    store = Checkpoints(tmp_path, keep=9, digest="d")
    store.watch(training.optimizers)
    states = {}
    for number in range(1, 9):
        training.step()
        assert store.boundary()
        if number in (2, 5, 8):
            states[number] = values(training.tensors())
            assert store.start(
                training.model, training.optimizers, local_step=number, global_step=1, facts={}
            )
        elif number in (4, 7):
            store.finish()
    store.finish()
    for number, state in states.items():
        other = Training(device=device)
        found = store._read(tmp_path / f"checkpoint-{number:010d}.json")
        store.load(found, other.model, other.optimizers)
        assert same(values(other.tensors()), state)


def test_a_discarded_checkpoint_is_reported_once_and_the_next_is_copied_at_once(tmp_path):
    training = Training()
    store = Checkpoints(tmp_path, keep=9, digest="d")
    store.watch(training.optimizers)
    training.step()
    assert store.boundary()
    start = {"global_step": 1, "facts": {}}
    # No optimizer's step follows.
    assert store.start(training.model, training.optimizers, local_step=1, **start)
    reports = [store.boundary()]
    store.finish()
    assert store.newest() is None
    reports += [store.boundary(), store.boundary()]
    assert reports.count(False) == 1, "at once, or at the boundary after"
    assert store.start(training.model, training.optimizers, local_step=2, **start)
    store.finish()
    assert store.newest().local_step == 2
