"""Members for which the others wait in round after round, each time within all limits, in virtual time."""

import json
import math
import random

import pytest

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_testing.syncers.virtual_job import VirtualJob

NAMES = [f"eu/{i}" for i in range(8)]


class Uploads(VirtualJob):
    """Each member sends its header and its upload after times that a test chooses."""

    def __init__(self, *, step_seconds, header, data, names=NAMES, **changes):
        values = {
            "job": "t", "steps": 10**6, "fragments": 24, "interval": 24, "overlap": 2, "quorum": 1,
            "learners": {"eu": len(names)}, **changes,
        }  # fmt: skip
        speeds = {name: step_seconds * (1 + 0.003 * i) for i, name in enumerate(names)}
        super().__init__(RunSpec(**values), speeds)
        self.header, self.data = header, data
        for name in names:
            self.join(name)

    def _pulled(self, learner, pull):
        seconds = self.header(learner.name)
        self.at(self.now + seconds, lambda: VirtualJob._pulled(self, learner, pull))

    def _probed(self, learner, probe):
        self.at(self.now + 0.1, lambda: VirtualJob._probed(self, learner, probe))

    def _merging(self, begin):
        took = {c.learner: self.data(c.learner) for c in begin.contributions}
        for name, seconds in took.items():
            done = ev.Progress(
                learner=name, round=begin.round, attempt=begin.attempt, received_bytes=1,
                awaited_seconds=seconds, done=True,
            )  # fmt: skip
            self.at(self.now + seconds, lambda event=done: self.post(event))
        merged = self._merged(begin)
        self.at(self.now + max(took.values()) + 0.01, lambda: self.post(merged))

    def merges_from(self, since):
        return sum(since < m["time"] for m in self.merges())

    def logged(self, event):
        return [line for line in map(json.loads, self.lines) if line["event"] == event]


def near(name):
    """A header, or an upload, that takes 0.05 s."""
    return 0.05


def late(name, seconds):
    return lambda each: seconds if each == name else 0.05


COUNTED = {0.25: (320.0, 620.0), 2.0: (700.0, 1300.0)}
"""By the seconds of a step, after the first ejections, whose number grows with the logarithm of the time."""


def counted(step_seconds, header, data):
    since, until = COUNTED[step_seconds]
    job = Uploads(step_seconds=step_seconds, header=header, data=data)
    job.run(until, most_events=10**6)
    return job.merges_from(since), {line["learner"] for line in job.logged("eject")}


@pytest.fixture(scope="module")
def honest():
    """Merges of a job without a member that is late, by the seconds of a step."""
    return {step_seconds: counted(step_seconds, near, near)[0] for step_seconds in COUNTED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_seconds", "late_by", "share", "header", "data"),
    [
        (0.25, 2.85, 0.95, True, False),
        (0.25, 2.85, 0.95, False, True),
        (0.25, 2.85, 0.95, True, True),
        (0.25, 0.8, 0.95, True, True),
        (2.0, 8.0, 0.95, True, False),
        (2.0, 8.0, 0.95, True, True),
        (2.0, 6.4, 0.95, False, True),
    ],
)
def test_members_that_are_late_each_time_cost_the_others_few_of_their_merges(
    step_seconds, late_by, share, header, data, honest
):
    """One with its header, another with its chunks, within the limits of single waits."""
    merges, ejected = counted(
        step_seconds,
        late("eu/6", late_by) if header else near,
        late("eu/7", late_by) if data else near,
    )
    assert merges >= share * honest[step_seconds]
    assert ejected == {name for name, is_late in (("eu/6", header), ("eu/7", data)) if is_late}


@pytest.mark.slow
def test_a_member_that_takes_up_to_a_quarter_more_than_tau_steps_is_not_ejected(honest):
    merges, ejected = counted(2.0, late("eu/6", 4.8), near)
    assert (merges >= 0.8 * honest[2.0], ejected) == (True, set())


@pytest.mark.slow
def test_members_that_fit_into_tau_steps_are_not_ejected_for_the_pauses_of_others():
    """Three far members; each of the others is paused for 2.5 s about once a minute."""
    draw = random.Random(1)
    due = {name: draw.uniform(0.0, 60.0) for name in NAMES[:5]}

    def data(name):
        if job.now < due.get(name, math.inf):
            return 0.05
        due[name] = job.now + draw.expovariate(1 / 60.0)
        return 2.55

    job = Uploads(step_seconds=1.0, header=lambda name: 0.05 if name in due else 1.7, data=data)
    job.run(600.0, most_events=10**6)
    assert (len(job.merges()) > 480, job.logged("eject")) == (True, [])


class Noise:
    """Random times of uploads, and occasionally a member that is paused for about 2 s."""

    def __init__(self, seed, *, median, pause_every):
        self.random = random.Random(seed)
        self.median, self.pause_every = median, pause_every
        self.until = dict.fromkeys(NAMES, 0.0)
        self.next = {name: self._interval() for name in NAMES}

    def _interval(self):
        return self.random.expovariate(1 / self.pause_every)

    def of(self, job, share):
        def seconds(name):
            while self.next[name] <= job().now:
                self.until[name] = self.next[name] + self.random.uniform(1.0, 2.5)
                self.next[name] += self._interval()
            upload = share * self.median * math.exp(self.random.gauss(0.0, 0.5))
            return max(0.0, self.until[name] - job().now) + upload

        return seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("median", [0.1, 0.5])
def test_honest_members_with_random_pauses_are_hardly_ever_ejected(median, seed):
    """Median uploads of less than τ steps, and of as much, where each round waits for some member."""
    noise = Noise(seed, median=median, pause_every=240.0)
    job = Uploads(
        step_seconds=0.25,
        header=noise.of(lambda: job, 0.3),
        data=noise.of(lambda: job, 0.7),
    )
    job.run(300.0, most_events=10**6)
    assert len(job.merges()) > (450 if median == 0.5 else 1000)
    assert len(job.logged("eject")) <= 1
