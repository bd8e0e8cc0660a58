"""Members that make the others wait again and again without ever missing a limit, in virtual time."""

import itertools
import json

import pytest

from diloco.codec.formats import FP32
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_testing.syncers.virtual_job import VirtualJob

BAD = "eu/3"
FROM, UNTIL = 320.0, 620.0
"""After the first ejections, whose number grows with the logarithm of the time."""


class Evading(VirtualJob):
    """Eight learners with steps of 1 s, so rounds wait for 4 s; eu/3 answers pulls as `_evade` does."""

    def __init__(self):
        spec = RunSpec(
            job="t", steps=100_000, fragments=24, interval=24, overlap=2, quorum=1,
            learners={"eu": 8},
        )  # fmt: skip
        super().__init__(spec, {f"eu/{i}": 1.0 + 0.02 * i for i in range(8)})
        for name in self.learners:
            self.join(name)

    def _pulled(self, learner, pull):
        if learner.name == BAD and self.now > 20:
            self._evade(learner, pull)
        else:
            super()._pulled(learner, pull)

    def _evade(self, learner, pull):
        raise NotImplementedError

    def later(self, seconds, learner, action):
        """Unless it has joined again by then."""
        generation = learner.generation
        self.at(self.now + seconds, lambda: learner.generation == generation and action())


class LeavesBeforeItsHeader(Evading):
    reconnects = True

    def _evade(self, learner, pull):
        def rejoin():
            self.die(BAD)
            self.join(BAD, reconnect=self.reconnects)

        self.later(3.9, learner, rejoin)


class RestartsBeforeItsHeader(LeavesBeforeItsHeader):
    reconnects = False


class IsReplacedBeforeItsHeader(LeavesBeforeItsHeader):
    """Its next process joins before its session ends."""

    reconnects = False

    def die(self, name, *, reason="StreamEnded"):
        pass


class LeavesAfterItsHeader(LeavesBeforeItsHeader):
    def _evade(self, learner, pull):
        super()._evade(learner, pull)
        VirtualJob._pulled(self, learner, pull)

    def _merging(self, begin):
        if BAD not in {c.learner for c in begin.contributions} or self.now <= 20:
            super()._merging(begin)
            return
        for each in begin.contributions:
            if each.learner != BAD:
                self.post(
                    ev.Progress(
                        learner=each.learner, round=begin.round, attempt=begin.attempt,
                        received_bytes=1 << 20, done=True,
                    )
                )  # fmt: skip


class BreaksItsStream(Evading):
    def _evade(self, learner, pull):
        broken = ev.Dropped(
            learner=BAD, round=pull.round, attempt=pull.attempt, reason=ev.STREAM_BROKEN, detail="x"
        )
        self.later(3.9, learner, lambda: self.post(broken))


class BreaksItsStreamAfterItsHeader(LeavesAfterItsHeader):
    def _evade(self, learner, pull):
        BreaksItsStream._evade(self, learner, pull)
        VirtualJob._pulled(self, learner, pull)


class SendsWhatWasMerged(Evading):
    def _evade(self, learner, pull):
        used = Contribution(
            learner=BAD, incarnation=learner.incarnation, round=pull.round, attempt=pull.attempt,
            local_step=max(self.engine.learners.by_name[BAD].used_reports.merged), steps=1, tokens=10,
            base=(1, 0), format=FP32, norms=(),
        )  # fmt: skip
        self.later(3.9, learner, lambda: self.post(used))


class MissesEverySeventeenthPull(Evading):
    def __init__(self):
        self.pulls = itertools.count(1)
        super().__init__()

    def _evade(self, learner, pull):
        if next(self.pulls) % 17:
            VirtualJob._pulled(self, learner, pull)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        LeavesBeforeItsHeader, RestartsBeforeItsHeader, IsReplacedBeforeItsHeader, LeavesAfterItsHeader,
        BreaksItsStream, BreaksItsStreamAfterItsHeader, SendsWhatWasMerged, MissesEverySeventeenthPull,
    ],
)  # fmt: skip
def test_a_member_that_costs_the_others_time_in_any_way_is_ejected_for_longer_each_time(job):
    world = job()
    world.run(UNTIL, most_events=10**6)
    merges = [m for m in world.merges() if FROM < m["time"] <= UNTIL]
    assert len(merges) >= 0.97 * (UNTIL - FROM)
    ejected = [
        line["probeSeconds"] for line in map(json.loads, world.lines) if line["event"] == "eject"
    ]
    assert all(b > a for a, b in itertools.pairwise(ejected))


class OfFew(VirtualJob):
    """The quorum needs eu/3 or a learner that is four times as slow."""

    def __init__(self, *, quorum, step_seconds, evades):
        names = [BAD, "eu/0", "eu/1", "eu/2", "eu/4"][: len(step_seconds)]
        spec = RunSpec(
            job="t", steps=100_000, fragments=24, interval=24, overlap=2, quorum=quorum,
            learners={"eu": 5},
        )  # fmt: skip
        speeds = dict(zip(names, step_seconds, strict=True))
        super().__init__(spec, speeds, delay=lambda what: 0.02 if what == "report" else 0.3)
        self._evades = evades
        for name in names:
            if name != BAD or evades != "absent":
                self.join(name)

    def _pulled(self, learner, pull):
        if learner.name != BAD or self.now <= 20:
            super()._pulled(learner, pull)
            return
        generation = learner.generation
        broken = ev.Dropped(
            learner=BAD, round=pull.round, attempt=pull.attempt, reason=ev.STREAM_BROKEN, detail="x"
        )

        def evade():
            if learner.generation != generation:
                return
            if self._evades == "breaks":
                self.post(broken)
            else:
                self.die(BAD)
                self.join(BAD, reconnect=True)

        self.at(self.now + 0.05, evade)


@pytest.mark.slow
@pytest.mark.parametrize("evades", ["breaks", "leaves"])
@pytest.mark.parametrize(
    ("quorum", "step_seconds"), [(2, (1.0, 1.0, 4.0)), (4, (0.5, 1.0, 1.02, 1.04, 4.0))]
)
def test_a_member_that_is_lost_right_after_each_pull_does_not_cost_the_others_merges(
    quorum, step_seconds, evades
):
    """It waits for nothing, but its reports make up the quorum, and each attempt is repeated after a pause."""
    merges = {}
    for how in (evades, "absent"):
        job = OfFew(quorum=quorum, step_seconds=step_seconds, evades=how)
        job.run(UNTIL, most_events=10**6)
        merges[how] = sum(40 < m["time"] <= UNTIL for m in job.merges())
        if how == evades:
            ejections = [x for x in map(json.loads, job.lines) if x["event"] == "eject"]
    assert merges[evades] >= 0.95 * merges["absent"], merges
    assert ejections


@pytest.mark.slow
def test_a_learner_that_often_crashes_during_an_upload_is_not_ejected_for_it():
    """Its session breaks at once, so the others hardly wait; restarts are what the algorithm is for."""

    class Crashes(Evading):
        def _evade(self, learner, pull):
            if pull.round % 30:
                VirtualJob._pulled(self, learner, pull)
                return

            def crash():
                self.die(BAD)
                self.at(self.now + 5, lambda: self.join(BAD))

            self.later(0.05, learner, crash)

    world = Crashes()
    world.run(UNTIL, most_events=10**6)
    assert len(world.merges()) >= 0.97 * (UNTIL - 20)
    events = [line["event"] for line in map(json.loads, world.lines)]
    assert events.count("leave") >= 15
    assert "eject" not in events
