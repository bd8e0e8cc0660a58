"""Ejected learners whose back-off is long, while the rounds of the others have no quorum, in virtual time."""

import itertools

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_testing.syncers.virtual_job import VirtualJob


class MuteJob(VirtualJob):
    """Two of three learners are needed; eu/2 delivers nothing from 20 s until `until`."""

    def __init__(self, *, speeds, until, overlap=1):
        spec = RunSpec(
            job="t", steps=100_000, fragments=24, interval=24, overlap=overlap, quorum=2,
            learners={"eu": 3},
        )  # fmt: skip
        super().__init__(spec, {f"eu/{i}": seconds for i, seconds in enumerate(speeds)})
        self.until = until
        for name in self.learners:
            self.join(name)

    def _is_mute(self, learner):
        return learner.name == "eu/2" and 20.0 < self.now < self.until

    def _pulled(self, learner, pull):
        if not self._is_mute(learner):
            super()._pulled(learner, pull)

    def _probed(self, learner, probe):
        if not self._is_mute(learner):
            super()._probed(learner, probe)

    def probes(self):
        return [at for at, decision in self.decisions if isinstance(decision, ev.ProbeLearner)]


def test_an_ejected_learner_is_probed_soon_when_a_learner_that_the_quorum_needs_breaks_each_upload():
    """Its reports make up the quorum again and again, for a moment each time."""

    class Breaks(MuteJob):
        def _pulled(self, learner, pull):
            if learner.name != "eu/1" or self.now < self.until:
                super()._pulled(learner, pull)
                return
            broken = ev.Dropped(
                learner="eu/1", round=pull.round, attempt=pull.attempt, reason=ev.STREAM_BROKEN,
                detail="x",
            )  # fmt: skip
            self.at(self.now + 0.5, lambda: self.post(broken))

    world = Breaks(speeds=[1.0, 1.02, 1.04], until=460.0)
    world.run(520.0, most_events=10**6)
    times = [m["time"] for m in world.merges() if m["time"] > 450.0]
    assert max(b - a for a, b in itertools.pairwise([*times, 520.0])) < 30.0


def test_a_learner_that_the_rounds_do_without_keeps_its_back_off_while_they_wait_for_a_slow_one():
    """Each round has its quorum as soon as the slow learner has made a step."""
    world = MuteJob(speeds=[1.0, 60.0, 1.0], until=1e9)
    world.run(2000.0, most_events=10**6)
    pauses = [b - a for a, b in itertools.pairwise(world.probes())]
    assert len(pauses) < 12
    assert max(pauses) > 600.0
