"""Digests of frozen parameters."""

from __future__ import annotations

import pytest
import torch
import xxhash
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from diloco.errors import ConfigError, UnavailableError
from diloco.spec import RunSpec
from diloco_worker.trainer import frozen, layout
from diloco_worker.trainer.frozen import digest, with_digests
from diloco_worker.trainer.layout import describe
from diloco_worker.trainer.replica import Replica
from diloco_worker.trainer.wrappers import tensors_of


def test_a_digest_covers_dtype_shape_and_every_bit_of_the_values():
    values = torch.arange(12, dtype=torch.float32)
    other = values.clone()
    other[11] = torch.nextafter(other[11], torch.tensor(99.0))
    found = {
        digest(each)
        for each in (
            values, other, values.reshape(3, 4), values.reshape(4, 3), values.bfloat16(), values.half(),
            values.view(torch.int32), values[:11], torch.zeros(0), torch.zeros(0, 2), -torch.zeros(1), torch.zeros(1),
        )
    }  # fmt: skip
    assert len(found) == 12
    assert digest(values.clone()) == digest(values)
    assert digest(nn.Parameter(values, requires_grad=False)) == digest(values)


def test_a_digest_is_what_it_was_in_the_first_release():
    """It is in snapshots, and learners of two versions compare theirs."""
    raw = b"bfloat16 [2];" + b"\x80\x3f\x00\x40"
    assert digest(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == xxhash.xxh3_64_hexdigest(raw)
    assert xxhash.xxh3_64_hexdigest(raw) == "ea096224499d830c"


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int64,
     torch.float8_e4m3fn, torch.complex64],
)  # fmt: skip
def test_a_tensor_is_read_in_pieces_and_in_any_layout(monkeypatch, dtype):
    values = torch.arange(30).reshape(5, 6).to(dtype)
    whole = digest(values)
    monkeypatch.setattr(layout, "PIECE_BYTES", 16)
    assert digest(values) == whole
    assert digest(values.t().contiguous().t()) == whole, "a view that is not contiguous"
    assert digest(values[2:3].reshape(6)[3]) == digest(values[2, 3].clone()), "a scalar"


def test_quantized_weights_have_the_digest_of_the_tensors_that_hold_them():
    values, scales = torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)
    base = digest(TwoTensor(values, scales))
    assert base == digest(TwoTensor(values.clone(), scales.clone()))
    others = [
        TwoTensor(values, scales + 1),
        TwoTensor(scales, values),
        TwoTensor(values[:1], scales[:1]),
    ]
    assert len({base, *map(digest, others)}) == 4


def test_a_quantized_base_stays_with_its_learner_and_no_job_can_store_it():
    model = nn.Linear(2, 2)
    quantized = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    model.base = nn.Parameter(quantized, requires_grad=False)
    found = describe(model)
    assert [t.name for t in with_digests(found.frozen)] == ["base"]
    assert "base" not in dict(tensors_of(model)), "no checkpoint can hold it"
    with pytest.raises(ConfigError, match=r"constant base is a TwoTensor, which the job cannot"):
        found.constants(ship_frozen=True)


def test_a_tensor_whose_bytes_cannot_be_read_is_named(monkeypatch):
    def unsupported(tensor: torch.Tensor) -> str:
        raise NotImplementedError("aten.view.dtype")

    monkeypatch.setattr(frozen, "digest", unsupported)
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"the parameter bias .* cannot be read as bytes: aten"):
        with_digests(describe(model).frozen)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    ],
)
def test_too_little_memory_to_read_a_tensor_is_not_a_permanent_refusal(monkeypatch, error):
    def lacking(tensor: torch.Tensor) -> str:
        raise error

    monkeypatch.setattr(frozen, "digest", lacking)
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with pytest.raises(UnavailableError, match="the parameter bias"):
        with_digests(describe(model).frozen)


@pytest.mark.parametrize(
    ("where", "stored", "kept"), [("Keep", [], 2), ("Ship", ["bias", "weight"], 0)]
)
def test_the_job_stores_frozen_parameters_only_if_it_is_asked_to(where, stored, kept):
    model = nn.Linear(4, 4).requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(4))
    replica = Replica(
        model, RunSpec(job="j", steps=1, fragments=1, interval=1, overlap=1, frozen=where)
    )
    assert [t.name for t in replica.layout.constants] == stored
    assert len(replica.layout.frozen) == kept
    assert all(t.digest for t in replica.layout.frozen)
    assert replica.shared.layout == replica.layout, "the link states the same"
    replica.close()


def test_a_large_base_is_announced(monkeypatch, capsys):
    model = nn.Linear(4, 4).requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(4))
    with_digests(describe(model).frozen)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(frozen, "ANNOUNCED_BYTES", 80)
    with_digests(describe(model).frozen)
    assert "reading 0 GiB of frozen parameters" in capsys.readouterr().err
