"""A member joins a real syncer first, with a model that no other member has: the honest ones train in the end."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest

from diloco.errors import ConfigError, MismatchError, UnavailableError
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.scripted import ScriptedLearner, good_round, thetas_of
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow

IMPATIENT = """
import os, sys
from diloco_syncer.core import initialisation
initialisation.STALL_SECONDS = 2.0
import diloco_syncer.__main__ as program
os._exit(program.main(sys.argv[1:]))
"""
"""The syncer, but it asks the next learner for the initial parameters after 2 s instead of 60 s."""


def model_of(*values: int) -> dict[str, Any]:
    """The model of a Hello: tensors of this many values."""
    return {"tensors": [pb.TensorInfo(name=f"x{i}", shape=[n]) for i, n in enumerate(values)]}


def joined(stack: ExitStack, syncer: RealSyncer, name: str) -> ScriptedLearner:
    """An honest learner that tries again for as long as it must, as a link does."""

    def attempt() -> ScriptedLearner | None:
        learner = stack.enter_context(ScriptedLearner(syncer, name))
        try:
            return learner.join()
        except UnavailableError:
            time.sleep(0.1)
            return None

    return until(attempt, expected=f"{name} joins", seconds=60)


def train(*learners: ScriptedLearner) -> None:
    first = learners[0]
    first.initialise(thetas_of(first))
    for learner in learners:
        learner.expect("ready")
    for seed in range(3):
        good_round(first, seed=seed)


def test_a10_a_model_beyond_the_memory_of_the_syncer_is_refused_and_the_honest_train(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ExitStack() as stack:
        with ScriptedLearner(syncer, "us/0") as misbehaving:
            with pytest.raises(ConfigError, match="give the syncer more memory") as seen:
                misbehaving.join(**model_of(1 << 37, 1 << 37))
            assert f"{1 << 38} values" in str(seen.value)
            train(*(joined(stack, syncer, f"eu/{i}") for i in range(2)))
        assert syncer.status().step >= 3


def test_a10_a_small_foreign_model_that_never_arrives_does_not_shut_the_honest_out(tmp_path):
    syncer = RealSyncer(tmp_path, make_spec())
    syncer.program = ["-c", IMPATIENT]
    with syncer, ExitStack() as stack:
        with ScriptedLearner(syncer, "us/0") as misbehaving:
            misbehaving.join(**model_of(3, 5))
            misbehaving.expect("initialise")
            with ScriptedLearner(syncer, "eu/0") as honest:
                with pytest.raises(
                    UnavailableError, match="eu/0 trains a different model than us/0"
                ):
                    honest.join()
            assert "with another model: eu/0" in syncer.status().waiting_for
            # Its session stays open and beats; it is closed when the model of the honest counts.
            learners = [joined(stack, syncer, f"eu/{i}") for i in range(2)]
            with pytest.raises(UnavailableError, match="no learner that joined has uploaded"):
                misbehaving.expect("ready")
            train(*learners)
        with ScriptedLearner(syncer, "us/0") as again:
            with pytest.raises(MismatchError, match="a different model than this job"):
                again.join(**model_of(3, 5))
        assert [x["reason"] for x in syncer.events("leave")][:1] == ["OtherModel"]
        syncer.assert_audit()
