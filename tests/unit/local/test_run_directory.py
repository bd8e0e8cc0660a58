"""The run directory: its owner and its contents."""

import errno
import fcntl
import io
import json
import os
import threading

import pytest

from diloco.errors import ConfigError, StorageError
from diloco_agent.output import Log
from diloco_job.plan import plan
from diloco_local import manifest as manifests
from diloco_local.commands import Commands, Programs, local_problems
from diloco_local.run_control import resume
from diloco_local.run_directory import RunDir
from diloco_local.settings import Settings
from diloco_local.summary import evaluations
from diloco_local.supervisor import job_limits, sharing
from diloco_syncer.storage.store import CHOICE
from diloco_testing.manifests.files import load_job

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


def adopt(run_dir, manifest, sets=()):
    job = load_job(manifest, sets)
    with run_dir.hold():
        return run_dir.adopt(manifest, job, plan(job).spec)


def test_a_fresh_directory_holds_the_manifest_as_given_and_the_spec(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "runs" / "small")
    assert adopt(run_dir, manifest) == tmp_path
    assert run_dir.manifest.read_text() == JOB
    assert json.loads(run_dir.spec.read_text())["steps"] == 200


def test_files_of_a_run_are_private(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    before = os.umask(0)
    try:
        adopt(run_dir, manifest)
        run_dir.write_status({"state": "Running"})
        run_dir.append_event({"event": "restart"})
        run_dir.choose_snapshot(0)
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in run_dir.path.rglob("*") if p.is_file()}
    assert modes == dict.fromkeys(modes, 0o600)
    folders = {p.stat().st_mode & 0o777 for p in run_dir.path.rglob("*") if p.is_dir()}
    assert folders == {0o700}
    assert modes.keys() >= {"job.yaml", "spec.json", "status.json", "events.jsonl", "from-snapshot"}


def test_a_link_planted_in_a_run_directory_is_not_written_through(tmp_path, manifest):
    run_dir, victim = RunDir(tmp_path / "run"), tmp_path / "victim"
    adopt(run_dir, manifest)
    victim.write_text("precious")
    for name in ("events.jsonl", "status.json.tmp", "spec.json.tmp"):
        (run_dir.path / name).symlink_to(victim)
    adopt(run_dir, manifest)
    run_dir.write_status({"state": "Running"})
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        run_dir.append_event({"event": "restart"})
    assert victim.read_text() == "precious"


def test_the_log_of_a_process_is_private_and_not_written_through_a_link(tmp_path):
    with Log(tmp_path / "a.log").open() as file:
        file.write(b"first\n")
    log = Log(tmp_path / "a.log")
    with log.open() as file:
        file.write(b"second\n")
    assert log.tail() == "second\n"
    assert (tmp_path / "a.log").stat().st_mode & 0o777 == 0o600
    (tmp_path / "b.log").symlink_to(tmp_path / "a.log")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        Log(tmp_path / "b.log").open()


def test_the_choice_of_a_snapshot_is_where_the_syncer_reads_it(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.choose_snapshot(90)
    assert run_dir.from_snapshot == tmp_path / "snapshots" / CHOICE
    assert run_dir.from_snapshot.read_text() == "90\n"


def test_a_snapshot_is_not_chosen_while_the_run_is_active(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest)
    with run_dir.hold(), pytest.raises(ConfigError, match="in use by the supervisor"):
        resume(run_dir.path, from_snapshot=1)
    assert not run_dir.from_snapshot.exists()


def test_a_status_command_that_reads_the_lock_does_not_keep_a_run_from_starting(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with run_dir.hold():
        pass
    fd = os.open(tmp_path / "run" / "state" / "supervisor.lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, os.close, (fd,))
    timer.start()
    try:
        with run_dir.hold():
            pass
    finally:
        timer.join()


def test_changes_from_the_command_line_are_in_the_kept_manifest(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest, ["spec.steps=300"])
    assert load_job(run_dir.manifest) == load_job(manifest, ["spec.steps=300"])


def test_a_kept_manifest_keeps_text_that_looks_like_a_number(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    sets = ['spec.regions[eu].config={rate: "3e-4"}']
    adopt(run_dir, manifest, sets)
    assert load_job(run_dir.manifest).spec.regions[0].config == {"rate": "3e-4"}


def test_an_allowed_change_is_accepted(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest)
    adopt(run_dir, manifest, ["spec.steps=300", "spec.sync.quorum=2"])
    assert json.loads(run_dir.spec.read_text())["steps"] == 300


def test_a_forbidden_change_is_refused_with_its_reason_and_nothing_is_written(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest)
    with pytest.raises(ConfigError, match=r"spec\.seed: .* 0 .* 5"):
        adopt(run_dir, manifest, ["spec.seed=5"])
    assert run_dir.manifest.read_text() == JOB


def test_the_directory_of_another_job_is_refused(tmp_path, manifest):
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest)
    with pytest.raises(ConfigError, match='belongs to job "small", not to "other"'):
        adopt(run_dir, manifest, ["metadata.name=other"])


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path, manifest):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"contains thesis\.tex and no job\.yaml"):
        adopt(RunDir(home), manifest)
    assert os.listdir(home) == ["thesis.tex"]


def test_a_file_is_not_a_run_directory(tmp_path, manifest):
    with pytest.raises(ConfigError, match="is a file"):
        adopt(RunDir(manifest), manifest)


def test_a_directory_that_cannot_be_created_is_named(manifest):
    with pytest.raises(StorageError, match="/proc"):
        adopt(RunDir(manifest.parents[-1] / "proc" / "run"), manifest)


def test_only_one_supervisor_holds_a_directory_and_a_second_gets_its_pid(tmp_path):
    run_dir, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    with run_dir.hold():
        assert second.supervisor_pid() == os.getpid()
        with pytest.raises(ConfigError, match=f"supervisor with pid {os.getpid()}"), second.hold():
            pass
        assert second.supervisor_pid() == os.getpid()
    assert second.supervisor_pid() is None
    with second.hold():
        pass


def test_a_manifest_whose_directory_was_deleted_is_refused(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, folder / "job.yaml")
    (folder / "job.yaml").unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match="the directory of the job's manifest no longer exists"):
        adopt(run_dir, run_dir.manifest)


def test_each_learner_has_its_own_directory_and_log(tmp_path):
    run_dir = RunDir(tmp_path)
    assert run_dir.state_of("eu/0") == tmp_path / "learners" / "eu-0"
    assert run_dir.log("eu/0") == tmp_path / "logs" / "eu-0.log"
    assert run_dir.state_of("evaluator") == tmp_path / "state" / "evaluator"


@pytest.mark.parametrize("content", ["", "{", "{}", "null", '{"manifest": 5}', "[" * 9000])
def test_a_run_whose_origin_is_damaged_is_resumed_with_its_manifest(tmp_path, manifest, content):
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest)
    origin = run_dir.path / "state" / "origin.json"
    origin.write_text(content)
    with pytest.raises(StorageError, match=r"origin\.json: .*diloco run MANIFEST --dir ") as caught:
        adopt(run_dir, run_dir.manifest)
    assert str(run_dir.path) in str(caught.value)
    assert adopt(run_dir, manifest) == adopt(run_dir, run_dir.manifest) == tmp_path


def test_what_a_resumed_run_needs_is_on_the_disk_before_the_run_begins(
    tmp_path, manifest, monkeypatch
):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    run_dir = RunDir(tmp_path / "run")
    adopt(run_dir, manifest)
    contents = [place for place in synced if not os.path.isdir(place)]
    assert [os.path.basename(place) for place in contents] == [
        "origin.json.tmp", "spec.json.tmp", "job.yaml.tmp",
    ]  # fmt: skip
    assert {str(run_dir.path), str(run_dir.path / "state")} <= set(synced)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "rewrites it"),
        ("null", "holds no JSON object; a running supervisor rewrites it"),
        ("[]", "holds no JSON object"),
        ('"processes"', "holds no JSON object"),
        ("[" * 9000, "nested too deeply"),
        ('{"processes": []}', "has no state, message, startTime, supervisor; a running"),
    ],
    ids=range(6),
)
def test_a_damaged_status_is_refused_with_its_name(tmp_path, content, message):
    run_dir = RunDir(tmp_path)
    run_dir.status_file.write_text(content)
    with pytest.raises(StorageError, match=message) as caught:
        run_dir.status()
    assert str(caught.value).startswith(f"{run_dir.status_file}: ")


def test_status_without_a_run_asks_for_a_run_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"no status\.json found"):
        RunDir(tmp_path).status()


def test_events_are_appended_as_complete_lines(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.events.write_text('{"event":"merge"}\n')
    run_dir.append_event({"event": "restart", "process": "eu/0"})
    first, second = map(json.loads, run_dir.events.read_text().splitlines())
    assert (first["event"], second["event"]) == ("merge", "restart")
    assert second["time"].endswith("+00:00")


def test_truncated_and_repeated_evaluations_are_tolerated(tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text('{"step":50,"loss":2.0}\n{"step":0,"loss":5.5}\n{"step":50,"loss":2.1}\n{"st')
    assert evaluations(file) == [(0, 5.5), (50, 2.1)]
    assert evaluations(tmp_path / "none") == []


def test_evaluations_of_the_older_part_are_read_as_well(tmp_path):
    (tmp_path / "eval.1.jsonl").write_text('{"step":0,"loss":5.5}\n{"step":50,"loss":2.0}\n')
    (tmp_path / "eval.jsonl").write_text('{"event":"rotate","part":2}\n{"step":100,"loss":1.5}\n')
    assert evaluations(tmp_path / "eval.jsonl") == [(0, 5.5), (50, 2.0), (100, 1.5)]


@pytest.mark.parametrize(
    ("change", "prefix"),
    [
        (
            "spec.learner={command: [python, train.py], podsPerLearner: 2}",
            "spec.learner.podsPerLearner: 2;",
        ),
        ("spec.runPolicy.suspend=true", "spec.runPolicy.suspend: true;"),
        (
            "spec.learner.env=[{name: KEY, valueFrom: {secretKeyRef: {name: a, key: b}}}]",
            "spec.learner.env[KEY].valueFrom:",
        ),
    ],
)
def test_requirements_that_one_machine_cannot_meet_are_reported(manifest, change, prefix):
    assert local_problems(load_job(manifest)) == []
    [problem] = local_problems(load_job(manifest, [change]))
    assert problem.startswith(prefix)


def test_the_run_policy_becomes_limits(manifest):
    sets = ["spec.runPolicy.learnerRestartLimit=3", "spec.runPolicy.activeDeadlineSeconds=60"]
    limits = job_limits(load_job(manifest, sets))
    assert (limits.learner_restarts, limits.active_seconds) == (3, 60)


@pytest.mark.parametrize(("cores", "learners", "each"), [(8, 3, "2"), (2, 4, "1"), (8, 0, "8")])
def test_cores_are_divided_among_learners(cores, learners, each):
    settings = Settings(environment={}, python="python", cores=cores)
    threads = settings.threads(learners=learners)
    assert threads == {"OMP_NUM_THREADS": each, "MKL_NUM_THREADS": each}
    mine = Settings(environment={"MKL_NUM_THREADS": "5"}, python="python", cores=cores)
    assert mine.threads(learners=learners) == {"OMP_NUM_THREADS": each}


@pytest.mark.parametrize(
    ("visible", "learners", "dealt", "note"),
    [
        ("", 2, [None, None], ""),
        ("-1", 2, [None, None], ""),
        ("0,1", 2, ["0", "1"], ""),
        ("0,1,2,3", 2, ["0,2", "1,3"], ""),
        ("GPU-a, GPU-b,GPU-c", 2, ["GPU-a,GPU-c", "GPU-b"], ""),
        ("0,-1,1", 2, ["0", "0"], "2 learners share 1 GPU"),
        ("4,5", 3, ["4", "5", "4"], "3 learners share 2 GPUs"),
    ],
)
def test_gpus_are_dealt_to_learners(monkeypatch, visible, learners, dealt, note):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = Settings.from_environment()
    assert [
        settings.devices_of(index, learners=learners).get("CUDA_VISIBLE_DEVICES")
        for index in range(learners)
    ] == dealt
    assert sharing(learners, len(settings.devices)).startswith(note)
    assert bool(note) == bool(sharing(learners, len(settings.devices)))


def test_the_learners_environment_overrides_the_dealt_gpu(tmp_path, manifest):
    name = "CUDA_VISIBLE_DEVICES"
    settings = Settings(environment={}, python="python", cores=2, devices=("0", "1"))
    for sets, expected in [
        ([], {"0", "1"}),
        ([f'spec.learner.env=[{{name: {name}, value: "7"}}]'], {"7"}),
    ]:
        found = plan(load_job(manifest, sets))
        commands = Commands(
            plan=found, run_dir=RunDir(tmp_path / "run"), settings=settings,
            directory=tmp_path, programs=Programs(),
        )  # fmt: skip
        started = [commands.of(learner.name, port=0, endpoint="") for learner in found.learners]
        assert {command.environment[name] for command in started} == expected


@pytest.mark.parametrize(
    ("sets", "expected"), [((), "127.0.0.1:0"), (["spec.learner.recovery=Checkpoint"], None)]
)
def test_learners_answer_each_other_on_this_machine_unless_the_job_does_not_want_it(
    tmp_path, manifest, sets, expected
):
    found = plan(load_job(manifest, sets))
    settings = Settings(environment={}, python="python", cores=2)
    commands = Commands(
        plan=found, run_dir=RunDir(tmp_path / "run"), settings=settings, directory=tmp_path,
        programs=Programs(),
    )  # fmt: skip
    started = [commands.of(learner.name, port=0, endpoint="") for learner in found.learners]
    assert {command.environment.get("DILOCO_PEER") for command in started} == {expected}


@pytest.mark.parametrize("mine", [None, "ACTIVE"])
def test_threads_of_the_sample_do_not_spin_unless_the_user_wants_it(tmp_path, manifest, mine):
    commands = Commands(
        plan=plan(load_job(manifest)), run_dir=RunDir(tmp_path / "run"),
        settings=Settings(
            environment={"OMP_WAIT_POLICY": mine} if mine else {}, python="python", cores=2
        ),
        directory=tmp_path, programs=Programs(),
    )  # fmt: skip
    assert commands.sample().environment == {"OMP_WAIT_POLICY": mine or "PASSIVE"}


def test_a_manifest_of_standard_input_is_kept_as_it_was(tmp_path, manifest, monkeypatch):
    text = manifest.read_bytes()
    manifests.read_standard_input.cache_clear()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    monkeypatch.chdir(tmp_path)
    stdin = manifests.STANDARD_INPUT
    job, run_dir = manifests.load_job(stdin), RunDir(tmp_path / "run")
    with run_dir.hold():
        assert run_dir.adopt(stdin, job, plan(job).spec) == tmp_path
    assert run_dir.manifest.read_bytes() == text
    manifests.read_standard_input.cache_clear()


def test_the_starts_of_a_learner_are_counted_over_all_runs(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    (tmp_path / "run" / "state").mkdir(parents=True)
    assert run_dir.starts("eu/0") == 0
    run_dir.write_starts("eu/0", 3)
    assert [RunDir(tmp_path / "run").starts(name) for name in ("eu/0", "us/0")] == [3, 0]
    run_dir.starts_of("eu/0").write_text("no number")
    assert run_dir.starts("eu/0") == 0
