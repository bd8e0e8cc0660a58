"""
Two tiny programs that tie processes to their supervisor; run by path, standard library only.

    leash.py run PARENT ARGV...   dies with its parent, then becomes ARGV (same process)
    leash.py guard MARK           when its standard input ends, kills every process with MARK

Two, because each leaves a hole alone: the kernel's parent-death signal does not reach
grandchildren, and the guard could be killed together with the supervisor. A mark is an environment
variable with a random value; it is inherited, so that also a helper with a session of its own is
found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK_VARIABLE = "DILOCO_LEASH"
"""Its value is "<mark of the supervisor>:<process>:<life>"."""

_PR_SET_PDEATHSIG = 1
_MOST_SWEEPS = 100


def marked(prefix: str) -> list[int]:
    """Pids of living processes whose mark begins with `prefix`; none where there is no /proc."""
    needle = f"\0{MARK_VARIABLE}={prefix}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        # Processes end while we look, and other users' processes are not ours to read.
        with contextlib.suppress(OSError):
            if entry.isdigit() and needle in b"\0" + Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def kill_marked(prefix: str) -> None:
    """Kill every process whose mark begins with `prefix`, and what it forks meanwhile."""
    for _ in range(_MOST_SWEEPS):
        pids = marked(prefix)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; the exec that follows keeps it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _run(parent: int, argv: list[str]) -> None:
    _die_with(parent)
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        os._exit(127)


def _guard(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(mark)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        _run(int(sys.argv[2]), sys.argv[3:])
    else:
        _guard(sys.argv[2])
