"""Which results the devices of all ranks have, as rank 0 plans it."""

from __future__ import annotations

from diloco_worker.core.fetches import Fetch, Fetches

SIZES = [100, 900, 300]


def plan(fetches: Fetches, boundary: int, ready, *, applied=(0, 0, 0), finished=0):
    return fetches.plan(boundary, ready, applied=applied, finished=finished)


def test_a_result_is_applied_when_all_devices_have_finished_the_boundary_that_fetched_it():
    fetches = Fetches(SIZES, [900, 300])
    assert plan(fetches, 4, [(0, 7)]) == ([], [Fetch(0, 7, 1)])
    assert plan(fetches, 5, [(0, 7)], finished=3) == ([], [])
    assert plan(fetches, 6, [(0, 7)], finished=4) == ([(0, 7)], [])
    assert plan(fetches, 7, [(0, 7)], applied=(7, 0, 0), finished=5) == ([], []), "it was applied"


def test_a_buffer_is_used_by_one_result_until_it_is_applied():
    fetches = Fetches(SIZES, [900, 300])
    ready = [(0, 1), (2, 1), (1, 1)]
    assert plan(fetches, 1, ready) == ([], [Fetch(0, 1, 1), Fetch(2, 1, 0)])
    assert plan(fetches, 2, ready) == ([], []), "the one of 900 elements has no buffer"
    there, fetched = plan(fetches, 3, ready, finished=1)
    assert there == [(0, 1), (2, 1)]
    assert fetched == [Fetch(1, 1, 0)]


def test_a_result_that_is_no_longer_ready_or_a_newer_one_is_fetched_again():
    fetches = Fetches(SIZES, [900, 300])
    plan(fetches, 1, [(0, 1)])
    assert plan(fetches, 2, []) == ([], [])
    assert plan(fetches, 3, [(0, 1)], finished=1) == ([], [Fetch(0, 1, 1)])
    assert plan(fetches, 4, [(0, 2)], finished=3) == ([], [Fetch(0, 2, 1)])
