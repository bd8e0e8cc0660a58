"""An error of the syncer's own inside a merge ends the attempt; no learner is blamed for it."""

import numpy as np
import pytest

from diloco.model.fragments import Tensor
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.merging.arithmetic import Arithmetic
from diloco_testing.learners.scripted import random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=name, shape=(300,), dtype="float32") for name in "ab")


def round_of(learners: list[DrivenLearner]) -> None:
    """Each makes a step and uploads what it is pulled for."""
    syncer, pulls = learners[0].syncer, {}
    for learner in learners:
        pulls[learner.name] = learner.step()
    for learner in learners:
        messages = [m for m in learner.received() if isinstance(m, pb.SyncerMessage)]
        pulls[learner.name] += [m.pull for m in messages if m.WhichOneof("kind") == "pull"]
    uploads = []
    for learner in learners:
        pull = pulls[learner.name][-1]
        delta_N = random_delta(learner.layout.fragments[pull.fragment], learner.local_step)
        uploads.append(learner.upload(pull, delta_N).send_all())
    syncer.run()
    for upload in uploads:
        upload.resume().send_all()
    syncer.run()


@pytest.mark.parametrize("method", ["__init__", "merge", "finish"])
def test_an_error_in_the_arithmetic_aborts_the_attempt_and_blames_no_member(monkeypatch, method):
    syncer = DrivenSyncer(driven_spec(learners={"eu": 2}, quorum=2))
    learners = [DrivenLearner(syncer, f"eu/{i}", TENSORS) for i in range(2)]
    fragments = learners[0].layout.fragments
    learners[0].initialise([np.zeros(f.elements, np.float32) for f in fragments])

    def broken(self: Arithmetic, *arguments: object, **named: object) -> None:
        raise MemoryError("cannot allocate")

    with monkeypatch.context() as patch:
        patch.setattr(Arithmetic, method, broken)
        round_of(learners)
    events = [line["event"] for line in syncer.lines]
    assert "refuse" not in events
    assert "eject" not in events
    [error] = [line for line in syncer.lines if line["event"] == "error"]
    assert error["decision"] == "BeginMerge"
    assert "cannot allocate" in error["reason"]

    syncer.now += 60.0
    round_of(learners)
    assert syncer.merged() == [1]
