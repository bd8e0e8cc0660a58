"""Text from a finished model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from diloco.errors import EXIT_USAGE, ConfigError
from diloco_worker import sample
from diloco_worker.recipes import config as config_reader
from diloco_worker.recipes import gpt

CONFIG = {"layers": 1, "width": 16, "heads": 2, "context": 16}


@pytest.fixture
def directory(tmp_path):
    """The model directory of a complete job; its model has not learned much."""
    model = gpt.GPT(config_reader.read(gpt.Config, CONFIG), seed=3)
    with torch.no_grad():
        model.head.weight.mul_(20)  # far from uniform, so that temperature matters
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(json.dumps({"recipe": "gpt", "config": CONFIG, "step": 9}))
    return tmp_path


def written(directory, prompt=b"def ", **changed):
    given = {"tokens": 40, "temperature": 0.7, "seed": 1} | changed
    return bytes(sample.generate(sample.load(directory), prompt, **given))


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "diloco_worker.sample", *arguments],
        capture_output=True,
        timeout=280,
        check=False,
    )


def test_the_same_seed_gives_the_same_text(directory):
    assert written(directory) == written(directory)
    assert len(written(directory)) == 40


@pytest.mark.parametrize(
    "changed", [{"seed": 2}, {"temperature": 2.0}, {"prompt": b"class X"}, {"prompt": b""}]
)
def test_seed_temperature_and_prompt_each_change_the_text(directory, changed):
    assert written(directory) != written(directory, **changed)


def test_temperature_zero_selects_the_most_likely_byte(directory):
    assert written(directory, temperature=0, seed=1) == written(directory, temperature=0, seed=2)
    model = sample.load(directory)
    with torch.no_grad():
        logits = model(torch.tensor([list(b"\0def ")]))[0, -1]
    logits[0] = -torch.inf
    assert written(directory, temperature=0)[0] == logits.argmax().item()


def test_the_separator_of_files_is_never_written(directory):
    model = sample.load(directory)
    with torch.no_grad():
        model.head.weight.zero_()
    assert 0 not in bytes(sample.generate(model, b"", tokens=400, temperature=1.0, seed=1))


@pytest.mark.slow
def test_the_program_writes_prompt_and_text_to_standard_output(directory):
    done = run("--model", str(directory), "--prompt", "é", "--tokens", "30", "--seed", "1")
    assert done.returncode == 0, done.stderr
    text = written(directory, "é".encode(), tokens=30)
    assert done.stdout.decode() == "é" + text.decode(errors="replace") + "\n"


@pytest.mark.slow
def test_a_model_of_another_program_is_refused_with_a_message(directory):
    (directory / "model.json").write_text(json.dumps({"recipe": None, "config": {}}))
    done = run("--model", str(directory))
    assert done.returncode == EXIT_USAGE
    assert b"trained by a program of its own; only recipe gpt can be sampled" in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "model.json").unlink(), "no model.json; give the model/ directory"),
        (lambda d: (d / "model.json").write_text("{"), "model.json: "),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors: "),
        (lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors: "),
        (
            lambda d: (d / "model.json").write_text(
                json.dumps({"recipe": "gpt", "config": CONFIG | {"width": 32}})
            ),
            "size mismatch",
        ),
    ],
)
def test_missing_and_damaged_files_are_named(directory, damage, message):
    damage(directory)
    with pytest.raises(ConfigError, match=message):
        sample.load(directory)


@pytest.mark.parametrize("flag", ["--tokens=-1", "--temperature=-1", "--temperature=x", "--seed=a"])
def test_wrong_flags_are_a_usage_error(directory, flag):
    with pytest.raises(SystemExit) as caught:
        sample.parse([f"--model={directory}", flag])
    assert caught.value.code == EXIT_USAGE
