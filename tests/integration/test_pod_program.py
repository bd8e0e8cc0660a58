"""The program that `diloco chaos --job` runs in a container: which processes it signals, and that it continues them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli import pod_program
from diloco_cli.pod_faults import BOOT
from diloco_testing.local.container import CHILD, Pod
from diloco_testing.local.fake_run import alive, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = Path(pod_program.__file__).read_bytes()
HELPERS = """
import os, subprocess
own = subprocess.Popen(["sleep", "600"])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
# Its parent ends: only its mark shows whose it is.
lost = int(subprocess.run(["sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE).stdout)
print("helpers", own.pid, apart.pid, lost, flush=True)
"""


def state_of(pid):
    """Such as "T" of a process that is stopped."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def are(pids, *states):
    return all(state_of(pid) in states for pid in pids)


class Container:
    """A container with a program and three helpers, and what is beside it on the same machine."""

    def __init__(self, pod, bystanders):
        self.pod, self.bystanders = pod, bystanders
        self.agent = pod.process.pid

    def program(self, start=0):
        main = self.pod.pid(start)
        lines = [line for line in self.pod.output.splitlines() if line.startswith("helpers ")]
        return [main, *map(int, lines[start].split()[1:])]

    def undisturbed(self):
        """Neither the agent, its guard nor others are stopped or dead."""
        children = Path(f"/proc/{self.agent}/task/{self.agent}/children").read_text().split()
        guard = [int(p) for p in children if b"guard" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert len(guard) == 1
        return are([self.agent, *guard, *self.bystanders], "S", "R", "D")


@pytest.fixture
def container(tmp_path):
    """Another pod with an agent, and a process without one, are on the same machine and must not be touched."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    own, other = (
        Pod(folder, HELPERS + CHILD, environment={"DILOCO_POD_UID": f"uid-{folder.name}"})
        for folder in folders
    )
    with own, other, subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            others = Container(other, [])
            yield Container(own, [other.process.pid, *others.program(), stranger.pid])
        finally:
            stranger.kill()


class Running:
    """The program, started as `kubectl exec -i` does."""

    def __init__(self, *arguments):
        boot = ("-I", "-S", "-c", BOOT, str(len(TEXT)), *map(str, arguments))
        self.process = subprocess.Popen(
            [sys.executable, *boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.process.stdin.write(TEXT)
        self.process.stdin.flush()

    def reply(self):
        return json.loads(self.process.stdout.readline() or "{}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.kill()
        self.process.wait()


def test_a_kill_ends_the_program_and_its_helpers_and_nothing_else(container):
    before = container.program()
    with Running("uid-one", "kill") as running:
        assert running.reply() == {"begun": 4}
        assert running.process.wait(30) == 0
    until(lambda: not any(map(alive, before)), "end of the program and its helpers")
    after = container.program(1)
    assert container.undisturbed()
    assert all(map(alive, after))


def test_a_pause_stops_the_program_and_its_helpers_until_its_time_is_over(container):
    stopped = container.program()
    with Running("uid-one", "pause", 2) as running:
        assert running.reply() == {"begun": 4}
        until(lambda: are(stopped, "T"), "all are stopped")
        assert container.undisturbed()
        assert running.reply() == {"ended": True}
        assert are(stopped, "S", "R", "D")
        assert running.process.wait(30) == 0


@pytest.mark.parametrize("kind", [("pause", 600), ("slow", 600, 0.999)])
@pytest.mark.parametrize("end", ["input", signal.SIGTERM, signal.SIGKILL])
def test_what_is_stopped_continues_when_the_input_ends_or_the_program_is_killed(
    container, kind, end
):
    stopped = container.program()
    with Running("uid-one", *kind) as running:
        assert running.reply() == {"begun": 4}
        until(lambda: are(stopped, "T"), "all are stopped")
        if end == "input":
            running.process.stdin.close()
            assert running.reply() == {"ended": True}
        else:
            running.process.send_signal(end)
        until(lambda: are(stopped, "S", "R", "D"), "all continue")
        running.process.wait(30)
        assert are(stopped, "S", "R", "D")
        assert container.undisturbed()


def test_what_is_stopped_continues_when_the_sender_is_killed(container):
    stopped = container.program()
    sender = (
        "import subprocess, sys, time\n"
        "running = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "running.stdin.write(sys.stdin.buffer.read()); running.stdin.flush()\n"
        "time.sleep(600)"
    )
    boot = (sys.executable, "-I", "-S", "-c", BOOT, str(len(TEXT)), "uid-one", "pause", "600")
    with subprocess.Popen(
        [sys.executable, "-c", sender, *boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(TEXT)
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == {"begun": 4}
        until(lambda: are(stopped, "T"), "all are stopped")
        process.kill()
        until(lambda: are(stopped, "S", "R", "D"), "all continue")


def test_a_slow_program_runs_and_is_stopped_in_each_second(container):
    main = container.program()[0]
    with Running("uid-one", "slow", 600, 0.5) as running:
        assert running.reply() == {"begun": 4}
        for _ in range(2):
            until(lambda: are([main], "T"), "it is stopped")
            until(lambda: are([main], "S", "R", "D"), "it runs")
        # Its successor is slow too.
        with Running("uid-one", "kill") as kill:
            assert kill.reply() == {"begun": 4}
        successor = container.program(1)[0]
        until(lambda: are([successor], "T"), "its successor is stopped")
        assert container.undisturbed()


@pytest.mark.parametrize("kind", [("kill",), ("pause", 600), ("slow", 600, 0.5)])
def test_nothing_is_signalled_without_exactly_one_agent_of_the_pod(container, kind):
    """Here, all containers are in one mount namespace, as processes of a node may be for a pod that sees them."""
    none = "0 processes look like the agent of this pod, expected 1"
    unknown = "the UID of its pod is not known"
    for uid, why in (("uid-three", none), ("uid", none), ("", unknown)):
        with Running(uid, *kind) as running:
            assert running.reply() == {"refused": why}
            assert running.process.wait(30) == 1
    assert are(container.program(), "S", "R", "D")
    assert container.undisturbed()


def test_a_program_that_waits_for_its_restart_is_not_disturbed(tmp_path):
    def reply():
        with Running("uid-one", "kill") as running:
            return running.reply()

    given = {"DILOCO_POD_UID": "uid-one"}
    with Pod(tmp_path, "1 / 0", environment=given) as pod:
        refused = {"refused": "its program does not run"}
        until(lambda: reply() == refused, "the back-off grows")
        assert pod.process.poll() is None


def test_agents_of_other_mount_namespaces_are_not_found(container):
    """A pod that sees the processes of its node: an agent with the same UID in its environment, elsewhere."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mount namespaces cannot be made here")
    elsewhere = ["unshare", "--mount", sys.executable, "-I", "-S", "-c", BOOT]
    with subprocess.Popen(
        [*elsewhere, str(len(TEXT)), "uid-one", "kill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        found, _ = process.communicate(TEXT, 60)
    assert json.loads(found) == {
        "refused": "0 processes look like the agent of this pod, expected 1"
    }
    assert container.undisturbed()
    assert all(map(alive, container.program()))
