"""Supervised processes and their guard: real processes, real signals."""

import os
import sys
import threading

import pytest

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
    assert (done.name, done.code, done.last_line) == ("one", 7, "why")
    assert processes.exits() == []
    assert processes.pid("one") is None


def test_the_last_line_is_never_that_of_an_earlier_process(processes, command):
    processes.start(command("print('of the first process')"))
    assert next_exit(processes).last_line == "of the first process"
    processes.start(command("pass"))
    assert next_exit(processes).last_line == ""


def test_a_signal_is_a_negative_code(processes, command):
    processes.start(command("import os; os.kill(os.getpid(), 9)"))
    assert next_exit(processes).code == -9


def test_the_pid_is_that_of_the_program_itself(processes, command, tmp_path):
    pid = processes.start(command("import os; print(os.getpid(), os.getpgid(0))"))
    assert next_exit(processes).last_line == f"{pid} {pid}"


def test_a_missing_program_is_an_exit_with_the_reason(processes, command):
    processes.start(command("", argv=("no-such-program",)))
    done = next_exit(processes)
    assert (done.code, done.last_line) == (127, "no-such-program: No such file or directory")


def test_a_log_that_cannot_be_opened_is_an_exit_and_no_exception(processes, command, tmp_path):
    (tmp_path / "one.log").mkdir()
    assert processes.start(command("pass")) is None
    assert next_exit(processes).last_line.endswith("one.log: Is a directory")


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
