"""
Local checkpoints of learners whose ranks all connect, with real processes: what a learner continues with after its
ranks were killed, with as many ranks as before and with another number.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.spec import Checkpoint
from diloco_testing.local.fake_run import until
from diloco_testing.syncers.process import RealSyncer, make_spec

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 120.0
EVERY = 4


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Learner:
    """The processes of one start of a learner; a context manager that kills them."""

    def __init__(
        self, folder: Path, syncer: RealSyncer, how: str, size: int, *options: str
    ) -> None:
        self.state = folder / "state"
        self.starts = len(list(folder.glob("start-*-0.err")))
        self._out = folder / f"start-{self.starts}"
        spec = folder / "learner-spec.json"
        spec.write_text(syncer.spec.to_json())
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            "DILOCO_JOB": "j", "DILOCO_LEARNER": "eu/0", "DILOCO_SYNCER": syncer.endpoint, "DILOCO_SPEC": str(spec),
            "DILOCO_STATE": str(self.state), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        self.processes = []
        for rank in range(size):
            with open(f"{self._out}-{rank}.err", "w") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "diloco_testing.learners.checkpointed", how, str(self._out), *options],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=errors,
                    )
                )  # fmt: skip

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End every rank at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def lines(self, rank: int = 0) -> list[dict]:
        """What the rank wrote so far."""
        path = Path(f"{self._out}-{rank}.jsonl")
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def errors(self, rank: int = 0) -> str:
        """Its standard error so far."""
        return Path(f"{self._out}-{rank}.err").read_text()

    def manifests(self) -> list[int]:
        """The local steps of the complete checkpoints."""
        return sorted(int(path.stem.split("-")[1]) for path in self.state.glob("checkpoint-*.json"))

    def await_(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something while all ranks run."""

        def reached() -> bool:
            ended = [p.returncode for p in self.processes if p.poll() is not None]
            assert not ended, [self.errors(rank) for rank in range(len(self.processes))]
            return bool(condition())

        until(reached, what, seconds=SECONDS)

    def killed_with(self, checkpoints: int) -> tuple[int, dict]:
        """Kill all ranks after so many checkpoints: the newest one's local step, and what rank 0 had then."""
        self.await_(lambda: self.manifests()[-1:] >= [checkpoints * EVERY], "checkpoints")
        self.kill()
        step = self.manifests()[-1]
        return step, self.at(step)

    def at(self, step: int, rank: int = 0) -> dict:
        """What a rank had after this local step."""
        return next(line for line in self.lines(rank)[1:] if line["localStep"] == step)

    def began(self, rank: int = 0) -> dict:
        """What a rank had when it had connected."""
        self.await_(lambda: self.lines(rank), "the ranks to connect")
        return self.lines(rank)[0]


@pytest.fixture
def syncer(tmp_path):
    spec = make_spec(
        learners={"eu": 1}, steps=10**6, fragments=4, interval=16, learner_checkpoint=Checkpoint(every_steps=EVERY, keep=2),
    )  # fmt: skip
    with RealSyncer(tmp_path / "syncer", spec) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_ranks_continue_with_their_state_and_another_number_of_ranks_with_the_same_tensors(
    tmp_path, syncer
):
    with Learner(tmp_path, syncer, "fsdp", 2) as first:
        step, before = first.killed_with(checkpoints=2)
        drawn = [first.at(step, rank) for rank in range(2)]
        assert len(first.manifests()) <= 2
    assert before["state"], "AdamW has a state"
    with Learner(tmp_path, syncer, "fsdp", 2) as second:
        for rank in range(2):
            assert second.began(rank)["resumed"] is True
            assert second.began(rank)["state"] == before["state"]
            assert second.began(rank)["read"] == drawn[rank]["read"] == step * (1 + rank)
        assert f"local checkpoint of local step {step}" in second.errors()
        assert "position continues with the state of the local checkpoint" in second.errors()
        step, before = second.killed_with(checkpoints=5)
        assert len(second.manifests()) <= 3
    with Learner(tmp_path, syncer, "fsdp", 3) as third:
        assert third.began()["resumed"] is True
        assert third.began()["state"] == before["state"]
        assert third.began()["read"] == 0
        text = f"position starts anew: the local checkpoint of local step {step} has the state that 2 ranks kept"
        assert text in third.errors()
