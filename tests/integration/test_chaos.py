"""Faults in the processes of real supervisors: what is disturbed, and that all of it is undone."""

import json
import os
import resource
import signal
from functools import partial
from pathlib import Path

import pytest

from diloco.runtime import files
from diloco_local.report.run_files import load
from diloco_testing.local import fake_run
from diloco_testing.local.fake_run import FakeRun, alive, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MANIFEST = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: fake}
spec:
  steps: 50
  learner: {command: [python, learner.py]}
  regions:
  - {name: eu, learners: 1, config: {helpers: true}}
  - {name: us, learners: 1, config: {helpers: true}}
"""

RUN = "run(job_path, job, run_dir, programs=programs, limits=changed)"
CHAOS = """chaos.run(
        job_path, job, run_dir, Options(seed=7, spare=0), programs=programs, limits=changed,
        faults=[Fault(**f | {"kind": Kind(f["kind"])}) for f in json.loads((here / "faults.json").read_text())],
        clock=lambda status: float((here / "clock").read_text()),
    )"""
IMPORTS = """
from diloco_local.chaos import run as chaos
from diloco_local.chaos.fault_plan import Options
from diloco_local.faults import Fault, Kind
"""


class ChaosRun(FakeRun):
    """A run of small scripts with faults; the test sets the clock of their plan."""

    def __init__(self, folder, *faults):
        super().__init__(folder, manifest=MANIFEST)
        assert RUN in fake_run.DRIVER
        (folder / "driver.py").write_text(IMPORTS + fake_run.DRIVER.replace(RUN, CHAOS))
        lines = [{"number": n, "at": 1.0, **fault} for n, fault in enumerate(faults, 1)]
        (folder / "faults.json").write_text(json.dumps(lines))
        self.set_clock(0)

    def set_clock(self, seconds):
        files.replace(self.folder / "clock", f"{seconds}")

    def journal(self):
        file = self.dir / "faults.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pids(self, name):
        """The processes of the last start of a learner."""
        start = self.starts(name)[-1]
        return [start["pid"], *start["helpers"]]


def state_of(pid):
    """Such as "T" of a process that is stopped."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def started(tmp_path):
    runs = []

    def start(*faults):
        runs.append(ChaosRun(tmp_path, *faults))
        supervisor = runs[0].start()
        until(runs[0].all_training, "training")
        runs[0].set_clock(1)
        return runs[0], supervisor

    yield start
    for run in runs:
        run.close()


PAUSE = {"kind": "pause", "target": "us/0", "until": 9.0}


def paused(run):
    until(lambda: all(state_of(pid) == "T" for pid in run.pids("us/0")), "a paused learner")


def test_a_paused_learner_is_stopped_with_its_helpers_and_continues_before_the_run_ends(started):
    run, supervisor = started(PAUSE)
    paused(run)
    assert all(state_of(pid) != "T" for pid in run.pids("eu/0"))
    supervisor.send_signal(signal.SIGINT)
    out, err = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, err) == (75, "")
    # Only a process that runs handles SIGTERM and leaves by itself.
    assert "us/0" in (run.dir / "order-of-leaving").read_text().split()
    assert [line["event"] for line in run.journal()] == ["plan", "begin", "end"]
    assert "fault 1: pause us/0 for" in out
    assert "faults: 1 (seed 7): 1 pause" in out


@pytest.mark.parametrize("sound", [True, False])
def test_a_complete_run_exits_with_0_only_if_its_audit_finds_no_violation(started, sound):
    run, supervisor = started(PAUSE)
    paused(run)
    merge = {"event": "merge", "epoch": 1, "step": 1, "fragment": 0, "quorum": 1, "members": []}
    if not sound:
        (run.dir / "events.jsonl").write_text(json.dumps(merge) + "\n")
    run.complete()
    out, _ = supervisor.communicate(timeout=120)
    assert supervisor.returncode == (0 if sound else 1), out
    assert ("audit: Passed: " if sound else "audit: Failed: ") in out
    assert run.status()["state"] == "Complete"


def test_a_supervisor_that_is_killed_leaves_no_process_that_is_stopped(started):
    run, supervisor = started(PAUSE)
    paused(run)
    pids = [*run.pids("us/0"), *run.pids("eu/0")]
    until(lambda: "begin" in [line["event"] for line in run.journal()], "line of the fault")
    supervisor.kill()
    until(lambda: not any(map(alive, pids)), "end of all processes", seconds=60)
    [fault] = load(run.dir).chaos.faults
    assert (fault.kind, fault.target) == ("pause", "us/0"), "a fault without an end is read"


def test_a_slow_learner_is_stopped_and_continues_again_and_again_until_its_end(started):
    run, _ = started({"kind": "slow", "target": "us/0", "until": 9.0, "amount": 0.5})
    [pid] = run.pids("us/0")[:1]
    for state in ("T", "S", "T", "S"):
        until(lambda expected=state: state_of(pid) == expected, f"state {state}")
    run.set_clock(9)
    until(lambda: run.journal()[-1]["event"] == "end", "end of the fault")
    assert state_of(pid) != "T"


def test_files_of_the_syncer_cannot_grow_until_the_fault_ends(started):
    run, _ = started({"kind": "syncer-full", "target": "syncer", "until": 9.0})
    pid = run.process("syncer")["pid"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = partial(resource.prlimit, pid, resource.RLIMIT_FSIZE)
    until(lambda: limit() == (0, before[1]), "limit of the syncer's files")
    run.set_clock(9)
    until(lambda: run.journal()[-1]["event"] == "end", "end of the fault")
    assert limit() == before


def test_killed_processes_restart_and_the_journal_has_what_was_skipped(started):
    run, _ = started(
        {"kind": "kill", "target": "us/0", "until": 9.0},
        {"kind": "syncer-kill", "target": "syncer", "until": 9.0},
        {"kind": "pause", "target": "us/0", "until": 9.0},
    )
    until(lambda: len(run.starts("us/0")) == 2, "second start of the learner")
    until(lambda: run.process("syncer").get("restarts") == 1, "second start of the syncer")
    assert len(run.starts("eu/0")) == 1
    lines = [line for line in run.journal() if line["event"] != "plan"]
    assert [(line["event"], line["fault"]) for line in lines] == [
        ("begin", "kill"), ("begin", "syncer-kill"), ("skip", "pause"),
    ]  # fmt: skip
    assert lines[-1]["reason"] == "us/0 is still disturbed"


def test_the_connections_of_a_learner_pass_a_proxy_only_if_the_plan_disturbs_them(started):
    run, _ = started({"kind": "cut", "target": "us/0", "until": 9.0})
    endpoint = run.status()["syncer"]["endpoint"]
    seen = {run.starts(name)[0]["environment"]["DILOCO_SYNCER"] for name in ("eu/0", "us/0")}
    assert len(seen | {endpoint}) == 3
    until(lambda: run.journal(), "begin of the fault")


def test_without_faults_of_connections_there_is_no_proxy(started):
    run, _ = started(PAUSE)
    endpoint = run.status()["syncer"]["endpoint"]
    assert run.starts("us/0")[0]["environment"]["DILOCO_SYNCER"] == endpoint
    paused(run)
    os.kill(run.pids("us/0")[0], signal.SIGKILL)
    until(lambda: len(run.starts("us/0")) == 2, "second start")
    assert state_of(run.pids("us/0")[0]) != "T", "the next process of this learner is not stopped"
