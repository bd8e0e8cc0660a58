"""What a learner records under `diloco doctor`: nothing that it did not see, and never in a job."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco.spec import RunSpec
from diloco_local.doctor import NO_SYNCER
from diloco_worker import examined
from diloco_worker.examined import ExaminedTrainer
from diloco_worker.settings import LearnerSettings


@dataclass
class Batch:
    images: torch.Tensor


class Model(nn.Module):
    """Takes anything; computes from its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.weight.sum()


@pytest.fixture
def config(tmp_path):
    spec = RunSpec(job="j", steps=9, learners={"eu": 1}, fragments=1, interval=1, overlap=1)
    (tmp_path / "spec.json").write_text(spec.to_json())
    return LearnerSettings(
        job="j", learner="eu/0", syncer=NO_SYNCER, spec=tmp_path / "spec.json", examination=tmp_path / "record.json"
    )  # fmt: skip


def examination(config, model=None):
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ExaminedTrainer(config, model, [optimizer]), model, optimizer


def record(config):
    return json.loads(config.examination.read_text())


def inputs(config, *args, **kwargs):
    """The digest of one step's inputs."""
    trainer, model, _ = examination(config)
    model(*args, **kwargs)
    trainer.step(tokens=1, loss=1.0)
    return record(config)["steps"][0]["inputs"]


def test_inputs_that_were_read_completely_have_a_digest(config):
    mask = torch.ones(3)
    known = inputs(config, {"mask": [mask]}, scale=2.0, names=["a"], cache=None)
    assert known == inputs(config, {"mask": [mask.clone()]}, scale=2.0, names=["a"], cache=None)
    assert known != inputs(config, {"mask": [mask]}, scale=2.0, names=["b"], cache=None)
    assert known != inputs(config, {"mask": [mask + 1]}, scale=2.0, names=["a"], cache=None)


@pytest.mark.parametrize(
    "rest",
    [
        Batch(torch.zeros(2)), [[[[[torch.zeros(2)]]]]], object(), torch.zeros(2, device="meta"),
        [torch.zeros(1)] * examined.MOST_VALUES, torch.zeros(200),
    ],
    ids=["object", "deep", "unknown", "unreadable", "many", "large"],
)  # fmt: skip
def test_inputs_of_which_a_part_was_not_read_have_no_digest(config, monkeypatch, rest):
    monkeypatch.setattr(examined, "MOST_BYTES", 700)
    if isinstance(rest, list) and len(rest) > 1:
        monkeypatch.setattr(examined, "MOST_BYTES", 1 << 20)
    assert inputs(config, torch.ones(3), rest) == ""
    assert inputs(config, rest, torch.ones(3)) == ""


def test_an_unknown_input_concerns_its_own_step_only(config):
    trainer, model, _ = examination(config)
    for batch in (Batch(torch.zeros(2)), torch.zeros(2)):
        model(batch)
        trainer.step(tokens=1, loss=1.0)
    first, second = record(config)["steps"]
    assert (first["inputs"], bool(second["inputs"])) == ("", True)


def test_the_loss_of_a_step_is_read_in_it_whatever_its_device(config, monkeypatch):
    """A tensor on a GPU would be read one call later, that of the third step never."""
    read = []
    monkeypatch.setattr(examined.LossReader, "read", lambda self, loss: read.append(loss))
    trainer, _, _ = examination(config)
    trainer.step(tokens=1, loss=torch.tensor([2.0], requires_grad=True))
    assert (read, type(read[0])) == ([2.0], float)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_a_scripted_model_is_examined_without_its_inputs(config):
    scripted = torch.jit.script(nn.Linear(2, 1))
    trainer, model, _ = examination(config, scripted)
    model(torch.ones(2)).sum().backward()
    trainer.step(tokens=1, loss=1.0)
    assert record(config)["steps"][0]["inputs"] == ""


def test_a_functional_step_is_examined_and_changes_no_parameter(config):
    trainer, model, _ = examination(config, nn.Linear(2, 1))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (batch,)).sum()

    for _ in range(examined.STEPS):
        gradients = torch.func.grad(loss)(parameters, torch.ones(1, 2))
        parameters = {name: p - gradients[name] for name, p in parameters.items()}
        trainer.step(tokens=1)
    assert [step["inputs"] for step in record(config)["steps"]] == [""] * examined.STEPS
    assert record(config)["trained"] is False


def test_the_pages_of_files_are_recorded_apart_from_the_memory(config):
    examination(config)
    found = record(config)
    assert 0 < found["sharedBytes"] < found["peakBytes"]


def test_that_a_program_reads_resumed_is_recorded(config):
    trainer, _, _ = examination(config)
    trainer.step(tokens=1, loss=1.0)
    assert record(config)["readsResumed"] is False
    assert trainer.resumed is False
    trainer.step(tokens=1, loss=1.0)
    assert record(config)["readsResumed"] is True


def test_an_examination_in_a_job_is_refused(config):
    """In an image or in learner.env, the variable would end each learner after three steps."""
    with pytest.raises(
        ConfigError, match=r"DILOCO_SYNCER is 10\.0\.0\.7:7070; expected it only under diloco"
    ):
        examination(replace(config, syncer="10.0.0.7:7070"))
    assert not config.examination.exists()


def test_an_examination_states_itself_in_the_log(config, caplog):
    examination(config)
    assert "eu/0: an examination of diloco doctor: 3 steps" in caplog.text


# ------------------------------------------------------------ what the program does to its parameters after `connect`


def steps(trainer, model, optimizer, *, at, change):
    """Three steps of training; before the one of this number, the program changes its model."""
    for number in range(1, examined.STEPS + 1):
        if number == at:
            change(model)
        model(torch.ones(2)).backward()
        optimizer.step()
        trainer.step(tokens=1, loss=1.0)


class TwoLayers(nn.Module):
    """One is trained, the other frozen; a third may be put in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.base = nn.Linear(2, 1), nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x).to(self.head.weight.dtype)).sum()


def replace_head(model):
    model.head = nn.Linear(2, 1)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_model_that_is_converted_is_refused_before_its_optimizer_fails(config, capsys, at):
    trainer, model, optimizer = examination(config, TwoLayers())
    with pytest.raises(SystemExit) as ended:
        steps(trainer, model, optimizer, at=at, change=lambda model: model.head.to(torch.bfloat16))
    assert ended.value.code == 78
    error = capsys.readouterr().err
    assert error.startswith(
        "diloco: eu/0: the element type of parameter head.weight is bfloat16, and was float32"
    )
    assert len(record(config)["steps"]) == at - 1


@pytest.mark.parametrize("at", [1, 3])
def test_a_layer_that_is_replaced_is_refused_in_the_last_step(config, capsys, at):
    trainer, model, optimizer = examination(config, TwoLayers())
    with pytest.raises(SystemExit) as ended:
        steps(trainer, model, optimizer, at=at, change=replace_head)
    assert ended.value.code == 78
    error = capsys.readouterr().err
    assert "in the place of parameters head.weight, head.bias, so that no merge has what" in error
    assert len(record(config)["steps"]) == examined.STEPS - 1, (
        "the diagnosis must see that it ended"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.base.requires_grad_(True), "a gradient is computed for parameters base.weight, base.bias"),
        (lambda model: nn.init.zeros_(model.base.weight), "frozen parameter base.weight was written while training"),
        (lambda model: model.add_module("more", nn.Linear(2, 1)), "computed for parameters more.weight, more.bias"),
        (lambda model: model.head.register_parameter("bias", None), "has removed parameter head.bias from the model"),
    ],
    ids=["unfrozen", "written", "added", "removed"],
)  # fmt: skip
def test_what_else_happens_to_parameters_is_recorded(config, change, sentence):
    trainer, model, optimizer = examination(config, TwoLayers())
    steps(trainer, model, optimizer, at=2, change=change)
    assert sentence in record(config)["changedBuffers"]


def test_parameters_with_which_no_job_can_begin_are_refused_by_name(config):
    model = Model()
    model.mask = nn.Parameter(torch.full((2, 2), -torch.inf))
    with pytest.raises(ConfigError, match=r"this learner are not finite: NaN or Inf in mask$"):
        examination(config, model)
    examination(replace(config, examination_step=5), model)  # it would get those of the job
