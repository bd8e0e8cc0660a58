"""Counters of Algorithm 1, and access to the inbox of a fragment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.ledger import MOST_TOKENS, Ledger


def staged(step: int, *, epoch: int = 1) -> Staged:
    return Staged(fragment=0, version=(epoch, step), ticket=step)


def test_a_step_counts_for_every_fragment_and_receiving_a_fragment_resets_its_counters():
    ledger = Ledger(2)
    ledger.count(10)
    ledger.count(5)
    ledger.received(1)
    ledger.count(1)
    assert (ledger.local_step, ledger.total_tokens) == (3, 16)
    assert (ledger.steps, ledger.tokens) == ([3, 1], [16, 1])


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "3", None, 10**30])
def test_invalid_tokens_are_refused_and_not_counted(tokens):
    ledger = Ledger(1)
    with pytest.raises(ValueError, match="tokens"):
        ledger.count(tokens)
    assert ledger.local_step == 0


def test_resuming_never_decreases_a_counter():
    ledger = Ledger(1)
    ledger.resume(local_step=7, total_tokens=70)
    ledger.resume(local_step=3, total_tokens=90)
    assert (ledger.local_step, ledger.total_tokens) == (7, 90)


def test_a_ledger_is_restored_from_json():
    ledger = Ledger(3)
    ledger.count(4)
    ledger.received(2, version=(1, 7))
    assert ledger.versions == [None, None, (1, 7)]
    assert Ledger.from_json(ledger.to_json()).to_json() == ledger.to_json()


def test_a_download_is_placed_at_once_if_the_trainer_has_applied_the_previous_one():
    slot = Slot(fragment=0)
    assert slot.arrived(staged(1)) == (staged(1), None)


def test_only_the_newest_download_is_held_until_the_trainer_has_applied_the_previous_one():
    slot = Slot(fragment=0)
    slot.arrived(staged(1))
    slot.placed()
    assert slot.arrived(staged(2)) == (None, None)
    assert slot.arrived(staged(3)) == (None, staged(2))
    assert slot.confirmed(1) == staged(3)


def test_an_older_or_equal_version_never_follows_a_newer_one():
    slot = Slot(fragment=0)
    slot.arrived(staged(5))
    slot.placed()
    slot.confirmed(1)
    assert slot.arrived(staged(4)) == (None, staged(4))
    assert slot.arrived(staged(5)) == (None, staged(5))
    assert slot.arrived(staged(1, epoch=2)) == (staged(1, epoch=2), None)


@given(st.lists(st.one_of(st.integers(1, 9).map(lambda s: ("arrive", s)), st.just(("apply", 0)))))
def test_no_sequence_of_events_writes_an_inbox_that_the_trainer_may_read(history):
    slot = Slot(fragment=0)
    in_inbox = 0
    applied = 0

    def place(item):
        nonlocal in_inbox
        assert slot.free, "written while it may be read"
        assert item.version[1] >= in_inbox
        in_inbox = item.version[1]
        slot.placed()

    for what, step in history:
        if what == "arrive":
            item, _ = slot.arrived(staged(step))
        else:
            applied = slot.published
            item = slot.confirmed(applied)
        if item is not None:
            place(item)
    arrived = [step for what, step in history if what == "arrive"]
    slot.confirmed(slot.published)
    newest = slot.version[1] if slot.version else 0
    assert newest == max(arrived, default=0)


def test_a_step_has_two_to_the_fortieth_tokens_at_most():
    ledger = Ledger(1)
    ledger.count(MOST_TOKENS)
    assert (ledger.local_step, ledger.total_tokens) == (1, 1 << 40)
    with pytest.raises(ValueError, match=r"is not a whole number from 0 to 2\*\*40"):
        ledger.count(MOST_TOKENS + 1)
    assert (ledger.local_step, ledger.total_tokens) == (1, 1 << 40)
