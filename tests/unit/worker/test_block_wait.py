"""A learner's blocks: what it states in full, what it is given at first, and how long it waits for one."""

from __future__ import annotations

import pytest

from diloco.errors import EXIT_TRY_AGAIN
from diloco_worker.core.block_wait import BlockWait
from diloco_worker.core.messages import LinkState
from diloco_worker.core.open_blocks import Blocks, Data
from diloco_worker.core.trainer import (
    PROGRESS_SECONDS,
    AwaitLink,
    Exit,
    Leave,
    Send,
    ShowProgress,
    TrainerCore,
)

DATA = Data(items=25, size=10, ahead=2)


def waiting(state, *, timeout=60.0):
    core = TrainerCore(
        name="eu/0", fragments=1, found=None, checkpoint_every=None, connect_timeout_seconds=60
    )
    core.link_state = state
    return core, BlockWait(core, name="eu/0", timeout_seconds=timeout)


def kinds(actions):
    return [type(action) for action in actions]


def test_a_statement_has_what_is_in_use_first_then_what_waits_and_what_was_trained_on():
    blocks = Blocks(data=DATA)
    blocks.leased([8, 9, 6])
    assert blocks.take(40) == 8
    blocks.stepped(43)
    assert blocks.take(43) == 9
    assert blocks.to_json() == {
        "items": 25,
        "size": 10,
        "wanted": 3,
        "open": [9, 6],
        "trained": [[8, 40, 43]],
        "asked": 0,
    }


def test_the_block_in_use_is_not_trained_on_however_many_steps_it_takes():
    blocks = Blocks(data=DATA)
    blocks.leased([0, 1])
    blocks.take(0)
    for step in range(1, 5):
        blocks.stepped(step)
        assert blocks.to_json()["trained"] == []
    blocks.ended(4)
    assert blocks.to_json()["trained"] == [[0, 0, 4]]
    assert blocks.to_json()["open"] == [1]


def test_the_last_block_of_a_loop_counts_with_the_step_that_ends_it():
    blocks = Blocks(data=DATA)
    blocks.leased([0])
    blocks.take(0)
    blocks.ended(0)  # the items are read, and the step on them follows
    assert blocks.to_json()["trained"] == []
    blocks.stepped(1)
    assert blocks.to_json()["trained"] == [[0, 0, 1]]


def test_leases_that_came_before_the_program_asked_are_its_blocks():
    core, wait = waiting(LinkState(connected=True, leases=[3, 4]))
    assert wait.take(DATA) == 3
    core.ledger.count(1)
    core.blocks.stepped(core.ledger.local_step)
    assert wait.take(DATA) == 4
    assert core.blocks.to_json()["trained"] == [[3, 0, 1]]


def test_a_learner_that_has_left_takes_no_block_and_does_not_wait():
    core, wait = waiting(LinkState(connected=True, leases=[3, 4]))
    assert wait.take(DATA) == 3
    core.close("SIGTERM")
    assert wait.retry() is None
    assert wait.take(DATA) is None
    assert wait.wait(now=1000.0) == []


def test_before_the_first_take_there_is_no_block():
    _, wait = waiting(LinkState(connected=True, leases=[3, 4]))
    assert wait.retry() is None


def test_while_it_waits_it_states_what_it_wants_at_first_and_with_each_message():
    core, wait = waiting(LinkState(connected=True))
    wait.take(DATA)
    core.offers = (0,)
    [first] = wait.wait(now=10.0)
    assert isinstance(first, Send)
    assert (list(first.state.offers), first.state.blocks["asked"]) == ([0], 0)
    assert wait.wait(now=10.0) == [AwaitLink()]
    assert wait.wait(now=10.0 + PROGRESS_SECONDS - 0.1) == [AwaitLink()]
    shown, again, last = wait.wait(now=10.0 + PROGRESS_SECONDS)
    assert shown == ShowProgress(
        "eu/0: waiting for a block of data: all blocks are at other learners (5 s)"
    )
    assert (list(again.state.offers), again.state.blocks["asked"]) == ([0], 1)
    assert last == AwaitLink()
    assert wait.wait(now=10.0 + 2 * PROGRESS_SECONDS - 0.1) == [AwaitLink()]
    assert wait.wait(now=10.0 + 2 * PROGRESS_SECONDS)[1].state.blocks["asked"] == 2


def test_the_reason_of_the_link_is_shown_where_there_is_one():
    _, wait = waiting(LinkState(text="the syncer does not answer"))
    wait.take(DATA)
    wait.wait(now=0.0)
    shown = wait.wait(now=7.0)[0]
    assert shown.text == "eu/0: waiting for a block of data: the syncer does not answer (7 s)"


def test_it_leaves_and_ends_exactly_when_the_time_is_over():
    core, wait = waiting(LinkState(connected=True), timeout=20.0)
    wait.take(DATA)
    wait.wait(now=100.0)
    assert kinds(wait.wait(now=119.9)) == [ShowProgress, Send, AwaitLink]
    leave, end = wait.wait(now=120.0)
    assert isinstance(leave, Leave)
    assert leave.state.leaving == "interrupted"
    assert end == Exit(
        EXIT_TRY_AGAIN,
        "eu/0: waiting for a block of data: all blocks are at other learners; none within 20 s; "
        "trying again may help",
    )
    assert core.closed


def test_each_block_has_the_whole_time():
    core, wait = waiting(LinkState(connected=True), timeout=20.0)
    wait.take(DATA)
    wait.wait(now=0.0)
    core.blocks.leased([0])
    assert wait.retry() == 0
    core.blocks.stepped(1)
    assert wait.take(DATA) is None
    assert kinds(wait.wait(now=19.0)) == [Send]
    assert kinds(wait.wait(now=38.0)) == [ShowProgress, Send, AwaitLink]
    assert kinds(wait.wait(now=39.0)) == [Leave, Exit]


def test_without_a_connection_it_is_not_known_that_the_syncer_leases_none():
    _, wait = waiting(LinkState(connected=False, leases_blocks=False))
    wait.take(DATA)
    assert kinds(wait.wait(now=0.0)) == [Send]


def test_other_data_is_refused_with_both_descriptions():
    _, wait = waiting(LinkState())
    wait.take(DATA)
    other = Data(items=26, size=10, ahead=2)
    with pytest.raises(ValueError, match=r"^blocks of ") as found:
        wait.take(other)
    assert str(found.value) == f"blocks of {other}, expected those of {DATA} as before"


def test_leases_of_the_link_reach_the_blocks_of_the_program_and_before_that_nothing():
    core, wait = waiting(LinkState(connected=True))
    core.check(LinkState(connected=True, leases=[5]), terminated=False)
    assert wait.take(DATA) == 5
    core.check(LinkState(connected=True, leases=[5, 6]), terminated=False)
    core.check(LinkState(connected=True, leases=None), terminated=False)
    core.blocks.stepped(1)
    assert wait.retry() == 6


def test_blocks_of_one_batch_count_with_the_step_of_the_trainer():
    core, wait = waiting(LinkState(connected=True, leases=[3, 4, 5]))
    assert [wait.take(DATA), wait.take(DATA)] == [3, 4]
    core.step(10, None, now=1.0)
    assert core.blocks.to_json()["trained"] == [[3, 0, 1]]


def test_with_a_syncer_that_leases_none_it_leaves_and_ends():
    _, wait = waiting(LinkState(connected=True, leases_blocks=False))
    wait.take(DATA)
    leave, end = wait.wait(now=0.0)
    assert leave.state.leaving == "interrupted"
    assert end.text.startswith("eu/0: the syncer is older than this learner, and leases no blocks")
