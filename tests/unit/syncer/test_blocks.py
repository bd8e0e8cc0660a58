"""Leases of blocks: each serial has one fate, whatever happens in which order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ProtocolError
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core.blocks import (
    BLOCK_SECONDS,
    HOLD_SECONDS,
    IDLE_SECONDS,
    MAX_ADOPTED,
    MOST_BLOCK_SECONDS,
    BlockLedger,
    FreeSerials,
)
from diloco_syncer.core.events import BlocksStated, Decision, LeaseBlocks, Log, TrainedBlock
from diloco_syncer.rpc import telemetry

NAMES = ("eu/0", "eu/1", "us/0")


def stated(name="eu/0", *, session=1, items=100, size=10, wanted=2, opened=(), trained=()):
    return BlocksStated(
        session=session, learner=name, items=items, size=size, wanted=wanted, open=tuple(opened),
        trained=tuple(TrainedBlock(serial=s, begin=0, end=1) for s in trained),
    )  # fmt: skip


def leases(decisions):
    return {d.learner: d.serials for d in decisions if isinstance(d, LeaseBlocks)}


def logged(decisions, event):
    return [d.fields for d in decisions if isinstance(d, Log) and d.event == event]


def take(ledger, event, now=0.0, incarnation=1):
    return [*ledger.stated(event, incarnation=incarnation, now=now), *ledger.advance(now)]


def test_blocks_are_leased_in_order_and_again_when_their_learner_is_gone():
    ledger = BlockLedger()
    assert leases(take(ledger, stated())) == {"eu/0": (0, 1)}
    assert leases(take(ledger, stated("us/0"))) == {"us/0": (2, 3)}
    out = ledger.left("eu/0", "SIGTERM", 1.0)
    assert logged(out, "release")[0]["blocks"] == [{"first": 0, "count": 2}]
    assert leases(take(ledger, stated("us/0", opened=[3], trained=[2]))) == {"us/0": (3, 0)}


def test_a_broken_connection_keeps_its_blocks_for_a_while():
    ledger = BlockLedger()
    take(ledger, stated())
    assert ledger.left("eu/0", "StreamEnded", 1.0) == []
    assert ledger.advance(HOLD_SECONDS + 0.9) == []
    assert leases(take(ledger, stated(session=2, opened=[0, 1]), HOLD_SECONDS)) == {"eu/0": (0, 1)}
    ledger.left("eu/0", "StreamEnded", 40.0)
    out = ledger.advance(40.0 + HOLD_SECONDS)
    assert logged(out, "release")[0]["reason"] == "Overdue"


def test_a_new_process_has_nothing_of_the_one_before():
    ledger = BlockLedger()
    take(ledger, stated())
    ledger.left("eu/0", "StreamEnded", 1.0)
    assert logged(ledger.joined("eu/0", 2), "release")[0]["reason"] == "Replaced"
    assert leases(take(ledger, stated(session=2), incarnation=2)) == {"eu/0": (0, 1)}


def test_a_block_of_another_learner_or_an_unknown_one_does_not_count_and_is_recorded_once():
    ledger = BlockLedger()
    take(ledger, stated())
    take(ledger, stated("us/0"))
    for serial in (0, 10**15, 77):
        out = take(ledger, stated("us/0", opened=[2, 3], trained=[serial]))
        assert not logged(out, "trained")
        refused = logged(out, "refuse")
        assert len(refused) == (serial == 0)
        if refused:
            assert "trained on block 0 of pass 0, which is not leased to it" in refused[0]["detail"]
    assert ledger.holders["eu/0"].open == [0, 1]


def test_a_statement_that_crosses_the_leases_or_is_repeated_after_a_cut_accuses_no_learner():
    ledger = BlockLedger()
    take(ledger, stated(wanted=3))
    take(ledger, stated(wanted=3, opened=[1, 2], trained=[0]))
    out = take(ledger, stated(wanted=3, opened=[2], trained=[0, 1]))
    assert [b["block"] for fields in logged(out, "trained") for b in fields["blocks"]] == [1]
    assert not logged(out, "refuse")
    ledger.left("eu/0", "StreamEnded", 1.0)
    assert not logged(take(ledger, stated(session=2, opened=[2], trained=[0, 1])), "refuse")
    again = BlockLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert not logged(take(again, stated(session=3, opened=[2], trained=[0, 1])), "refuse")


def starved():
    """us/0 has the rest of a pass while eu/0 sits on three blocks of it."""
    ledger = BlockLedger()
    take(ledger, stated(items=40, wanted=3))
    out = take(ledger, stated("us/0", items=40, wanted=3))
    while serials := leases(out).get("us/0"):
        out = take(ledger, stated("us/0", items=40, trained=serials[:1], opened=serials[1:]), 1.0)
    return ledger


def test_blocks_of_a_connected_learner_that_makes_no_steps_are_leased_again_once_others_wait():
    ledger = starved()
    ledger.stepped("eu/0", 5.0)
    assert ledger.advance(IDLE_SECONDS + 4.9) == []
    out = ledger.advance(IDLE_SECONDS + 5.0)
    assert logged(out, "release")[0]["reason"] == "NoSteps"
    assert leases(out)["eu/0"] == ()
    assert leases(out)["us/0"][0] == 0
    # It continues: what it had begun counts only if no other learner has it.
    out = take(ledger, stated(items=40, wanted=3, trained=[0], opened=[]), 200.0)
    assert len(logged(out, "refuse")) == 1
    assert leases(out)["eu/0"]


def test_blocks_of_a_learner_that_is_gone_and_of_one_that_makes_no_steps_may_be_released_at_once():
    ledger = BlockLedger()
    take(ledger, stated(items=40, wanted=2))
    take(ledger, stated("eu/1", items=40, wanted=2))
    ledger.left("eu/1", "StreamEnded", IDLE_SECONDS - HOLD_SECONDS)
    ledger.stated(stated("us/0", items=40, wanted=5), incarnation=1, now=IDLE_SECONDS)
    out = ledger.advance(IDLE_SECONDS)
    released = [(line["learner"], line["reason"]) for line in logged(out, "release")]
    assert released == [("eu/1", "Overdue"), ("eu/0", "NoSteps")]


def test_a_learner_that_steps_and_never_ends_a_block_delays_the_others_for_a_while_only():
    ledger = starved()
    for second in range(1, int(BLOCK_SECONDS)):
        ledger.stepped("eu/0", float(second))
        assert ledger.advance(float(second)) == []
    assert logged(ledger.advance(BLOCK_SECONDS), "release")[0]["reason"] == "Overdue"
    assert ledger.patience == 2 * BLOCK_SECONDS


@pytest.mark.parametrize("part", [4, 2, 1])
def test_the_time_for_a_block_doubles_up_to_a_limit(part):
    ledger = starved()
    ledger.patience = most = MOST_BLOCK_SECONDS / part
    ledger.stepped("eu/0", most)
    assert ledger.advance(most - 0.1) == []
    assert logged(ledger.advance(most), "release")[0]["reason"] == "Overdue"
    assert ledger.patience == min(2 * most, MOST_BLOCK_SECONDS)


def test_while_no_learner_waits_a_learner_keeps_its_blocks():
    ledger = BlockLedger()
    take(ledger, stated())
    assert ledger.advance(1e6) == []


def test_a_returning_learner_cannot_claim_blocks_far_ahead():
    ledger = BlockLedger()
    take(ledger, stated(items=10**12, size=1))
    ledger.left("eu/0", "StreamEnded", 1.0)
    claimed = [MAX_ADOPTED - 1, MAX_ADOPTED, 10**11]
    take(ledger, stated(session=2, items=10**12, size=1, trained=claimed), 1.0)
    assert ledger.free.rest == MAX_ADOPTED


def test_another_dataset_is_a_conflict_in_one_sentence():
    ledger = BlockLedger()
    take(ledger, stated())
    assert ledger.conflict(stated("us/0")) == ""
    assert ledger.conflict(stated("us/0", items=99)) == (
        "us/0 states a dataset of 99 items in blocks of 10, expected 100 items in blocks of 10 as eu/0 stated first; "
        "give all learners the same dataset, or begin another run"
    )


def test_of_a_small_dataset_no_block_is_open_twice_in_two_passes():
    ledger = BlockLedger()
    assert leases(take(ledger, stated(items=20, wanted=5))) == {"eu/0": (0, 1)}
    assert leases(take(ledger, stated(items=20, wanted=5, opened=[0], trained=[1]))) == {
        "eu/0": (0,)
    }
    assert leases(take(ledger, stated(items=20, wanted=5, trained=[0]))) == {"eu/0": (2, 3)}


def test_of_a_huge_dataset_only_what_is_open_is_kept():
    ledger = BlockLedger()
    take(ledger, stated(items=10**12, size=1, wanted=32))
    for serial in range(1000):
        take(ledger, stated(items=10**12, size=1, wanted=32, trained=[serial]))
    assert len(json.dumps(ledger.to_json())) < 500


def test_while_one_block_stays_open_nothing_grows():
    ledger = BlockLedger()
    take(ledger, stated(items=10**12, size=1))
    out = take(ledger, stated("us/0", items=10**12, size=1))
    for _ in range(2000):
        a, b = leases(out)["us/0"]
        out = take(ledger, stated("us/0", items=10**12, size=1, trained=[a], opened=[b]))
    assert ledger.oldest == 0
    assert len(ledger._opened) < 100
    assert len(json.dumps(ledger.to_json())) < 500


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_free_serials_are_a_set(operations):
    free, model = FreeSerials(), set(range(100))
    for add, serial in operations:
        if add and serial not in model and serial < free.rest:
            free.add(serial)
            model.add(serial)
        elif not add and serial in model:
            free.remove(serial)
            model.discard(serial)
        assert {n for n in range(100) if n in free} == model
        assert free.lowest == min(model)
        assert all(a < b for a, b in free.gaps)
        assert all(b < a for (_, b), (a, _) in zip(free.gaps, free.gaps[1:], strict=False))


@dataclass
class History:
    """Learners that train, leave, return and die, and a syncer that resumes from snapshots."""

    blocks: int
    ledger: BlockLedger = field(default_factory=BlockLedger)
    now: float = 0.0
    session: int = 0
    trained: list[int] = field(default_factory=list)
    sent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 1))
    sessions: dict[str, int | None] = field(default_factory=dict)
    saved: str = "null"
    saved_trained: list[int] = field(default_factory=list)

    def took(self, decisions: list[Decision]) -> None:
        self.sent |= leases(decisions)
        for fields in logged(decisions, "trained"):
            self.trained += [block["block"] for block in fields["blocks"]]
        self.check()

    def check(self) -> None:
        ledger = self.ledger
        opened = [serial for holder in ledger.holders.values() for serial in holder.open]
        numbers = [serial % self.blocks for serial in opened]
        assert len(set(numbers)) == len(numbers), "a block is open at two learners"
        assert len(set(self.trained)) == len(self.trained), "a serial counts twice"
        assert not set(opened) & set(self.trained)
        for serial in range(ledger.free.rest):
            assert (serial in ledger.free) + (serial in opened) + (serial in self.trained) == 1

    def state(self, name: str, trained: tuple[int, ...]) -> None:
        if self.sessions.get(name) is None:
            self.session += 1
            self.sessions[name] = self.session
            self.took(self.ledger.joined(name, self.incarnations[name]))
        opened = [serial for serial in self.sent.get(name, ()) if serial not in trained]
        event = stated(
            name, session=self.sessions[name], items=self.blocks, size=1, wanted=3,
            opened=opened, trained=trained,
        )  # fmt: skip
        self.took(self.ledger.stated(event, incarnation=self.incarnations[name], now=self.now))
        self.took(self.ledger.advance(self.now))

    def step(self, action: str, name: str, number: int) -> None:
        self.now += number
        match action:
            case "train":
                self.state(name, self.sent.get(name, ())[: number + 1])
            case "lie":
                self.state(name, (number,))
            case "cut" | "leave":
                if self.sessions.get(name) is not None:
                    self.sessions[name] = None
                    reason = "StreamEnded" if action == "cut" else "Goodbye"
                    self.took(self.ledger.left(name, reason, self.now))
            case "die":
                self.sessions[name] = None
                self.incarnations[name] += 1
                self.sent.pop(name, None)
                self.took(self.ledger.left(name, "StreamEnded", self.now))
            case "wait":
                self.now += 10
                self.took(self.ledger.advance(self.now))
            case "long":
                self.now += BLOCK_SECONDS
                self.took(self.ledger.advance(self.now))
            case "snapshot":
                self.saved, self.saved_trained = json.dumps(self.ledger.to_json()), [*self.trained]
            case "crash":
                self.ledger = BlockLedger.from_json(json.loads(self.saved))
                self.trained = [*self.saved_trained]
                self.sessions.clear()
                self.took(self.ledger.advance(self.now))


ACTIONS = (
    "train",
    "train",
    "train",
    "lie",
    "cut",
    "leave",
    "die",
    "wait",
    "long",
    "snapshot",
    "crash",
)


@given(
    st.integers(1, 20),
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.sampled_from(NAMES), st.integers(0, 3)), max_size=60
    ),
)
def test_in_any_history_each_serial_is_free_open_at_one_learner_or_trained_once(blocks, history):
    run = History(blocks)
    for action, name, number in history:
        run.step(action, name, number)
    # Whatever happened: who remains trains on everything that is left of two passes.
    for name in NAMES[1:]:
        run.step("leave", name, 0)
    run.now += 2 * HOLD_SECONDS
    run.took(run.ledger.advance(run.now))
    last = max([run.ledger.free.rest, 2 * blocks])
    for _ in range(4 * last + 4):
        if run.ledger.oldest >= last:
            break
        run.state("eu/0", run.sent.get("eu/0", ()))
    assert set(range(last)) <= set(run.trained)


@pytest.mark.parametrize("gaps", [(), ((1, 3), (5, 6))])
def test_the_state_survives_a_snapshot(gaps):
    ledger = BlockLedger()
    take(ledger, stated(wanted=9))
    ledger.free = FreeSerials(gaps, 10)
    again = BlockLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert again.to_json() == ledger.to_json()


@pytest.mark.parametrize(
    "fields",
    [
        {"items": 0, "size": 1},
        {"items": 5, "size": 0},
        {"items": 5, "size": 6},
        {"items": (1 << 48) + 1, "size": 1},
        {"items": 5, "size": 1, "wanted": 33},
        {"items": 5, "size": 1, "open": list(range(33))},
        {"items": 5, "size": 1, "open": [1], "trained": [pb.TrainedBlock(serial=1)]},
        {"items": 5, "size": 1, "open": [(1 << 62) + 1]},
        {"items": 5, "size": 1, "trained": [pb.TrainedBlock(end=1 << 50)]},
        {"items": 5, "size": 1, "trained": [pb.TrainedBlock(begin=3, end=3)]},
    ],
)
def test_a_statement_beyond_its_bounds_is_refused(fields):
    data = pb.LearnerMessage(blocks=pb.Blocks(**fields)).SerializeToString()
    with pytest.raises(ProtocolError):
        telemetry.received(data, session=1, learner="eu/0", fragments=2)


def test_the_largest_statement_fits_into_a_message():
    big = [(1 << 62) - n for n in range(64)]
    trained = [pb.TrainedBlock(serial=n, begin=1 << 39, end=1 << 40) for n in big[:32]]
    stated = pb.Blocks(items=1 << 48, size=1, wanted=32, open=big[32:], trained=trained)
    data = pb.LearnerMessage(blocks=stated).SerializeToString()
    event = telemetry.received(data, session=1, learner="eu/0", fragments=1)
    assert isinstance(event, BlocksStated)
    assert len(event.trained) == len(event.open) == 32
