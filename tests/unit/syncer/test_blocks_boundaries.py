"""Leases of blocks: exact limits, the lines about them, and what a pause or a restart of the syncer changes."""

from __future__ import annotations

import json

import pytest

from diloco_syncer.core.blocks import (
    BLOCK_SECONDS,
    HOLD_SECONDS,
    IDLE_SECONDS,
    BlockLedger,
    FreeSerials,
    data_line,
    spans,
)
from diloco_syncer.core.events import BlocksStated, LeaseBlocks, Log, TrainedBlock


def stated(name="eu/0", *, session=1, items=100, size=10, wanted=2, opened=(), trained=()):
    return BlocksStated(
        session=session, learner=name, items=items, size=size, wanted=wanted, open=tuple(opened),
        trained=tuple(TrainedBlock(serial=s, begin=s, end=s + 3) for s in trained),
    )  # fmt: skip


def leases(decisions):
    return {d.learner: d.serials for d in decisions if isinstance(d, LeaseBlocks)}


def lines(decisions):
    return [(d.event, d.fields) for d in decisions if isinstance(d, Log)]


def take(ledger, event, now=0.0, incarnation=1):
    return [*ledger.stated(event, incarnation=incarnation, now=now), *ledger.advance(now)]


def restarted(ledger):
    return BlockLedger.from_json(json.loads(json.dumps(ledger.to_json())))


def test_the_first_statement_records_the_dataset_and_then_what_is_leased():
    out = take(BlockLedger(), stated(items=95), incarnation=7)
    assert lines(out) == [
        ("data", {"items": 95, "size": 10, "learner": "eu/0", "next": 0, "free": [], "open": []}),
        ("lease", {"learner": "eu/0", "incarnation": 7, "blocks": [{"first": 0, "count": 2}]}),
    ]
    # It is recorded once.
    assert lines(take(BlockLedger(), stated(wanted=0)))[1:] == []


def test_the_line_of_the_dataset_after_a_restart_states_every_serial():
    ledger = BlockLedger()
    for name, wanted in (("eu/0", 2), ("us/0", 2), ("ap/0", 1)):
        take(ledger, stated(name, wanted=wanted))
    take(ledger, stated(wanted=1, opened=[0], trained=[1]))
    ledger.left("us/0", "Goodbye", 0.0)
    take(ledger, stated("us/0", session=2, wanted=1))
    assert lines(data_line(ledger.to_json())) == [
        (
            "data",
            {
                "items": 100,
                "size": 10,
                "learner": "eu/0",
                "next": 5,
                "free": [{"first": 3, "count": 1}],
                "open": [{"first": n, "count": 1} for n in (0, 2, 4)],
            },
        )
    ]
    assert data_line(None) == []
    assert BlockLedger().to_json() is None
    assert BlockLedger.from_json(None).to_json() is None


def test_what_a_learner_has_from_before_the_syncer_lost_its_state_is_recorded_as_leased():
    # No snapshot knew of the blocks: the learner returns with one that it trained on and two that are open.
    out = take(BlockLedger(), stated(wanted=2, opened=[5, 4], trained=[2]), incarnation=3)
    assert [event for event, _ in lines(out)] == ["data", "lease", "trained"]
    assert lines(out)[1][1] == {
        "learner": "eu/0",
        "incarnation": 3,
        "blocks": [{"first": 2, "count": 1}, {"first": 4, "count": 2}],
    }
    assert lines(out)[2][1]["blocks"] == [{"block": 2, "begin": 2, "end": 5}]
    assert leases(out) == {"eu/0": (5, 4)}


def test_only_the_first_statement_of_a_session_can_claim_blocks():
    ledger = BlockLedger()
    take(ledger, stated())
    assert lines(take(ledger, stated(opened=[0, 1, 7]))) == []
    assert ledger.holders["eu/0"].open == [0, 1]


def test_a_returning_learner_cannot_claim_a_block_that_is_a_whole_pass_ahead():
    ledger = BlockLedger()
    take(ledger, stated(items=30, wanted=1))
    ledger.left("eu/0", "StreamEnded", 1.0)
    out = take(ledger, stated(items=30, session=2, wanted=1, opened=[0, 2, 3]), 2.0)
    assert leases(out) == {"eu/0": (0, 2)}


def test_a_block_that_was_claimed_by_none_is_refused_again_in_the_next_session():
    ledger = BlockLedger()
    take(ledger, stated())
    take(ledger, stated("us/0"))
    for session in (1, 1, 2):
        out = take(ledger, stated("us/0", session=session, opened=[2, 3], trained=[0]))
        refused = [fields for event, fields in lines(out) if event == "refuse"]
        if session == 1 and ledger.holders["us/0"].refused and not refused:
            continue
        [fields] = refused
        assert (fields["learner"], fields["reason"]) == ("us/0", "Protocol")
        assert fields["detail"] == (
            "trained on block 0 of pass 0, which is not leased to it; it does not count. "
            "No more are recorded in this session"
        )
    assert len([event for event, _ in lines(out) if event == "refuse"]) == 1


def test_a_free_block_that_is_stated_as_trained_is_named_with_its_pass():
    ledger = BlockLedger()
    take(ledger, stated(items=25, wanted=3))
    take(ledger, stated(items=25, wanted=3, trained=[0, 1, 2]))
    out = take(ledger, stated(items=25, wanted=3, opened=[3, 4, 5], trained=[7]))
    [(event, fields)] = lines(out)
    assert event == "refuse"
    assert fields["detail"].startswith("trained on block 1 of pass 2, ")


def test_those_with_the_fewest_blocks_are_leased_one_first_then_those_first_by_name():
    ledger = BlockLedger()
    take(ledger, stated("us/0", items=30, wanted=1))
    for name in ("us/0", "eu/1", "eu/0"):
        ledger.stated(stated(name, items=30, wanted=3), incarnation=1, now=0.0)
    # Three blocks in all, of which us/0 has one.
    assert leases(ledger.advance(0.0)) == {"us/0": (0,), "eu/0": (1,), "eu/1": (2,)}


def test_a_learner_that_reconnected_keeps_its_blocks_as_long_as_it_is_connected():
    ledger = BlockLedger()
    take(ledger, stated())
    ledger.left("eu/0", "StreamEnded", 1.0)
    take(ledger, stated(session=2, opened=[0, 1]), 5.0)
    assert ledger.advance(5.0 + 10 * HOLD_SECONDS) == []
    assert ledger.advance(5.0 + 20 * HOLD_SECONDS) == []


def test_blocks_found_in_a_snapshot_are_kept_for_a_while_from_the_first_event_on():
    ledger = BlockLedger()
    take(ledger, stated(), incarnation=4)
    again = restarted(ledger)
    assert again.advance(1000.0) == []
    assert again.advance(1000.0 + HOLD_SECONDS - 0.1) == []
    assert lines(again.advance(1000.0 + HOLD_SECONDS)) == [
        (
            "release",
            {
                "learner": "eu/0",
                "incarnation": 4,
                "blocks": [{"first": 0, "count": 2}],
                "reason": "Overdue",
            },
        )
    ]
    # One that returns in time has them again.
    again = restarted(ledger)
    again.advance(1000.0)
    out = take(again, stated(opened=[0, 1]), 1001.0, incarnation=4)
    assert (lines(out), leases(out)) == ([], {"eu/0": (0, 1)})
    assert again.advance(1001.0 + 2 * HOLD_SECONDS) == []


def test_a_process_that_restarts_while_the_syncer_does_loses_what_it_had():
    ledger = BlockLedger()
    take(ledger, stated())
    again = restarted(ledger)
    out = take(again, stated(session=9), 1.0, incarnation=2)
    assert [
        (event, fields["incarnation"], fields.get("reason")) for event, fields in lines(out)
    ] == [
        ("release", 1, "Replaced"),
        ("lease", 2, None),
    ]
    assert leases(out) == {"eu/0": (0, 1)}


def test_a_learner_without_blocks_leaves_no_line():
    ledger = BlockLedger()
    take(ledger, stated(wanted=0))
    assert ledger.left("eu/0", "Goodbye", 1.0) == []
    assert ledger.left("us/0", "Goodbye", 1.0) == []
    assert ledger.joined("us/0", 1) == []


def test_a_learner_that_left_is_leased_nothing():
    ledger = BlockLedger()
    take(ledger, stated(wanted=1))
    ledger.stated(stated(wanted=4), incarnation=1, now=0.0)
    ledger.left("eu/0", "StreamEnded", 1.0)
    assert ledger.advance(1.0) == [LeaseBlocks(learner="eu/0", serials=(0,))]
    assert ledger.holders["eu/0"].wanted == 0


def starved():
    """eu/0 has three blocks of a pass, and us/0 waits for them."""
    ledger = BlockLedger()
    take(ledger, stated(items=40, wanted=3))
    out = take(ledger, stated("us/0", items=40, wanted=3))
    while serials := leases(out).get("us/0"):
        out = take(ledger, stated("us/0", items=40, trained=serials[:1], opened=serials[1:]))
    return ledger


def test_a_pause_of_the_syncer_is_no_silence_of_a_learner():
    ledger = starved()
    ledger.shift(50.0)
    assert ledger.advance(IDLE_SECONDS + 49.9) == []
    assert lines(ledger.advance(IDLE_SECONDS + 50.0))[0][1]["reason"] == "NoSteps"


def test_a_pause_of_the_syncer_does_not_shorten_the_time_for_a_block():
    ledger = starved()
    ledger.shift(50.0)
    for second in range(51, int(BLOCK_SECONDS) + 50):
        ledger.stepped("eu/0", float(second))
        assert ledger.advance(float(second)) == []
    assert lines(ledger.advance(BLOCK_SECONDS + 50.0))[0][1]["reason"] == "Overdue"


def restating(ledger, second, *, reconnects=False, trained=()):
    """eu/0 states what it has, in its session or in a new one after a cut of a second."""
    session = 1
    if reconnects:
        session = 1 + second
        ledger.left("eu/0", "StreamEnded", second - 1.0)
    opened = [0, 1, 2][len(trained) :]
    event = stated(
        session=session, items=40, wanted=len(opened), opened=opened, trained=trained
    )  # of 4 blocks in a pass
    return take(ledger, event, float(second))


@pytest.mark.parametrize("reconnects", [False, True], ids=["one session", "ever new sessions"])
def test_a_learner_that_states_the_same_blocks_again_has_no_more_time_for_them(reconnects):
    ledger = starved()
    for second in range(20, int(BLOCK_SECONDS), 20):
        ledger.stepped("eu/0", float(second))
        assert lines(restating(ledger, second, reconnects=reconnects)) == []
    name, fields = lines(ledger.advance(BLOCK_SECONDS))[0]
    assert (name, fields["learner"], fields["reason"]) == ("release", "eu/0", "Overdue")


def test_to_state_the_same_blocks_again_is_no_step():
    ledger = starved()
    for second in range(20, int(IDLE_SECONDS), 20):
        assert lines(restating(ledger, second, reconnects=True)) == []
    name, fields = lines(ledger.advance(IDLE_SECONDS))[0]
    assert (name, fields["learner"], fields["reason"]) == ("release", "eu/0", "NoSteps")


def test_a_block_that_ends_gives_the_learner_time_for_the_next_one():
    ledger = starved()
    restating(ledger, 100, trained=[0])
    assert ledger.holders["eu/0"].ended_at == ledger.holders["eu/0"].stepped_at == 100.0


@pytest.mark.parametrize("ticks", [False, True])
def test_after_a_restart_of_the_syncer_the_time_for_a_block_begins_again(ticks):
    ledger = restarted(starved())
    if ticks:
        ledger.advance(1e6)
    take(ledger, stated(session=5, items=40, wanted=3, opened=[0, 1, 2]), 1e6)
    assert ledger.holders["eu/0"].ended_at == ledger.holders["eu/0"].stepped_at == 1e6


def test_a_pause_of_the_syncer_does_not_shorten_the_time_of_a_broken_connection():
    ledger = BlockLedger()
    take(ledger, stated())
    ledger.left("eu/0", "StreamEnded", 1.0)
    ledger.shift(50.0)
    assert ledger.advance(HOLD_SECONDS + 50.9) == []
    assert lines(ledger.advance(HOLD_SECONDS + 51.0))[0][0] == "release"


def test_a_new_lease_begins_a_new_time():
    ledger = starved()
    ledger.advance(IDLE_SECONDS)  # eu/0 lost its blocks, and us/0 has them
    assert ledger.holders["us/0"].stepped_at == ledger.holders["us/0"].ended_at == IDLE_SECONDS
    out = take(ledger, stated(items=40, wanted=3), IDLE_SECONDS + 1)
    assert leases(out)["eu/0"]
    assert ledger.advance(2 * IDLE_SECONDS - 0.1) == []


def test_blocks_of_a_learner_whose_connection_broke_are_not_taken_early():
    ledger = starved()
    ledger.left("eu/0", "StreamEnded", IDLE_SECONDS - 1)
    assert ledger.advance(IDLE_SECONDS + 5) == []


def test_a_state_with_gaps_is_the_same_after_a_restart():
    ledger = BlockLedger()
    take(ledger, stated(wanted=6))
    take(ledger, stated("us/0", wanted=2))
    ledger.left("eu/0", "Goodbye", 0.0)
    take(ledger, stated("eu/1", wanted=2), incarnation=3)
    assert ledger.to_json() == {
        "items": 100,
        "size": 10,
        "statedBy": "eu/0",
        "next": 8,
        "free": [[2, 6]],
        "held": {
            "us/0": {"incarnation": 1, "open": [6, 7]},
            "eu/1": {"incarnation": 3, "open": [0, 1]},
        },
    }
    again = restarted(ledger)
    assert again.to_json() == ledger.to_json()
    # What is leased next is the same, and nothing that is open.
    assert leases(take(again, stated("ap/0", wanted=5))) == {"ap/0": (2, 3, 4, 5, 8)}
    assert again.oldest == ledger.oldest == 0
    assert again.conflict(stated(items=101)).endswith(
        "; give all learners the same dataset, or begin another run"
    )


def test_serials_are_listed_as_runs():
    assert spans([]) == []
    assert spans([7, 3, 4, 5, 9]) == [
        {"first": 3, "count": 3},
        {"first": 7, "count": 1},
        {"first": 9, "count": 1},
    ]


def test_a_serial_is_free_within_a_gap_and_from_the_rest_on():
    free = FreeSerials([(2, 4), (6, 7)], 9)
    assert [n for n in range(12) if n in free] == [2, 3, 6, 9, 10, 11]
    assert free.gaps == ((2, 4), (6, 7))
    free.add(4)
    free.add(8)
    assert (free.gaps, free.rest) == (((2, 5), (6, 7)), 8)
    free.add(7)
    assert (free.gaps, free.rest) == (((2, 5),), 6)
    free.remove(8)
    assert (free.gaps, free.rest) == (((2, 5), (6, 8)), 9)
    free.remove(3)
    assert free.gaps == ((2, 3), (4, 5), (6, 8))
