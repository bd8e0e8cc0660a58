"""The run directory: whom it belongs to, what is kept in it."""

import json
import os

import pytest

from diloco.errors import ConfigError, StorageError
from diloco_operator.local.closing import evaluations
from diloco_operator.local.commands import local_problems
from diloco_operator.local.rundir import RunDir
from diloco_operator.local.settings import Settings
from diloco_operator.local.supervisor import job_limits
from diloco_operator.manifest import load_job
from diloco_operator.plan import plan

JOB = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: small}
spec:
  steps: 200   # a remark that stays
  learner: {command: [python, train.py]}
  regions: [{name: eu, learners: 2}]
"""


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def adopt(rundir, manifest, sets=()):
    job = load_job(manifest, sets)
    with rundir.hold():
        return rundir.adopt(manifest, job, plan(job).spec)


def test_a_fresh_directory_holds_the_manifest_as_given_and_the_spec(tmp_path, manifest):
    rundir = RunDir(tmp_path / "runs" / "small")
    assert adopt(rundir, manifest) == tmp_path
    assert rundir.manifest.read_text() == JOB
    assert json.loads(rundir.spec.read_text())["steps"] == 200


def test_changes_from_the_command_line_are_in_the_kept_manifest(tmp_path, manifest):
    rundir = RunDir(tmp_path / "run")
    adopt(rundir, manifest, ["spec.steps=300"])
    assert load_job(rundir.manifest) == load_job(manifest, ["spec.steps=300"])


def test_an_allowed_change_goes_on(tmp_path, manifest):
    rundir = RunDir(tmp_path / "run")
    adopt(rundir, manifest)
    adopt(rundir, manifest, ["spec.steps=300", "spec.sync.quorum=2"])
    assert json.loads(rundir.spec.read_text())["steps"] == 300


def test_a_forbidden_change_is_refused_with_its_reason_and_nothing_is_written(tmp_path, manifest):
    rundir = RunDir(tmp_path / "run")
    adopt(rundir, manifest)
    with pytest.raises(ConfigError, match=r"spec\.seed: .* 0 .* 5"):
        adopt(rundir, manifest, ["spec.seed=5"])
    assert rundir.manifest.read_text() == JOB


def test_the_directory_of_another_job_is_refused(tmp_path, manifest):
    rundir = RunDir(tmp_path / "run")
    adopt(rundir, manifest)
    with pytest.raises(ConfigError, match='belongs to job "small", not to "other"'):
        adopt(rundir, manifest, ["metadata.name=other"])


def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path, manifest):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex and no job\.yaml"):
        adopt(RunDir(home), manifest)
    assert os.listdir(home) == ["thesis.tex"]


def test_a_file_is_no_run_directory(tmp_path, manifest):
    with pytest.raises(ConfigError, match="is a file"):
        adopt(RunDir(manifest), manifest)


def test_a_folder_that_cannot_be_made_is_said(manifest):
    with pytest.raises(StorageError, match="/proc"):
        adopt(RunDir(manifest.parents[-1] / "proc" / "run"), manifest)


def test_only_one_holds_a_directory_and_the_other_learns_the_pid(tmp_path):
    rundir, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    with rundir.hold():
        assert second.supervisor_pid() == os.getpid()
        with pytest.raises(ConfigError, match=f"supervisor with pid {os.getpid()}"), second.hold():
            pass
        assert second.supervisor_pid() == os.getpid()
    assert second.supervisor_pid() is None
    with second.hold():
        pass


def test_a_manifest_whose_folder_is_gone_is_refused(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    rundir = RunDir(tmp_path / "run")
    adopt(rundir, folder / "job.yaml")
    (folder / "job.yaml").unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match="the folder of the job's manifest is gone"):
        adopt(rundir, rundir.manifest)


def test_learners_and_logs_have_places_of_their_own(tmp_path):
    rundir = RunDir(tmp_path)
    assert rundir.state_of("eu/0") == tmp_path / "learners" / "eu-0"
    assert rundir.log("eu/0") == tmp_path / "logs" / "eu-0.log"
    assert rundir.state_of("evaluator") == tmp_path / "state" / "evaluator"


def test_status_of_a_directory_without_a_run_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no status\.json"):
        RunDir(tmp_path).status()


def test_events_are_whole_lines_behind_those_of_others(tmp_path):
    rundir = RunDir(tmp_path)
    rundir.events.write_text('{"event":"merge"}\n')
    rundir.append_event({"event": "restart", "process": "eu/0"})
    first, second = map(json.loads, rundir.events.read_text().splitlines())
    assert (first["event"], second["event"]) == ("merge", "restart")
    assert second["time"].endswith("+00:00")


def test_torn_and_repeated_scores_do_no_harm(tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text('{"step":50,"loss":2.0}\n{"step":0,"loss":5.5}\n{"step":50,"loss":2.1}\n{"st')
    assert evaluations(file) == [(0, 5.5), (50, 2.1)]
    assert evaluations(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("spec.learner.podsPerLearner=2", "spec.learner.podsPerLearner: 2;"),
        ("spec.runPolicy.suspend=true", "spec.runPolicy.suspend: true;"),
        (
            "spec.learner.env=[{name: KEY, valueFrom: {secretKeyRef: {name: a, key: b}}}]",
            "spec.learner.env[KEY].valueFrom:",
        ),
    ],
)
def test_what_one_machine_cannot_do_is_said(manifest, change, said):
    assert local_problems(load_job(manifest)) == []
    [problem] = local_problems(load_job(manifest, [change]))
    assert problem.startswith(said)


def test_the_run_policy_becomes_limits(manifest):
    sets = ["spec.runPolicy.learnerRestartLimit=3", "spec.runPolicy.activeDeadlineSeconds=60"]
    limits = job_limits(load_job(manifest, sets))
    assert (limits.learner_restarts, limits.active_seconds) == (3, 60)


@pytest.mark.parametrize(("cores", "learners", "each"), [(8, 3, "2"), (2, 4, "1"), (8, 0, "8")])
def test_cores_are_dealt_to_learners(cores, learners, each):
    settings = Settings(environment={}, python="python", cores=cores)
    threads = settings.threads(learners=learners)
    assert threads == {"OMP_NUM_THREADS": each, "MKL_NUM_THREADS": each}
    mine = Settings(environment={"MKL_NUM_THREADS": "5"}, python="python", cores=cores)
    assert mine.threads(learners=learners) == {"OMP_NUM_THREADS": each}
