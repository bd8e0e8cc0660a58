"""How `diloco doctor` watches a program end, and what it does with its scratch directory."""

from __future__ import annotations

import errno
import tempfile
from types import SimpleNamespace

import pytest

from diloco.errors import StorageError
from diloco_agent.processes import ProcessExit
from diloco_job.manifest_file import parse_job
from diloco_local import doctor

JOB = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  steps: 100
  sync: {fragments: 2, interval: 2, overlap: 1}
  learner: {command: [python, train.py]}
  regions: [{name: eu, learners: 1}]
"""


class Program:
    """A process that ends at a time of the clock; stands for `Processes`."""

    def __init__(self, clock, *, ends_at, calls_after_done=0, on_terminate=True):
        self.clock, self.ends_at, self.on_terminate = clock, ends_at, on_terminate
        self.record = SimpleNamespace(steps=(1, 2, 3), calls_after_done=calls_after_done)
        self.order = []

    def start(self, command):
        self.order.append("start")

    def exits(self):
        if self.clock.now < self.ends_at:
            return []
        return [ProcessExit(name="eu/0", code=0, last_lines=(), cause="")]

    def limit_logs(self):
        """Without a log."""

    def terminate(self, name):
        self.order.append(f"terminate {name} at {self.clock.now:.0f}")
        if self.on_terminate:
            self.ends_at = self.clock.now

    def close(self):
        self.order.append(f"close at {self.clock.now:.0f}")


class Clock:
    """Each sleep takes a second."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += 1.0


@pytest.fixture
def watch(monkeypatch):
    def run(seconds, **options):
        clock = Clock()
        program = Program(clock, **options)
        monkeypatch.setattr(doctor, "time", clock)
        monkeypatch.setattr(doctor, "Processes", lambda: program)
        monkeypatch.setattr(doctor, "_read", lambda file: program.record)
        _, exited = doctor._watch(SimpleNamespace(name="eu/0"), None, seconds)
        return exited is not None, program.order

    return run


def test_a_program_that_evaluates_at_its_end_has_all_of_its_time(watch):
    assert watch(300.0, ends_at=200.0) == (True, ["start", "close at 200"])
    assert watch(1.0, ends_at=25.0) == (True, ["start", "close at 25"])


def test_a_program_that_does_not_end_gets_sigterm_before_sigkill(watch):
    end = ["start", "terminate eu/0 at 301"]
    assert watch(300.0, ends_at=1e9) == (False, [*end, "close at 301"])
    assert watch(300.0, ends_at=1e9, on_terminate=False) == (False, [*end, "close at 306"])


def test_a_loop_that_ignores_done_does_not_get_all_of_the_time(watch):
    assert watch(300.0, ends_at=1e9, calls_after_done=8)[1][1] == "terminate eu/0 at 30"


def examine(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return doctor.examine(tmp_path / "job.yaml", parse_job(JOB), tmp_path / "runs/j", seconds=9)


def test_a_scratch_directory_that_cannot_be_removed_costs_no_result(tmp_path, monkeypatch):
    """A file system over the network keeps files that a process has open."""

    def remove(path, *args, **kwargs):
        if not kwargs.get("ignore_errors"):
            raise OSError(errno.EBUSY, "Device or resource busy")

    started = doctor.Examination(learner="eu/0", record=None, code=0, cause="", seconds=1.0)
    monkeypatch.setattr(doctor, "_start", lambda *args, **kwargs: started)
    monkeypatch.setattr(tempfile.TemporaryDirectory, "_rmtree", remove)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert examine(tmp_path).examinations == (started,)


def test_an_error_without_a_file_names_none(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(doctor, "_start", fail)
    with pytest.raises(StorageError, match=r"^Cannot allocate memory; nothing was examined"):
        examine(tmp_path)
