"""Harm done to the processes inside pods, as it happens in real clusters."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from diloco_testing.clusters_job import Job
from diloco_testing.kubectl import Object

# Children of the container's first process; exec'd helpers such as this program have another parent.
_KILL_CHILD = """
import os, pathlib, signal
kids = pathlib.Path('/proc/1/task/1/children').read_text().split()
found = [pid for pid in map(int, kids)
         if any(word in pathlib.Path(f'/proc/{pid}/cmdline').read_text() for word in WORDS)]
assert len(found) == 1, (kids, found)
os.kill(found[0], signal.SIGKILL)
print(found[0])
"""


def kill_child(job: Job, pod: str, *words: str) -> int:
    """
    kill -9 of the process that does a container's work (not of its first process).

    Args:
        job: whose pod.
        pod: its name.
        words: one of them is part of the command of the process that is meant.

    Returns:
        The pid that it had, within the container.
    """
    program = _KILL_CHILD.replace("WORDS", repr(words))
    return int(job.cluster.kubectl.exec(pod, "python3", "-c", program, namespace=job.namespace))


def kill_first_process(pod: Object) -> None:
    """
    kill -9 of a container's first process, from outside: from inside, the kernel protects it.

    Local clusters only: their processes are this machine's.
    """
    uid = pod["metadata"]["uid"]
    found = [pid for pid in _processes() if _is_first_of(pid, uid)]
    if len(found) != 1:
        raise AssertionError(f"{pod['metadata']['name']}: first processes of main: {found}")
    os.kill(found[0], signal.SIGKILL)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_first_of(pid: int, pod_uid: str) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        if pod_uid not in (folder / "cgroup").read_text():
            return False
        inside = next(
            line
            for line in (folder / "status").read_text().splitlines()
            if line.startswith("NSpid")
        ).split()[-1]
        return inside == "1" and b"diloco_operator.pod" in (folder / "cmdline").read_bytes()
    except (OSError, StopIteration):
        return False
