"""Supervised processes and their guard: real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from diloco_agent import processes as module
from diloco_agent.output import Log, last_lines
from diloco_agent.processes import Command, Processes
from diloco_testing.local.fake_run import alive, until


@pytest.fixture
def processes():
    made = Processes()
    yield made
    made.close()


@pytest.fixture
def command(tmp_path):
    def make(code, *, name="one", argv=None, **environment):
        return Command(
            name=name,
            argv=argv or (sys.executable, "-c", code),
            environment={"PATH": os.environ["PATH"], **environment},
            directory=tmp_path,
            log=tmp_path / f"{name}.log",
        )

    return make


def next_exit(processes):
    [done] = until(processes.exits, "exit")
    return done


def test_an_exit_has_code_and_last_line(processes, command):
    code = "import sys; print('first'); print('why', file=sys.stderr); sys.exit(7)"
    processes.start(command(code, PYTHONUNBUFFERED="1"))
    done = next_exit(processes)
    assert (done.name, done.code, done.cause) == ("one", 7, "why")
    assert processes.exits() == []
    assert processes.pid("one") is None


def test_the_last_line_is_never_that_of_an_earlier_process(processes, command):
    processes.start(command("print('of the first process')"))
    assert next_exit(processes).cause == "of the first process"
    processes.start(command("pass"))
    assert next_exit(processes).cause == ""


def test_a_signal_is_a_negative_code(processes, command):
    processes.start(command("import os; os.kill(os.getpid(), 9)"))
    assert next_exit(processes).code == -9


def test_the_pid_is_that_of_the_program_itself(processes, command, tmp_path):
    pid = processes.start(command("import os; print(os.getpid(), os.getpgid(0))"))
    assert next_exit(processes).cause == f"{pid} {pid}"


def test_a_missing_program_is_an_exit_with_the_reason(processes, command):
    processes.start(command("", argv=("no-such-program",)))
    done = next_exit(processes)
    assert (done.code, done.cause) == (127, "no-such-program: No such file or directory")


def test_a_log_that_cannot_be_opened_is_an_exit_and_no_exception(processes, command, tmp_path):
    (tmp_path / "one.log").mkdir()
    assert processes.start(command("pass")) is None
    assert next_exit(processes).cause.endswith("one.log: Is a directory")


@pytest.mark.parametrize(
    ("environment", "argv", "cause"),
    [
        ({"LR=3": "x"}, None, "illegal environment variable name"),
        ({"LR": "x\0y"}, None, "embedded null byte"),
        ({}, (sys.executable, "\0"), "embedded null byte"),
    ],
)
def test_what_no_process_can_have_is_an_exit_with_the_reason(
    processes, command, environment, argv, cause
):
    assert processes.start(command("pass", argv=argv, **environment)) is None
    assert next_exit(processes).cause == f"{sys.executable}: {cause}"


def test_kill_includes_helpers_and_terminate_does_not(processes, command):
    code = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = command(code)
    processes.start(parent)
    helper = int(until(lambda: parent.log.read_text().strip(), "helper"))
    processes.terminate("one")
    assert next_exit(processes).code == -15
    until(lambda: not alive(helper), "end of the helper")  # its process has exited
    processes.start(parent)
    helper = int(until(lambda: parent.log.read_text().split()[1:], "helper")[0])
    processes.kill("one")
    assert next_exit(processes).code == -9
    assert not alive(helper)


def test_a_guard_that_was_killed_is_replaced_at_the_next_start(processes, command):
    guard = processes._guard
    guard.kill()
    guard.wait()
    processes.start(command("pass"))
    assert processes._guard is not guard
    assert processes._guard.poll() is None


def test_orphans_are_reaped_after_the_guard_was_killed_and_another_guard_watches(processes):
    guard = processes._guard.pid
    os.kill(guard, signal.SIGKILL)
    orphan = subprocess.Popen(["true"])
    for pid in (guard, orphan.pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    processes.reap_orphans()
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan.pid, os.WNOHANG)
    orphan.wait()
    assert processes._guard.pid != guard
    assert alive(processes._guard.pid)


def test_a_guard_that_ends_at_once_is_started_again_no_more_than_once_a_second(
    processes, monkeypatch
):
    started, now = [], [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        module, "_guard_command", lambda *arguments: started.append(now[0]) or ("false",)
    )
    processes._guard.kill()
    for _ in range(12):
        if processes._guard.returncode is None:
            os.waitid(os.P_PID, processes._guard.pid, os.WEXITED | os.WNOWAIT)
        orphan = subprocess.Popen(["true"])
        os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
        processes.reap_orphans()
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)
        orphan.wait()
        now[0] += 0.25
    assert started == [100.0, 101.0, 102.0]


def test_a_start_from_a_thread_is_refused(processes, command):
    errors = []

    def start():
        try:
            processes.start(command("pass"))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert errors == ["one was started from a thread; it would be killed with that thread"]


def test_two_processes_of_the_same_name_are_refused(processes, command):
    processes.start(command("import time; time.sleep(600)"))
    with pytest.raises(RuntimeError, match="one is running with pid"):
        processes.start(command("pass"))


def test_close_leaves_no_process(command):
    processes = Processes()
    pid = processes.start(command("import time; time.sleep(600)"))
    processes.close()
    assert not alive(pid)
    assert processes._guard.poll() is not None


# ---------------------------------------------------------------------------------- logs


def test_a_log_that_grows_starts_over_and_keeps_its_end(tmp_path):
    path = tmp_path / "eu-0.log"
    log = Log(path)
    with log.open() as file:
        os.write(file.fileno(), b"first\n" * 10)
        log.limit(most_bytes=60)
        assert path.stat().st_size == 60
        os.write(file.fileno(), b"last\n")
        log.limit(most_bytes=60)
        assert path.stat().st_size == 0
        assert last_lines(log.tail())[-1] == "last"
        os.write(file.fileno(), b"after\n")
    assert path.read_text() == "after\n"
    assert last_lines(log.tail())[-2:] == ("last", "after")
    earlier = tmp_path / "eu-0.1.log"
    assert earlier.read_text() == ("first\n" * 10 + "last\n")[-60:], "no more than the limit"
    assert earlier.stat().st_mode & 0o777 == 0o600


def test_a_log_whose_earlier_part_cannot_be_written_is_limited_too(tmp_path):
    path = tmp_path / "eu-0.log"
    (tmp_path / "eu-0.1.log").mkdir()
    log = Log(path)
    with log.open() as file:
        os.write(file.fileno(), b"x" * 100)
        log.limit(most_bytes=60)
    assert path.stat().st_size == 0


def test_the_limit_holds_for_a_process_that_writes_without_end(processes, command, monkeypatch):
    monkeypatch.setattr(Log.limit, "__defaults__", (1 << 20,))
    endless = command("while True: print('x' * 1000)")
    processes.start(endless)
    earlier = endless.log.with_suffix(".1.log")

    def moved():
        processes.limit_logs()
        return earlier.exists()

    until(moved, "a second part")
    assert earlier.stat().st_size <= 1 << 20
    processes.kill("one")
    # The last line may be cut, by the signal or where the file started over.
    assert set(next_exit(processes).cause) == {"x"}


def test_the_cause_of_a_crash_under_torchrun_is_that_of_its_rank(processes, command):
    code = """
import sys
print("Traceback (most recent call last):\\n  File x\\nKeyError: 'w'", file=sys.stderr)
print("E1123 13:00:07.1 7 torch/x.py:8] failed (exitcode: 1) local_rank: 0", file=sys.stderr)
print("ChildFailedError:\\n====\\nRoot Cause (first observed failure):", file=sys.stderr)
print("[0]:\\n  rank      : 0 (local_rank: 0)\\n" + "=" * 60, file=sys.stderr)
sys.exit(1)
"""
    processes.start(command(code))
    done = next_exit(processes)
    assert done.cause == "rank 0: KeyError: 'w'"
    assert done.last_lines[-1] == "=" * 60
