"""What the ranks of a learner hold of its tensors, and how they must fit together."""

from __future__ import annotations

import json

import pytest
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from diloco.errors import ConfigError
from diloco_worker.trainer.shards import described, shares

MESH = "a DTensor with placements (S(0)) on a mesh of [2]"


def text(lo, shape, *, placed: str = MESH, whole=(10, 4), name: str = "w") -> str:
    info = {
        "name": name, "shape": [*whole], "dtype": "float32", "embedding": False, "aliases": [], "digest": "",
        "buffer": False,
    }  # fmt: skip
    entry = {"info": info, "box": [lo, shape], "placed": placed, "same": False}
    return json.dumps({"merged": [entry], "frozen": [], "buffers": []})


def test_shards_that_are_the_whole_tensor_are_accepted():
    ranks = [text([0, 0], [5, 4]), text([5, 0], [5, 4])]
    found = shares(ranks, [1])[1]["w"]
    assert found.held == found.copied
    assert found.held.lo == (5, 0)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (text([5, 0], [4, 4]), r"w is a DTensor .* and its shards have 36 of its 40 values"),
        (text([4, 0], [6, 4]), r"w is a DTensor .*, and the shard \[0:5, 0:4\] and .* overlap"),
        (
            text([5, 0], [5, 4], placed="a DTensor with placements (S(0)) on a mesh of [1, 2]"),
            r"w is a DTensor .* mesh of \[2\] in rank 0, and .* mesh of \[1, 2\] in rank 1",
        ),
        (text([0, 0], [10, 4], placed="a plain tensor"), "and a plain tensor in rank 1"),
        (text([5, 0], [5, 4], name="v"), "parameter w is missing, parameter v is not part"),
    ],
)
def test_meshes_and_models_that_differ_between_ranks_are_refused(other, why):
    for rank in range(2):
        with pytest.raises(ConfigError, match=why):
            shares([text([0, 0], [5, 4]), other], [rank])


def test_the_first_fsdp_is_refused_by_name():
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    model = nn.ModuleDict({"inner": wrapped})
    with pytest.raises(ConfigError, match=r"expected fully_shard\(model\), the second FSDP"):
        described(model, moving=())
