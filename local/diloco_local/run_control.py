"""`diloco kill`, `suspend` and `resume`: control of a run from another terminal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rich.console import Console

from diloco.errors import ConfigError, UnavailableError
from diloco_local.manifest import load_job
from diloco_local.run_directory import RunDir
from diloco_local.supervisor import run

SUSPEND_SECONDS = 180.0
POLL_SECONDS = 0.1


def kill(directory: Path, learner: str) -> int:
    """
    Kill a learner and its helpers, as a machine failure would; its supervisor restarts it.

    Returns:
        The pid of the killed process.

    Raises:
        ConfigError: no run is active in `directory`, or no such learner runs.
    """
    run_dir = RunDir(directory)
    pid = run_dir.find_learner_pid(learner)
    supervisor = _supervisor(run_dir)
    if _parent(pid) != supervisor:
        # status.json is up to a second old: the learner exited, and its pid may have been reused.
        raise ConfigError(f"learner {learner} with pid {pid} has just exited; try again")
    os.killpg(pid, signal.SIGKILL)
    return pid


def suspend(directory: Path, *, timeout_seconds: float = SUSPEND_SECONDS) -> None:
    """
    Stop a run cleanly, as one Ctrl-C does, and wait until its supervisor has exited.

    Raises:
        ConfigError: no run is active in `directory`.
        UnavailableError: it still runs after `timeout_seconds`.
    """
    run_dir = RunDir(directory)
    pid = _supervisor(run_dir)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while run_dir.supervisor_pid() == pid:
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"{run_dir.path}: the supervisor with pid {pid} still runs after "
                f"{timeout_seconds:g} s; check its logs, or run the command again to stop it "
                "immediately"
            )
        time.sleep(POLL_SECONDS)


def resume(
    directory: Path, *, from_snapshot: int | None = None, console: Console | None = None
) -> int:
    """
    Resume a run from its directory; returns the exit code of `supervisor.run`.

    Args:
        directory: that of the run.
        from_snapshot: step of the snapshot to start from, 0: start over; None: the newest.
        console: for the progress.

    Raises:
        ConfigError: there is no run in `directory`, or it is active.
        StorageError: the choice of the snapshot cannot be written.
    """
    run_dir = RunDir(directory)
    if not run_dir.manifest.exists():
        raise ConfigError(
            f"{run_dir.path}: no job.yaml found; give the directory of a run with --dir"
        )
    if from_snapshot is not None:
        if (pid := run_dir.supervisor_pid()) is not None:
            raise ConfigError(
                f"{run_dir.path}: in use by the supervisor with pid {pid}; stop it with: diloco "
                f"suspend --dir {run_dir.path}"
            )
        run_dir.choose_snapshot(from_snapshot)
    return run(run_dir.manifest, load_job(run_dir.manifest), run_dir.path, console=console)


def _supervisor(run_dir: RunDir) -> int:
    pid = run_dir.supervisor_pid()
    if pid is None:
        raise ConfigError(f"{run_dir.path}: no run is active here; start it with: diloco resume")
    return pid


def _parent(pid: int) -> int | None:
    """The parent of a process; None when it has exited."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # "pid (name) state ppid", where the name may contain parentheses.
    return int(stat.rpartition(")")[2].split()[1])
