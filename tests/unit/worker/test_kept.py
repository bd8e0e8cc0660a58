"""`Learner.keep`: what is kept, what is refused, and what a checkpoint returns."""

from __future__ import annotations

import contextlib
import json
import math
import os

import numpy as np
import pytest
import torch
from torch import nn

from diloco.errors import ConfigError, DamagedError
from diloco_worker import Learner
from diloco_worker.trainer import kept as kept_module
from diloco_worker.trainer.checkpoint import Checkpoints
from diloco_worker.trainer.kept import Kept
from diloco_worker.trainer.trees import pack, unpack

FACTS = {"local_step": 1, "total_tokens": 2, "steps": [1], "tokens": [2]}


class Holder:
    """Returns the state that it was given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Broken(Holder):
    def state_dict(self):
        raise RuntimeError("no iterator yet")

    def load_state_dict(self, state):
        raise KeyError("epoch")


STATE = {
    "step": 3, "none": None, "rates": [0.5, math.inf], "order": (1, "a", True), 7: {"x": torch.arange(3)},
    "generator": torch.Generator().manual_seed(3).get_state(), "empty": torch.zeros(0),
    "a/b": torch.ones(2), "a": {"b": torch.zeros(2)}, ("k", 1): torch.tensor(2.0, dtype=torch.bfloat16),
}  # fmt: skip


def saved(directory, objects):
    kept = Kept()
    kept.add(objects)
    model = nn.Linear(2, 2)
    store = Checkpoints(directory, keep=1, digest="d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert store.start(
        model, [optimizer], local_step=1, global_step=2, facts=FACTS, kept=kept.capture()
    )
    store.finish()
    return store


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def test_a_state_comes_back_as_it_was_also_when_its_checkpoint_was_deleted(tmp_path):
    store = saved(tmp_path, {"loader": Holder(STATE), "ema": Holder({"w": torch.ones(2)})})
    other, kept = Holder(), Kept()
    kept.add({"loader": other})
    with contextlib.closing(store.kept(store.newest())) as entries:
        for path in tmp_path.iterdir():
            path.unlink()
        assert entries.local_step == 1
        assert "loader" in entries
        assert "other" not in entries
        kept.restore("loader", entries.read("loader"))
    assert same(other.state, STATE)


def test_a_state_is_read_into_host_memory_whatever_the_default_device_is(tmp_path):
    store = saved(tmp_path, {"loader": Holder(STATE)})
    with contextlib.closing(store.kept(store.newest())) as entries, torch.device("meta"):
        found = entries.read("loader")
    assert same(found, STATE)


def test_a_state_is_that_of_the_step_at_which_the_checkpoint_began(tmp_path):
    average = {"w": torch.ones(2), "order": [1, 2]}
    store = saved(tmp_path, {"ema": Holder(average)})
    average["w"].fill_(7)
    average["order"].append(3)
    with contextlib.closing(store.kept(store.newest())) as entries:
        assert same(entries.read("ema"), {"w": torch.ones(2), "order": [1, 2]})


def test_a_checkpoint_without_kept_objects_has_no_entries(tmp_path):
    store = saved(tmp_path, {})
    with contextlib.closing(store.kept(store.newest())) as entries:
        assert "loader" not in entries


def test_a_damaged_file_is_found_when_an_entry_is_read(tmp_path):
    store = saved(tmp_path, {"ema": Holder({"w": torch.ones(100)})})
    found = store.newest()
    with contextlib.closing(store.kept(found)) as entries:
        os.truncate(found.path, found.path.stat().st_size - 8)
        with pytest.raises(DamagedError):
            entries.read("ema")


def test_an_object_without_the_two_methods_is_refused():
    class Half:
        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match="rng is a Half without load_state_dict; expected"):
        Kept().add({"rng": Half()})
    with pytest.raises(TypeError, match="x is a int without state_dict and load_state_dict"):
        Kept().add({"x": 3})


def test_a_name_twice_is_refused_and_nothing_of_that_call_is_kept():
    kept = Kept()
    kept.add({"ema": Holder({})})
    with pytest.raises(ValueError, match="ema is kept already"):
        kept.add({"loader": Holder({}), "ema": Holder({})})
    assert list(kept.capture()) == ["ema"]


def test_names_and_numbers_have_limits(monkeypatch):
    for name in ("a/b", "", "n" * 65):
        with pytest.raises(ValueError, match="is not a Python name of at most 64"):
            Kept().add({name: Holder({})})
    monkeypatch.setattr(kept_module, "MAX_ENTRIES", 2)
    kept = Kept()
    kept.add({"a": Holder({})})
    with pytest.raises(ValueError, match="more than 2"):
        kept.add({"b": Holder({}), "c": Holder({})})


def looped():
    state = {}
    state["self"] = state
    return state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"rng": torch.Generator()}, "loader/rng is a Generator; only tensors and plain values"),
        ({"seen": {1, 2}}, "loader/seen is a set"),
        ({"t": torch.ones(2).to_sparse()}, "loader/t has dtype float32 and layout sparse_coo"),
        (looped(), "RecursionError"),
        (None, "returned None, as that of a Holder around what has no state"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named(state, reason):
    kept = Kept()
    kept.add({"ema": Holder({}), "loader": Holder(state)})
    with pytest.raises(ConfigError, match="the state of loader cannot be saved") as error:
        kept.capture()
    assert reason in str(error.value)


def test_an_object_that_fails_is_named():
    kept = Kept()
    kept.add({"loader": Broken()})
    with pytest.raises(
        ConfigError, match=r"the state of loader .*RuntimeError\('no iterator yet'\)"
    ):
        kept.capture()
    with pytest.raises(ConfigError, match=r"loader does not take its state .*KeyError\('epoch'\)"):
        kept.restore("loader", {})


@pytest.mark.parametrize(
    ("limit", "state"), [("MAX_TENSOR_BYTES", torch.zeros(30)), ("MAX_VALUE_BYTES", "x" * 120)]
)
def test_the_states_together_have_a_limit(monkeypatch, limit, state):
    monkeypatch.setattr(kept_module, limit, 200)
    kept = Kept()
    kept.add({"a": Holder({"x": state})})
    kept.capture()
    kept.add({"b": Holder({"x": state})})
    with pytest.raises(ConfigError, match="with b, the states have"):
        kept.capture()


def test_without_a_job_nothing_is_kept_but_mistakes_are_found():
    model = nn.Linear(1, 1)
    learner = Learner.connect(model, torch.optim.SGD(model.parameters()), standalone_steps=5)
    learner.keep(loader=Broken())
    with pytest.raises(ValueError, match="loader is kept already"):
        learner.keep(loader=Holder())
    with pytest.raises(TypeError, match="without"):
        learner.keep(other=object())
    learner.step(tokens=1)
    with pytest.raises(ValueError, match="before the first"):
        learner.keep(late=Holder())
    assert not learner.resumed


def test_numbers_of_numpy_are_saved_as_those_of_python():
    """A learning rate of numpy must not cost the local checkpoints."""
    packed = pack({"rate": np.float32(0.5), "step": np.int64(3), "best": np.bool_(True)}, {})
    assert unpack(packed, {}) == {"rate": 0.5, "step": 3, "best": True}
    assert json.dumps(packed)
    with pytest.raises(ConfigError, match=r"x is a longdouble; only tensors and plain values"):
        pack(np.longdouble(1), {}, "x")
