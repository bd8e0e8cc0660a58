"""The recipes of examples/ that need more than this package, as their READMEs start them, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_testing.local.run_process import CLI

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # of the libraries
]  # fmt: skip

EXAMPLES = Path(__file__).parents[2] / "examples"


def need(*libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def run(*command: object, **environment: str) -> str:
    """Standard output of a command that must succeed; a run that hangs is killed with its supervisor."""
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(argument) for argument in command], env={**os.environ, **quiet, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, to: Path) -> Path:
    """A copy of an example, which may write beside its files."""
    shutil.copytree(EXAMPLES / name, to, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def job(folder: Path, *changes: str, file: str = "job.yaml") -> Path:
    """The run directory of an example's job that is complete, and whose merges are correct."""
    sets = [part for change in changes for part in ("--set", change)]
    to = folder.parent / "run"
    run(*CLI, "run", folder / file, "--dir", to, *sets)
    assert "Passed" in run(*CLI, "audit", "--dir", to)
    return to


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "eval.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def score(folder: Path, run_dir: Path, **environment: str) -> float:
    """The loss of the exported model."""
    model = run_dir / "model/model.safetensors"
    return float(json.loads(run(sys.executable, folder / "eval.py", model, **environment))["loss"])


def test_experts_train_alone_and_are_about_equally_busy(tmp_path):
    line = run(sys.executable, EXAMPLES / "06-experts/train.py", STEPS="50").splitlines()[-1]
    found = re.fullmatch(r"step 50: loss ([\d.]+), busiest expert (\d+)%", line)
    assert found, line
    assert float(found[1]) < 3.2  # a guess has ln 256 = 5.5
    assert int(found[2]) < 60  # without the balancing loss, one expert may get all


def test_a_tokenizer_is_trained_on_a_folder_of_text_and_its_tokens_are_trained_on(tmp_path):
    need("tokenizers")
    folder, text = example("07-tokenizer", tmp_path / "tokenizer"), tmp_path / "text"
    (text / "below").mkdir(parents=True)
    (text / ".hidden").write_text("secret " * 1000)
    (text / "picture").write_bytes(b"\xff\xfe" * 1000)
    for number in range(3):
        (text / f"below/{number}.txt").write_text("Ein Text aus Wörtern, und noch ein Text. " * 200)
    printed = run(sys.executable, folder / "prepare.py", text)
    assert re.fullmatch(
        r"validation: \d+ tokens, [\d.]+ .*\ntrain: \d+ tokens, [\d.]+ .*\n", printed
    )
    vocabulary = json.loads((folder / "data/tokenizer.json").read_text())["model"]["vocab"]
    assert "ĠText" in vocabulary
    assert "secret" not in vocabulary
    line = run(sys.executable, folder / "train.py", STEPS="50").splitlines()[-1]
    assert float(line.removeprefix("step 50: loss ")) < 4.0  # of a repeated sentence
    shutil.rmtree(text / "below")
    done = subprocess.run(
        [sys.executable, folder / "prepare.py", text], capture_output=True, text=True
    )
    assert (done.returncode, "0 files of text, expected two or more" in done.stderr) == (1, True)


def test_a_learner_of_two_ranks_trains_alone_and_unknown_settings_of_its_region_are_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder = example("08-ranks", tmp_path / "ranks")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    shown = run(*torchrun, folder / "train.py", STEPS="50").splitlines()
    assert shown[0] == "FSDPModel on 2 ranks, 16 windows per step"
    assert float(shown[-1].removeprefix("step 50: loss ")) < 3.2  # a guess has ln 256 = 5.5
    spec = importlib.util.spec_from_file_location("ranks", folder / "train.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    for config, sentence in (
        (
            {"shards": 2},
            "unknown keys ['shards'], expected some of ['sharding', 'batch', 'slowdown']",
        ),
        ({"sharding": "tp"}, "sharding is 'tp', expected ddp or fsdp"),
        ({"batch": 5}, "batch is 5, expected a multiple of 2 ranks"),
        ({"slowdown": 0.5}, "slowdown is 0.5, expected 1 or more"),
    ):
        with pytest.raises(SystemExit, match=re.escape(f"regions[].config: {sentence}")):
            program.Config.of(config, 2)


def test_a_vision_transformer_trains_alone():
    environment = {"MODEL": "vit", "STEPS": "150"}
    line = run(sys.executable, EXAMPLES / "03-images/train.py", **environment).splitlines()[2]
    assert float(line.removeprefix("step 150: loss ")) < 3.3  # a guess has ln 36 = 3.58


@pytest.mark.slow_tier
@pytest.mark.parametrize(
    ("name", "manifest", "better"),
    [
        ("06-experts", "job.yaml", 1.0),
        ("07-tokenizer", "job.yaml", 0.5),
        ("03-images", "job-vit.yaml", 0.1),
    ],
)
def test_two_learners_train_a_recipe_and_its_eval_scores_the_model(
    tmp_path, name, manifest, better
):
    folder = example(name, tmp_path / name)
    if name == "07-tokenizer":
        need("tokenizers")
        run(sys.executable, folder / "prepare.py")
    steps = 60 if name != "03-images" else 200
    run_dir = job(
        folder, f"spec.steps={steps}", "spec.sync.quorum=2", f"spec.evaluation.everySteps={steps}", file=manifest,
    )  # fmt: skip
    own = {"MODEL": "vit"} if name == "03-images" else {}
    assert score(folder, run_dir, **own) < losses(run_dir)[0] - better


@pytest.mark.slow_tier
def test_learners_of_different_sharding_batch_size_and_speed_train_one_model(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder = example("08-ranks", tmp_path / "ranks")
    changes = ("spec.steps=40", "spec.sync.quorum=2", "spec.evaluation.everySteps=40")
    run_dir = job(folder, *changes)
    assert score(folder, run_dir) < 4.0  # a guess has ln 256 = 5.5
    shapes = {
        "eu": "DistributedDataParallel on 2 ranks, 16 windows per step",
        "us": "FSDPModel on 2 ranks, 8 windows per step",
    }
    seconds = {}
    for region, windows in (("eu", 16), ("us", 8)):
        assert shapes[region] in (run_dir / f"logs/{region}-0.log").read_text()
        text = (run_dir / f"learners/{region}-0/steps.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert {line["tokens"] for line in lines} == {windows * 64}
        seconds[region] = statistics.median(line["seconds"] for line in lines)
    assert seconds["us"] > 1.3 * seconds["eu"]
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    members = [m["learner"] for e in events if e["event"] == "merge" for m in e["members"]]
    assert members.count("eu/0") == members.count("us/0") > 10


@pytest.mark.slow_tier
def test_an_adapter_that_two_learners_trained_is_exported_alone_and_merged(tmp_path):
    need("transformers", "peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = example("05-lora", tmp_path / "lora")
    run(sys.executable, folder / "base.py", STEPS="60")
    run_dir = job(folder, "spec.steps=100", "spec.sync.quorum=2", "spec.evaluation.everySteps=100")
    tensors = load_file(run_dir / "model/model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == 45056, "only the adapter"
    stored = max(path.stat().st_size for path in (run_dir / "snapshots").iterdir())
    assert stored < 200_000 < (folder / "base/model.safetensors").stat().st_size

    options = ("--dir", run_dir, "--adapter", folder / "adapter")
    run(*CLI, "export", "--to", tmp_path / "peft", *options)
    run(*CLI, "export", "--to", tmp_path / "merged", *options, "--merge-into", folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    for name, value in tensors.items():
        assert torch.equal(loaded.state_dict()[name], value), name
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(32, 96)[None]
    torch.testing.assert_close(
        merged(input_ids=ids).logits, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )
    assert score(folder, run_dir) < losses(run_dir)[0] - 0.05
