"""
The run directory: all files of one job on one machine.

One supervisor at a time holds the directory with a file lock, which the kernel releases when the
process exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from diloco.errors import ConfigError, StorageError
from diloco.journal import writer
from diloco.runtime import files, untrusted_json
from diloco.runtime.disk import PRIVATE
from diloco.spec import RunSpec
from diloco_job.manifest_file import Dumper, parse_job
from diloco_job.names import learner_slug
from diloco_job.rules import transition_problems
from diloco_job.types import DiLoCoJob
from diloco_local.manifest import load_job, read_manifest

FINAL_STATES = ("Suspended", "Complete", "Failed")
NEEDED = ("state", "message", "startTime", "supervisor")
"""Fields of status.json that are read here, or when the run is resumed."""

_LOCK_SECONDS = 1.0


class RunDir:
    """Paths of a run directory, and the files that the supervisor writes."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.manifest = self.path / "job.yaml"
        self.spec = self.path / "spec.json"
        self.status_file = self.path / "status.json"
        self.events = self.path / "events.jsonl"
        self.evaluations = self.path / "eval.jsonl"
        self.from_snapshot = self.path / "snapshots" / "from-snapshot"
        self.model = self.path / "model"
        self.sample = self.model / "sample.txt"
        self.report = self.path / "report.html"
        self.endpoint = self.path / "state" / "endpoint"
        self._origin = self.path / "state" / "origin.json"
        self._lock = self.path / "state" / "supervisor.lock"

    def log(self, process: str) -> Path:
        """The log file of a process."""
        return self.path / "logs" / f"{learner_slug(process)}.log"

    def state_of(self, process: str) -> Path:
        """The directory of a learner or the evaluator; outlives its restarts."""
        place = "learners" if "/" in process else "state"
        return self.path / place / learner_slug(process)

    def health_of(self, process: str) -> Path:
        """Where a learner or the evaluator reports its health."""
        return self.path / "state" / f"{learner_slug(process)}.health.json"

    def starts_of(self, learner: str) -> Path:
        """Where the supervisors count how often a learner was started."""
        return self.path / "state" / f"{learner_slug(learner)}.starts"

    # ------------------------------------------------------------------------------ lock

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """
        Lock this directory for one supervisor.

        Raises:
            ConfigError: the directory holds other files, or another supervisor uses it.
            StorageError: the directory cannot be written.
        """
        self._refuse_foreign()
        with _storage(self.path):
            self._lock.parent.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
        try:
            if not _lock(fd):
                raise ConfigError(
                    f"{self.path}: in use by the supervisor with pid {_read_pid(fd)}; "
                    f"stop it with: diloco suspend --dir {self.path}"
                )
            with _storage(self._lock):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def supervisor_pid(self) -> int | None:
        """Pid of the supervisor that uses this directory; None when there is none."""
        try:
            fd = files.open_regular(self._lock)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_pid(fd)
        else:
            return None
        finally:
            os.close(fd)

    def is_local(self) -> bool:
        """Whether a supervisor has used this directory; one that was fetched from a cluster has had none."""
        return self._lock.exists()

    def _refuse_foreign(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; give a directory with --dir")
        if not self.path.exists() or self.manifest.exists() or self._lock.exists():
            return
        if others := sorted(entry.name for entry in self.path.iterdir()):
            raise ConfigError(
                f"{self.path}: not a run directory: it contains {', '.join(others[:3])} and no "
                "job.yaml; give an empty or a new directory with --dir"
            )

    # ------------------------------------------------------------------------------ content

    def adopt(self, job_path: Path, job: DiLoCoJob, spec: RunSpec) -> Path:
        """
        Prepare the directory for `job`, new or resumed; call it while holding the lock.

        Returns:
            The directory of the user's manifest, where the user's own commands start.

        Raises:
            ConfigError: it belongs to another job, a change is not allowed, or the manifest's
                directory no longer exists.
            StorageError: the directory cannot be written.
        """
        if self.manifest.exists():
            old = load_job(self.manifest)
            if old.metadata.name != job.metadata.name:
                raise ConfigError(
                    f'{self.path}: belongs to job "{old.metadata.name}", not to '
                    f'"{job.metadata.name}"; give another directory with --dir'
                )
            if problems := transition_problems(old, job):
                raise ConfigError(
                    f"{self.path}: the job started with other values; give another directory with "
                    "--dir, or change them back:\n" + "\n".join(problems)
                )
        origin = self._origin_of(job_path)
        if not origin.parent.is_dir():
            raise ConfigError(
                f"{origin.parent}: the directory of the job's manifest no longer exists; the "
                "job's commands start there, so restore it"
            )
        text = _manifest_text(job_path, job)
        with _storage(self.path):
            for folder in ("learners", "logs", "snapshots", "state"):
                (self.path / folder).mkdir(files.PRIVATE_DIRECTORY, exist_ok=True)
            place = json.dumps({"manifest": str(origin)}) + "\n"
            # Durable, and the manifest last: without these files, a run cannot be resumed after a power failure.
            files.replace(self._origin, place, durable=True, mode=PRIVATE)
            files.replace(self.spec, spec.to_json(), durable=True, mode=PRIVATE)
            files.replace(self.manifest, text, durable=True, mode=PRIVATE)
        return origin.parent

    def origin(self) -> Path:
        """
        The manifest that this run was started with; the user's own commands start in its directory.

        Raises:
            StorageError: it is not known.
        """
        return self._origin_of(self.manifest)

    def _origin_of(self, job_path: Path) -> Path:
        """`job_path`, or the file it was copied from if it is this directory's job.yaml."""
        path = job_path.absolute()
        if path.resolve() != self.manifest.resolve() or not self._origin.exists():
            return path
        try:
            return Path(untrusted_json.parse(self._origin.read_text())["manifest"])
        except (ValueError, KeyError, TypeError):
            raise StorageError(
                f"{self._origin}: does not name the manifest of this run; continue the run with: diloco run "
                f"MANIFEST --dir {self.path}"
            ) from None

    def status(self) -> dict[str, Any]:
        """
        The latest status, corrected if the supervisor was killed.

        Raises:
            ConfigError: this is not the directory of a local run.
            StorageError: status.json is damaged.
        """
        try:
            status: Any = untrusted_json.parse(self.status_file.read_text(), finite=False)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: no status.json found; give the directory of a run with --dir"
            ) from None
        except ValueError as error:
            raise StorageError(
                f"{self.status_file}: {error}; a running supervisor rewrites it"
            ) from None
        if not isinstance(status, dict):
            raise StorageError(
                f"{self.status_file}: holds no JSON object; a running supervisor rewrites it"
            )
        if "processes" not in status:
            raise ConfigError(
                f"{self.path}: was fetched from a cluster; use kubectl for the status of the job, or "
                f"inspect what was fetched with: diloco report --dir {self.path}"
            )
        if missing := [field for field in NEEDED if field not in status]:
            raise StorageError(
                f"{self.status_file}: has no {', '.join(missing)}; a running supervisor rewrites it"
            )
        if status["state"] not in FINAL_STATES and self.supervisor_pid() is None:
            status["state"] = "Suspended"
            status["message"] = (
                f"the supervisor (pid {status['supervisor']['pid']}) no longer runs; "
                f"resume the job with: diloco resume --dir {self.path}"
            )
            for process in status["processes"]:
                process |= {"state": "Stopped", "pid": None}
        return status

    def find_learner_pid(self, name: str) -> int:
        """
        Pid of a running learner.

        Raises:
            ConfigError: there is no such learner, or it does not run.
        """
        learners = [p for p in self.status()["processes"] if p["role"] == "learner"]
        learner = next((found for found in learners if found["name"] == name), None)
        if learner is None:
            known = ", ".join(found["name"] for found in learners)
            raise ConfigError(f'no learner "{name}"; the learners are {known}')
        pid = learner["pid"]
        if not isinstance(pid, int):
            raise ConfigError(f"learner {name} is not running (state {learner['state']})")
        return pid

    def choose_snapshot(self, step: int) -> None:
        """
        Have the next syncer start from the snapshot of this step; 0: start over.

        Raises:
            StorageError: the disk reported an error.
        """
        with _storage(self.path):
            self.from_snapshot.parent.mkdir(files.PRIVATE_DIRECTORY, exist_ok=True)
            files.replace(self.from_snapshot, f"{step}\n", durable=True, mode=PRIVATE)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json atomically."""
        files.replace(self.status_file, json.dumps(status, indent=2) + "\n", mode=PRIVATE)

    def starts(self, learner: str) -> int:
        """
        How often a learner was started, by all supervisors of this directory.

        Raises:
            OSError: the count cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, ValueError):
            return max(0, int(files.read(self.starts_of(learner))))
        return 0

    def write_starts(self, learner: str, count: int) -> None:
        """Replace the count of a learner's starts."""
        files.replace(self.starts_of(learner), f"{count}\n", mode=PRIVATE)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Append a line to events.jsonl; the syncer appends to the file too."""
        writer.append(self.events, event)


def _manifest_text(job_path: Path, job: DiLoCoJob) -> str:
    """The manifest as written, or with the changes of `--set` applied."""
    text = read_manifest(job_path)
    if parse_job(text).model_dump() == job.model_dump():
        return text
    data = job.model_dump(by_alias=True, exclude_unset=True, mode="json")
    body = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return f"# {job_path.name} with the changes of --set\n{body}"


def _lock(fd: int) -> bool:
    """Whether the lock was free. `supervisor_pid` of another process holds it for an instant."""
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        else:
            return True


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdigit() else None


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise StorageError(
            f"{where}: {error.strerror}; the run cannot write its files there"
        ) from None
