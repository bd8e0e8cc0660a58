"""How long a job that merges nothing may have no reason in its status."""

from collections import Counter

from diloco_syncer.core.engine import STUCK_SECONDS, STUCK_STEPS
from diloco_syncer.core.learners import UNMEASURED_SECONDS
from diloco_testing.syncers.engine_job import Job


class StandingJob(Job):
    """A job whose members never deliver; a learner may join again."""

    def __init__(self, names, **changes):
        self.joined = Counter()
        super().__init__(names, overlap=1, **changes)
        self.meet()

    def session(self, name):
        return self.names.index(name) + 1 + 100 * self.joined[name]

    def join_again(self, name):
        self.left(name)
        self.joined[name] += 1
        self.hello(name, fresh=False, incarnation=self.names.index(name) + 1)

    def unexplained(self, seconds, each_second):
        """Seconds in which the status has no reason."""
        count = 0
        for second in range(1, seconds):
            self.wait(float(second))
            each_second(second)
            count += not self.engine.waiting_for()
        assert self.engine.step == 0
        return count


MOST = STUCK_SECONDS + STUCK_STEPS * 2
"""Seconds that explain themselves with a round in each step, one in flight, and steps of 1 s."""


def test_a_quorum_that_is_lost_again_and_again_does_not_explain_for_ever_that_nothing_is_merged():
    job = StandingJob("ab", quorum=2)

    def each_second(second):
        if second % 15 == 0:
            job.join_again("b")
        job.report_all(second)

    assert MOST - 5 < job.unexplained(1000, each_second) < MOST + 10


def test_a_learner_that_states_a_step_of_a_day_explains_no_day_without_a_merge():
    job = StandingJob("a")

    def each_second(second):
        if second < 5:
            job.report("a", second, step_seconds=86_400.0)

    assert job.unexplained(2000, each_second) <= STUCK_SECONDS + STUCK_STEPS * 2 * 4 + 1


def test_the_first_step_of_a_learner_explains_no_more_than_a_minute_long_one():
    job = StandingJob("a")
    job.report("a", 1, step_seconds=86_400.0)
    most = STUCK_SECONDS + STUCK_STEPS * 2 * UNMEASURED_SECONDS
    assert job.unexplained(3000, lambda second: None) == most
