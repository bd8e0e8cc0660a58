"""What the evaluator keeps of its user's command, when it kills it, and the directory of the model."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import tempfile
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from diloco_testing.local.fake_run import alive, until
from diloco_worker import evaluator
from diloco_worker.evaluator import CommandScorer, NoScoreError


def command(body):
    return CommandScorer(command=("python", "-c", textwrap.dedent(body)))


def test_only_the_end_of_what_a_command_prints_is_kept():
    body = """
        import sys
        for _ in range(2048):
            print(16384 * "x")
            print(16384 * "y", file=sys.stderr)
        print('{"loss": 1.5}')
        """
    tracemalloc.start()
    try:
        assert command(body)({}) == {"loss": 1.5}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20  # of the 64 MiB printed


def test_a_command_that_takes_too_long_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "EVALUATION_SECONDS", 2.0)
    path = tmp_path / "pid"
    body = f"""
        import os, pathlib, time
        pathlib.Path({str(path)!r}).write_text(str(os.getpid()))
        time.sleep(600)
        """
    with pytest.raises(NoScoreError, match="timed out after 2"):
        command(body)({})
    if path.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


HELPER = """
    import os, signal, subprocess, sys
    helper = subprocess.Popen([sys.executable, "-c", {helper!r}], **{options})
    with open({path!r} + ".part", "w") as file:
        file.write(str(helper.pid))
    os.rename({path!r} + ".part", {path!r})
    os.write(1, b'{{"loss": 1.5}}\\n')  # whole: a line that print writes may come in two parts
    """


def with_helper(
    path: Path, *, helper: str = "import time; time.sleep(600)", then: str = "", **options: Any
) -> str:
    """A command that starts another process, which has its standard output and its standard error."""
    return textwrap.dedent(HELPER).format(helper=helper, options=options, path=str(path)) + then


def test_the_processes_that_a_command_started_end_with_it_after_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "EVALUATION_SECONDS", 2.0)
    path = tmp_path / "pid"
    while not path.exists():  # on a busy machine, the command may be killed before it has a helper
        with pytest.raises(NoScoreError, match="timed out after"):
            command(with_helper(path, then="signal.pause()"))({})
        evaluator.EVALUATION_SECONDS *= 2
    until(lambda: not alive(int(path.read_text())), "end of the helper")


def test_what_a_command_leaves_running_delays_no_score_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "EVALUATION_SECONDS", 60.0)
    path = tmp_path / "pid"
    assert command(with_helper(path))({}) == {"loss": 1.5}
    until(lambda: not alive(int(path.read_text())), "end of the helper")


def test_a_process_of_a_command_in_a_session_of_its_own_delays_no_score(tmp_path, monkeypatch):
    """Such as a daemon, which may write to the pipe for as long as it lives."""
    monkeypatch.setattr(evaluator, "EVALUATION_SECONDS", 60.0)
    path, helper = (
        tmp_path / "pid",
        "import os, time\nwhile True: os.write(1, b'x\\n'), time.sleep(0.01)",
    )
    try:
        assert command(with_helper(path, helper=helper, start_new_session=True))({}) == {
            "loss": 1.5
        }
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


# ---------------------------------------------------------------- the directory of the model


def test_what_killed_evaluators_left_behind_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("diloco-evaluation-left", "diloco-evaluation-used", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "diloco-evaluation-link").symlink_to(tmp_path / "another")
    used = os.open(tmp_path / "diloco-evaluation-used", os.O_RDONLY)
    try:
        fcntl.flock(used, fcntl.LOCK_EX)  # by an evaluator of another job
        assert command("print('{\"loss\": 1}')")({}) == {"loss": 1}
    finally:
        os.close(used)
    left = {path.parent.name for path in tmp_path.glob("*/model.safetensors")}
    assert left == {"diloco-evaluation-used", "diloco-evaluation-link", "another"}


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_model_is_scored_where_the_file_system_locks_no_directories(monkeypatch, tmp_path, code):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert command("print('{\"loss\": 1}')")({}) == {"loss": 1}


def test_a_directory_that_another_evaluator_has_not_locked_yet_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "diloco-evaluation-new").mkdir()
    assert command("print('{\"loss\": 1}')")({}) == {"loss": 1}
    assert (tmp_path / "diloco-evaluation-new").exists()


def test_a_directory_that_another_evaluator_removes_meanwhile_costs_no_score(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in "ab":
        (tmp_path / f"diloco-evaluation-{name}").mkdir()
        (tmp_path / f"diloco-evaluation-{name}" / "model.safetensors").touch()
    listed = os.scandir

    def list_after_the_other(path):
        if not isinstance(path, int) and Path(path).name in (
            "diloco-evaluation-a",
            "diloco-evaluation-b",
        ):
            shutil.rmtree(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", list_after_the_other)
    monkeypatch.setattr(os, "listdir", lambda path: [entry.name for entry in os.scandir(path)])
    assert command("print('{\"loss\": 1}')")({}) == {"loss": 1}
