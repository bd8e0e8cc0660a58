"""Frozen parameters through real processes: a syncer, links, the library in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from diloco.rpc import channels
from diloco_testing.learners.linked import train
from diloco_testing.syncers.process import RealSyncer, make_spec, until
from diloco_worker import Learner
from diloco_worker.fetch import fetch_model

pytestmark = pytest.mark.slow


class Tuned(nn.Module):
    """A frozen base of 131 KB and a small trained head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(8, 4096, bias=False, dtype=torch.float32).requires_grad_(False)
        self.head = nn.Linear(4096, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(inputs))


class Tied(nn.Module):
    """A frozen embedding that is the output layer too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8).requires_grad_(False)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(inputs * self.scale) + self.shift


Join = Callable[..., tuple[Learner, nn.Module, torch.optim.Optimizer]]


@pytest.fixture
def join(enter) -> Join:
    """Joins a job as a learner with a model."""

    def joined(syncer, model, name="eu/0"):
        enter(syncer.spec, syncer.port, name=name)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1e-5)  # larger ones diverge on 4096 inputs
        return Learner.connect(model, optimizer, connect_timeout_seconds=90), model, optimizer

    return joined


def refused(join: Join, syncer: RealSyncer, model: nn.Module) -> int:
    with pytest.raises(SystemExit) as stopped:
        join(syncer, model, name="eu/1")
    return stopped.value.code


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_another_frozen_base_is_refused_by_name_also_after_a_restart_of_the_syncer(
    tmp_path, join, capfd
):
    with RealSyncer(tmp_path / "syncer", make_spec()) as syncer:
        first, *_ = join(syncer, Tuned(0))
        for restarted in (False, True):
            if restarted:
                assert syncer.terminate() == 0
                syncer.start()
                assert [t.name for t in syncer.status().tensors] == ["head.bias", "head.weight"]
            assert refused(join, syncer, Tuned(1)) == 78
            printed = capfd.readouterr().err
            assert "eu/1 trains a different model than this job, which eu/0 initialized" in printed
            assert "frozen parameter base.weight has other values" in printed
        other, model, _ = join(syncer, Tuned(0), name="eu/2")
        assert torch.equal(model.base.weight, Tuned(0).base.weight)
        other.close()
        first.close()


def test_with_keep_the_syncer_has_no_byte_of_the_base_and_the_export_fits_on_top_of_it(
    tmp_path, join
):
    with RealSyncer(tmp_path / "syncer", make_spec(steps=4)) as syncer:
        learner, model, optimizer = join(syncer, Tuned(0))
        while not learner.done:
            train(learner, model, optimizer)
        until(lambda: syncer.status().state == "Complete", expected="the job is complete")
        base_bytes = 4 * model.base.weight.numel()
        assert bytes_below(syncer.dir / "model") < base_bytes / 4
        assert bytes_below(syncer.dir / "snapshots") < base_bytes
        exported = load_file(syncer.dir / "model" / "model.safetensors")
        described = json.loads((syncer.dir / "model" / "model.json").read_text())
        assert [t["name"] for t in described["frozen"]] == ["base.weight"]
        complete = Tuned(0)
        missing, unexpected = complete.load_state_dict(exported, strict=False)
        assert (missing, unexpected) == (["base.weight"], [])
        assert torch.equal(complete.head.weight, exported["head.weight"])
        assert not torch.equal(complete.head.weight, Tuned(0).head.weight), "it was trained"


def test_with_ship_a_learner_gets_the_base_and_the_export_has_tied_tensors_under_every_name(
    tmp_path, join
):
    with RealSyncer(tmp_path / "syncer", make_spec(steps=4, frozen="Ship")) as syncer:
        first, model, optimizer = join(syncer, Tied(0))
        second, other, _ = join(syncer, Tied(1), name="eu/1")
        assert torch.equal(other.embed.weight, model.embed.weight), "downloaded"
        second.close()
        with channels.channel(syncer.endpoint, tls=None, purpose="bulk") as channel:
            seen = fetch_model(channel, status=syncer.status(), spec=syncer.spec)
        assert seen.keys() == model.state_dict().keys(), "the evaluator"
        while not first.done:
            train(first, model, optimizer)
        until(lambda: syncer.status().state == "Complete", expected="the job is complete")
        Tied(1).load_state_dict(load_file(syncer.dir / "model" / "model.safetensors"))
