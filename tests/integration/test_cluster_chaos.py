"""`diloco chaos --job` with real agents on this machine; a made-up kubectl runs the commands of the pods."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco_testing.kubernetes.kubectl import line, make_kubectl, make_state
from diloco_testing.local.container import Pod
from diloco_testing.local.fake_run import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]

JOB = {
    "apiVersion": "diloco.dev/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"name": "a", "namespace": "team", "uid": "uid-a"},
    "spec": {
        "steps": 9,
        "sync": {"quorum": 1},
        "regions": [{"name": "eu", "learners": 2}],
        "runPolicy": {"learnerRestartLimit": 0},
    },
    "status": {"state": "Training", "step": 5, "conditions": []},
}


def listed(name, role, *, ready=True):
    return {
        "metadata": {
            "name": name, "uid": f"uid-{name}",
            "labels": {"diloco.dev/region": "eu", "diloco.dev/role": role},
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "main", "state": {"running": {}}}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }  # fmt: skip


def state_of(pid):
    """Such as "T" of a process that is stopped."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


class Cluster:
    """Two learners and a syncer: an agent of each on this machine, and what kubectl shows of them."""

    def __init__(self, folder):
        self.folder = folder / "cluster"
        make_state(folder)
        self.kubectl = make_kubectl(folder)
        self.log = folder / "kubectl.log"
        self.run = folder / "run"
        self.pods = {}
        for name, role in (("a-eu-0", "learner"), ("a-eu-1", "learner"), ("a-syncer-x", "syncer")):
            own = folder / name
            own.mkdir()
            (self.folder / f"pod-{name}").mkdir(exist_ok=True)
            steps = "".join(line(100 + step) + "\n" for step in range(3))
            (self.folder / f"pod-{name}/steps.jsonl").write_text(steps)
            given = {"DILOCO_POD_UID": f"uid-{name}", "DILOCO_POD": name.replace("-x", "-0")}
            self.pods[name] = Pod(own, role=role, environment=given)
        self.show()

    def show(self, *roles, ready=True, **job):
        """What the API server shows from now on: the pods of these roles, by default all."""
        body = {**JOB, **job}
        pods = [
            listed(name, role, ready=ready)
            for name in self.pods
            if (role := "syncer" if "syncer" in name else "learner")
            in (roles or ("syncer", "learner"))
        ]
        for name, text in (
            ("job.json", json.dumps(body)), ("job.yaml", yaml.safe_dump(body)),
            ("pods.json", json.dumps({"items": pods})),
        ):  # fmt: skip
            (self.folder / f"{name}.new").write_text(text)
            (self.folder / f"{name}.new").rename(self.folder / name)

    def end(self, kind, message="", *roles):
        condition = {"type": kind, "status": "True", "message": message}
        self.show(
            *roles, status={**JOB["status"], "state": kind, "step": 9, "conditions": [condition]}
        )

    def pid(self, name, start=0):
        return self.pods[name].pid(start)

    def events(self):
        file = self.run / "faults.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    @contextlib.contextmanager
    def chaos(self, *arguments, **environment):
        """The command while it runs; killed if the test fails meanwhile."""
        path = f"{os.path.dirname(self.kubectl)}{os.pathsep}{os.environ['PATH']}"
        with subprocess.Popen(
            [sys.executable, "-m", "diloco_cli", "chaos", "--job", "a", "--dir", str(self.run),
             "-n", "team", "--context", "eu", *map(str, arguments)],
            env={**os.environ, "PATH": path, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    first, second, syncer = made.pods.values()
    with first, second, syncer:
        for name in made.pods:
            made.pid(name)
        yield made


def ended(process, seconds=120):
    out, _ = process.communicate(timeout=seconds)
    print(out)
    return out


# With this seed and 20 of a kind per minute, the first fault begins within 3 s.
SOON = ("--seed", "1", "--minutes", "5", "--longest", "300")


def test_killed_learners_and_syncers_are_restarted_by_their_agents(cluster):
    with cluster.chaos(*SOON, "--kill-rate", "20", "--syncer-kill-rate", "20") as process:
        kinds = ("kill", "syncer-kill")
        until(
            lambda: {e["fault"] for e in cluster.events() if e["event"] == "begin"} == set(kinds),
            "both kinds of kills", seconds=90,
        )  # fmt: skip
        copies = [cluster.run / f"learners/eu-{index}/steps.jsonl" for index in (0, 1)]
        until(lambda: all(copy.exists() for copy in copies), "copies of steps", seconds=90)
        cluster.end(
            "Complete", "", "syncer"
        )  # as the operator does, the learners' pods are removed
        out = ended(process)
    begun = [e for e in cluster.events() if e["event"] == "begin"]
    for event in begun:
        name = "a-syncer-x" if event["target"] == "syncer" else f"a-eu-{event['target'][-1]}"
        assert cluster.pid(name, 1) != cluster.pid(name)
        assert cluster.pods[name].process.poll() is None, "the agent lives"
        assert event["step"] == 5
    assert "warning: the plan kills eu/" in out, "learnerRestartLimit is 0"
    assert "job a: Complete at step 9" in out
    assert f"faults: {len(begun)} (seed 1)" in out
    assert "audit: " in out
    assert "of learners whose pods are gone, up to about 15 s of the last steps are missing" in out
    assert all(len(copy.read_text().splitlines()) == 3 for copy in copies)
    assert (cluster.run / "report.html").exists()
    assert (cluster.run / "spec.json").exists(), "the files of the job are fetched"
    log = cluster.log.read_text()
    assert "--context=eu --namespace=team exec -i pod/a-" in log


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        *(("pause", end) for end in ("job", signal.SIGINT, signal.SIGTERM, signal.SIGKILL)),
        *(("slow", end) for end in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_a_stopped_learner_continues_however_the_command_ends(cluster, kind, end):
    with cluster.chaos(*SOON, f"--{kind}-rate", "20") as process:
        until(lambda: [e for e in cluster.events() if e["event"] == "begin"], "a fault", seconds=90)
        victim = cluster.pid(f"a-eu-{cluster.events()[1]['target'][-1]}")
        other = ({cluster.pid("a-eu-0"), cluster.pid("a-eu-1")} - {victim}).pop()
        until(lambda: state_of(victim) == "T", "it is stopped")
        assert state_of(other) != "T", "one learner is spared"
        if end == "job":
            cluster.end("Failed", "learners failed")
        else:
            process.send_signal(end)
        out = ended(process)
        until(lambda: state_of(victim) != "T", "it continues")
        until(lambda: "a" if state_of(victim) in "SR" else "", "it works")
    events = [event["event"] for event in cluster.events()]
    if end == signal.SIGKILL:
        assert events == ["plan", "begin"]
        return
    assert events == ["plan", "begin", "end"]
    if end == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        return
    assert process.returncode == (1 if end == "job" else 130)
    assert f"faults: 1 (seed 1): 1 {kind}" in out
    outlook = "job a: Failed at step 9: learners failed" if end == "job" else (
        "all faults are undone; job a continues without them in the cluster"
    )  # fmt: skip
    assert outlook in out
    assert "no reply" not in out


def test_an_api_server_that_fails_for_a_while_ends_nothing(cluster):
    def printed(text):
        return text in process.stdout.readline()

    with cluster.chaos(*SOON, "--kill-rate", "0.01") as process:
        until(cluster.events, "the plan begins", seconds=90)
        (cluster.folder / "down").touch()
        down = (
            "cannot read job a: Unable to connect to the server: connection refused; trying again"
        )
        until(lambda: printed(down), "the failure is shown", seconds=60)
        (cluster.folder / "down").unlink()
        until(lambda: printed("the cluster replies again"), "it replies", seconds=60)
        cluster.end("Complete")
        assert "job a: Complete at step 9" in ended(process)
        assert process.returncode == 0


def test_a_fault_without_its_pod_is_skipped_with_a_reason(cluster):
    """The pod is ready for the API server, and another one by now: the program in it refuses."""
    text = (cluster.folder / "pods.json").read_text()
    (cluster.folder / "pods.json").write_text(text.replace("uid-a-eu", "uid-b-eu"))
    with cluster.chaos(*SOON, "--kill-rate", "20") as process:
        until(lambda: [e for e in cluster.events() if e["event"] == "skip"], "a skip", seconds=90)
        cluster.end("Complete")
        out = ended(process)
    skip = next(e for e in cluster.events() if e["event"] == "skip")
    assert skip["reason"] == "0 processes look like the agent of this pod, expected 1"
    assert f"fault 1 is skipped (kill {skip['target']}): {skip['reason']}" in out
    assert "faults: 0 (seed 1); " in out


def test_faults_are_counted_only_while_enough_learners_train(cluster):
    cluster.show(ready=False)
    with cluster.chaos(*SOON, "--kill-rate", "20") as process:
        until(lambda: "waiting" in process.stdout.readline(), "it waits", seconds=60)
        cluster.end("Suspended")
        out = ended(process)
    assert "faults: none, because too few learners trained" in out
    assert process.returncode == 0
    assert not (cluster.run / "faults.jsonl").exists()
