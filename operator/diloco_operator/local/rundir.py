"""
The run directory: where one job on one machine leaves everything, and who may use it.

One supervisor at a time holds the directory by a file lock, which the system drops with the
process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from diloco.errors import ConfigError, StorageError
from diloco.spec import RunSpec
from diloco_operator.api import DiLoCoJob
from diloco_operator.manifest import load_job
from diloco_operator.names import learner_slug
from diloco_operator.validate import transition_problems

FINAL_STATES = ("Suspended", "Complete", "Failed")


class RunDir:
    """Paths of a run directory, and the files that the supervisor writes."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.manifest = self.path / "job.yaml"
        self.spec = self.path / "spec.json"
        self.status_file = self.path / "status.json"
        self.events = self.path / "events.jsonl"
        self.evaluations = self.path / "eval.jsonl"
        self.model = self.path / "model"
        self.sample = self.model / "sample.txt"
        self.report = self.path / "report.html"
        self.endpoint = self.path / "state" / "endpoint"
        self._origin = self.path / "state" / "origin.json"
        self._lock = self.path / "state" / "supervisor.lock"

    def log(self, process: str) -> Path:
        """Where a process writes what it says."""
        return self.path / "logs" / f"{learner_slug(process)}.log"

    def state_of(self, process: str) -> Path:
        """The directory that a learner or the evaluator keeps over its restarts."""
        place = "learners" if "/" in process else "state"
        return self.path / place / learner_slug(process)

    # ------------------------------------------------------------------------------ who may use it

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """
        Be the one supervisor of this directory.

        Raises:
            ConfigError: the directory holds other things, or another supervisor is at work.
            StorageError: the disk refused.
        """
        self._refuse_foreign()
        with _storage(self.path):
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.path}: in use by the supervisor with pid {_read_pid(fd)}; "
                    f"end it with: diloco suspend --dir {self.path}"
                ) from None
            with _storage(self._lock):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def supervisor_pid(self) -> int | None:
        """Pid of the supervisor at work here; None when there is none."""
        try:
            fd = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
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

    def _refuse_foreign(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; give a directory with --dir")
        if not self.path.exists() or self.manifest.exists() or self._lock.exists():
            return
        if others := sorted(entry.name for entry in self.path.iterdir()):
            raise ConfigError(
                f"{self.path}: holds {', '.join(others[:3])} and no job.yaml, so it is no run "
                "directory; give an empty or a new one with --dir"
            )

    # ------------------------------------------------------------------------------ what it holds

    def adopt(self, job_path: Path, job: DiLoCoJob, spec: RunSpec) -> Path:
        """
        Make the directory that of `job`, fresh or going on; call it while holding.

        Returns:
            The folder of the user's manifest, where own commands start.

        Raises:
            ConfigError: it is another job's, the change is not allowed, or the folder is gone.
            StorageError: the disk refused.
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
                    f"{self.path}: the job began with other values; give another directory with "
                    "--dir or change them back:\n" + "\n".join(problems)
                )
        origin = self._origin_of(job_path)
        if not origin.parent.is_dir():
            raise ConfigError(
                f"{origin.parent}: the folder of the job's manifest is gone; the job's files are "
                "looked for there, so put it back"
            )
        text = _manifest_text(job_path, job)
        with _storage(self.path):
            for folder in ("learners", "logs", "snapshots", "state"):
                (self.path / folder).mkdir(exist_ok=True)
            replace_file(self.manifest, text)
            replace_file(self.spec, spec.to_json())
            replace_file(self._origin, json.dumps({"manifest": str(origin)}) + "\n")
        return origin.parent

    def origin(self) -> Path:
        """The manifest that this run was started with."""
        return self._origin_of(self.manifest)

    def _origin_of(self, job_path: Path) -> Path:
        """`job_path`, or what it was copied from when it is this directory's own job.yaml."""
        path = job_path.absolute()
        if path.resolve() == self.manifest.resolve() and self._origin.exists():
            return Path(json.loads(self._origin.read_text())["manifest"])
        return path

    def status(self) -> dict[str, Any]:
        """
        What the supervisor said last; when it is gone without a word, that is said too.

        Raises:
            ConfigError: no run was started in this directory.
        """
        try:
            status: dict[str, Any] = json.loads(self.status_file.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: holds no status.json; give the directory of a run with --dir"
            ) from None
        except ValueError as error:
            raise StorageError(
                f"{self.status_file}: {error}; a supervisor at work rewrites it"
            ) from None
        if "processes" not in status:
            raise ConfigError(
                f"{self.path}: was fetched from a cluster, where the job is; ask kubectl, or look at "
                f"it with: diloco report --dir {self.path}"
            )
        if status["state"] not in FINAL_STATES and self.supervisor_pid() is None:
            status["state"] = "Suspended"
            status["message"] = (
                f"the supervisor (pid {status['supervisor']['pid']}) is gone; "
                f"go on with: diloco resume --dir {self.path}"
            )
            for process in status["processes"]:
                process |= {"state": "Stopped", "pid": None}
        return status

    def find_learner_pid(self, name: str) -> int:
        """
        Pid of a living learner.

        Raises:
            ConfigError: there is no such learner, or it is not alive.
        """
        entries = [one for one in self.status()["processes"] if one["role"] == "learner"]
        entry = next((one for one in entries if one["name"] == name), None)
        if entry is None:
            known = ", ".join(one["name"] for one in entries)
            raise ConfigError(f'there is no learner "{name}"; the learners are {known}')
        pid = entry["pid"]
        if not isinstance(pid, int):
            raise ConfigError(f"learner {name} is not alive (state {entry['state']})")
        return pid

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json; a reader sees the old one or the new one."""
        replace_file(self.status_file, json.dumps(status, indent=2) + "\n")

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to events.jsonl; the syncer appends there too: one write, whole lines."""
        line = json.dumps({"time": wall_text(datetime.now(UTC)), **event}, separators=(",", ":"))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.events, flags, 0o644)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)


def wall_text(when: datetime) -> str:
    """A wall clock time as every file of the run writes it."""
    return when.isoformat(timespec="milliseconds")


def replace_file(path: Path, text: str) -> None:
    """Give `path` this content at once; not synced to disk: a crash of the machine may lose it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _manifest_text(job_path: Path, job: DiLoCoJob) -> str:
    """The manifest as given, or what `--set` made of it."""
    text = job_path.read_text()
    if load_job(text).model_dump() == job.model_dump():
        return text
    data = job.model_dump(by_alias=True, exclude_unset=True, mode="json")
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return f"# {job_path.name} with the changes of --set\n{body}"


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
            f"{where}: {error.strerror}; the run cannot keep its files there"
        ) from None
