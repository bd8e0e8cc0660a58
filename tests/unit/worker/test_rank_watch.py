"""How a process ends when its learner has failed on any machine: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from diloco.model.fragments import Tensor, cut
from diloco_testing.learners import control_area
from diloco_testing.local.fake_run import until
from diloco_worker.core.agreement import Board, board_bytes
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.trainer import rank_processes
from diloco_worker.trainer.rank_processes import RankProcess
from diloco_worker.trainer.rank_watch import RankWatch

PROGRAM = """
import sys, time
from diloco_worker.core.agreement import Board
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.trainer import rank_watch

rank_watch.GRACE_SECONDS = 0.2
board = Board(SharedMemory.attach(int(sys.argv[1])), ranks=2, fragments=1)
watch = rank_watch.RankWatch(board, {}, learner="eu/0", check=lambda: print("reported", flush=True))
watch.start()
print("ready", flush=True)
if sys.argv[2] == "error":
    raise RuntimeError("Connection closed by peer")
time.sleep(300)
"""


@pytest.fixture
def board():
    return control_area.board(ranks=2, fragments=1)


@pytest.fixture
def zombie():
    """A process that has ended, and that its parent has not reaped yet."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = RankProcess(pid=process.pid, started=rank_processes._state(process.pid)[1])
    process.stdin.close()
    until(lambda: found.ended, "the end")
    yield found
    process.wait()


def watching(board: Board, processes) -> RankWatch:
    return RankWatch(board, processes, learner="eu/0", check=lambda: None)


def test_a_rank_that_ended_before_it_left_is_a_failure_with_its_name(board, zombie):
    watching(board, {0: RankProcess.own(), 1: zombie})._look()
    assert board.failure == f"rank 1 (process {zombie.pid}) exited, so this learner exits"


def test_a_rank_that_ended_after_it_left_is_none(board, zombie):
    board.leave(1)
    watching(board, {0: RankProcess.own(), 1: zombie})._look()
    assert board.failure == ""


def test_after_close_nothing_ends_and_the_hook_for_errors_is_as_before(board, monkeypatch):
    before = sys.excepthook
    watch = watching(board, {})
    monkeypatch.setattr(watch, "_exit", lambda text: pytest.fail(text))
    watch.start()
    assert sys.excepthook != before
    watch.close()
    assert sys.excepthook == before
    board.fail("too late")
    time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "error"])
def test_a_process_that_hangs_or_ends_with_an_error_ends_with_the_sentence_and_exit_code_75(how):
    layout = cut([Tensor(name="w", shape=(1,), dtype="float32")], num_fragments=1)
    size = board_bytes(ranks=2, fragments=1)
    shared = SharedMemory.create(layout, constants_bytes=0, control_bytes=size)
    board = Board(shared, ranks=2, fragments=1)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(shared.fd), how],
        pass_fds=[shared.fd], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        board.fail("rank 1 on b does not answer: nothing came for 15 s")
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
        shared.close()
    assert process.returncode == 75, error
    assert error.endswith("diloco: eu/0: rank 1 on b does not answer: nothing came for 15 s\n")
    assert ("Connection closed by peer" in error) == (how == "error")
    assert out.startswith("reported\n")
