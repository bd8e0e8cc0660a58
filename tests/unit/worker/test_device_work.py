"""What is under way on a device, and what the link may know of it; without a device."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from diloco_worker.core.agreement import HOME
from diloco_worker.core.device_work import DeviceWork
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.core.rooms import UNDER_WAY, Devices, Rooms

SIZES = (128, 128, 128, 128)
COPY = HostCopy(local_step=1, steps=1, tokens=1, base=1)
READY = LinkState(ready=[(0, 2), (1, 2)], open=[2, 3], initial_requested=1)


def state(local_step: int, *offers: int) -> TrainerState:
    return TrainerState(local_step=local_step, offers=offers, applied=(1, 1, 1, 1))


def work() -> DeviceWork:
    return DeviceWork(SIZES, Rooms.of(SIZES, announced=2))


def test_without_work_the_link_knows_a_state_at_once():
    assert work().close(state(1)) == state(1)


def test_a_state_with_copies_is_known_when_they_are_complete_and_only_those_that_the_link_can_read():
    found = work()
    first, second = found.copy_out(2, COPY), found.copy_out(3, COPY)
    assert found.close(state(1, 2, 3)) is None
    assert found.busy
    assert found.close(state(2)) is None, "a newer state would replace the offers"
    found.settle([second])
    assert found.current == [HOME, HOME, HOME, second.place]
    assert found.close(state(3)) == replace(state(1), offers=[3])
    assert found.close(state(4)) == state(4), "that of step 3 is older, and offers nothing"
    assert first.place != second.place
    assert first.buffer != second.buffer


def test_while_work_is_under_way_nothing_begins_and_nothing_is_shown():
    found = work()
    assert found.shown(replace(READY, initial_requested=0)).open == [2, 3]
    found.copy_out(2, COPY)
    found.close(state(1, 2))
    assert found.shown(READY) == replace(READY, open=(), ready=(), initial_requested=0)
    assert found.copy_out(3, COPY) is None
    assert found.fetch(READY.ready, (1, 1, 1, 1)) == []


def test_a_result_is_ready_when_it_is_on_the_device_and_only_that_generation():
    found = work()
    assert found.shown(READY).ready == []
    assert [i.fragment for i in found.fetch(READY.ready, (1, 1, 1, 1))] == [0, 1]
    found.close(state(1))
    found.settle([])
    assert found.shown(READY).ready == [(0, 2), (1, 2)]
    newer = replace(READY, ready=[(0, 3), (1, 2)])
    assert found.shown(newer).ready == [(1, 2)]
    assert found.shown(READY).ready == [(1, 2)], "what was replaced is not kept"


def test_a_buffer_of_a_result_is_free_only_after_the_boundary_that_applies_it():
    found = work()
    found.fetch(READY.ready, (1, 1, 1, 1))
    found.close(state(1))
    found.settle([])
    found.shown(READY)
    applied = found.apply(0)
    assert found.fetch([(2, 2)], (2, 1, 1, 1)) == [], "one is applied, one is staged"
    found.close(state(2))
    found.settle([])
    found.close(state(3))
    (next_,) = found.fetch([(2, 2), (3, 2)], (2, 1, 1, 1))
    assert next_.buffer == applied.buffer


def test_results_that_were_applied_are_not_fetched_again():
    assert work().fetch([(0, 2)], (2, 1, 1, 1)) == []


def test_copies_need_a_buffer_and_a_place_that_the_link_does_not_read():
    found = work()
    places = set()
    for step in (1, 2):
        made = [found.copy_out(p, COPY) for p in (0, 1)]
        assert found.copy_out(2, COPY) is None, "there are two buffers"
        found.close(state(step, 0, 1))
        found.settle(made)
        places |= {out.place for out in made}
    assert places == {1, 2, 3, 4}
    made = [found.copy_out(p, COPY) for p in (2, 3)]
    assert {out.place for out in made}.isdisjoint(found.current)
    found.close(state(3, 2, 3))
    found.settle(made)
    assert found.copy_out(0, COPY) is None, "four copies occupy four places"
    assert found.idle([2, 3], 0) == [0, 1]
    found.current[0] = HOME
    assert found.copy_out(0, COPY) is not None


def test_a_new_link_knows_what_the_last_one_could_have():
    found = work()
    assert found.known(state(0)) == state(0)
    found.close(state(1))
    found.copy_out(2, COPY)
    assert found.known(state(2)) == state(1), "a copy was begun at the boundary of step 2"
    found.close(state(2, 2))
    assert found.known(state(3)) == state(1)
    found.settle(found.copies)
    assert found.known(state(3)) == state(1)
    found.close(state(3))
    assert found.known(state(4)) == state(2), "its offers are not repeated"


def test_a_new_link_knows_how_often_the_whole_model_was_copied():
    found = work()
    found.close(state(1))
    found.copy_out(2, COPY)
    found.close(state(2, 2))
    assert found.known(replace(state(3), initial_copied=2)) == replace(state(1), initial_copied=2)


def test_rooms_are_those_of_the_largest_fragments_that_can_be_under_way_together():
    rooms = Rooms.of([100, 900, 300, 200, 100], announced=3)
    assert list(rooms.outgoing) == [900, 300, 200]
    assert list(rooms.spares) == [900, 900, 300, 300, 200, 200]
    assert list(rooms.incoming) == [900, 300]
    assert list(Rooms.of([7], announced=3).spares) == [7, 7]


@pytest.mark.parametrize("announced", [*permutations(range(5), 3)])
def test_any_announced_fragments_fit_in_any_order(announced):
    sizes = [100, 900, 300, 200, 100]
    found = DeviceWork(sizes, Rooms.of(sizes, announced=3))
    for step in (1, 2, 3):
        made = [found.copy_out(p, COPY) for p in announced]
        assert None not in made
        found.close(state(step, *announced))
        found.settle(made)
    assert found.fetch([(p, 2) for p in announced], (0,) * 5)


def test_only_a_place_that_is_large_enough_is_released_for_a_fragment():
    sizes = [100, 900, 300, 200, 100]
    found = DeviceWork(sizes, Rooms.of(sizes, announced=2))
    made = [found.copy_out(p, COPY) for p in (1, 2)]
    found.close(state(1, 1, 2))
    found.settle(made)
    assert found.idle([], 0) == [1, 2]
    assert found.idle([], 1) == [1]
    assert found.idle([1], 1) == []


def test_a_copy_that_was_lost_is_not_offered_and_its_buffer_and_place_are_free_again():
    found = work()
    first, second = found.copy_out(2, COPY), found.copy_out(3, COPY)
    assert found.copies == (first, second)
    found.lost(first)
    assert found.copies == (second,)
    again = found.copy_out(1, COPY)
    assert (again.buffer, again.place) == (first.buffer, first.place)


def test_devices_have_buffers_for_tau_and_four_more_fragments_and_for_three_boundaries():
    devices = Devices.of((10, 30, 20, 50, 40, 60, 70, 5), overlap=1)
    assert devices.fragments == (10, 30, 20, 50, 40, 60, 70, 5)
    assert devices.announced == 5
    assert devices.rooms == Rooms(
        spares=[n for n in (70, 60, 50, 40, 30) for _ in range(UNDER_WAY + 1)],
        outgoing=[70, 60, 50, 40, 30],
        incoming=[70, 60, 50],
    )


def test_a_new_link_that_asks_before_anything_is_known_gets_the_present_state():
    found = work()
    found.copy_out(2, COPY)
    assert found.known(state(1, 2)) == state(1, 2)


def test_while_results_are_under_way_they_are_not_begun_again():
    found = work()
    assert len(found.fetch(READY.ready, (1, 1, 1, 1))) == 2
    found.close(state(1))
    assert found.busy
    assert found.fetch(READY.ready, (1, 1, 1, 1)) == []


def test_a_result_that_no_free_buffer_has_room_for_does_not_hold_up_a_smaller_one():
    found = DeviceWork((900, 100), Rooms(spares=[], outgoing=[], incoming=[100]))
    assert [i.fragment for i in found.fetch([(0, 2), (1, 2)], (1, 1))] == [1]


def test_a_result_that_is_on_the_device_is_not_fetched_again():
    found = DeviceWork(SIZES, Rooms.of(SIZES, announced=2, results=4))
    assert len(found.fetch(READY.ready, (1, 1, 1, 1))) == 2
    found.close(state(1))
    found.settle([])
    found.shown(READY)
    assert found.fetch(READY.ready, (1, 1, 1, 1)) == []
    newer = found.fetch([(0, 3), (1, 2)], (1, 1, 1, 1))
    assert [(i.fragment, i.generation) for i in newer] == [(0, 3)]
