"""What each rank holds and copies: all pieces together are every value once."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_worker.core.shard_slices import (
    DIVIDED_ELEMENTS,
    EVEN_ROWS,
    Box,
    piece,
    uncovered,
    whole,
)


def copies(shape, boxes, **options) -> np.ndarray:
    """How often each value is copied."""
    counts = np.zeros(shape, int)
    for rank in boxes:
        if (found := piece(boxes, rank, **options)) is not None:
            counts[found.slices()] += 1
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (200, 300), (1, 40000), (3, 2, 9000)])
def test_a_tensor_that_all_ranks_hold_is_copied_once(shape, ranks):
    boxes = {rank: whole(shape) for rank in range(ranks)}
    for turn in range(3):
        assert (copies(shape, boxes, turn=turn) == 1).all()


def test_a_large_tensor_is_divided_evenly_and_small_ones_in_turn():
    boxes = {rank: whole((DIVIDED_ELEMENTS, 2)) for rank in range(4)}
    sizes = [piece(boxes, rank, turn=5).elements for rank in range(4)]
    assert sizes == [DIVIDED_ELEMENTS // 2] * 4
    small = {rank: whole((9,)) for rank in range(4)}
    owners = [[rank for rank in range(4) if piece(small, rank, turn=turn)] for turn in range(5)]
    assert owners == [[0], [1], [2], [3], [0]]


def test_whole_rows_are_divided_if_there_are_enough_and_else_the_longest_dimension():
    for shape, expected in [((200, 9000), (50, 9000)), ((7, 9000), (7, 2250))]:
        boxes = {rank: whole(shape) for rank in range(4)}
        assert {piece(boxes, rank, turn=0).shape for rank in range(4)} == {expected}


def test_shards_and_their_replicas_are_copied_once():
    halves = [Box((0, 0), (101, 300)), Box((101, 0), (99, 300))]
    boxes = {0: halves[0], 1: halves[1], 2: halves[0], 3: halves[1]}
    assert uncovered((200, 300), boxes) == ""
    assert (copies((200, 300), boxes, turn=0) == 1).all()
    assert all(piece(boxes, rank, turn=0).elements < 101 * 300 for rank in range(4))


def test_what_may_differ_between_the_ranks_is_copied_by_the_first_holder():
    boxes = {rank: whole((DIVIDED_ELEMENTS, 2)) for rank in (1, 3)}
    found = [piece(boxes, rank, turn=1, divided=False) for rank in range(4)]
    assert found == [None, whole((DIVIDED_ELEMENTS, 2)), None, None]


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ({0: Box((0,), (4,)), 1: Box((6,), (4,))}, "its shards have 8 of its 10 values"),
        ({0: Box((0,), (6,)), 1: Box((5,), (5,))}, "the shard [0:6] and the shard [5:10] overlap"),
        ({0: Box((0,), (6,)), 1: Box((6,), (5,))}, "the shard [6:11] is not within its shape [10]"),
        ({}, "its shards have 0 of its 10 values"),
    ],
)
def test_shards_that_are_not_exactly_the_tensor_are_described(boxes, why):
    assert uncovered((10,), boxes) == why
    assert uncovered((10,), {0: Box((0,), (5,)), 1: Box((5,), (5,)), 2: Box((0,), (5,))}) == ""


def test_a_piece_is_found_within_the_part_that_the_rank_holds():
    held = Box((4, 0), (4, 3))
    assert Box((6, 1), (2, 1)).slices(held.lo) == (slice(2, 4), slice(1, 2))


@pytest.mark.parametrize(
    ("rows", "expected"), [(EVEN_ROWS * 2, (16, 2000)), (EVEN_ROWS * 2 - 1, (31, 1000))]
)
def test_rows_are_divided_from_sixteen_for_each_holder_on(rows, expected):
    boxes = {rank: whole((rows, 2000)) for rank in range(2)}
    assert {piece(boxes, rank, turn=0).shape for rank in range(2)} == {expected}
