"""The names of a job are those of the user's modules, whatever parts of a model are wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from diloco_testing.learners.alone import alone
from diloco_worker.trainer.buffers import Watch
from diloco_worker.trainer.checkpoint import Checkpoints
from diloco_worker.trainer.layout import describe
from diloco_worker.trainer.wrappers import bare, plain_names, tensors_of


class Own(nn.Module):
    """Calls a module of its own `module`, as the wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.register_buffer("usage", torch.zeros(2))


def facts(model):
    """What the layout states of every tensor, and the tensors."""
    found = describe(model)
    named = (*found.trained, *found.frozen, *found.moving, *found.buffers)
    return [n.info for n in named], [id(n.tensor) for n in named]


def both(layer):
    return torch.compile(checkpoint_wrapper(DistributedDataParallel(layer)))


def both_the_other_way(layer):
    return checkpoint_wrapper(torch.compile(DistributedDataParallel(layer)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [torch.compile, DistributedDataParallel, nn.DataParallel, both, both_the_other_way]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_wrapped_part_has_the_names_of_the_model_itself(wrap, whole):
    model = nn.Sequential(Own(), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[2].requires_grad_(False)
    plain = facts(model)
    with alone():
        model[0], model[1] = wrap(model[0]), wrap(model[1])
        assert facts(wrap(model) if whole else model) == plain
    assert plain[0][0].name == "0.module.bias"
    assert {n for n, _ in tensors_of(model)} == {t.name for t in plain[0]}


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "wide": lambda: torch.zeros(3, dtype=torch.complex128),
    "meta": lambda: torch.zeros(3, device="meta"),
    "expanded": lambda: torch.zeros(1, 2).expand(3, 2),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_checkpoint_is_made_beside_buffers_that_each_learner_builds_for_itself(tmp_path, kind):
    def made(value):
        model = nn.Linear(3, 3)
        model.register_buffer("own", ODD[kind](), persistent=False)
        nn.init.constant_(model.weight, value)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    store = Checkpoints(tmp_path, keep=1, digest="d")
    assert store.start(*made(5.0), local_step=1, global_step=1, facts={})
    store.finish()
    model, optimizers = made(0.0)
    store.load(store.newest(), model, optimizers)
    assert bool((model.weight == 5).all())


def test_a_lazy_module_has_names_before_it_has_shapes():
    assert [n for n, _ in tensors_of(nn.LazyBatchNorm1d())] == [
        "weight",
        "bias",
        "num_batches_tracked",
    ]


class Adapter(nn.Module):
    """Calls a part of it as torch.compile does, beside a parameter of its own."""

    def __init__(self, part) -> None:
        super().__init__()
        self._orig_mod = part
        self.weight = nn.Parameter(torch.zeros(2))


def test_a_module_with_tensors_of_its_own_is_no_wrapper():
    model = nn.Sequential(Adapter(nn.Linear(2, 2, bias=False)))
    assert sorted(n for n, _ in tensors_of(model)) == ["0._orig_mod.weight", "0.weight"]


class Forwarding(nn.Module):
    """Hands out the attributes of the model inside, as PEFT's models do."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.base_model = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


@pytest.mark.slow  # to import the compiler takes a second
def test_a_model_around_a_compiled_one_keeps_its_own_names():
    model = Forwarding(torch.compile(nn.Linear(2, 1, bias=False)))
    assert bare(model) is model
    assert [n for n, _ in tensors_of(model)] == ["base_model.weight"]


@pytest.mark.slow
def test_a_layer_that_is_also_compiled_has_one_alias():
    model = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    model["fast"] = torch.compile(model["layer"])
    infos, _ = facts(model)
    assert [(t.name, t.aliases) for t in infos] == [
        ("fast.bias", ("layer.bias",)),
        ("fast.weight", ("layer.weight",)),
    ]


def test_a_module_of_the_user_keeps_its_name():
    names = plain_names(nn.Sequential(Own()))
    assert names("0.module.weight") == "0.module.weight"


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper])
def test_a_buffer_that_is_replaced_in_a_wrapped_part_is_noticed(wrap):
    own = Own()
    model = nn.Sequential(wrap(own))
    found = describe(model, moving=["*.usage"])
    watch = Watch(model, constant=(), moving=found.moving)
    assert watch.changed() == ""
    own.usage = torch.ones(2)
    assert "buffer 0.usage was replaced by another tensor" in watch.changed()
