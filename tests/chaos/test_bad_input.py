"""
`diloco run` with real learner processes, some of which are faulty, and with a full disk: the job continues.

The learners run their own script; the config of their region selects the fault.
"""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from diloco.journal.audit import audit
from diloco.spec import RunSpec
from diloco_testing.local.run_process import LocalRun
from diloco_testing.syncers.process import ask_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_SECONDS = 300.0
"""For processes that import torch and compile kernels while both cores build programs."""

TRAIN = """\
import json, os, sys, time
config = json.loads(os.environ["DILOCO_CONFIG"])
os.environ["DILOCO_FAULTS"] = config.get("faults", "")
import torch
from torch import nn
from diloco.rpc.channels import channel
from diloco.v1 import syncer_pb2, syncer_pb2_grpc
from diloco_worker import Learner

def wait_until(what):
    with channel(os.environ["DILOCO_SYNCER"], tls=None, purpose="control") as wire:
        ask = syncer_pb2_grpc.SyncerStub(wire).GetStatus
        while not what(ask(syncer_pb2.StatusRequest(), wait_for_ready=True)):
            time.sleep(0.1)

if config.keys() & {"faults", "wide"}:  # the fault is not the initialisation
    wait_until(lambda status: status.state != "Initialising")
torch.set_num_threads(1)
torch.manual_seed(0)
wide = config.get("wide", 1200)
model = nn.Sequential(nn.Linear(500, wide), nn.Tanh(), nn.Linear(wide, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(4, 500)
learner = Learner.connect(model, optimizer, connect_timeout_seconds=config.get("connect_timeout", 60))
# However long a busy machine takes to start the processes, none is far behind.
wait_until(lambda status: len(status.learners) >= config.get("together", 0))
while not learner.done:
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    learner.step(tokens=32, loss=loss)
"""

REGIONS = {
    "good": {"together": 4},
    "damaged": {"together": 4, "faults": "upload:corrupt-chunk;upload:truncate"},
    "mixed": {"together": 4, "faults": "upload:repeat;upload:reorder;upload:corrupt-chunk=1"},
    "nan": {"together": 4, "faults": "upload:nan"},
}


def job(name, *, steps, regions, **spec):
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": name},
        "spec": {
            "steps": steps,
            "sync": {"fragments": 2, "interval": 2, "overlap": 1, **spec.pop("sync", {})},
            "learner": {"command": [sys.executable, "train.py"], **spec.pop("learner", {})},
            "regions": [{"name": n, "learners": 1, "config": c} for n, c in regions.items()],
            **spec,
        },
    }


@contextlib.contextmanager
def running(folder, manifest):
    (folder / "train.py").write_text(TRAIN)
    run = LocalRun(folder, manifest)
    try:
        yield run
    finally:
        run.stop()


def events(run, event):
    return [line for line in run.lines("events.jsonl") if line["event"] == event]


def merged(run):
    """Number of merges per learner."""
    counts = {}
    for line in events(run, "merge"):
        for member in line["members"]:
            counts[member["learner"]] = counts.get(member["learner"], 0) + 1
    return counts


def assert_audit(run):
    verdict = audit((run.dir / "events.jsonl").read_text().splitlines())
    assert verdict.ok, verdict.violations


def test_damaged_uploads_are_repeated_or_refused(tmp_path):
    """Damaged chunks are requested again; NaN is refused each time and never reaches the model."""
    with running(tmp_path, job("faulty", steps=10**6, regions=REGIONS)) as run:
        healthy = {f"{name}/0" for name in REGIONS} - {"nan/0"}
        run.until(
            lambda: (
                all(merged(run).get(name, 0) >= 3 for name in healthy)
                and len(events(run, "refuse")) >= 3
            ),
            TIMEOUT_SECONDS,
            expected="all learners except nan/0 are merged",
        )
        subprocess.run(["kill", "-INT", str(run.process.pid)], check=True)
        run.wait(60)
        assert set(merged(run)) == healthy
        refusals = {(x["learner"], x["reason"]) for x in events(run, "refuse")}
        late = {name for name in refusals if name[1] in ("AnswerLate", "Stalled")}
        assert refusals - late == {("nan/0", "NotFinite")}, "on a busy machine others may be late"
        joined = {(x["learner"], x["incarnation"]) for x in events(run, "join")}
        assert len(joined) == len(REGIONS), "no process was replaced"
        assert events(run, "restart") == []
        assert_audit(run)
        newest = sorted((run.dir / "snapshots").glob("*.safetensors"))[-1]
        for name, array in safetensors.numpy.load_file(newest).items():
            if array.dtype == np.float32:
                assert np.isfinite(array).all(), name


@pytest.mark.slow_tier
def test_a_learner_with_another_model_ends_the_run_with_the_difference(tmp_path):
    regions = {"eu": {}, "us": {"wide": 1201}}
    with running(tmp_path, job("wide", steps=10**6, regions=regions)) as run:
        assert run.wait(TIMEOUT_SECONDS) == 1
        output = run.output.read_text()
        assert "learner us/0 was refused" in output
        assert "parameter 0.weight has shape [1201, 500] instead of [1200, 500]" in output
        # The other learner is stopped then; an upload that this interrupts is refused too.
        refusals = [x for x in events(run, "refuse") if x["learner"] == "us/0"]
        assert [x["reason"] for x in refusals] == ["Mismatch"], refusals
        assert [x["learner"] for x in events(run, "join")] == ["eu/0"], "it was not restarted"
        status = run.status()
        assert status["state"] == "Failed"
        [failed] = [c for c in status["conditions"] if c["type"] == "Failed"]
        assert failed["status"] == "True"
        assert "0.weight has shape" in failed["message"]
        assert_audit(run)


def test_a_learner_without_a_syncer_exits_with_a_temporary_failure(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "spec.json").write_text(
        RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1, learners={"eu": 1}).to_json()
    )
    environment = {
        "DILOCO_JOB": "j", "DILOCO_LEARNER": "eu/0", "DILOCO_SYNCER": "127.0.0.1:1",
        "DILOCO_SPEC": str(tmp_path / "spec.json"), "DILOCO_CONFIG": json.dumps({"connect_timeout": 2}),
        "DILOCO_STATE": str(tmp_path / "state"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True,
        timeout=240, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 75
    [sentence] = [x for x in done.stderr.splitlines() if x.startswith("diloco: ")][-1:]
    assert "eu/0: no syncer within 2 s" in sentence
    assert "Traceback" not in done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a few megabytes, where the machine allows mounting."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount on this machine: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place, *, left_bytes):
    """Fill what is free of the disk, except for `left_bytes`, and never free more meanwhile."""
    with (place / "ballast").open("ab", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * (1 << 16))
        file.truncate(max(0, file.tell() - left_bytes))


def test_a_full_disk_stops_snapshots_but_not_training(small_disk):
    """First no byte is free, then enough for log lines but not for a snapshot, then enough for all."""
    snapshots = {"checkpoint": {"everySteps": 4, "keep": 1}}
    manifest = job("full", steps=10**6, regions={"eu": {}, "us": {}}, syncer=snapshots)
    with running(small_disk, manifest) as run:
        run.until(lambda: run.step() > 8, TIMEOUT_SECONDS, expected="training")
        syncer = run.child("diloco_syncer")
        endpoint = (run.dir / "state" / "endpoint").read_text().strip()

        def wait_for(what, expected):
            run.until(lambda: what(ask_status(endpoint)), TIMEOUT_SECONDS, expected=expected)

        log = run.dir / "logs" / "syncer.log"

        def failed():
            # Also what a failed or a replaced snapshot has freed.
            fill(small_disk, left_bytes=0)
            return "No space left on device" in log.read_text()

        run.until(failed, TIMEOUT_SECONDS, expected="the error is in the log")
        for left_bytes in (0, 1 << 18):
            fill(small_disk, left_bytes=left_bytes)
            step = ask_status(endpoint).step
            wait_for(lambda status, step=step: status.step > step + 16, "training continues")
            assert ask_status(endpoint).snapshot_step < step
        (small_disk / "ballast").unlink()
        freed = ask_status(endpoint).step
        wait_for(lambda status: status.snapshot_step > freed, "snapshots again")
        assert ask_status(endpoint).state == "Training"
        assert run.child("diloco_syncer") == syncer, "the syncer was not restarted"
        subprocess.run(["kill", "-INT", str(run.process.pid)], check=True)
        run.wait(60)
