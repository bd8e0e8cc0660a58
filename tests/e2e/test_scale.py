"""
200 jobs of 3 regions: how long they take, what the operator needs for it, and how often it writes.

API server and etcd alone: no pod ever starts, so a hot loop would be the operator's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from diloco_testing.clusters_install import CHART, NAMESPACE
from diloco_testing.clusters_job import manifest
from diloco_testing.kubectl import until

JOBS, REGIONS = 200, ("eu", "us", "asia")
CONVERGE_SECONDS = 300.0
QUIET_SECONDS = 60.0
MOST_MEGABYTES = 256
MOST_WRITES = 40
"""For each job: its children once each (16 or so), its status, Events; nothing twice."""
USER = "system:serviceaccount:diloco-system:"


@pytest.fixture(scope="module")
def api(local):
    """A cluster without nodes, with the chart's rights and CRD in it."""
    cluster = local.start("scale", pods=False)
    cluster.helm(
        "install", "diloco", str(CHART), "--namespace", NAMESPACE, "--create-namespace"
    )  # fmt: skip
    yield cluster
    local.end("scale")


def as_operator(cluster, folder: Path) -> Path:
    """A kubeconfig of the chart's ServiceAccount."""
    token = cluster.kubectl("create", "token", "diloco", "-n", NAMESPACE, "--duration=2h").strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    path = folder / "operator.kubeconfig"
    path.write_text(json.dumps(config))
    return path


class Operator:
    """The operator as a process of this machine."""

    def __init__(self, cluster, folder: Path) -> None:
        self.log = folder / "operator.log"
        environment = {
            **os.environ,
            "KUBECONFIG": str(as_operator(cluster, folder)),
            "DILOCO_WORKER_IMAGE": "worker:1", "DILOCO_SYNCER_IMAGE": "syncer:1",
            "DILOCO_HEALTH_PORT": "0", "DILOCO_METRICS_PORT": "0",
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco_operator"], env=environment, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder,
            )  # fmt: skip

    def peak_megabytes(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) / 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def converged(api, tmp_path_factory):
    """All jobs applied, every child there; what it took."""
    kubectl = api.kubectl
    operator = Operator(api, tmp_path_factory.mktemp("operator"))
    try:
        names = [f"job-{i:03}" for i in range(JOBS)]
        jobs = [manifest(name, steps=1000, regions=dict.fromkeys(REGIONS, 2)) for name in names]
        since = datetime.now(UTC)
        kubectl.apply(*jobs)
        applied = time.monotonic()

        def all_there() -> bool:
            # A HEAD-like look: names only, or 600 objects would be parsed each time.
            text = kubectl("get", "statefulsets", "-o", "name")
            return len(text.split()) == JOBS * len(REGIONS) and len(_told(kubectl)) == JOBS

        until(all_there, CONVERGE_SECONDS, saying="every job has its children and a status",
              every=2.0, tell=lambda: operator.log.read_text()[-3000:])  # fmt: skip
        seconds = time.monotonic() - applied
        assert operator.process.poll() is None, operator.log.read_text()[-3000:]
        yield operator, since, seconds
    finally:
        operator.stop()


def _told(kubectl) -> list[str]:
    """Jobs whose condition Accepted is True."""
    path = r'{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Accepted")].status}{"\n"}{end}'
    lines = kubectl("get", "dilocojobs", "-o", f"jsonpath={path}").split()
    return [line for line in lines if line.endswith("=True")]


def test_two_hundred_jobs_get_their_children(converged):
    operator, _, seconds = converged
    print(
        f"{JOBS} jobs x {len(REGIONS)} regions: {seconds:.0f} s, "
        f"{operator.peak_megabytes():.0f} MB, {operator.cpu_seconds():.0f} s of CPU"
    )
    assert seconds < CONVERGE_SECONDS


def test_the_operator_stays_small(converged):
    operator, _, _ = converged
    assert operator.peak_megabytes() < MOST_MEGABYTES


def test_no_job_is_written_about_again_and_again(api, converged):
    _, since, _ = converged
    time.sleep(QUIET_SECONDS)
    writes = [one for one in api.audit.requests(user=USER, since=since) if one.writes]
    about = Counter(_job(one) for one in writes)
    assert len(about) == JOBS, set(about)
    print(f"writes per job: {min(about.values())} to {max(about.values())}")
    assert max(about.values()) <= MOST_WRITES, about.most_common(3)
    applied = Counter(
        (one.resource, one.name)
        for one in writes
        if one.verb == "patch" and "/" not in one.resource
    )
    assert applied.most_common(1)[0][1] <= 2, applied.most_common(5)


def test_then_it_is_quiet(api, converged):
    since = datetime.now(UTC)
    time.sleep(QUIET_SECONDS)
    found = [one for one in api.audit.requests(user=USER, since=since) if one.writes]
    assert not found, "\n".join(map(str, found[:20]))


def _job(request) -> str:
    return request.name[: len("job-000")] if request.name else "?"
