"""Several members that fail in turns, each again as soon as its last failure is forgotten, in virtual time."""

import json

import pytest

from diloco.spec import RunSpec
from diloco_testing.syncers.virtual_job import VirtualJob

STEP_SECONDS = 0.25
NAMES = [f"eu/{i}" for i in range(4)]
SINCE, UNTIL = 160.0, 480.0
"""Twice the time after which a failure is forgotten, after the first failures."""


class Turns(VirtualJob):
    """
    Some members know what the syncer has counted, and fail as often as they can without a longer back-off.

    Each is mute until it is ejected, once its failures are forgotten, but only one at a time, in turns.
    """

    def __init__(self, *, mute):
        spec = RunSpec(
            job="t", steps=10**6, fragments=24, interval=24, overlap=2, quorum=1,
            learners={"eu": len(NAMES)},
        )  # fmt: skip
        speeds = {name: STEP_SECONDS * (1 + 0.003 * i) for i, name in enumerate(NAMES)}
        super().__init__(spec, speeds)
        self.bad, self.turn = NAMES[len(NAMES) - mute :], 0
        for name in NAMES:
            self.join(name)

    def _pulled(self, learner, pull):
        if not self._is_mute(learner.name):
            self.at(self.now + 0.05, lambda: VirtualJob._pulled(self, learner, pull))

    def _probed(self, learner, probe):
        self.at(self.now + 0.1, lambda: VirtualJob._probed(self, learner, probe))

    def _is_mute(self, name):
        its_turn = self.now > 5.0 and name == self.bad[self.turn % len(self.bad)]
        return its_turn and self.engine.learners.by_name[name].ejections == 0

    def _log(self, event, **fields):
        super()._log(event, **fields)
        if event == "eject":
            self.turn += 1

    def ejected(self):
        """Who was, in the time that counts."""
        lines = [line for line in map(json.loads, self.lines) if line["event"] == "eject"]
        return [line["learner"] for line in lines if line["time"] > SINCE]

    def merged(self):
        """Its merges in the time that counts, as a share of those without a failure: one per step."""
        counted = sum(line["time"] > SINCE for line in self.merges())
        return counted * STEP_SECONDS / (UNTIL - SINCE)


@pytest.mark.slow
@pytest.mark.parametrize(("mute", "least"), [(1, 0.98), (3, 0.94)])
def test_members_that_fail_in_turns_cost_the_others_two_percent_of_their_merges_each(mute, least):
    job = Turns(mute=mute)
    job.run(UNTIL, most_events=10**6)
    assert set(job.ejected()) == set(job.bad), "each has failed again"
    assert job.merged() >= least
