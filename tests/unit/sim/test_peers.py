"""Simulated learners that take the state of their optimizers from each other, and the checker of what they took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim import faults
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Began, LearnerMoment, Moment, Saved
from diloco_sim.checkers.recovered import Recovered
from diloco_sim.description import Description, sample
from diloco_sim.world import World
from diloco_testing.sim import peer_breaks
from diloco_testing.sim.worlds import Recorder, small, violation

pytestmark = pytest.mark.slow  # whole worlds

LOST = "20..20.1 checkpoint-lost us/0"


def with_peers(plan: str = LOST, *, every: int | None = 5, steps: int = 60) -> Description:
    """The small world whose learners ask each other for 32 KiB of state."""
    return replace(small(plan, moments=4096), checkpoint_every=every, steps=steps)


def recoveries(description: Description) -> list[dict[str, object]]:
    """The lines of a world that keeps all promises."""
    lines = Recorder("recovery")
    outcome = World(description, checkers=[lines]).run()
    assert outcome.ok, outcome.violation
    return lines.lines


def test_a_learner_without_a_checkpoint_begins_with_the_state_of_a_peer_of_its_region_or_another():
    [line] = recoveries(with_peers())
    assert (line["learner"], line["source"], line["peer"]) == ("us/0", "Peer", "eu/0")
    assert 20 < line["stateStep"] <= line["step"]
    assert line["bytes"] > 8 * 4096
    assert line["problem"] == ""


def test_peers_that_write_no_checkpoints_refuse_and_the_learner_begins_anew():
    [line] = recoveries(with_peers(every=None))
    assert (line["source"], line["peer"]) == ("None", "")
    assert "it writes no local checkpoints" in line["problem"]


@pytest.mark.parametrize(
    ("disturbance", "problem"),
    [
        ("22..90 peer-mute eu/0\n 22..90 peer-mute eu/1", "no complete answer within"),
        ("22..30 peer-old eu/0\n 22..30 peer-old eu/1", "it is of global step"),
        ("22.3..25 crash eu/0\n 22..60 latency us/0 eu/1 0.5", ""),
        ("22.1..90 pause eu/0\n 22..90 cut us/0 eu/1", "timed out|no answer"),
        ("22..90 corruption eu/0 us/0 0.9\n 22..90 corruption eu/1 us/0 0.9", "damaged|state"),
        ("22.3..24 crash syncer\n 22..60 peer-slow eu/0 3000", ""),
        ("22..90 peer-slow eu/0 10\n 22..90 peer-slow eu/1 10", "no complete answer within"),
    ],
)
def test_a_learner_joins_whatever_its_peers_do(disturbance, problem):
    last = recoveries(with_peers(f"{LOST}\n{disturbance}", steps=250))[-1]
    assert last["learner"] == "us/0"
    if not problem:
        assert last["source"] == "Peer"
    else:
        assert last["source"] == "None"
        assert any(part in last["problem"] for part in problem.split("|")), last["problem"]


@pytest.mark.parametrize(
    ("way", "peer", "problem"),
    [(1, "eu/0", ""), (2, "", "damaged or incomplete"), (3, "", "damaged or incomplete"),
     (4, "", "it sent more than"), (5, "", "damaged or incomplete")],
)  # fmt: skip
def test_a_peer_that_sends_something_else_is_not_believed(way, peer, problem):
    """The first way, false steps in the header, changes nothing: the manifest has the true ones."""
    plan = f"{LOST}\n 22..60 peer-false eu/0 {way}\n 22..60 peer-false eu/1 {way}"
    [line] = recoveries(with_peers(plan))
    assert line["peer"] == peer
    assert problem in line["problem"]


@pytest.mark.parametrize(
    ("apply", "sentence", "description"),
    [
        (peer_breaks.states_of_any_step, "it asked for",
         with_peers(f"{LOST}\n 22..30 peer-old eu/0\n 22..30 peer-old eu/1")),
        (peer_breaks.damaged_states, "a state that no learner had",
         with_peers(f"{LOST}\n 22..60 corruption eu/0 us/0 0.1\n 22..60 corruption eu/1 us/0 0.1")),
        (peer_breaks.steps_of_the_header, "states Peer eu/0 of step 10",
         with_peers(f"{LOST}\n 22..60 peer-false eu/0 1")),
        (peer_breaks.peers_never_abandoned, "us/0 still waits for the last of eu/0",
         with_peers(f"{LOST}\n 22..30 peer-mute eu/0", steps=250)),
        (peer_breaks.one_peer_again_and_again, "us/0 asks eu/0 after ['eu/0']", with_peers(every=None)),
        (peer_breaks.peers_stated_with_the_step_of_now, "states Peer eu/0 of step",
         with_peers(f"{LOST}\n 22..60 peer-slow eu/0 3000")),
        (peer_breaks.state_of_a_peer_not_loaded, "states Peer eu/0 of step", with_peers()),
    ],
)  # fmt: skip
def test_a_broken_recovery_is_found(monkeypatch, apply, sentence, description):
    assert World(description).run().ok
    apply(monkeypatch)
    found = violation(description)
    assert found.checker == "recovered"
    assert sentence in found.sentence


def moment(**of_peer: object) -> Moment:
    learner = LearnerMoment(connected=True, done=False, versions=(), **of_peer)
    return Moment(quiet=True, healthy_since=0.0, step=9, learners={"eu/0": learner},
                  attempts=0, queues=0, streams=0)  # fmt: skip


def test_a_peer_that_makes_no_step_while_it_answers_is_found():
    checker = Recovered(4, 1.0, lambda name, now: 0.0)
    for now in range(0, 200, 5):
        checker.observe(moment(local_step=now, serves=True), now)
    for now in range(200, 300, 5):
        checker.observe(moment(local_step=300, serves=False), now)
    checker.observe(moment(local_step=300, serves=True), 300.0)
    checker.observe(moment(local_step=300, serves=True), 330.0)
    with pytest.raises(Violation, match=r"eu/0 answers another learner and makes no step in 35 s"):
        checker.observe(moment(local_step=300, serves=True), 335.0)


def test_a_line_of_a_process_that_did_not_begin_is_found():
    checker = Recovered(4, 1.0, lambda name, now: 0.0)
    checker.observe(Saved("eu/0", 7, 11, b"moments"), 1.0)
    checker.observe(Began("eu/0", 2, 12, b"moments"), 2.0)
    line = {
        "event": "recovery",
        "learner": "eu/0",
        "source": "OldCheckpoint",
        "peer": "",
        "stateStep": 11,
    }
    checker.observe({**line, "incarnation": 2}, 3.0)
    with pytest.raises(Violation, match="states OldCheckpoint"):
        checker.observe({**line, "incarnation": 3}, 3.0)


def test_a_part_of_the_drawn_worlds_has_peers_and_their_faults():
    drawn = [sample(seed, steps=40) for seed in range(200)]
    peered = [description for description in drawn if description.moments]
    assert 30 < len(peered) < 70
    assert {d.checkpoint_every for d in peered} >= {None, 5, 20}
    kinds = {fault.kind for d in peered for fault in d.plan}
    assert kinds >= set(faults.PEERS)
    assert not {f.kind for d in drawn if not d.moments for f in d.plan} & set(faults.PEERS)
