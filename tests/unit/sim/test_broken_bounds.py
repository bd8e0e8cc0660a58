"""Checkers bite: each bound of `checkers/bounds.py` is exceeded by a core that a test has broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_sim.checkers.bounds import LINES_PER_LEARNER, LINES_PER_MERGE, Bounds, Most
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import LearnerMoment, Moment
from diloco_sim.world import World
from diloco_testing.sim import breaks
from diloco_testing.sim.worlds import small, violation

MOST = Most(
    learners=3, fragments=2, overlap=1, merges_per_second=1.0, link_bytes=1000, vector_bytes=2000, journal_bytes=3000,
    kept_snapshots=1,
)  # fmt: skip


def moment(**facts: Any) -> Moment:
    plain = {"attempts": 0, "queues": 0, "streams": 0}
    return Moment(quiet=False, healthy_since=None, step=3, learners={}, **{**plain, **facts})


@pytest.mark.parametrize(
    ("what", "most", "sentence"),
    [
        ("attempts", 7, "8 attempts are open, expected at most 7"),
        ("streams", 36, "37 transfers wait, expected at most 36"),
        ("queues", 2000, "2001 events and lines wait, expected at most 2000"),
        ("outbox", 4196, "4197 messages wait for a session, expected at most 4196"),
        ("link_bytes", 1000, "1001 bytes are held by a link, expected at most 1000"),
        ("vector_bytes", 2000, "2001 bytes of vectors are held by the syncer, expected at most 2000"),
        ("journal_bytes", 3000, "3001 bytes are in the journal, expected at most 3000"),
    ],
)  # fmt: skip
def test_each_count_has_a_bound(what, most, sentence):
    bounds = Bounds(MOST)
    bounds.observe(moment(**{what: most}), 1.0)
    with pytest.raises(Violation) as found:
        bounds.observe(moment(**{what: most + 1}), 1.0)
    assert found.value.sentence == sentence


def test_downloads_of_a_fragment_by_a_learner_have_a_bound():
    bounds = Bounds(MOST)

    def judge(begun: dict[int, int], now: float) -> None:
        learner = LearnerMoment(connected=False, done=False, versions=(), begun=begun)
        bounds.observe(replace(moment(), learners={"eu/0": learner}), now)

    judge({0: 30, 1: 30}, 5.0)
    judge({0: 60, 1: 60}, 10.0)
    with pytest.raises(
        Violation, match="eu/0 has begun 31 downloads of fragment 1 within 5 s, expected at most 30"
    ):
        judge({0: 60, 1: 91}, 15.0)


def test_lines_have_a_bound_within_ten_seconds():
    bounds = Bounds(MOST)
    most = LINES_PER_LEARNER * 4 + LINES_PER_MERGE * 10 * 4
    for number in range(2 * most):
        bounds.observe({"event": "join", "step": 1}, number * 10.1 / most)
    for number in range(most):
        bounds.observe({"event": "join", "step": 1}, 100.0 + number / most)
    with pytest.raises(Violation, match=rf"{most + 1} lines within 10 s, expected at most {most}"):
        bounds.observe({"event": "join", "step": 1}, 101.0)


@pytest.mark.slow
def test_bounds_finds_a_syncer_that_records_too_much(monkeypatch):
    breaks.too_many_lines(monkeypatch)
    found = violation(small())
    assert (found.checker, "lines within 10 s" in found.sentence) == ("bounds", True), found


@pytest.mark.slow
def test_bounds_finds_lines_that_wait_for_a_disk_without_a_limit(monkeypatch):
    breaks.endless_queue_of_lines(monkeypatch)
    found = violation(replace(small("5..500 disk-hang syncer"), steps=1000))
    assert (found.checker, "events and lines wait" in found.sentence) == ("bounds", True), found


@pytest.mark.slow
def test_bounds_finds_messages_for_a_learner_that_is_gone(monkeypatch):
    """Nothing reaches it, and what it sends arrives: its session lasts until too many messages wait."""
    description = replace(
        small("5..200 half-open syncer us/0"), steps=3000, step_seconds=(0.1, 0.11, 0.12)
    )
    breaks.endless_outbox(monkeypatch)
    found = violation(description)
    assert (found.checker, "messages wait for a session" in found.sentence) == ("bounds", True), (
        found
    )


@pytest.mark.slow
def test_bounds_finds_a_learner_that_downloads_without_a_pause(monkeypatch):
    """It joins a quorum of all, and the syncer crashes when one of the two parts of the model has arrived."""
    plan = """
        30..31 crash us/0+trainer
        31..60 bandwidth us/0 syncer 0.001
        50..51 crash syncer
    """
    description = replace(small(plan, bandwidth=1e5), steps=120)
    kept = replace(description.spec.syncer_checkpoint, every_steps=10)
    spec = replace(description.spec, quorum=3, syncer_checkpoint=kept)
    description = replace(description, spec=spec)
    whole = World(description).run()
    assert whole.ok, whole.violation
    breaks.undone_parts_kept(monkeypatch)
    found = violation(description)
    assert found.checker == "bounds"
    assert "downloads of fragment 0 within 5 s, expected at most 30" in found.sentence
