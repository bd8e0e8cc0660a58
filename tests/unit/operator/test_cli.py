"""The `diloco` command as a real process: what it prints where, and its exit codes."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EVERYTHING = ROOT / "tests/golden/everything.yaml"
EXAMPLE = ROOT / "examples/01-text/job.yaml"


def diloco(*words, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diloco_operator.cli", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def run_dir(tmp_path):
    """A run that is complete, as far as files go."""
    path = tmp_path / "runs/job"
    (path / "model").mkdir(parents=True)
    (path / "job.yaml").write_text(EVERYTHING.read_text())
    (path / "model/model.safetensors").write_bytes(b"tensors")
    (path / "model/model.json").write_text(
        json.dumps({"step": 5, "sha256": hashlib.sha256(b"tensors").hexdigest()})
    )
    return path


def test_a_good_manifest_is_summed_up_in_one_line(tmp_path):
    done = diloco("validate", EXAMPLE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{EXAMPLE}: stdlib-gpt is good: 600 steps, 4 learners (eu 2, us 2), quorum 1, "
        "syncer in eu\n"
    )


def test_a_bad_manifest_is_refused_on_standard_error_with_exit_code_2(tmp_path):
    done = diloco("validate", EXAMPLE, "--set", "spec.sync.quorum=5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{EXAMPLE}: 1 problem\n"
        "spec.sync.quorum: 5 is more than the 4 learners of all regions together\n"
    )


def test_problems_are_json_when_asked_for(tmp_path):
    sets = ["--set", "spec.sync.quorum=5", "--set", "spec.steps=0"]
    done = diloco("validate", EXAMPLE, *sets, "-o", "json", cwd=tmp_path)
    assert done.returncode == 2
    said = json.loads(done.stdout)
    assert said["valid"] is False
    assert [one.partition(":")[0] for one in said["problems"]] == ["spec.steps", "spec.sync.quorum"]


def test_what_needs_a_cluster_is_good_but_said(tmp_path):
    done = diloco("validate", EXAMPLE, "--set", "spec.learner.podsPerLearner=2", cwd=tmp_path)
    assert done.returncode == 0
    assert "only in a cluster: spec.learner.podsPerLearner: 2" in done.stdout


def test_run_refuses_what_needs_a_cluster_before_anything_starts(tmp_path):
    done = diloco("run", EXAMPLE, "--set", "spec.learner.podsPerLearner=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "\nspec.learner.podsPerLearner: 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
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
        ["export", "--to", "x", "--dir", "none"],
    ],
    ids=lambda words: "-".join(map(str, words))[-30:],
)
def test_a_wrong_command_line_exits_with_2_and_no_traceback(tmp_path, words):
    done = diloco(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_command(tmp_path):
    done = diloco("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert set(re.findall(r"^  (\w+)  ", done.stdout, re.M)) == {
        "validate", "run", "status", "kill", "suspend", "resume", "report", "export", "sample",
        "audit", "render", "crd", "certs", "logs",
    }  # fmt: skip


def test_the_only_run_is_meant_when_none_is_named(tmp_path, run_dir):
    done = diloco("export", "--to", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/other/job.yaml").touch()
    done = diloco("export", "--to", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "several runs; give --dir one of runs/job, runs/other" in done.stderr


def test_export_copies_the_model_and_says_its_digest(tmp_path, run_dir):
    done = diloco("export", "--to", "a/b", "-o", "json", "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(b"tensors").hexdigest()
    assert sorted(one.name for one in (tmp_path / "a/b").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]
    assert (tmp_path / "a/b/model.safetensors").read_bytes() == b"tensors"


def test_export_of_a_damaged_model_leaves_what_was_there(tmp_path, run_dir):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_bytes(b"before")
    (run_dir / "model/model.safetensors").write_bytes(b"tensorz")
    done = diloco("export", "--to", "out", "--dir", run_dir, cwd=tmp_path)
    assert done.returncode == 1
    assert "SHA-256 is" in done.stderr
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == b"before"


def test_status_prints_what_the_run_directory_says(tmp_path, run_dir):
    said = {"state": "Complete", "step": 5, "message": "done", "processes": []}
    (run_dir / "status.json").write_text(json.dumps(said))
    for words in (["status", run_dir], ["status", "--dir", run_dir], ["status"]):
        done = diloco(*words, "-o", "json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == said


def test_before_the_run_is_complete_there_is_no_model(tmp_path, run_dir):
    (run_dir / "model/model.json").unlink()
    for words in (["export", "--to", "out"], ["sample"]):
        done = diloco(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert "no model there yet" in done.stderr


def test_audit_exits_with_1_when_a_promise_was_broken(tmp_path, run_dir):
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


def test_validate_does_not_wait_for_what_it_does_not_need(tmp_path):
    code = (
        "import sys; sys.argv = ['diloco', 'validate', sys.argv[1]]\n"
        "from diloco_operator.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        "print(sorted({'torch', 'grpc', 'matplotlib', 'numba', 'diloco_worker', 'diloco_syncer'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, EXAMPLE], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr
