"""Faults in the processes inside pods, and of a node, as they happen in real clusters."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

from diloco_testing.clusters.job import Job
from diloco_testing.clusters.kubectl import KubectlError, Object
from diloco_testing.clusters.provision import Cluster

# Children of the container's first process; exec'd helpers such as this program have another parent.
_KILL_CHILD = """
import os, pathlib, signal, sys, time

def found():
    kids = pathlib.Path('/proc/1/task/1/children').read_text().split()
    for pid in map(int, kids):
        try:
            command = pathlib.Path(f'/proc/{pid}/cmdline').read_text()
        except OSError:
            continue
        if any(word in command for word in ARGUMENTS):
            yield pid

[killed] = found()
os.kill(killed, signal.SIGKILL)
begun = time.monotonic()
while not set(found()) - {killed}:
    if time.monotonic() - begun > SECONDS:
        sys.exit('no other process was started')
    time.sleep(0.02)
print(time.monotonic() - begun)
"""


@contextlib.contextmanager
def silent_kubelet(cluster: Cluster) -> Iterator[None]:
    """The kubelet of a local cluster's node is paused; its containers run on."""
    pid = int((cluster.folder / "run/kubelet.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def another_node(cluster: Cluster, name: str = "another") -> Iterator[None]:
    """
    A node that reports and takes no pods.

    The control plane evicts nothing from a node that is silent while no other node of its zone reports.
    """
    kubectl, ended = cluster.kubectl, Event()

    def report() -> None:
        while True:
            lease = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": name, "namespace": "kube-node-lease"},
                "spec": {
                    "holderIdentity": name, "leaseDurationSeconds": 40,
                    "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                },
            }  # fmt: skip
            with contextlib.suppress(KubectlError):  # it is due for 40 s
                kubectl.apply(lease, namespace="kube-node-lease")
            if ended.wait(10.0):
                return

    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    ready = {"type": "Ready", "status": "True", "reason": "Reported", "message": "of a test"}
    kubectl.apply({**node, "spec": {"unschedulable": True}})
    kubectl(
        "patch",
        "node",
        name,
        "--subresource=status",
        "-p",
        json.dumps({"status": {"conditions": [ready]}}),
    )
    reporting = Thread(target=report, name="another-node")
    reporting.start()
    try:
        yield
    finally:
        ended.set()
        reporting.join()
        kubectl.delete("node", name)
        kubectl.delete("lease", name, "kube-node-lease")


def kill_child(job: Job, pod: str, *arguments: str, seconds: float = 45.0) -> float:
    """
    kill -9 of the process that does a container's work (not of its first process).

    Args:
        job: whose pod.
        pod: its name.
        arguments: at least one is part of the command line of the process to kill.
        seconds: how long to wait for its successor.

    Returns:
        Seconds from the kill until its successor was started, as a process in the container saw it.
    """
    program = _KILL_CHILD.replace("ARGUMENTS", repr(arguments)).replace("SECONDS", repr(seconds))
    return float(job.cluster.kubectl.exec(pod, "python3", "-c", program, namespace=job.namespace))


def kill_first_process(pod: Object) -> None:
    """kill -9 of a container's first process."""
    signal_first_process(pod, signal.SIGKILL, program="diloco_agent")


def signal_first_process(pod: Object, number: signal.Signals, *, program: str) -> None:
    """
    Signal a container's first process, from outside: from inside, the kernel protects it.

    Local clusters only: their processes are this machine's.

    Args:
        pod: its pod.
        number: the signal.
        program: part of its command line.
    """
    uid = pod["metadata"]["uid"]
    found = [pid for pid in _processes() if _is_first_of(pid, uid, program.encode())]
    if len(found) != 1:
        raise AssertionError(f"{pod['metadata']['name']}: first processes of main: {found}")
    os.kill(found[0], number)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_first_of(pid: int, pod_uid: str, program: bytes) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        if pod_uid not in (folder / "cgroup").read_text():
            return False
        inside = next(
            line
            for line in (folder / "status").read_text().splitlines()
            if line.startswith("NSpid")
        ).split()[-1]
        return inside == "1" and program in (folder / "cmdline").read_bytes()
    except (OSError, StopIteration):
        return False
