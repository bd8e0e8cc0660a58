"""Copies for a checkpoint are of one step, although most of them are made while training continues."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from diloco_worker.core import copy_budget
from diloco_worker.core.copy_budget import ATTEMPTS, SHARE, CopyBudget
from diloco_worker.trainer import checkpoint, copies
from diloco_worker.trainer.checkpoint import Checkpoints, pack
from diloco_worker.trainer.copies import Copies, Result

SECONDS = 60.0
SIDE = 160
"""A weight of this side is large enough to be deferred."""


class Watched(threading.Event):
    """`entered` is set when a thread waits; `timeouts` is for how long each of them would."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self.entered.set()
        return super().wait(SECONDS if timeout is None else timeout)


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


LONG_STEPS = CopyBudget(steps=(100 * SECONDS,))
"""Five percent of them is time enough for any copy."""


def test_the_next_optimizer_step_waits_for_copies_that_are_not_made_yet(training):
    training.copies.budget = LONG_STEPS
    before = values(training.tensors())
    copy = training.begin()
    copy.copied = Watched()
    stepping = threading.Thread(target=training.step)
    stepping.start()
    assert copy.copied.entered.wait(SECONDS)
    assert same(values(training.tensors()), before), "the step did not begin"
    assert copy.complete() is Result.COPIED
    stepping.join(SECONDS)
    training.copies.boundary()
    assert copy.guarded()
    assert same(copy.tensors, before)
    assert not same(values(training.tensors()), before)


def test_the_optimizer_waits_for_at_most_a_share_of_a_step_then_the_copy_is_abandoned(training):
    training.copies.budget = CopyBudget(steps=(0.4,))
    before = values(training.tensors())
    copy = training.begin()
    spent = copy.spent_seconds
    copy.copied = Watched()
    training.step()  # returns although nothing is copied
    assert copy.copied.timeouts == [pytest.approx(max(0.0, SHARE * 0.4 - spent))]
    assert not same(values(training.tensors()), before)
    assert copy.complete() is Result.ABANDONED
    training.copies.boundary()
    assert training.copies.wait_seconds > 0
    assert copy.guarded()
    assert training.copies.budget.abandoned == 1
    training.step()
    training.copies.boundary()
    assert training.copies.wait_seconds is None, "nothing was copied beside this step"


def test_optimizers_share_what_a_step_may_wait():
    training = Training(optimizers=2)
    training.copies.watch(training.optimizers)
    training.step()
    training.copies.boundary()
    training.copies.budget = CopyBudget(steps=(0.2,))
    copy = training.begin()
    copy.copied = Watched()
    training.step()
    assert len(copy.copied.timeouts) == 1, "the second does not wait for an abandoned copy"


def test_an_abandoned_copy_ends_with_the_piece_that_it_is_at(training, monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 1 << 10)
    pieces = []
    real = copies._copy_in_pieces

    def counted(tensor, copy):
        for _ in real(tensor, copy):
            pieces.append(tensor)
            if len(pieces) == 5:
                assert started.abandon()
            yield

    monkeypatch.setattr(copies, "_copy_in_pieces", counted)
    started = training.begin()
    assert started.complete() is Result.ABANDONED
    assert len(pieces) == 5


def test_a_copy_that_is_made_cannot_be_abandoned(training):
    copy = training.begin()
    assert copy.complete() is Result.COPIED
    assert not copy.abandon()


def test_pieces_of_any_tensor_make_the_whole_tensor(monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 1 << 10)
    for tensor in (
        torch.randn(37, 91), torch.randn(91, 37).t(), torch.randn(7000, dtype=torch.bfloat16),
        torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last), torch.ones(3000) > 0,
        torch.empty(0), torch.tensor(2.5), nn.Parameter(torch.randn(40, 40)),
    ):  # fmt: skip
        copy = torch.zeros(tensor.shape, dtype=tensor.dtype)
        assert len([*copies._copy_in_pieces(tensor, copy)]) == -(-tensor.nbytes // 1024) or not (
            tensor.is_contiguous()
        )
        assert torch.equal(copy, tensor)


def test_parameters_and_moments_are_deferred_and_nothing_else(training):
    copy = training.begin()
    for tensor in copy.tensors.values():
        if tensor.numel() == SIDE * SIDE:
            tensor.fill_(9)  # what `complete` copies is overwritten
    assert copy.complete() is Result.COPIED
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
    assert copy.complete() is Result.CHANGED


@pytest.mark.parametrize("change", [True, False])
def test_the_owner_of_a_part_counts_its_changes(change):
    part, owner = torch.ones(3), torch.zeros(6)
    copy, room = copies.Copy(), torch.zeros(3)
    copy.defer(part, room, owner)
    if change:  # as a DTensor: what it holds counts nothing
        owner.add_(1)
    assert copy.complete() is (Result.CHANGED if change else Result.COPIED)
    assert torch.equal(room, part)


def test_a_step_without_the_optimizers_hook_is_found(training):
    copy = training.begin()
    assert copy.complete() is Result.COPIED
    training.copies.boundary()
    assert not copy.guarded()


def test_leaving_completes_the_copy(training):
    before = values(training.tensors())
    copy = training.begin()
    finishing = threading.Thread(target=training.copies.finish)
    finishing.start()
    assert copy.complete() is Result.COPIED
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
    tmp_path, device, monkeypatch
):
    monkeypatch.setattr(copy_budget, "SHARE", 1e9)  # these steps are shorter than a thread's start
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


def until_idle(store):
    deadline = time.monotonic() + SECONDS
    while store.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_copy_that_is_always_too_slow_is_made_in_the_end_and_is_of_one_step(
    tmp_path, monkeypatch, caplog
):
    """The device delivers a piece only after the optimizer's step, unless the optimizer waits."""
    caplog.set_level("INFO")
    training, store = Training(), Checkpoints(tmp_path, keep=9, digest="d")
    store.watch(training.optimizers)
    real, stepped = copies._copy_in_pieces, threading.Event()

    def slow(tensor, copy):
        for _ in real(tensor, copy):
            stepped.wait(0.01 if store._copies.budget.abandoned == ATTEMPTS else SECONDS)
            yield

    monkeypatch.setattr(copies, "_copy_in_pieces", slow)
    states, due = {}, True
    for number in range(1, 40):
        stepped.clear()
        training.step()
        stepped.set()
        due |= not store.boundary()
        until_idle(store)
        if store.newest() is not None:
            break
        stepped.clear()
        if number > 1 and due and store.start(
            training.model, training.optimizers, local_step=number, global_step=1, facts={}
        ):  # fmt: skip
            states[number], due = values(training.tensors()), False
    assert len(states) == ATTEMPTS + 1
    assert caplog.text.count("is discarded: its copy was not made within") == 1
    found = store.newest()
    assert found.local_step == max(states)
    other = Training()
    store.load(found, other.model, other.optimizers)
    assert same(values(other.tensors()), states[found.local_step])
    assert "its copy stopped training for" in caplog.text, "the last attempt was waited for"


@pytest.fixture
def touching(tmp_path, monkeypatch):
    """A model whose first step was made, and checkpoints that touch memory for its copies."""
    monkeypatch.setattr(checkpoint, "UNTOUCHED_BYTES", 1)
    monkeypatch.setattr(copies, "TOUCHED_BYTES", 10_000)
    training, store = Training(), Checkpoints(tmp_path, keep=9, digest="d")
    store.watch(training.optimizers, training.model)
    training.step()
    return training, store


def start(training, store) -> bool:
    return store.start(training.model, training.optimizers, local_step=1, global_step=1, facts={})


def test_memory_for_copies_is_touched_before_the_first_checkpoint(touching, monkeypatch):
    training, store = touching
    monkeypatch.setattr(copies, "TOUCHING_SHARE", 1.0)
    touched = []
    real = copies._as_bytes

    def seen(tensor):
        touched.append(tensor.data_ptr())
        return real(tensor)

    monkeypatch.setattr(copies, "_as_bytes", seen)
    store.boundary()
    store._toucher.join(SECONDS)
    assert {tensor.data_ptr() for tensor in store._copies._memory.values()} == {*touched}
    assert store._copies.reserve(training.tensors() | dict(training.model.named_buffers())) == []
    assert start(training, store)
    store.finish()
    assert store.newest().local_step == 1


def test_a_checkpoint_does_not_wait_until_all_memory_is_touched(touching, monkeypatch):
    training, store = touching
    monkeypatch.setattr(copies, "TOUCHING_SHARE", 1e-9)
    store.boundary()
    toucher = store._toucher
    assert toucher.is_alive()
    before = values(training.tensors())
    assert start(training, store)
    assert not toucher.is_alive(), "nothing overwrites the copies"
    store.finish()
    other = Training()
    store.load(store.newest(), other.model, other.optimizers)
    assert same(values(other.tensors()), before)
