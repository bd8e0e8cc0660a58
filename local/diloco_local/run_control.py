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
TURN_SECONDS = 0.1


def kill(run_dir: Path, learner: str) -> int:
    """
    Kill a learner and its helpers, as a machine failure would; its supervisor restarts it.

    Returns:
        The pid of the killed process.

    Raises:
        ConfigError: no run is active in `run_dir`, or no such learner runs.
    """
    rundir = RunDir(run_dir)
    pid = rundir.find_learner_pid(learner)
    supervisor = _supervisor(rundir)
    if _parent(pid) != supervisor:
        # status.json is up to a second old: the learner exited, and its pid may have been reused.
        raise ConfigError(f"learner {learner} with pid {pid} has just exited; try again")
    os.killpg(pid, signal.SIGKILL)
    return pid


def suspend(run_dir: Path, *, timeout_seconds: float = SUSPEND_SECONDS) -> None:
    """
    Stop a run cleanly, as one Ctrl-C does, and wait until its supervisor has exited.

    Raises:
        ConfigError: no run is active in `run_dir`.
        UnavailableError: it still runs after `timeout_seconds`.
    """
    rundir = RunDir(run_dir)
    pid = _supervisor(rundir)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while rundir.supervisor_pid() == pid:
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"{rundir.path}: the supervisor with pid {pid} still runs after "
                f"{timeout_seconds:g} s; check its logs, or run the command again to stop it "
                "immediately"
            )
        time.sleep(TURN_SECONDS)


def resume(
    run_dir: Path, *, from_snapshot: int | None = None, console: Console | None = None
) -> int:
    """
    Resume a run from its directory; returns the exit code of `supervisor.run`.

    Args:
        run_dir: its directory.
        from_snapshot: step of the snapshot to start from, 0: start over; None: the newest.
        console: for the progress.

    Raises:
        ConfigError: there is no run in `run_dir`, or it is active.
        StorageError: the choice of the snapshot cannot be written.
    """
    rundir = RunDir(run_dir)
    if not rundir.manifest.exists():
        raise ConfigError(
            f"{rundir.path}: no job.yaml found; give the directory of a run with --dir"
        )
    if from_snapshot is not None:
        if (pid := rundir.supervisor_pid()) is not None:
            raise ConfigError(
                f"{rundir.path}: in use by the supervisor with pid {pid}; stop it with: diloco "
                f"suspend --dir {rundir.path}"
            )
        rundir.choose_snapshot(from_snapshot)
    return run(rundir.manifest, load_job(rundir.manifest), rundir.path, console=console)


def _supervisor(rundir: RunDir) -> int:
    pid = rundir.supervisor_pid()
    if pid is None:
        raise ConfigError(f"{rundir.path}: no run is active here; start it with: diloco resume")
    return pid


def _parent(pid: int) -> int | None:
    """The parent of a process; None when it has exited."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # "pid (name) state ppid", where the name may contain parentheses.
    return int(stat.rpartition(")")[2].split()[1])
