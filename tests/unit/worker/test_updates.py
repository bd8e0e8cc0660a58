"""Which committed fragments a learner lacks, and what is requested to get them."""

import pytest

from diloco_testing.learners.sessions import welcome
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.updates import MAX_RETRY_SECONDS, RETRY_SECONDS, Updates


def updates(*versions):
    slots = [Slot(fragment=p, version=v and (1, v)) for p, v in enumerate(versions)]
    return Updates(slots), slots


def asked(downloads):
    return [(d.fragment, d.tries, d.delay_seconds) for d in downloads]


def test_only_fragments_that_are_older_than_the_syncers_are_requested_and_each_once():
    it, _ = updates(5, 5, None)
    it.began(((1, 5), (1, 6), (1, 4)), welcome())
    found = it.catch_up()
    assert found == [
        ev.Download(fragment=p, exact=False, tries=1, delay_seconds=0.0) for p in (1, 2)
    ]
    assert it.outdated == {1, 2}
    assert it.catch_up() == [], "they are on their way"


def test_a_fragment_of_which_nothing_is_known_is_not_requested():
    it, _ = updates(5, None)
    it.began(((1, 5),), welcome())
    assert it.catch_up() == []


def test_more_versions_than_fragments_are_ignored():
    it, _ = updates(5)
    it.began(((1, 5), (1, 9)), welcome())
    it.note(1, (1, 9))
    assert it.catch_up() == []
    it.note(0, (1, 9))
    assert asked(it.catch_up()) == [(0, 1, 0.0)]


def test_an_older_announcement_does_not_replace_a_newer_one():
    it, _ = updates(5)
    it.note(0, (1, 5))
    it.note(0, (1, 4))
    assert it.catch_up() == []
    it.note(0, (2, 1))
    it.note(0, (1, 9))
    assert asked(it.catch_up()) == [(0, 1, 0.0)]


def test_a_result_that_is_being_downloaded_is_not_requested_beside_it():
    it, _ = updates(5)
    it.result_announced(0, 6)
    assert it.outdated == set(), "the round is not committed"
    it.note(0, (1, 6))
    assert it.catch_up() == []
    assert it.outdated == {0}, "its delta would take the merge of step 6 back"


def test_the_end_of_an_older_result_requests_nothing_beside_the_newer_one():
    it, slots = updates(5)
    it.result_announced(0, 6)
    older = ev.Download(fragment=0, round=6)
    assert not it.superseded(older)
    it.result_announced(0, 9)
    assert it.superseded(older)
    for version in ((1, 6), (1, 9)):
        it.note(0, version)
        assert it.catch_up() == []
    slots[0].version = (1, 6)
    assert it.placed(0) == it.ended(older, retried=False) == []
    assert it.outdated == {0}
    newer = ev.Download(fragment=0, round=9)
    assert asked(it.ended(newer, retried=False)) == [(0, 1, 0.0)]


def test_the_end_of_the_current_version_requests_nothing_beside_a_result_that_waits_for_it():
    it, _ = updates(5)
    it.note(0, (1, 6))
    [current] = it.catch_up()
    it.result_announced(0, 9)
    assert it.ended(current, retried=False) == []
    assert asked(it.ended(ev.Download(fragment=0, round=9), retried=False)) == [(0, 1, 0.0)]


def test_when_the_session_ends_what_is_missing_is_requested_again_in_the_next():
    it, _ = updates(5)
    it.note(0, (1, 6))
    it.catch_up()
    it.session_lost()
    assert asked(it.catch_up()) == [(0, 1, 0.0)]


def test_a_failed_result_is_followed_by_the_current_version_at_once():
    it, _ = updates(5)
    it.result_announced(0, 6)
    it.note(0, (1, 6))
    request = ev.Download(fragment=0, round=6, tries=3)
    assert it.ended(request, retried=True) == []
    assert asked(it.ended(request, retried=False)) == [(0, 1, 0.0)]


def test_the_current_version_is_requested_again_after_pauses_that_double():
    it, _ = updates(5)
    it.note(0, (1, 6))
    [request] = it.catch_up()
    delays = []
    for tries in range(2, 9):
        [request] = it.ended(request, retried=False)
        assert (request.round, request.exact, request.tries) == (0, False, tries)
        delays.append(request.delay_seconds)
    assert delays[:5] == [RETRY_SECONDS * f for f in (1, 2, 4, 8, 16)]
    assert delays[5:] == [MAX_RETRY_SECONDS] * 2


def test_a_placed_fragment_may_be_offered_again():
    it, slots = updates(5)
    it.note(0, (1, 6))
    it.catch_up()
    slots[0].version = (1, 6)
    assert it.placed(0) == []
    assert it.outdated == set()


@pytest.mark.parametrize("behind", [True, False])
def test_a_fragment_stays_outdated_while_the_newest_is_held_or_missing(behind):
    it, slots = updates(5)
    it.note(0, (1, 6))
    [request] = it.catch_up()
    assert asked(it.ended(request, retried=False)) == [(0, 2, RETRY_SECONDS)]
    if not behind:
        slots[0].version = (1, 6)
        slots[0].held = Staged(fragment=0, version=(1, 6), ticket=1)
    assert it.placed(0) == []
    assert it.outdated == {0}


def test_a_fragment_that_could_not_be_decoded_is_requested_after_a_pause():
    it, slots = updates(5)
    it.note(0, (1, 6))
    [request] = it.catch_up()
    slots[0].version = (1, 6)
    assert it.ended(request, retried=False) == []
    slots[0].version = None
    assert asked(it.placed(0)) == [(0, 2, RETRY_SECONDS)]


def test_a_new_session_forgets_versions_that_no_longer_exist_but_not_what_is_held():
    it, slots = updates(5, 5, 5)
    for p in range(3):
        it.note(p, (1, 9))
    it.catch_up()
    slots[1].version, slots[1].held = (1, 9), Staged(fragment=1, version=(1, 9), ticket=1)
    it.session_lost()
    assert it.began(((1, 5), (1, 5), (1, 6)), welcome(epoch=2)) == []
    assert it.outdated == {1, 2}
    assert asked(it.catch_up()) == [(2, 1, 0.0)]
