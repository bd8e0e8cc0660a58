"""The coordinator of a replay, with real wire bytes: the fragments that an epoch begins with."""

import numpy as np
import pytest

from diloco.errors import UnavailableError
from diloco.journal.replay import plan_of
from diloco.model.fragments import Tensor
from diloco_syncer.core import events as ev
from diloco_syncer.core.replay import ReplayEngine
from diloco_syncer.replaying import ReplayCoordinator
from diloco_testing.learners.scripted import random_delta, thetas_of
from diloco_testing.local.tapes import initialised, member, merge, process, start, tapes
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(2))

# Killed after step 3, with a snapshot of step 1. The result of step 2 waited in the inbox until local step 6.
EVENTS = [
    start(),
    initialised(),
    merge(1, member("eu/0", 2)),
    merge(2, member("eu/0", 4)),
    merge(3, member("eu/0", 5, base=1)),
    start(step=1, epoch=2),
    merge(2, member("eu/0", 7, base=None)),
]
TAPES = tapes(eu_0=process("eu/0", 9, results={3: [(1, 1)], 6: [(0, 2)], 8: [(1, 3)]}))


class Replayed:
    """A syncer in a replay, and its learner."""

    def __init__(self):
        spec = driven_spec(steps=6)
        engine = ReplayEngine.of(spec, plan_of(EVENTS, TAPES, feedback=False))
        self.syncer = DrivenSyncer(spec, engine=engine, coordinator=ReplayCoordinator)
        self.learner = DrivenLearner(self.syncer, "eu/0", TENSORS)
        self.learner.initialise(thetas_of(self.learner))
        self.parameters = self.syncer.state.parameters

    def merge(self, *, steps):
        """The learner makes steps up to a pull, which it answers."""
        for _ in range(steps):
            pulls = self.learner.step()
        [pull] = pulls
        upload = self.learner.upload(
            pull, random_delta(self.learner.layout.fragments[pull.fragment], seed=pull.round)
        )
        upload.send_all()
        self.syncer.run()
        upload.resume().send_all()
        assert upload.replies[-1].done, upload.replies
        self.syncer.run()

    def fragments(self):
        return self.parameters.all()


@pytest.fixture
def restarted():
    """When the second epoch has begun, and what the syncer had before its first merge and after it."""
    replayed = Replayed()
    replayed.initial = replayed.fragments()
    replayed.merge(steps=2)
    replayed.snapshot = replayed.fragments()
    replayed.merge(steps=2)
    replayed.second = replayed.fragments()
    replayed.learner.received()
    replayed.merge(steps=1)
    return replayed


def test_an_epoch_begins_with_the_values_and_momentum_of_its_snapshot(restarted):
    assert restarted.syncer.merged() == [1, 2, 3]
    assert [found.version for found in restarted.fragments()] == [(1, 0), (1, 1)]
    for found, kept in zip(restarted.fragments(), restarted.snapshot, strict=True):
        np.testing.assert_array_equal(found.theta_N, kept.theta_N)
        np.testing.assert_array_equal(found.momentum_N, kept.momentum_N)
    assert restarted.snapshot[1].theta_N.tobytes() != restarted.initial[1].theta_N.tobytes()
    assert restarted.parameters.versions(0) == [(1, 0)], (
        "no version that a new process would not have"
    )
    starts = [line["step"] for line in restarted.syncer.lines if line["event"] == "start"]
    assert starts == [0, 1]
    assert restarted.syncer.facts.epoch == 2


def test_sessions_and_attempts_end_with_their_epoch(restarted):
    [*_, error] = restarted.learner.received()
    assert isinstance(error, UnavailableError)
    assert "the run had another syncer from here on: epoch 2; connect again" in str(error)
    assert len(restarted.syncer.attempts) == 0


def test_a_learner_is_shown_what_the_restart_has_undone_and_sends_its_next_fragment_whole(
    restarted,
):
    syncer, learner = restarted.syncer, restarted.learner
    again = DrivenLearner.__new__(DrivenLearner)
    again.__dict__.update(learner.__dict__)
    again.session = syncer.sessions.open("eu/0")
    syncer.run(ev.Hello(
        session=again.session.number, learner="eu/0", region="eu", incarnation=learner.incarnation, fresh=False,
        local_step=5, checkpoint_step=0,
    ))  # fmt: skip
    assert again.step() == []  # local step 6
    shown = restarted.parameters.current(0, "eu/0")
    assert shown.version == (1, 2)
    assert shown.theta_N is restarted.second[0].theta_N
    [pull] = again.step()
    assert (pull.round, pull.attempt, pull.fragment, [*pull.versions]) == (2, 1, 0, [])
    assert syncer.attempts.get(2, 1).version == (2, 2)
