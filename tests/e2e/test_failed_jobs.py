"""
After the end: the files of a job without a syncer pod are fetched, and a failed job is resumed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_testing.clusters.install import RESTRICTED
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until

SOON = 120.0
STEPS = 5


@pytest.fixture
def make(eu, fleet, namespace):
    """A job in a namespace of this test."""

    def made(name: str, **spec) -> Job:
        body = manifest(name, regions={"eu": 1}, pod_fields=fleet.images.pod_fields, **spec)
        return Job(eu, namespace, body)

    return made


@pytest.fixture
def diloco(eu, tmp_path):
    """Runs `diloco ...` as a user with kubectl for this cluster does; returns what it prints."""
    path = eu.kubectl.script(tmp_path / "bin").parent
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("diloco")), *arguments], env=environment,
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout, done.stderr)
        return done.stdout + done.stderr

    return run


def test_a_failed_job_is_understood_without_its_pods_and_resumed_after_correction(
    make, diloco, tmp_path
):
    """Its journal and its model come through a pod of their own, under restricted Pod Security."""
    job = make("mortem", steps=STEPS).apply()
    job.until_condition("Complete", 240)
    job.change(steps=10**6)
    job.until_step(STEPS + 5, 240)
    job.change(runPolicy={"activeDeadlineSeconds": 1})
    job.until_condition("Failed", SOON, reason="DeadlineExceeded")
    until(lambda: not job.pods(), SOON, expected="no pod is left", details=job.details)
    kubectl, where = job.cluster.kubectl, ("-n", job.namespace, "--to")
    labels = [f"{label}={value}" for label, value in RESTRICTED.items()]
    kubectl("label", "namespace", job.namespace, *labels)

    assert "starting pod mortem-fetch-" in diloco("logs", job.name, *where, "run")
    assert "merges of" in diloco("audit", "--dir", "run")
    diloco("export", "--job", job.name, *where, "model")
    assert (tmp_path / "model/model.safetensors").stat().st_size > 10**5
    until(
        lambda: not kubectl.list("pods", job.namespace), 60,
        expected="both pods are deleted", details=job.details,
    )  # fmt: skip

    kubectl("label", "namespace", job.namespace, *(f"{label}-" for label in RESTRICTED))
    step = job.status()["step"]
    job.change(runPolicy={"suspend": True, "activeDeadlineSeconds": None})
    job.until_condition("Suspended", SOON)
    assert job.condition("Failed")["status"] == "False"
    job.change(runPolicy={"suspend": False})
    job.until_condition("LearnersReady", SOON)
    assert job.step() >= step, "it continues from the syncer's last snapshot"
    job.until_step(step + 10, SOON)
    assert job.audit().ok
