"""A rank that waits for another: it ends with a sentence, and never without an end."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from diloco.model.fragments import Tensor, cut
from diloco_worker import distributed
from diloco_worker.core.agreement import HOME, PLANS, Board, FirstRank, Plan, board_bytes
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState
from diloco_worker.core.trainer import TrainerCore
from diloco_worker.distributed import DistributedTrainer, _First
from diloco_worker.ipc.shared_memory import SharedMemory


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


# ---------------------------------------------------------------- rank 0


@pytest.fixture
def first():
    """Rank 0 of a model of four fragments; the copies of 2 and 3 are in the spare places, that of 3 the older one."""
    tensors = [Tensor(name=name, shape=(256,), dtype="float32") for name in "abcd"]
    shared = SharedMemory.create(cut(tensors, num_fragments=4), constants_bytes=0, spares=2)
    first = _First.__new__(_First)
    first._shared, first._locks, first.decisions = shared, None, FirstRank(4, 2)
    first._core = SimpleNamespace(applied=[1] * 4, initial_copied=0)
    first.decisions.places.current = [HOME, HOME, 1, 2]
    for fragment, local_step, place in ((2, 7, 1), (3, 5, 2)):
        copy = HostCopy(local_step=local_step, steps=1, tokens=1, base=0)
        shared.set_host_copy(fragment, copy, place=place)
    yield first
    shared.close()


def copied_at(first: _First) -> list[int]:
    return [first._shared.host_copy(p).local_step for p in range(4)]


def test_a_result_that_is_ready_releases_no_copy_that_can_still_be_pulled(first):
    first._newest = lambda: LinkState(open=[2, 3], ready=[(2, 2), (3, 2)])
    first.plan(1, terminated=False)
    first._newest = lambda: LinkState(open=[0], ready=[(0, 2)])
    first.plan(2, terminated=False)
    assert copied_at(first) == [0, 0, 7, 5]
    assert first.decisions.places.current == [HOME, HOME, 1, 2]


def test_fragments_that_lack_a_place_get_those_of_the_oldest_copies_and_no_more(first):
    first._newest = lambda: LinkState(open=[0])
    assert first.plan(1, terminated=False).places == {}
    assert copied_at(first) == [0, 0, 7, 0]
    assert first.plan(2, terminated=False).places == {0: 2}


def test_the_locks_of_a_copied_model_are_released_for_a_link_with_a_smaller_request(first):
    first._locks, first._link_state = distributed.contextlib.ExitStack(), LinkState()
    first._core.initial_copied = 1
    first.settle()
    assert first._locks is None
