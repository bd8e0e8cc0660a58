"""The `diloco` command as a real process: what it prints where, and its exit codes."""

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_syncer.storage.model import export_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
EVERYTHING = ROOT / "tests/golden/everything.yaml"
EXAMPLE = ROOT / "examples/01-text/job.yaml"
OWN_LOOP = ROOT / "examples/02-own-loop/job.yaml"


def diloco(*arguments, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diloco_cli", *map(str, arguments)],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with the files of a complete run."""
    path = tmp_path / "runs/job"
    (path / "model").mkdir(parents=True)
    (path / "job.yaml").write_text(EVERYTHING.read_text())
    (path / "model/model.safetensors").write_bytes(b"tensors")
    (path / "model/model.json").write_text(
        json.dumps({"step": 5, "sha256": hashlib.sha256(b"tensors").hexdigest()})
    )
    return path


def test_a_valid_manifest_is_summarized_in_one_line(tmp_path):
    done = diloco("validate", EXAMPLE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{EXAMPLE}: stdlib-gpt is valid: 600 steps, 4 learners (eu 2, us 2), quorum 1, "
        "syncer in eu\n"
    )


def test_an_invalid_manifest_is_reported_on_standard_error_with_exit_code_2(tmp_path):
    done = diloco("validate", EXAMPLE, "--set", "spec.sync.quorum=5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{EXAMPLE}: 1 problem\n"
        "spec.sync.quorum: 5 is more than 4, the number of learners in all regions\n"
    )


def test_problems_are_json_when_asked_for(tmp_path):
    sets = ["--set", "spec.sync.quorum=5", "--set", "spec.steps=0"]
    done = diloco("validate", EXAMPLE, *sets, "-o", "json", cwd=tmp_path)
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["valid"] is False
    assert [problem.partition(":")[0] for problem in found["problems"]] == [
        "spec.steps",
        "spec.sync.quorum",
    ]


def test_the_usage_names_the_optional_directory_once(tmp_path):
    assert diloco("status", "--help", cwd=tmp_path).stdout.startswith(
        "Usage: diloco status [OPTIONS] [DIR]\n"
    )


def test_requirements_of_a_cluster_are_valid_and_reported(tmp_path):
    done = diloco("validate", OWN_LOOP, "--set", "spec.learner.podsPerLearner=2", cwd=tmp_path)
    assert done.returncode == 0
    assert "only in a cluster: spec.learner.podsPerLearner: 2" in done.stdout


def test_the_name_of_a_manifest_does_not_reach_the_terminal_as_controls(tmp_path):
    manifest = tmp_path / "job\x1b[31m.yaml"
    manifest.write_text(OWN_LOOP.read_text())
    done = diloco("validate", manifest, cwd=tmp_path)
    assert done.returncode == 0
    assert "/job\\u001b[31m.yaml: " in done.stdout


def test_run_refuses_jobs_that_need_a_cluster_before_anything_starts(tmp_path):
    done = diloco("run", OWN_LOOP, "--set", "spec.learner.podsPerLearner=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "\nspec.learner.podsPerLearner: 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "none.yaml"],
        ["validate"],
        ["nonsense"],
        ["validate", EXAMPLE, "--what"],
        ["validate", EXAMPLE, "-o", "xml"],
        ["export"],
        ["sample", "--tokens", "0"],
        ["status"],
        ["status", "none"],
        ["kill", "eu/0", "--dir", "none"],
        ["suspend"],
        ["resume", "--dir", "none"],
        ["report"],
        ["audit", "none"],
        ["chaos", EXAMPLE, "--kill-rate", "-1"],
        ["export", "--to", "x", "--dir", "none"],
    ],
    ids=lambda arguments: "-".join(map(str, arguments))[-30:],
)
def test_a_wrong_command_line_exits_with_2_and_no_traceback(tmp_path, arguments):
    done = diloco(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_command_in_a_group(tmp_path):
    done = diloco("--help", cwd=tmp_path)
    assert done.returncode == 0
    commands = done.stdout.partition("Start a training program:")[2]
    assert "..." not in commands, "a summary is truncated"
    assert set(re.findall(r"^  (\w+)  ", commands, re.M)) == {
        "new", "doctor", "validate", "run", "status", "kill", "suspend", "resume", "report",
        "export", "sample", "audit", "render", "crd", "certs", "logs", "experiment", "sim", "chaos",
        "replay", "tape",
    }  # fmt: skip


def test_version_is_that_of_the_package(tmp_path):
    done = diloco("--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"diloco {importlib.metadata.version('diloco')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_commands(tmp_path, monkeypatch, shell):
    monkeypatch.setenv("_DILOCO_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "diloco val")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "diloco val")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    done = subprocess.run(
        [Path(sys.executable).with_name("diloco")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "validate" in done.stdout
    assert "render" not in done.stdout


def test_a_manifest_can_come_from_standard_input(tmp_path):
    done = diloco("validate", "-", cwd=tmp_path, text=EXAMPLE.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("-: stdlib-gpt is valid")
    done = diloco("validate", "-", cwd=tmp_path, text="a: 1\n")
    assert done.returncode == 2
    assert done.stderr.startswith("-: ")


def test_kubectl_finds_the_command_as_its_plugin(tmp_path):
    program = Path(sys.executable).with_name("kubectl-diloco")
    done = subprocess.run([program, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"diloco {importlib.metadata.version('diloco')}\n"


def test_every_command_of_a_run_takes_its_directory_in_both_ways(tmp_path, run_dir):
    commands = {
        **{name: [name] for name in ("suspend", "resume", "status", "report", "audit", "sample")},
        **{"kill": ["kill", "eu/0"], "export": ["export", "--to", "out"]},
        **{"replay": ["replay"], "tape": ["tape", "show"]},
    }
    for name, command in commands.items():
        by_option = diloco(*command, "--dir", run_dir / "none", cwd=tmp_path)
        by_position = diloco(*command, run_dir / "none", cwd=tmp_path)
        assert f"{run_dir / 'none'}: not a run directory" in by_position.stderr, name
        assert by_position.stderr == by_option.stderr


def test_a_run_without_a_tape_is_neither_shown_nor_replayed(tmp_path, run_dir):
    shown = diloco("tape", "show", run_dir, cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert (
        f"{run_dir}: no tape; a run of this release writes it when the job starts" in shown.stderr
    )
    replayed = diloco("replay", run_dir, cwd=tmp_path)
    assert (replayed.returncode, replayed.stdout) == (2, "")
    assert str(run_dir) in replayed.stderr
    assert "Traceback" not in replayed.stderr


def test_the_only_run_is_the_default(tmp_path, run_dir):
    done = diloco("export", "--to", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/other/job.yaml").touch()
    done = diloco("export", "--to", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "several runs; give --dir one of runs/job, runs/other" in done.stderr


def test_export_copies_the_model_and_prints_its_digest(tmp_path, run_dir):
    done = diloco("export", "--to", "a/b", "-o", "json", "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(b"tensors").hexdigest()
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]
    assert (tmp_path / "a/b/model.safetensors").read_bytes() == b"tensors"


def test_export_writes_a_folder_for_other_libraries(tmp_path, run_dir):
    export_model(
        run_dir / "model", {"w": np.zeros(600, np.float32), "v": np.ones(9, np.float32)}, {}
    )
    options = ("--dtype", "bfloat16", "--shard-size", "1Ki")
    done = diloco("export", "--to", "out", *options, "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out/model.json").read_text())["files"]
    assert len(written) == 2
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        f"out/{name}" for name in written
    ]


def test_export_of_an_adapter_counts_what_it_leaves_out(tmp_path, run_dir):
    names = [f"q.lora_{kind}.default.weight" for kind in "AB"] + [f"buffer{n}" for n in range(9)]
    export_model(run_dir / "model", {name: np.zeros((2, 2), np.float32) for name in names}, {})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    done = diloco("export", "--to", "out", "--adapter", ".", "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert "no place for them: 9 tensors: buffer0, buffer1" in line
    assert line.endswith(", buffer7 and 1 more")


@pytest.mark.parametrize("size", ["5GB", "0", "-1", "many"])
def test_a_shard_size_that_is_no_quantity_is_refused(tmp_path, run_dir, size):
    done = diloco("export", "--to", "out", f"--shard-size={size}", "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 2
    assert f"--shard-size '{size}': expected a quantity of bytes, such as 5G" in done.stderr


def test_export_of_a_damaged_model_keeps_existing_files(tmp_path, run_dir):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_bytes(b"before")
    (run_dir / "model/model.safetensors").write_bytes(b"tensorz")
    done = diloco("export", "--to", "out", "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 1
    assert "SHA-256 is" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == b"before"


def test_status_prints_the_status_of_the_run_directory(tmp_path, run_dir):
    status = {
        "state": "Complete", "step": 5, "message": "done", "processes": [], "supervisor": None,
        "startTime": "2026-11-23T00:00:00Z",
    }  # fmt: skip
    (run_dir / "status.json").write_text(json.dumps(status))
    for arguments in (["status", run_dir], ["status", "--dir", run_dir], ["status"]):
        done = diloco(*arguments, "-o", "json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == status


def test_before_the_run_is_complete_there_is_no_model(tmp_path, run_dir):
    (run_dir / "model/model.json").unlink()
    for arguments in (["export", "--to", "out"], ["sample"]):
        done = diloco(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "no model yet" in done.stderr


def test_audit_exits_with_1_on_a_violation(tmp_path, run_dir):
    events = run_dir / "events.jsonl"
    start = {"time": "t", "epoch": 1, "event": "start", "fragments": 2, "interval": 2}
    events.write_text(json.dumps({**start, "quorum": 1, "steps": 5}) + "\n")
    done = diloco("audit", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    with events.open("a") as file:
        file.write(json.dumps({"time": "t", "epoch": 0, "event": "join"}) + "\n")
    done = diloco("audit", "-o", "json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["violations"]


def test_b03_no_control_character_of_a_fetched_file_reaches_the_terminal(tmp_path, run_dir):
    evil = "eu/0\nPassed: all is well\x1b[2J\x9b31m\u202e\u2028"
    member = {"learner": evil, "incarnation": 1, "step": 1, "steps": 1, "tokens": 1, "weight": 5}
    merge = {"event": "merge", "step": 1, "fragment": 0, "quorum": 1, "members": [member]}
    (run_dir / "events.jsonl").write_text(json.dumps({"time": "t", "epoch": 1, **merge}) + "\n")
    for flags in ([], ["-o", "json"]):
        done = diloco("audit", *flags, cwd=tmp_path)
        assert done.returncode == 1
        assert "2J" in done.stdout
        assert not any(control in done.stdout for control in "\x1b\x9b\u202e\u2028")
        assert not any(line.startswith("Passed") for line in done.stdout.split("\n"))
    assert any("Passed: all is well" in text for text in json.loads(done.stdout)["violations"])


def test_an_audit_without_a_journal_is_refused(tmp_path, run_dir):
    (run_dir / "events.jsonl").unlink(missing_ok=True)
    done = diloco("audit", cwd=tmp_path)
    assert (done.returncode, "events.jsonl: no such file" in done.stderr) == (2, True)


def test_validate_imports_only_what_it_needs(tmp_path):
    code = (
        "import sys; sys.argv = ['diloco', 'validate', sys.argv[1]]\n"
        "from diloco_cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        "print(sorted({'torch', 'grpc', 'matplotlib', 'numba', 'diloco_worker', 'diloco_syncer'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, EXAMPLE], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr


def test_the_simulator_needs_either_a_seed_or_a_range(tmp_path):
    done = diloco("sim", cwd=tmp_path)
    assert done.returncode == 2
    assert "give either --seed or --seeds" in done.stderr
