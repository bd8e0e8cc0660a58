"""A rank that waits for another: it ends with a sentence, and never without an end."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from diloco_worker import distributed
from diloco_worker.core.agreement import PLANS, Board, Plan, board_bytes
from diloco_worker.core.messages import LinkState
from diloco_worker.core.trainer import TrainerCore
from diloco_worker.distributed import DistributedTrainer


class Area:
    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    def read_control(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def write_control(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data


def rank(number: int) -> DistributedTrainer:
    """One of two ranks, without a model and without the others."""
    trainer = DistributedTrainer.__new__(DistributedTrainer)
    trainer.name, trainer._rank, trainer._first, trainer._journal = "eu/0", number, None, None
    trainer._boundary, trainer._terminated, trainer._rank_0_pid = 0, False, os.getpid()
    trainer._board = Board(Area(board_bytes(ranks=2, fragments=1)), ranks=2, fragments=1)
    trainer._core = TrainerCore(
        name="eu/0", fragments=1, found=None, checkpoint_every=None, connect_timeout_seconds=1.0
    )
    nothing = SimpleNamespace(close=lambda: None, restore=lambda: None)
    trainer._replica = trainer._run_queue = trainer._termination = nothing
    return trainer


def ending(capfd: pytest.CaptureFixture[str], wait) -> str:
    """The sentence with which the process ends; the exit code is that of trying again."""
    with pytest.raises(SystemExit) as stopped:
        wait()
    assert stopped.value.code == 75
    return capfd.readouterr().err


def test_a_rank_whose_program_has_no_collective_waits_for_its_plan_with_a_deadline(
    monkeypatch, capfd
):
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0.05)
    text = ending(capfd, lambda: rank(1)._plan(1))
    assert (
        "eu/0: rank 0 has not ended the step before within 0 s; expected every rank to call" in text
    )
    assert "each step to have a collective of the training" in text


def test_rank_0_waits_for_the_other_ranks_with_a_deadline(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0.05)
    text = ending(capfd, lambda: rank(0)._await_ranks(1))
    assert "of the ranks, 0, 1 did not end the step before the last within 0 s" in text


def test_a_waiting_rank_notices_that_rank_0_has_ended(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "ALIVE_SECONDS", 0.0)
    trainer = rank(1)
    trainer._rank_0_pid = 2**22 + 1
    assert "rank 0 (process 4194305) has ended" in ending(capfd, lambda: trainer._plan(1))


def test_a_rank_that_rank_0_has_left_behind_ends(capfd):
    trainer = rank(1)
    trainer._board.publish(Plan(boundary=1 + PLANS, link_state=LinkState()))
    text = ending(capfd, lambda: trainer._plan(1))
    assert "rank 1 is too far behind rank 0: the plan of boundary 1 was overwritten" in text


def test_sigterm_in_any_rank_is_in_the_plan_that_a_rank_follows():
    trainer = rank(1)
    trainer._board.publish(Plan(boundary=1, link_state=LinkState(), terminated=True))
    trainer._plan(1)
    assert trainer._terminated
    assert trainer.done
