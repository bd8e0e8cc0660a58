"""
Every killed process restarts without help; nothing is merged twice; the others do not wait.

One job of four learners takes all failures, one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_testing.clusters.faults import kill_child, kill_first_process
from diloco_testing.clusters.job import Job, manifest, when
from diloco_testing.clusters.kubectl import until
from diloco_testing.machine import slowdown

BACK_SECONDS = 120.0
"""For a pod that Kubernetes recreates: kubelet, start, import of torch, on busy cores."""
NO_PAUSE_SECONDS = 2.0
"""A back-off would pause for 2 s after the fifth exit in a row."""
VICTIM, WITNESS = "us/1", "eu/0"
RECIPE = "diloco_worker.recipes"


@pytest.fixture(scope="module")
def job(eu, fleet):
    """Four learners that train for as long as the module needs them."""
    body = manifest(
        "storm", steps=10**6, regions={"eu": 2, "us": 2}, pod_fields=fleet.images.pod_fields
    )
    with fleet.namespace("failures", eu) as namespace:
        made = Job(eu, namespace, body).apply()
        made.until_condition("LearnersReady", 180)
        made.until_step(5, 120)
        yield made


@pytest.fixture
def watched(job):
    """Around each failure: the step never goes back beyond a snapshot, the witness keeps training."""
    before, since = job.step(), time.time()
    witness = job.instances()[job.pod_of(WITNESS)]
    yield job
    job.until_condition("LearnersReady", BACK_SECONDS)
    job.until_step(before + 10, BACK_SECONDS)
    verdict = job.audit()
    assert verdict.ok, verdict.violations
    never_back_beyond_a_snapshot(job)
    assert job.instances()[job.pod_of(WITNESS)] == witness, (
        "the learner that was not killed is not restarted"
    )
    rest = longest_rest(job, WITNESS, since)
    print(f"longest time between two steps of {WITNESS}: {rest:.2f} s")
    assert rest < 5.0 * slowdown(), "no learner waits for another"


def never_back_beyond_a_snapshot(job: Job) -> None:
    lines = job.log()
    for i, line in enumerate(lines):
        if line["event"] == "start" and line["epoch"] > 1:
            durable = [x["step"] for x in lines[:i] if x["event"] == "snapshot" and x["ok"]]
            assert line["step"] == max(durable, default=0), line


def stepping_again(job: Job, learner: str, incarnations: int) -> bool:
    return len({line["incarnation"] for line in job.steps(learner)}) >= incarnations


def import_seconds(job: Job, learner: str) -> float:
    """How long `import torch` takes in that container now, under the present load."""
    program = "import time; t = time.monotonic(); import torch; print(time.monotonic() - t)"
    return float(job.in_learner(learner, program))


def longest_rest(job: Job, learner: str, since: float) -> float:
    """Longest time between two optimizer steps of a learner, in seconds."""
    times = [when(line["time"]).timestamp() for line in job.steps(learner)]
    times = [t for t in times if t >= since]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def test_a_deleted_learner_pod_is_replaced_and_the_others_keep_training(watched):
    job, pod = watched, watched.pod_of(VICTIM)
    uid = next(p["metadata"]["uid"] for p in job.pods() if p["metadata"]["name"] == pod)
    job.cluster.kubectl.delete("pod", pod, job.namespace, "--force", "--grace-period=0")
    until(
        lambda: any(
            p["metadata"]["name"] == pod and p["metadata"]["uid"] != uid and _ready(p)
            for p in job.pods("learner")
        ),
        BACK_SECONDS, expected=f"{pod} is back", details=job.details,
    )  # fmt: skip
    until(lambda: job.steps(VICTIM), BACK_SECONDS, expected=f"{VICTIM} steps again")


def test_a_killed_training_process_steps_again_at_once_five_times_in_a_row(watched):
    """Nothing pauses in between, the kubelet least of all: the rest of the gap is what a start takes here and now."""
    job, pod = watched, watched.pod_of(VICTIM)
    until(lambda: job.steps(VICTIM), BACK_SECONDS, expected=f"{VICTIM} steps")
    instance = job.instances()[pod]
    measured = []
    after = import_seconds(job, VICTIM)
    for _ in range(5):
        before = after
        incarnations = len({line["incarnation"] for line in job.steps(VICTIM)})
        paused = kill_child(job, pod, RECIPE)
        until(
            lambda n=incarnations: stepping_again(job, VICTIM, n + 1),
            90, expected=f"{VICTIM} steps again", every=3.0, details=job.details,
        )  # fmt: skip
        # Its own file records when; frequent polling would take CPU from it.
        gap = _gap_before_last_start(job)
        # Other work on the machine comes and goes: the slower of the two measurements counts.
        after = import_seconds(job, VICTIM)
        imported = max(before, after)
        measured.append({"paused": paused, "gap": gap, "import": imported})
        print(
            f"killed: {paused:.2f} s to the next process, {gap:.2f} s to the next step; import torch: {imported:.2f} s"
        )
    assert job.instances()[pod] == instance, "the container itself was not restarted"
    assert all(kill["paused"] < NO_PAUSE_SECONDS for kill in measured), measured
    assert all(kill["gap"] < 5.0 * slowdown() + 3 * kill["import"] for kill in measured), measured


def test_a_killed_first_process_is_restarted_by_the_kubelet(watched):
    job, pod = watched, watched.pod_of(VICTIM)
    if not job.cluster.local:
        pytest.skip("the pods' processes are another machine's")
    restarts = job.instances()[pod][1]
    kill_first_process(next(p for p in job.pods() if p["metadata"]["name"] == pod))
    until(
        lambda: job.instances()[pod][1] == restarts + 1,
        BACK_SECONDS,
        expected=f"{pod} was restarted",
    )
    status = job.status()
    assert status["state"] != "Failed"


STATES = """
import glob
print(*(open(path).read().rpartition(")")[2].split()[0] for path in glob.glob("/proc/[0-9]*/stat")))
"""


def test_faults_that_diloco_chaos_injects_are_undone_and_shown(watched, tmp_path):
    """With this seed: eu/1 slow for 2.9 s, us/0 killed, us/1 paused for 4.7 s, the syncer killed after 25 s."""
    job = watched
    instances = job.instances()
    path = job.cluster.kubectl.script(tmp_path / "bin").parent
    rates = [f"--{kind}-rate=2" for kind in ("slow", "kill", "pause", "syncer-kill")]
    plan = ["--seed=11920", "--minutes=0.7", "--longest=6", "--spare=2", *rates]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("diloco")), "chaos", "--job", job.name, "-n", job.namespace,
         "--dir", str(tmp_path / "run"), *plan],
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/faults.jsonl").read_text().splitlines()]
    begun = {line["number"]: line for line in lines if line["event"] == "begin"}
    skipped = {line["number"]: line for line in lines if line["event"] == "skip"}
    ended = {line["number"]: line for line in lines if line["event"] == "end"}
    # What does not train when its time comes, on a busy machine, is left alone.
    assert sorted([*begun, *skipped]) == [1, 2, 3, 4]
    assert len(begun) > 1, skipped
    assert {(line["fault"], line["target"]) for line in begun.values()} <= {
        ("slow", "eu/1"), ("kill", "us/0"), ("pause", "us/1"), ("syncer-kill", "syncer"),
    }  # fmt: skip
    for number, line in begun.items():
        if line["seconds"]:
            took = when(ended[number]["time"]) - when(line["time"])
            assert took.total_seconds() > line["seconds"] / 2
    assert job.instances() == instances, "the containers themselves run on"
    for learner in ("eu/0", "eu/1", "us/0", "us/1"):
        assert "T" not in job.in_learner(learner, STATES).split()
    assert f"faults: {len(begun)} (seed 11920)" in done.stdout
    assert "goodput: " in done.stdout
    assert "audit: Passed" in done.stdout
    assert "Injected faults" in (tmp_path / "run/report.html").read_text()


def test_a_killed_syncer_process_continues_from_its_snapshot(watched):
    job = watched
    epoch = job.status()["epoch"]
    kill_child(job, job.syncer_pod(), "diloco_syncer")
    until(
        lambda: (job.status().get("epoch") or 0) > epoch, BACK_SECONDS,
        expected="the syncer serves again", details=job.details,
    )  # fmt: skip


def test_a_deleted_syncer_pod_continues_from_its_volume(watched):
    job = watched
    epoch, pod = job.status()["epoch"], job.syncer_pod()
    learners = _learner_instances(job)
    job.cluster.kubectl.delete("pod", pod, job.namespace, "--force", "--grace-period=0")
    until(
        lambda: (job.status().get("epoch") or 0) > epoch, BACK_SECONDS,
        expected="a new syncer pod serves", details=job.details,
    )  # fmt: skip
    assert _learner_instances(job) == learners, "no learner was restarted"


@pytest.mark.slow_tier
def test_a_deleted_syncer_deployment_is_made_again(watched):
    job = watched
    epoch = job.status()["epoch"]
    learners = _learner_instances(job)
    job.cluster.kubectl.delete("deployment", f"{job.name}-syncer", job.namespace)
    until(
        lambda: (job.status().get("epoch") or 0) > epoch, BACK_SECONDS,
        expected="the Deployment is back and its syncer serves", details=job.details,
    )  # fmt: skip
    assert _learner_instances(job) == learners, "no learner was restarted"


def test_a_deleted_stateful_set_is_made_again_and_the_other_region_keeps_training(watched):
    job = watched
    before = {k: v for k, v in _learner_instances(job).items() if "-eu-" in k}
    job.cluster.kubectl.delete("statefulset", f"{job.name}-us", job.namespace)
    job.until_condition("LearnersReady", BACK_SECONDS)
    assert {k: v for k, v in _learner_instances(job).items() if "-eu-" in k} == before


def test_a_job_that_lost_everything_at_once_continues(watched):
    """All pods of the job at the same moment: the syncer's volume is what remains."""
    job = watched
    step, epoch = job.step(), job.status()["epoch"]
    for pod in job.pods():
        if f"{job.name}-eu-0" != pod["metadata"]["name"]:
            job.cluster.kubectl.delete(
                "pod", pod["metadata"]["name"], job.namespace, "--force", "--grace-period=0"
            )
    until(
        lambda: (job.status().get("epoch") or 0) > epoch,
        BACK_SECONDS,
        expected="the syncer is back",
    )
    job.until_step(step + 1, BACK_SECONDS)


def _ready(pod) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
    )


def _learner_instances(job: Job) -> dict[str, tuple[str, int]]:
    return {pod: instance for pod, instance in job.instances().items() if "-syncer-" not in pod}


def _gap_before_last_start(job: Job) -> float:
    """Seconds between the last step of the previous incarnation and the first of the current one."""
    lines = job.steps(VICTIM)
    last = lines[-1]["incarnation"]
    first = next(i for i, line in enumerate(lines) if line["incarnation"] == last)
    return (when(lines[first]["time"]) - when(lines[first - 1]["time"])).total_seconds()
