"""How `Learner.connect` ends where the job cannot be joined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.spec import RunSpec
from diloco_worker import Learner


def test_a_state_directory_that_cannot_be_written_is_not_a_permanent_refusal(
    tmp_path, monkeypatch, capsys
):
    spec = RunSpec(job="j", steps=1, fragments=1, interval=1, overlap=1, learners={"eu": 1})
    (tmp_path / "spec.json").write_text(spec.to_json())
    (tmp_path / "state" / "steps.jsonl").mkdir(parents=True)
    for name, value in {
        "DILOCO_JOB": "j",
        "DILOCO_LEARNER": "eu/0",
        "DILOCO_SYNCER": "127.0.0.1:1",
        "DILOCO_SPEC": str(tmp_path / "spec.json"),
        "DILOCO_STATE": str(tmp_path / "state"),
    }.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    with pytest.raises(SystemExit) as ended:
        Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ended.value.code == 1, "the supervisor restarts it"
    assert "steps.jsonl" in capsys.readouterr().err
