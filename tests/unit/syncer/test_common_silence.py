"""Silence that most learners share, such as a cut of the syncer's network, is the fault of none. In virtual time."""

import json

import pytest

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.learners import SILENT_SECONDS, LearnerRecords
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


def records(*seen, gone=()):
    """Connected learners eu/0, eu/1, … whose last message came at these times, and some that are not connected."""
    found = LearnerRecords()
    for number, last_seen in enumerate(seen):
        record = found.get_or_add(f"eu/{number}", region="eu")
        record.session, record.last_seen = number + 1, last_seen
    for number, last_seen in enumerate(gone):
        found.get_or_add(f"us/{number}", region="us").last_seen = last_seen
    return found


@pytest.mark.parametrize(
    ("silent", "others", "common"),
    [(1, 0, True), (1, 1, False), (2, 0, True), (1, 2, False), (2, 1, True), (2, 2, False), (3, 1, True), (3, 2, True)],
)  # fmt: skip
def test_silence_is_common_if_more_than_half_of_all_are_silent(silent, others, common):
    found = records(*[0.0] * silent, *[9.0] * others)
    assert found.silent_with_most(found.by_name["eu/0"], 10.0) is common


def test_a_learner_is_silent_after_more_than_three_seconds():
    found = records(0.0, 0.0, 0.0)
    first = found.by_name["eu/0"]
    assert not found.silent_with_most(first, SILENT_SECONDS)
    assert found.silent_with_most(first, SILENT_SECONDS + 0.001)
    # One that sent something is none of the silent, whatever the others do.
    first.last_seen = 5.0
    assert not found.silent_with_most(first, 5.0 + SILENT_SECONDS)
    # Others that sent something just in time are not silent.
    found = records(0.0, 5.0, 5.0)
    assert not found.silent_with_most(found.by_name["eu/0"], 5.0 + SILENT_SECONDS)
    assert found.silent_with_most(found.by_name["eu/0"], 5.001 + SILENT_SECONDS)


def test_learners_that_are_not_connected_are_no_others_but_one_that_is_gone_is_judged_by_those_that_are():
    found = records(9.0, 9.0, gone=[0.0, 0.0, 0.0, 0.0])
    assert not found.silent_with_most(found.by_name["us/0"], 10.0)
    found = records(0.0, gone=[0.0])
    assert found.silent_with_most(found.by_name["us/0"], 10.0)
