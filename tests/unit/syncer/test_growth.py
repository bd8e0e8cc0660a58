"""Growth of Θ that stops a job."""

import math

from diloco_syncer.core.growth import Growth
from diloco_testing.syncers.engine_job import Job


def test_theta_may_grow_from_zero_and_by_less_than_tenfold_between_snapshots():
    growth = Growth()
    assert not growth.check(0, 0.0, 0.9)
    assert not growth.check(1, 0.5, 4.9)
    assert growth.check(1, 4.9, 5.1), "counted from the last snapshot"
    growth.snapshot()
    assert growth.check(1, 4.9, 5.1), "that snapshot may fail"
    growth.snapshot_done(durable=True)
    assert not growth.check(1, 4.9, 5.1)
    assert growth.check(0, 0.0, math.inf)
    assert growth.check(0, 0.0, math.nan)


def test_the_growth_is_counted_from_the_last_durable_snapshot():
    growth = Growth()
    for size in (1.0, 2.0, 4.0):
        growth.snapshot()
        assert not growth.check(0, size, 2 * size)
        growth.snapshot_done(durable=False)
    assert growth.check(0, 8.0, 11.0), "none of them is durable"
    growth.snapshot()
    assert not growth.check(0, 8.0, 9.0)
    growth.snapshot_done(durable=True)
    assert not growth.check(0, 9.0, 79.0), "8 is the size in that snapshot"
    assert growth.check(0, 9.0, 81.0)


def test_theta_may_grow_exactly_tenfold():
    growth = Growth()
    assert not growth.check(0, 0.5, 5.0)
    growth.snapshot_done(durable=True)
    assert growth.check(0, 4.9, 5.1), "that snapshot was not of this process"


def test_a_halt_of_which_the_reason_is_lost_still_counts_after_a_restart():
    scheduler = Job("a").engine.scheduler
    lines = [{"event": "merge"}, {"event": "halt"}]
    assert list(scheduler.replayed(lines)) == lines
    assert scheduler.halted == "a merge was implausible"
