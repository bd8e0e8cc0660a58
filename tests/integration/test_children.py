"""Children on their leash: real processes, real signals."""

import os
import sys
import threading

import pytest

from diloco_operator.local.children import Children, Command
from diloco_testing.fake_run import alive, until


@pytest.fixture
def children():
    made = Children()
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


def death(children):
    [dead] = until(children.deaths, "death")
    return dead


def test_a_death_carries_code_and_last_line(children, command):
    code = "import sys; print('first'); print('why', file=sys.stderr); sys.exit(7)"
    children.start(command(code, PYTHONUNBUFFERED="1"))
    dead = death(children)
    assert (dead.name, dead.code, dead.last_line) == ("one", 7, "why")
    assert children.deaths() == []
    assert children.pid("one") is None


def test_the_last_line_is_never_that_of_an_earlier_life(children, command):
    children.start(command("print('of the first life')"))
    assert death(children).last_line == "of the first life"
    children.start(command("pass"))
    assert death(children).last_line == ""


def test_a_signal_is_a_negative_code(children, command):
    children.start(command("import os; os.kill(os.getpid(), 9)"))
    assert death(children).code == -9


def test_the_pid_is_that_of_the_program_itself(children, command, tmp_path):
    pid = children.start(command("import os; print(os.getpid(), os.getpgid(0))"))
    assert death(children).last_line == f"{pid} {pid}"


def test_a_program_that_is_not_there_is_a_death_that_says_so(children, command):
    children.start(command("", argv=("no-such-program",)))
    dead = death(children)
    assert (dead.code, dead.last_line) == (127, "no-such-program: No such file or directory")


def test_a_folder_that_is_not_there_is_a_death_and_no_exception(children, command, tmp_path):
    (tmp_path / "one.log").mkdir()
    assert children.start(command("pass")) is None
    assert death(children).last_line.endswith("one.log: Is a directory")


def test_kill_takes_helpers_along_and_terminate_does_not(children, command):
    code = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    one = command(code)
    children.start(one)
    helper = int(until(lambda: one.log.read_text().strip(), "helper"))
    children.terminate("one")
    assert death(children).code == -15
    until(lambda: not alive(helper), "end of the helper")  # its learner is gone
    children.start(one)
    helper = int(until(lambda: one.log.read_text().split()[1:], "helper")[0])
    children.kill("one")
    assert death(children).code == -9
    assert not alive(helper)


def test_a_guard_that_died_is_replaced_at_the_next_start(children, command):
    guard = children._guard
    guard.kill()
    guard.wait()
    children.start(command("pass"))
    assert children._guard is not guard
    assert children._guard.poll() is None


def test_a_child_from_a_thread_is_refused(children, command):
    said = []

    def start():
        try:
            children.start(command("pass"))
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert said == ["one was started from a thread; it would die with that thread"]


def test_two_of_one_name_are_refused(children, command):
    children.start(command("import time; time.sleep(600)"))
    with pytest.raises(RuntimeError, match="one is alive with pid"):
        children.start(command("pass"))


def test_close_leaves_nobody(command):
    children = Children()
    pid = children.start(command("import time; time.sleep(600)"))
    children.close()
    assert not alive(pid)
    assert children._guard.poll() is not None
