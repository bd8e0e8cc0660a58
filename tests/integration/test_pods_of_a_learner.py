"""Two agents of one learner: real processes, real reports, and a collective that breaks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_testing.local.container import Pod
from diloco_testing.local.fake_run import until

pytestmark = pytest.mark.slow

AGENT = """
import dataclasses, sys
from diloco.runtime.logs import configure_logging
from diloco_agent import settings
from diloco_agent.supervisor import Supervisor

port, arguments = int(sys.argv[1]), sys.argv[5:]
configure_logging(json=False, name="agent")
config = dataclasses.replace(settings.read(arguments), rank_zero=("127.0.0.1", port))
sys.exit(Supervisor(config).run())
"""
"""The agent, with rank 0 at another address than the pod's name."""

RANK = """
import os, signal, socket, sys, time

print("start", os.getpid(), os.environ["DILOCO_RESTARTS"], flush=True)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
path = os.environ["COLLECTIVE"]
if os.environ["RANK"] == "0":
    server = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        os.unlink(path)
    server.bind(path)
    server.listen()
    peer, _ = server.accept()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(path)
            break
        except OSError:
            peer.close()
            time.sleep(0.05)
print("met", flush=True)
try:
    lost = not peer.recv(1)
except OSError:
    lost = True
sys.exit("Connection closed by peer")
"""
"""Meets the other rank, and fails when that goes away."""

HUNG = RANK.replace(
    'print("met", flush=True)',
    """print("met", flush=True)
if os.environ["RANK"] == "1":
    from diloco_worker import report_progress
    report_progress()
    while True:
        time.sleep(60)
""",
)
"""The same, but rank 1 hangs after its first step, while rank 0 waits for it."""


class Learner:
    """The two pods of a learner."""

    def __init__(self, folder: Path, program: str = RANK, **environment: str) -> None:
        self.folder, self.program = folder, program
        self.environment = {"DILOCO_PODS_PER_LEARNER": "2", "COLLECTIVE": str(folder / "c")}
        self.environment |= environment
        self.pods: list[Pod] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[Learner]:
        with contextlib.ExitStack() as stack:
            for rank in range(2):
                port = self.pods[0].port if rank else 0
                pod = self._pod(rank, port)
                self.pods.append(stack.enter_context(pod))
            self.until_met(1)
            yield self

    def _pod(self, rank: int, port: int) -> Pod:
        folder = self.folder / str(rank)
        folder.mkdir()
        return Pod(
            folder, self.program, wrapped=(sys.executable, "-c", AGENT, str(port)),
            environment={**self.environment, "DILOCO_POD": f"j-eu-{rank}"},
        )  # fmt: skip

    def until_met(self, times: int) -> None:
        until(
            lambda: all(pod.output.splitlines().count("met") >= times for pod in self.pods),
            f"meeting {times} of the ranks",
        )

    @property
    def faults(self) -> int:
        counts = json.loads((self.folder / "0" / "state" / "lives.json").read_text())
        return int(counts["faults"])


def test_a_pod_of_another_rank_is_ready_while_its_program_runs(tmp_path):
    with Learner(tmp_path).running() as learner:
        pod = learner.pods[1]
        until(lambda: pod.ask("/readyz") == (200, "running"), "ready pod")
        assert pod.ask("/startz") == (200, "started")


def test_a_rank_that_hangs_is_noticed_by_its_own_liveness_probe(tmp_path):
    with Learner(tmp_path, HUNG, DILOCO_STUCK_SECONDS="2").running() as learner:
        leader, hung = learner.pods
        _, message = until(
            lambda: (answer := hung.ask("/livez"))[0] == 503 and answer, "a dead rank"
        )
        assert message.startswith("no progress for ")
        assert message.endswith("step 1 of this process")
        assert leader.ask("/livez") == (200, "alive"), "it reports no health in this test"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_restarts_both_and_does_not_count_as_a_fault(tmp_path, rank):
    with Learner(tmp_path, DILOCO_RESTART_LIMIT="0").running() as learner:
        os.kill(learner.pods[rank].pid(0), signal.SIGKILL)
        learner.until_met(2)
        assert [len(pod.starts) for pod in learner.pods] == [2, 2]
        assert learner.faults == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_of_either_rank_counts_once_and_the_limit_ends_rank_0(tmp_path, rank):
    with Learner(tmp_path, DILOCO_RESTART_LIMIT="1").running() as learner:
        os.kill(learner.pods[rank].pid(0), signal.SIGUSR1)
        learner.until_met(2)
        assert learner.faults == 1
        os.kill(learner.pods[rank].pid(1), signal.SIGUSR1)
        assert learner.pods[0].wait() == 1
        written = learner.pods[0].termination_message
        assert written["reason"] == "RestartLimit"
        assert written["message"].startswith("learner eu/0 crashed 2 times")


def test_a_pod_that_comes_back_restarts_the_other_and_does_not_count_as_a_fault(tmp_path):
    with Learner(tmp_path, DILOCO_RESTART_LIMIT="0").running() as learner:
        pod = learner.pods[1]
        pod.process.kill()
        pod.wait()
        assert pod.process.stdout is not None
        pod.process.stdout.close()
        pod.start()
        learner.until_met(2)
        assert learner.faults == 0


def test_a_pod_that_is_stopped_ends_the_process_of_the_other(tmp_path):
    with Learner(tmp_path, DILOCO_RESTART_LIMIT="0").running() as learner:
        leader = learner.pods[0]
        assert learner.pods[1].process.poll() is None
        learner.pods[1].process.send_signal(signal.SIGTERM)
        until(
            lambda: leader.ask("/readyz")[1].endswith(("is being stopped", "does not report")),
            "readiness that names the rank",
        )
        until(
            lambda: leader.ask("/startz")[0] == leader.ask("/livez")[0] == 200, "a pod that stays"
        )
        assert len(leader.starts) == 1
