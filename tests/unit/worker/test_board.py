"""What the rows of the ranks state besides their boundaries: the steps of the optimizers, and who has left."""

from __future__ import annotations

import struct
import zlib

import pytest

from diloco_testing.learners.control_area import ControlArea, board
from diloco_worker.core.agreement import (
    HOME,
    PLANS,
    TEXT_CHARACTERS,
    Board,
    FirstRank,
    Places,
    Plan,
    board_bytes,
)
from diloco_worker.core.messages import LinkState
from diloco_worker.core.rooms import Devices, Rooms

HEAD = struct.Struct("<QII")  # of a plan: boundary, bytes, checksum


def test_the_steps_of_each_rank_are_of_the_boundary_that_it_entered_with_them():
    rows = board(ranks=3, fragments=1)
    assert rows.steps() == [(0, 0)] * 3
    rows.enter(1, 7, terminated=False, finished=5, steps=12)
    rows.enter(2, 8, terminated=True, steps=(1 << 32) - 1)
    assert rows.steps() == [(0, 0), (7, 12), (8, (1 << 32) - 1)]
    assert rows.rows() == [(0, False), (7, False), (8, True)]


def test_a_rank_that_leaves_keeps_its_row():
    rows = board(ranks=2, fragments=1)
    rows.enter(1, 7, terminated=True, finished=5, steps=12)
    rows.leave(1)
    assert (rows.rows()[1], rows.steps()[1], rows.finished([1])) == ((7, True), (7, 12), 5)
    assert [rows.left(0), rows.left(1)] == [False, True]


def test_rows_of_another_machine_bring_the_steps_of_its_ranks():
    here, there = board(ranks=3, fragments=1), board(ranks=3, fragments=1)
    there.enter(2, 9, terminated=False, steps=4)
    here.take_rows([1, 2], there.rows_of([1, 2]))
    assert here.steps() == [(0, 0), (0, 0), (9, 4)]


@pytest.mark.parametrize(("fragment", "fits"), [(0, True), (1, False), (2, True)])
def test_a_place_fits_what_is_no_larger_than_it(fragment, fits):
    rooms = Rooms(spares=[20, 30], outgoing=[], incoming=[])
    places = Places(3, 2, devices=Devices(fragments=[20, 30, 10], rooms=rooms, announced=2))
    assert places.plan([2]) == {2: 1}
    places.write([2])
    places.current[2] = places.written()[2]
    assert places.fits(fragment, 2) is fits
    assert not places.fits(0, 0), f"place {HOME} has no room for a copy by a device"


def test_a_rank_that_does_not_count_its_steps_states_none():
    rows = board(ranks=1, fragments=1)
    rows.enter(0, 5, terminated=False)
    assert (rows.steps(), rows.finished()) == ([(5, 0)], 5)


def test_a_result_is_not_applied_before_any_device_has_finished_a_boundary():
    first = FirstRank(2, 2, devices=Devices.of((128, 128), overlap=1))

    def plan(boundary):
        state = LinkState(ready=[(0, 1)])
        return first.plan(boundary, state, applied=[0, 0], terminated=False, now=0.0)

    begun = plan(1)
    assert [(f.fragment, f.generation) for f in begun.fetches] == [(0, 1)]
    assert [list(begun.link_state.ready), list(plan(2).link_state.ready)] == [[], []]
    first.finished = 1
    assert list(plan(3).link_state.ready) == [(0, 1)]


def test_a_plan_of_exactly_the_room_reaches_the_board_of_another_machine():
    here, there = board(ranks=2, fragments=1), board(ranks=2, fragments=1)
    empty = Plan(boundary=7, link_state=LinkState())
    taken = len(here.publish(empty))
    room = (board_bytes(ranks=2, fragments=1) - board_bytes(ranks=2, fragments=0)) // PLANS + 32768
    record = here.publish(Plan(boundary=7, link_state=LinkState(text="x" * (room - taken))))
    assert len(record) == room
    there.take(record)
    assert there.plan(7) == here.plan(7)


def test_a_plan_that_is_a_byte_too_long_has_the_begin_of_its_sentence():
    here = board(ranks=2, fragments=1)
    taken = len(here.publish(Plan(boundary=7, link_state=LinkState(text=""))))
    room = (board_bytes(ranks=2, fragments=1) - board_bytes(ranks=2, fragments=0)) // PLANS + 32768
    here.publish(Plan(boundary=7, link_state=LinkState(text="x" * (room - taken + 1))))
    assert here.plan(7).link_state.text == "x" * TEXT_CHARACTERS + "…"


@pytest.mark.parametrize("beyond", [0, 1, 32])
def test_what_states_more_bytes_than_a_plan_has_room_for_is_none(beyond):
    """Whatever its checksum: the bytes beyond the room belong to the plan of another boundary."""
    room = (board_bytes(ranks=1, fragments=1) - board_bytes(ranks=1, fragments=0)) // PLANS + 32768
    area = ControlArea(board_bytes(ranks=1, fragments=1))
    rows = Board(area, ranks=1, fragments=1)
    at = len(rows.rows_of([0]))
    plan = Plan(boundary=PLANS, link_state=LinkState())
    data = plan.to_bytes().ljust(room - HEAD.size + beyond)
    area.write_control(at, HEAD.pack(PLANS, len(data), zlib.crc32(data, PLANS)) + data)
    found = rows.plan(PLANS)
    assert (found.boundary if found else None) == (None if beyond else PLANS)


def test_a_plan_of_a_thousand_fragments_fits():
    rows, many = board(ranks=1, fragments=1000), range(1000)
    state = LinkState(
        versions=[[9, 10**6 + n] for n in many], ready=[(n, 10**6) for n in many], open=[*many], text="x" * 500
    )  # fmt: skip
    plan = Plan(boundary=5, link_state=state, places=dict.fromkeys(many, 9))
    rows.publish(plan)
    assert rows.plan(5).places == plan.places
    assert rows.plan(5).link_state.text == state.text
