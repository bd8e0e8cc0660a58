"""Silence that most learners share, such as a cut of the syncer's network, is the fault of none. In virtual time."""

import json

import pytest

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_testing.syncers.virtual_job import VirtualJob

CUT_AT = 20.0


class Cut(VirtualJob):
    """From `CUT_AT` on, nothing of these learners arrives, and no merge gets its data."""

    def __init__(self, silent, *, learners=4, step_seconds=1.0, overlap=2, header=0.05):
        names = [f"eu/{i}" for i in range(learners)]
        spec = RunSpec(
            job="t", steps=10**6, fragments=24, interval=24, overlap=overlap, quorum=1,
            learners={"eu": learners},
        )  # fmt: skip
        speeds = {name: step_seconds * (1 + 0.02 * i) for i, name in enumerate(names)}
        super().__init__(spec, speeds, delay=lambda what: 0.02)
        self.silent, self.header = frozenset(names[:silent]), header
        for name in names:
            self.join(name)

    def _received(self, name):
        return self.now < CUT_AT or name not in self.silent

    def _merging(self, begin):
        cut_off = CUT_AT - 1 <= self.now <= CUT_AT  # in the middle of its uploads
        if not cut_off and all(self._received(c.learner) for c in begin.contributions):
            super()._merging(begin)

    def _pulled(self, learner, pull):
        # The last one is later, so that the others have contributed when the cut comes.
        seconds = self.header if learner.name == "eu/0" else 0.01
        self.at(self.now + seconds, lambda: VirtualJob._pulled(self, learner, pull))

    def _send(self, event, learner, what):
        if self._received(learner.name):
            super()._send(event, learner, what)

    def _wake_at(self, when):
        self._wake = when

        def tick():
            if self._wake == when:
                for learner in self.learners.values():
                    if learner.alive and self._received(learner.name):
                        self.post(ev.Heartbeat(session=learner.session, learner=learner.name))
                self.post(ev.Tick())

        self.at(when, tick)

    def logged(self, event):
        return [line for line in map(json.loads, self.lines) if line["event"] == event]


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("step_seconds", [0.25, 0.9, 1.0])
def test_a_cut_of_the_syncers_network_while_a_round_merges_is_charged_to_no_learner(
    step_seconds, overlap
):
    job = Cut(4, step_seconds=step_seconds, overlap=overlap)
    job.run(CUT_AT + 20)
    assert [line["reason"] for line in job.logged("leave")] == ["HeartbeatLate"] * 4
    assert job.logged("eject") == []
    for record in job.engine.learners:
        assert (record.waits.seconds, record.late.seconds, record.long_waits) == (0.0, 0.0, 0)


@pytest.mark.parametrize("silent", [3, 4])
def test_nor_is_it_charged_to_a_learner_whose_header_is_cut_off_while_the_others_wait(silent):
    job = Cut(silent, header=0.9)
    job.run(CUT_AT + 20)
    assert job.logged("eject") == []


def test_a_learner_that_falls_silent_alone_is_charged():
    job = Cut(1, header=0.9)
    job.run(CUT_AT + 20)
    [ejected] = job.logged("eject")
    assert (ejected["learner"], ejected["reason"]) == ("eu/0", "AnswerLate")
