"""`diloco kill`, `suspend` and `resume`: what another terminal asks of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rich.console import Console

from diloco.errors import ConfigError, UnavailableError
from diloco_operator.local.rundir import RunDir
from diloco_operator.local.supervisor import run
from diloco_operator.manifest import load_job

SUSPEND_SECONDS = 180.0
TURN_SECONDS = 0.1


def kill(run_dir: Path, learner: str) -> int:
    """
    End a learner and its helpers as a failing machine would; its supervisor starts it again.

    Returns:
        The pid that was killed.

    Raises:
        ConfigError: nothing runs in `run_dir`, or there is no such learner alive.
    """
    rundir = RunDir(run_dir)
    pid = rundir.find_learner_pid(learner)
    supervisor = _supervisor(rundir)
    if _parent(pid) != supervisor:
        # status.json is up to a second old: the learner ended, and its number may be anybody's.
        raise ConfigError(f"learner {learner} with pid {pid} has just ended; try again")
    os.killpg(pid, signal.SIGKILL)
    return pid


def suspend(run_dir: Path, *, patience_seconds: float = SUSPEND_SECONDS) -> None:
    """
    Have the run finish and save, as one Ctrl-C does, and wait until its supervisor is gone.

    Raises:
        ConfigError: nothing runs in `run_dir`.
        UnavailableError: it is still not gone after `patience_seconds`.
    """
    rundir = RunDir(run_dir)
    pid = _supervisor(rundir)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_seconds
    while rundir.supervisor_pid() == pid:
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"{rundir.path}: the supervisor with pid {pid} is still at work after "
                f"{patience_seconds:g} s; look into its logs, or ask once more to stop at once"
            )
        time.sleep(TURN_SECONDS)


def resume(run_dir: Path, *, console: Console | None = None) -> int:
    """
    Go on with a run as its directory describes it; the exit code of `supervisor.run`.

    Raises:
        ConfigError: no run was started in `run_dir`, or it is at work.
    """
    rundir = RunDir(run_dir)
    if not rundir.manifest.exists():
        raise ConfigError(
            f"{rundir.path}: holds no job.yaml; give the directory of a run with --dir"
        )
    return run(rundir.manifest, load_job(rundir.manifest), rundir.path, console=console)


def _supervisor(rundir: RunDir) -> int:
    pid = rundir.supervisor_pid()
    if pid is None:
        raise ConfigError(f"{rundir.path}: nothing runs here; start it with: diloco resume")
    return pid


def _parent(pid: int) -> int | None:
    """The parent of a process; None when it is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # "pid (name) state ppid": the name may hold anything, also brackets.
    return int(stat.rpartition(")")[2].split()[1])
