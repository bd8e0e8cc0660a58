"""A merge at its edges: aborts between two steps, the window, what is asked too early."""

from __future__ import annotations

from functools import partial

import pytest

from diloco.errors import ProtocolError, UnavailableError
from diloco.model.fragments import CHUNK
from diloco_syncer.core.contribution import ContributionError
from diloco_syncer.merging.streaming import (
    MIN_GAP,
    FragmentMerge,
    MergeAbortedError,
    _Progress,
)
from diloco_testing.syncers.merging import feed, fragment_of, merge_of, upload, values_of

FRAGMENT = fragment_of(100, 2 * CHUNK)


def uploads_of(*names, fragment=FRAGMENT):
    return [upload(fragment, n, values_of(fragment, seed=i)) for i, n in enumerate(names)]


def test_an_abort_just_before_a_chunk_is_merged_ends_it_quietly(monkeypatch):
    work = FragmentMerge._work

    def aborted_first(merge, index):
        merge.abort("cut")
        work(merge, index)

    monkeypatch.setattr(FragmentMerge, "_work", aborted_first)
    uploads = uploads_of("a")
    merge = merge_of(FRAGMENT, [u.contribution for u in uploads])
    merge.add("a", 0, uploads[0].chunks[0])
    assert not merge.finished
    with pytest.raises(MergeAbortedError, match="cut"):
        merge.ready(0)


def test_the_first_reason_of_an_abort_stays_and_everything_is_admitted_after_it():
    uploads = uploads_of("a", "b")
    merge = merge_of(FRAGMENT, [u.contribution for u in uploads], window=1)
    assert merge.has_room("a", 0)
    assert not merge.has_room("a", 1)
    merge.abort("first")
    merge.abort("second")
    assert merge.has_room("a", 1)
    merge.add("b", 0, uploads[1].chunks[0])
    with pytest.raises(MergeAbortedError, match="first"):
        merge.result()


@pytest.mark.parametrize("window", [1, 2])
def test_a_member_is_at_most_a_window_ahead_of_the_slowest(window):
    uploads = uploads_of("a", "b")
    merge = merge_of(FRAGMENT, [u.contribution for u in uploads], window=window)
    assert merge.has_room("a", window - 1)
    assert not merge.has_room("a", window)
    for index in range(window):
        merge.add("a", index, uploads[0].chunks[index])
    assert not merge.wait_for_room("a", window, 0.0)
    merge.add("b", 0, uploads[1].chunks[0])
    assert merge.has_room("a", window)


def test_a_member_that_sends_its_last_chunk_first_does_not_open_the_window_for_the_others():
    fragment = fragment_of(12 * CHUNK)
    uploads = [upload(fragment, name, values_of(fragment, seed=i)) for i, name in enumerate("ab")]
    merge = merge_of(fragment, [u.contribution for u in uploads], window=2)
    for ask in (merge.has_room, partial(merge.wait_for_room, timeout_seconds=0.0)):
        with pytest.raises(ContributionError, match="a: chunk 11 arrived before 11 others") as seen:
            ask("a", 11)
        assert seen.value.learner == "a"
    assert not merge.has_room("b", 2)


def test_a_gap_of_a_few_damaged_chunks_is_no_reason_to_refuse_a_member():
    fragment = fragment_of(12 * CHUNK)
    uploads = [upload(fragment, name, values_of(fragment, seed=i)) for i, name in enumerate("ab")]
    merge = merge_of(fragment, [u.contribution for u in uploads], window=2)
    damaged = range(MIN_GAP)
    for index in range(12):
        for each in uploads:
            name = each.contribution.learner
            assert merge.has_room(name, index)
            if name == "b" or index not in damaged:
                merge.add(name, index, each.chunks[index])
    for index in damaged:
        assert merge.has_room("a", index)
        merge.add("a", index, uploads[0].chunks[index])
    assert merge.finished
    assert not merge_of(fragment, [u.contribution for u in uploads], window=2).has_room(
        "a", MIN_GAP
    )
    with pytest.raises(ContributionError):
        merge_of(fragment, [u.contribution for u in uploads], window=2).has_room("a", MIN_GAP + 1)


def test_what_is_not_merged_yet_has_no_answer():
    uploads = uploads_of("a")
    merge = merge_of(FRAGMENT, [u.contribution for u in uploads])
    assert merge.ready(0) is None
    assert not merge.wait_for_output(0, 0.0)
    with pytest.raises(UnavailableError, match="chunk 0 of fragment 0 was not merged within 0 s"):
        merge.output(0, 0.0)
    with pytest.raises(UnavailableError, match="3 chunks are not merged"):
        merge.result()
    feed(merge, uploads)
    assert merge.finished
    assert merge.wait_for_output(0, 0.0)
    assert merge.output(0, 0.0) is merge.ready(0)


def test_non_members_have_neither_room_nor_chunks():
    merge = merge_of(FRAGMENT, [u.contribution for u in uploads_of("a")])
    for ask in (
        lambda: merge.has_room("b", 0),
        lambda: merge.wait_for_room("b", 0, 0.0),
        lambda: merge.add("b", 0, b""),
    ):
        with pytest.raises(ProtocolError, match="b is not a member"):
            ask()


def test_the_slowest_member_moves_only_when_the_last_of_its_place_leaves():
    progress = _Progress(2, chunks=3)
    assert not progress.reached(0, 2)
    assert progress.slowest == 0
    assert progress.reached(1, 1)
    assert progress.slowest == 1
    assert not progress.reached(1, 1), "it was there before"
    assert not progress.reached(1, 0), "and never goes back"
    assert progress.reached(1, 99)
    assert progress.slowest == 2, "beyond the last chunk is the end"
    assert progress.reached(0, 3)
    assert progress.slowest == 3
