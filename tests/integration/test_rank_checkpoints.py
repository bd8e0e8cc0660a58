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
SECONDS = 300.0
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
        learners={"eu": 1},
        steps=10**6,
        fragments=4,
        interval=16,
        learner_checkpoint=Checkpoint(every_steps=EVERY, keep=2),
    )
    with RealSyncer(tmp_path / "syncer", spec) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_ranks_continue_with_their_optimizer_state_bitwise_and_each_with_what_it_kept(
    tmp_path, syncer
):
    with Learner(tmp_path, syncer, "fsdp", 2) as first:
        step, before = first.killed_with(checkpoints=2)
        read = [first.at(step, rank)["read"] for rank in range(2)]
    assert len(before["state"]) == 3 * 8
    with Learner(tmp_path, syncer, "fsdp", 2) as second:
        for rank in range(2):
            began = second.began(rank)
            assert began["resumed"] is True
            assert began["state"] == before["state"]
            assert began["read"] == read[rank] == step * (1 + rank)
        assert f"local checkpoint of local step {step}" in second.errors()
        text = f"position continues with the state of the local checkpoint of local step {step}"
        assert text in second.errors()
        assert text not in second.errors(1), "rank 0 speaks for all"
        second.await_(
            lambda: second.lines()[-1]["localStep"] > step + 4 * EVERY, "more checkpoints"
        )
        # One is being written, and the oldest is about to be deleted.
        assert len(second.manifests()) <= 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.slow_tier
def test_ranks_that_cannot_use_their_checkpoint_join_with_the_model_of_the_job(tmp_path, syncer):
    """Such as those of a program with another optimizer."""
    with Learner(tmp_path, syncer, "fsdp", 2) as first:
        first.killed_with(checkpoints=1)
    with Learner(tmp_path, syncer, "fsdp", 2, "--other-optimizer") as second:
        assert second.began()["resumed"] is False
        assert "cannot be used" in second.errors()
        second.await_(lambda: len(second.lines()) > EVERY, "steps")


RANKS = [
    pytest.param("fsdp", 2, "fsdp", 3, id="FSDP2 x 2 to x 3"),
    pytest.param("fsdp", 2, "alone", 1, id="FSDP2 x 2 to one process"),
    pytest.param("alone", 1, "fsdp", 2, id="one process to FSDP2 x 2"),
    pytest.param("ddp", 2, "ddp", 2, id="DDP x 2"),
    pytest.param("ddp", 1, "ddp", 2, id="DDP x 1 to DDP x 2"),
    pytest.param("ddp", 2, "fsdp", 2, id="DDP x 2 to FSDP2 x 2"),
    pytest.param("tensor", 4, "hsdp", 4, id="TP x FSDP 2 x 2 to HSDP 2 x 2"),
]


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("how", "size", "then", "ranks"), RANKS)
def test_ranks_that_hold_other_parts_continue_with_the_same_tensors(
    tmp_path, syncer, how, size, then, ranks
):
    with Learner(tmp_path, syncer, how, size) as first:
        step, before = first.killed_with(checkpoints=2)
    with Learner(tmp_path, syncer, then, ranks) as second:
        began = second.began()
        assert began["resumed"] is True
        assert began["state"] == before["state"]
        kept = "position continues with the state"
        if size != ranks:
            assert began["read"] == 0
            kept = (
                f"position starts over: the local checkpoint of local step {step} has the state that {size} ranks "
                f"kept, which does not fit {ranks}"
            )
        assert kept in second.errors()
        second.await_(lambda: second.manifests()[-1] > step, "a checkpoint of its own")


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("damage", ["a byte", "missing"])
def test_a_damaged_or_missing_piece_of_one_rank_makes_all_ranks_use_the_checkpoint_before(
    tmp_path, syncer, damage
):
    with Learner(tmp_path, syncer, "fsdp", 2) as first:
        step, _ = first.killed_with(checkpoints=3)
        earlier = first.manifests()[-2]
        before = first.at(earlier)
        piece = first.state / f"checkpoint-{step:010d}.rank-1.safetensors"
    if damage == "missing":
        piece.unlink()
    else:
        data = bytearray(piece.read_bytes())
        data[-1] ^= 1
        piece.write_bytes(data)
    with Learner(tmp_path, syncer, "fsdp", 2) as second:
        assert second.began()["state"] == second.began(1)["state"] == before["state"]
        why = "No such file" if damage == "missing" else f"{piece.name} has SHA-256"
        assert f"checkpoint checkpoint-{step:010d}.json is skipped: " in second.errors()
        assert why in second.errors()


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(1200)
def test_a_disk_that_is_full_for_one_rank_costs_the_checkpoint_and_not_the_training(
    tmp_path, syncer
):
    with Learner(tmp_path, syncer, "fsdp", 2, "--small-disk=1") as learner:
        learner.await_(
            lambda: learner.lines()[-1:] and learner.lines()[-1]["localStep"] > 3 * EVERY, "steps"
        )
        assert learner.manifests() == [EVERY]
        assert "rank 1: [Errno 27] File too large; training continues" in learner.errors()
        before = learner.at(EVERY)
        learner.kill()
    with Learner(tmp_path, syncer, "fsdp", 2) as second:
        assert second.began()["state"] == before["state"]


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(1200)
def test_sigterm_for_one_rank_saves_a_checkpoint_of_the_last_step_of_all(tmp_path, syncer):
    with Learner(tmp_path, syncer, "ddp", 2) as learner:
        learner.await_(
            lambda: learner.lines()[-1:] and learner.lines()[-1]["localStep"] > 1, "steps"
        )
        learner.processes[1].send_signal(signal.SIGTERM)
        for process in learner.processes:
            assert process.wait(SECONDS) == 0
        last = learner.lines()[-1]
        assert learner.manifests()[-1] == last["localStep"]
    with Learner(tmp_path, syncer, "ddp", 2) as second:
        assert second.began()["state"] == last["state"]
        assert second.began()["read"] == last["read"]
