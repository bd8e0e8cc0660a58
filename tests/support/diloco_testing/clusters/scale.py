"""
Many jobs on an API server without nodes: no pod ever starts, so whatever is slow, large or hot is the operator's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from diloco_testing.clusters.audit import Request
from diloco_testing.clusters.install import CHART, NAMESPACE
from diloco_testing.clusters.job import manifest
from diloco_testing.clusters.kubectl import Kubectl, until
from diloco_testing.clusters.provision import Cluster, LocalClusters

JOBS, REGIONS = 200, ("eu", "us", "asia")
CONVERGE_SECONDS = 300.0
USER = "system:serviceaccount:diloco-system:"


def api_server(
    local: LocalClusters, name: str = "scale", *flags: str, kind: str = "up-api"
) -> Cluster:
    """A cluster without nodes, with the chart's rights and CRD in it; `flags` are helm's."""
    cluster = local.start(name, kind)
    cluster.helm(
        "install", "diloco", str(CHART), "--namespace", NAMESPACE, "--create-namespace", *flags
    )
    return cluster


class Operator:
    """The operator as a process of this machine, with the rights of the chart's ServiceAccount."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        """Start it; its log is kept in `folder`."""
        self.log = folder / "operator.log"
        environment = {
            **os.environ,
            "KUBECONFIG": str(_kubeconfig(cluster, folder)),
            "DILOCO_WORKER_IMAGE": "worker:1", "DILOCO_SYNCER_IMAGE": "syncer:1",
            "DILOCO_HEALTH_PORT": "0", "DILOCO_METRICS_PORT": "0",
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco_operator"], env=environment, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder,
            )  # fmt: skip

    def peak_megabytes(self) -> float:
        """Resident memory at its highest."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) / 1024

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        return _cpu_seconds(self.process.pid)

    def details(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-3000:]

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def operator(cluster: Cluster, folder: Path) -> Iterator[Operator]:
    """An operator for as long as the block lasts."""
    running = Operator(cluster, folder)
    try:
        yield running
    finally:
        running.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Converged:
    """Every job has its children and was accepted."""

    since: datetime
    """When the first of the jobs was applied."""
    seconds: float
    """From the last job's apply until all was there."""
    total_seconds: float
    """From the first job's apply."""
    cpu_seconds: float
    """Of the operator meanwhile."""
    server_cpu_seconds: float
    """Of etcd and the API server meanwhile."""


def converge(
    cluster: Cluster, running: Operator, *, first: int = 0, jobs: int = JOBS,
    seconds: float = CONVERGE_SECONDS,
) -> Converged:  # fmt: skip
    """
    Apply jobs and wait for their children and conditions.

    Args:
        cluster: where.
        running: the operator.
        first: number of the first of them; those before it are there already.
        jobs: how many there are then.
        seconds: how long to wait at most.
    """
    names = [name_of(number) for number in range(first, jobs)]
    made = [manifest(name, steps=1000, regions=dict.fromkeys(REGIONS, 2)) for name in names]
    kubectl, since, cpu = cluster.kubectl, datetime.now(UTC), running.cpu_seconds()
    server_cpu = _server_cpu_seconds(cluster)
    begun = time.monotonic()
    for start in range(0, len(made), JOBS):
        kubectl.apply(*made[start : start + JOBS])
    applied = time.monotonic()

    def all_there() -> bool:
        assert running.process.poll() is None, running.details()
        # Names only: 600 objects would be parsed at each look.
        sets = kubectl("get", "statefulsets", "-o", "name").split()
        return len(sets) == jobs * len(REGIONS) and num_accepted(kubectl) == jobs

    until(all_there, seconds, expected="every job has its children and a status",
          every=max(2.0, jobs / 100), details=running.details)  # fmt: skip
    now = time.monotonic()
    return Converged(
        since=since, seconds=now - applied, total_seconds=now - begun,
        cpu_seconds=running.cpu_seconds() - cpu,
        server_cpu_seconds=_server_cpu_seconds(cluster) - server_cpu,
    )  # fmt: skip


def name_of(number: int) -> str:
    """Name of a job; all of them have the same length."""
    return f"job-{number:03}"


def num_accepted(kubectl: Kubectl) -> int:
    """Jobs whose condition Accepted is True."""
    accepted = r'.status.conditions[?(@.type=="Accepted")].status'
    path = f'{{range .items[*]}}{{{accepted}}}{{"\\n"}}{{end}}'
    return kubectl("get", "dilocojobs", "-o", f"jsonpath={path}").split().count("True")


def requests(cluster: Cluster, since: datetime) -> list[Request]:
    """What the operator asked for since then."""
    return list(cluster.audit.requests(user=USER, since=since))


def writes_by_job(found: list[Request]) -> Counter[str]:
    """Writes about each job."""
    return Counter(request.name[: len(name_of(0))] or "?" for request in found if request.writes)


def _server_cpu_seconds(cluster: Cluster) -> float:
    """CPU time of a local cluster's etcd and API server so far."""
    pids = (cluster.folder / "run" / f"{name}.pid" for name in ("etcd", "apiserver"))
    return sum(_cpu_seconds(int(pid.read_text())) for pid in pids)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kubeconfig(cluster: Cluster, folder: Path) -> Path:
    token = cluster.kubectl("create", "token", "diloco", "-n", NAMESPACE, "--duration=2h").strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    path = folder / "operator.kubeconfig"
    path.write_text(json.dumps(config))
    return path
