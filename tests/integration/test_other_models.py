"""A learner that restarts with another model than its job has: a real syncer, its link, a local checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.spec import Checkpoint
from diloco_testing.learners.linked import step_until
from diloco_testing.syncers.process import RealSyncer, make_spec
from diloco_worker import Learner

pytestmark = pytest.mark.slow


def model_of(width: int, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4, bias=bias))


def test_a_learner_that_restarts_with_another_model_is_refused_with_the_difference(
    tmp_path, enter, capfd
):
    spec = make_spec(learner_checkpoint=Checkpoint(every_steps=2, keep=2))
    with RealSyncer(tmp_path / "syncer", spec) as syncer:

        def join(model: nn.Module) -> tuple[Learner, torch.optim.Optimizer]:
            nonlocal state
            state = enter(spec, syncer.port)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            return Learner.connect(model, optimizer, connect_timeout_seconds=90), optimizer

        state = tmp_path
        model = model_of(16)
        learner, optimizer = join(model)
        with learner:
            step_until(lambda: [*state.glob("checkpoint-*.json")], learner, model, optimizer)
        for restarted in (False, True):
            if restarted:
                assert syncer.terminate() == 0
                syncer.start()
            capfd.readouterr()
            with pytest.raises(SystemExit) as stopped:
                join(model_of(24, bias=False))
            assert stopped.value.code == 78
            refusal = capfd.readouterr().err.splitlines()[-1]
            assert "eu/0 trains a different model than this job, which eu/0 initialized" in refusal
            for difference in (
                "parameter 2.bias is missing",
                "parameter 0.bias has shape [24] instead of [16]",
                "parameter 0.weight has shape [24, 8] instead of [16, 8]",
                "parameter 2.weight has shape [4, 24] instead of [4, 16]",
            ):
                assert refusal.count(difference) == 1, refusal
            # As the one who speaks, the one who is refused, and the one who initialized the job.
            assert refusal.count("eu/0") <= 3, refusal
        again, _ = join(model_of(16))
        with again:
            assert again.resumed, "the other model has not replaced its checkpoint"
