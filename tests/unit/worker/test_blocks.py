"""Blocks of data in a learner: when they count as trained on, and what a program may ask for."""

from __future__ import annotations

import pytest

from diloco.errors import EXIT_REFUSED, EXIT_TRY_AGAIN
from diloco_syncer.rpc.telemetry import MAX_OPEN
from diloco_worker.core.block_wait import BlockWait
from diloco_worker.core.messages import LinkState
from diloco_worker.core.open_blocks import Blocks, Data
from diloco_worker.core.trainer import Exit, Send, ShowProgress, TrainerCore
from diloco_worker.data_blocks import blocks_of, data_of
from diloco_worker.standalone import StandaloneTrainer

DATA = Data(items=25, size=10, ahead=2)


def test_a_block_counts_when_the_loop_takes_the_next_one_after_a_step():
    blocks = Blocks(data=DATA)
    blocks.leased([4, 5])
    assert blocks.take(7) == 4
    blocks.stepped(8)
    assert blocks.to_json()["open"] == [4, 5]
    assert blocks.take(8) == 5
    assert blocks.to_json() | {"wanted": 3, "open": [5], "trained": [[4, 7, 8]]} == blocks.to_json()
    assert blocks.take(8) is None


def test_blocks_of_one_batch_count_with_its_step():
    blocks = Blocks(data=DATA)
    blocks.leased([0, 1, 2])
    assert [blocks.take(0), blocks.take(0)] == [0, 1]
    assert blocks.to_json()["trained"] == []
    blocks.stepped(1)
    assert blocks.to_json()["trained"] == [[0, 0, 1]]


def test_what_is_trained_on_is_stated_until_the_leases_no_longer_have_it():
    blocks = Blocks(data=DATA)
    blocks.leased([0, 1])
    blocks.take(0)
    blocks.stepped(1)
    blocks.take(1)
    blocks.leased([0, 1])  # sent before the syncer knew
    assert blocks.to_json()["trained"] == [[0, 0, 1]]
    assert blocks.to_json()["open"] == [1]
    blocks.leased([1, 2])
    assert blocks.to_json()["trained"] == []
    assert blocks.take(2) == 2


def test_a_statement_is_within_the_bounds_of_the_syncer_also_after_leases_were_taken_back():
    blocks = Blocks(data=Data(items=1000, size=1, ahead=31))
    blocks.leased(range(32))
    blocks.take(0)
    blocks.leased(range(100, 132))  # after a cut: block 0 is at another learner
    assert len(blocks.to_json()["open"]) == MAX_OPEN
    for step in range(1, 34):
        blocks.stepped(step)
        blocks.take(step)
    assert len(blocks.to_json()["trained"]) == MAX_OPEN


def core_of(state):
    core = TrainerCore(
        name="eu/0", fragments=1, found=None, checkpoint_every=None, connect_timeout_seconds=60
    )
    core.link_state = state
    return core, BlockWait(core, name="eu/0", timeout_seconds=60)


def test_a_learner_without_a_block_states_so_shows_it_and_ends_after_a_limit():
    _, wait = core_of(LinkState(connected=True))
    assert wait.take(DATA) is None
    [send] = wait.wait(now=0.0)
    assert isinstance(send, Send)
    assert send.state.blocks["wanted"] == 3
    [shown, again, _] = wait.wait(now=6.0)
    assert isinstance(again, Send)
    assert again.state.blocks != send.state.blocks  # so the link states it again
    assert isinstance(shown, ShowProgress)
    assert shown.text == "eu/0: waiting for a block of data: all blocks are at other learners (6 s)"
    end = wait.wait(now=61.0)[-1]
    assert isinstance(end, Exit)
    assert (end.code, end.text.endswith("none within 61 s; trying again may help")) == (
        EXIT_TRY_AGAIN,
        True,
    )


def test_a_syncer_of_an_earlier_release_is_refused_in_one_sentence():
    _, wait = core_of(LinkState(connected=True, leases_blocks=False))
    assert wait.take(DATA) is None
    end = wait.wait(now=0.0)[-1]
    assert isinstance(end, Exit)
    assert end.code == EXIT_REFUSED
    assert "the syncer is older than this learner" in end.text


def test_blocks_of_another_dataset_are_refused():
    _, wait = core_of(LinkState())
    wait.take(DATA)
    with pytest.raises(ValueError, match="expected those of"):
        wait.take(Data(items=26, size=10, ahead=2))


@pytest.mark.parametrize(
    ("dataset", "size", "ahead", "message"),
    [
        (0, 1, 2, "the dataset has 0 items, expected 1 to"),
        ([], 1, 2, "the dataset has 0 items"),
        (1 << 49, 1, 2, "expected 1 to"),
        (10, 0, 2, "size is 0, expected 1 to the 10 items"),
        (10, 11, 2, "size is 11"),
        (10, 1, 32, "ahead is 32, expected 0 to 31"),
        (10, 1.5, 2, "size is 1.5, expected a whole number"),
        (iter(()), 1, 2, "without a length"),
    ],
)
def test_what_cannot_be_cut_into_blocks_is_refused_in_one_sentence(dataset, size, ahead, message):
    with pytest.raises((TypeError, ValueError), match=message):
        data_of(dataset, size=size, ahead=ahead)


def test_without_a_job_a_program_gets_all_blocks_pass_after_pass():
    trainer = StandaloneTrainer(steps=4)
    seen = []
    for block in blocks_of(data_of(range(25), size=10, ahead=0), trainer.take_block):
        seen.append((block.of_pass, block.number, block.range))
        trainer.step(tokens=1)
    assert seen == [
        (0, 0, range(10)),
        (0, 1, range(10, 20)),
        (0, 2, range(20, 25)),
        (1, 0, range(10)),
    ]
