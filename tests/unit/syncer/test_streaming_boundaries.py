"""A merge at its edges: aborts between two steps, the window, what is asked too early."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from diloco.codec import frames
from diloco.errors import AbortedError, ProtocolError, UnavailableError
from diloco.model.fragments import CHUNK
from diloco_syncer.core.contribution import ContributionError
from diloco_syncer.merging.arithmetic import cut_into_segments
from diloco_syncer.merging.streaming import (
    MIN_GAP,
    FragmentMerge,
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
    with pytest.raises(AbortedError, match="cut"):
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
    with pytest.raises(AbortedError, match="first"):
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


def test_segments_of_a_tensor_cover_its_own_values_once_and_no_padding():
    fragment = fragment_of(100, 2 * CHUNK, 130)
    per_chunk = cut_into_segments(fragment)
    assert [segment.index for chunk in per_chunk for segment in chunk] == [0, 1, 2, 3, 4]
    for number, slot in enumerate(fragment.slots):
        mine = [(chunk, s) for chunk in range(3) for s in per_chunk[chunk] if s.slot == number]
        values = [v for _, s in mine for v in range(s.lo, s.lo + s.used)]
        assert values == list(range(slot.offset, slot.offset + slot.tensor.elements))
        for chunk, segment in mine:
            assert segment.used <= segment.hi - segment.lo
            assert segment.start == segment.lo - fragment.chunk(chunk)[0]


def test_a_result_states_the_size_of_its_own_values_and_how_far_norms_are_off():
    fragment = fragment_of(100, 200)
    theta_N, delta_N = np.zeros((2, fragment.elements), np.float32)
    first = fragment.slots[0]
    delta_N[first.offset : first.offset + 100] = 1.0
    for slot in fragment.slots:
        theta_N[slot.offset : slot.offset + slot.tensor.elements] = 2.0
    uploads = [upload(fragment, name, delta_N) for name in "ab"]
    rough = replace(uploads[0].contribution, norms=(10.005, 0.0))
    members = [rough, uploads[1].contribution]
    merge = merge_of(fragment, members, theta_N=theta_N, merge="Average")
    feed(merge, uploads)
    result = merge.result()
    assert result.sizes == pytest.approx((2.0, math.sqrt((100 * 1.0 + 200 * 4.0) / 300)))
    assert [c.learner for c in result.confirmed] == ["a", "b"]
    assert [c.norm for c in result.confirmed] == pytest.approx([10.0, 10.0])
    assert [c.deviation for c in result.confirmed] == pytest.approx([0.005 / 10.005, 0.0])


def test_a_merge_that_is_over_has_room_for_every_chunk_and_its_fragment_an_answer():
    fragment = fragment_of(12 * CHUNK)
    idle = upload(fragment, "a", values_of(fragment, seed=1), weight=0).contribution
    unchanged = merge_of(fragment, [idle])
    assert unchanged.wait_for_output(11, 0.0)
    aborted = merge_of(fragment, [replace(idle, learner=n, steps=1, tokens=1) for n in "bc"])
    aborted.abort("cut")
    assert aborted.has_room("b", 11)
    assert aborted.wait_for_room("b", 11, 0.0)


def test_each_chunk_of_a_merge_that_changes_nothing_is_that_chunk_of_theta():
    theta_N = values_of(FRAGMENT, seed=3)
    idle = upload(FRAGMENT, "a", values_of(FRAGMENT, seed=0), weight=0).contribution
    merge = merge_of(FRAGMENT, [idle], theta_N=theta_N)
    for index in range(FRAGMENT.chunks):
        lo, hi = FRAGMENT.chunk(index)
        assert frames.unpack(merge.output(index, 0.0)).payload == theta_N[lo:hi].tobytes()


def test_a_tensor_that_is_complete_before_the_one_in_front_of_it_releases_none_of_that():
    fragment = fragment_of(2 * CHUNK, 2 * CHUNK)
    uploads = uploads_of("a", "b", fragment=fragment)
    merge = merge_of(fragment, [each.contribution for each in uploads])

    def add(*chunks):
        for index in chunks:
            for each in uploads:
                merge.add(each.contribution.learner, index, each.chunks[index])

    add(2, 3, 0)
    found = [merge.ready(index) is not None for index in range(4)]
    assert found == [False, False, True, True]
    add(1)
    assert merge.finished


def test_a_member_without_weight_is_never_held_back():
    """What it sends is not used, so it may be as far ahead as it likes."""
    uploads = uploads_of("a", "b")
    weightless = replace(uploads[0].contribution, tokens=0)
    merge = merge_of(FRAGMENT, [weightless, uploads[1].contribution], window=1)
    assert merge.has_room("a", 1)
    assert merge.wait_for_room("a", 1, 0.0)
    merge.add("a", 1, b"no chunk at all")
