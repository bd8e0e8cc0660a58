"""
Two small programs that tie processes to their supervisor; run by path, standard library only.

    process_guard.py run PARENT ARGV...   becomes ARGV, which is killed when PARENT exits
    process_guard.py guard MARK           at the end of its standard input, kills processes with MARK

Neither is enough alone: the kernel's parent-death signal does not reach grandchildren, and the guard
can be killed together with the supervisor. A mark is an environment variable with a random value;
processes inherit it, so that helpers in sessions of their own are found too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from pathlib import Path

MARK_VARIABLE = "DILOCO_PROCESS_MARK"
"""Its value is "<mark of the supervisor>:<process>:<start>:"."""

_PR_SET_PDEATHSIG = 1
_MAX_SWEEPS = 100


def marked(prefix: str) -> list[int]:
    """Pids of running processes whose mark begins with `prefix`; none without /proc."""
    needle = f"\0{MARK_VARIABLE}={prefix}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        # Processes end during the scan, and those of other users are not readable.
        with contextlib.suppress(OSError):
            if entry.isdigit() and needle in b"\0" + Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def kill_marked(prefix: str) -> None:
    """Kill every process whose mark begins with `prefix`, and what it forks in the meantime."""
    for _ in range(_MAX_SWEEPS):
        pids = marked(prefix)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent exits; the setting survives an exec."""
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
        reason = error.strerror
        # exec reports a directory of PATH that it may not search instead of the missing program.
        candidates = [os.path.join(folder, argv[0]) for folder in os.get_exec_path()]
        if isinstance(error, PermissionError) and not any(map(os.path.exists, candidates)):
            reason = os.strerror(errno.ENOENT)
        sys.stderr.write(f"{argv[0]}: {reason}\n")
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
