"""What a learner costs the syncer is the same beside 7 others and beside 999. CPU time, as others work beside it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_testing.syncers.merging import fragment_of, merge_of, upload, values_of
from diloco_testing.syncers.virtual_job import VirtualJob

MOST_SECONDS = 1e-3
"""Of the engine, for one step of one learner."""


class TimedJob(VirtualJob):
    """Adds up the CPU time of the engine."""

    seconds = 0.0

    def post(self, event: ev.Event) -> None:
        real, clock = self.engine.handle, time.thread_time
        begun = clock()
        decisions = real(event, self.now)
        self.seconds += clock() - begun
        for decision in decisions:
            self._carry_out(decision)


def engine_seconds(learners: int, until: float) -> float:
    """Per step of one learner, each of which takes a second and is in nearly all merges."""
    spec = RunSpec(
        job="t", steps=10**6, fragments=24, interval=24, overlap=2, learners={"eu": learners}
    )
    job = TimedJob(spec, {f"eu/{i}": 1.0 + i * 1e-6 for i in range(learners)})
    for name in job.learners:
        job.join(name)
    job.run(4.0, most_events=10**7)
    before = sum(learner.local_step for learner in job.learners.values())
    job.seconds = 0.0
    job.run(until, most_events=10**7)
    steps = sum(learner.local_step for learner in job.learners.values()) - before
    assert steps >= 0.9 * learners * (until - 4.0)
    assert len(job.merges()[-1]["members"]) >= 0.9 * learners
    return job.seconds / steps


@pytest.mark.slow
def test_11_a_step_of_one_of_1000_learners_takes_the_engine_less_than_a_millisecond():
    assert engine_seconds(1000, 8.0) < MOST_SECONDS


def bookkeeping_seconds(members: int) -> float:
    """Of a merge, per message of one member; nothing is merged meanwhile."""
    fragment = fragment_of(*[1 << 18] * 6)
    contribution = upload(fragment, "a", values_of(fragment, 0)).contribution
    merge = merge_of(
        fragment, [replace(contribution, learner=f"{i:04d}") for i in range(members)],
        window=fragment.chunks,
    )  # fmt: skip
    begun = time.thread_time()
    for index in range(fragment.chunks):
        for i in range(members):
            merge.has_room(f"{i:04d}", index)
    return (time.thread_time() - begun) / (fragment.chunks * members)


def test_23_a_message_of_one_of_1000_members_costs_a_merge_what_one_of_8_does():
    assert min(bookkeeping_seconds(1000) for _ in range(3)) < 10 * min(
        bookkeeping_seconds(8) for _ in range(3)
    )
