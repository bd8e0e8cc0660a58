"""A model as a checkpoint of torch.distributed.checkpoint: what the real `load` reads from it, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from diloco.errors import ConfigError, StorageError
from diloco_local.dcp_export import export_dcp
from diloco_syncer.storage.model import export_model


def make_model() -> nn.Sequential:
    """With a buffer of integers, and a dimension that two ranks cannot halve."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that is complete."""
    tensors = {name: tensor.numpy().copy() for name, tensor in make_model().state_dict().items()}
    export_model(tmp_path / "run" / "model", tensors, {"job": "j", "step": 600})
    return tmp_path / "run"


SHARDED = """
import sys
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[1])
from test_dcp_export import make_model

rank = int(sys.argv[4])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
model = make_model()
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
state = model.state_dict()
checkpoint.load(state, checkpoint_id=sys.argv[2])
model.load_state_dict(state)
for name, expected in make_model().state_dict().items():
    found = model.state_dict()[name]
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    assert torch.equal(found, expected), name
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_load_of_torch_reads_it_into_a_plain_and_into_a_sharded_model(run, tmp_path):
    stated = export_dcp(run, tmp_path / "to")
    assert stated == json.loads((tmp_path / "to/model.json").read_text())
    assert (stated["step"], sorted(stated["files"])) == (600, [".metadata", "__0_0.distcp"])
    model = make_model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    state = model.state_dict()
    with pytest.warns(UserWarning, match="in a single process"):
        checkpoint.load(state, checkpoint_id=tmp_path / "to", no_dist=True)
    for name, expected in make_model().state_dict().items():
        assert torch.equal(state[name], expected)
    arguments = [str(Path(__file__).parent), str(tmp_path / "to"), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, *arguments, str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error


def test_what_cannot_be_exported_is_refused(run, tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / ".metadata").touch()
    with pytest.raises(ConfigError, match="to: has files; give an empty directory"):
        export_dcp(run, tmp_path / "to")
    export_model(tmp_path / "lora/model", {"a": np.float32([1])}, {"frozen": [{"name": "base"}]})
    with pytest.raises(ConfigError, match="lacks the frozen tensors"):
        export_dcp(tmp_path / "lora", tmp_path / "other")
    (run / "model/model.safetensors").write_bytes(b"x")
    with pytest.raises(StorageError, match="SHA-256 is"):
        export_dcp(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_writer_that_fails_is_an_error_with_its_last_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match=r"to: torch\.distributed\.checkpoint: it ended with 1"):
        export_dcp(run, tmp_path / "to")
