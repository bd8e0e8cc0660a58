"""The syncer's parameters keep the versions that a late learner's delta may be based on."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.model.fragments import Tensor, cut
from diloco.spec import RunSpec
from diloco_syncer.storage.parameters import FragmentParameters, Parameters

SPEC = RunSpec(job="t", steps=1000)
LAYOUT = cut(
    [Tensor(name=f"w{i:02d}", shape=(128,), dtype="float32") for i in range(SPEC.fragments)],
    num_fragments=SPEC.fragments,
)


def filled(value: float) -> np.ndarray:
    return np.full(128, value, np.float32)


@pytest.fixture
def parameters() -> Parameters:
    return Parameters(
        LAYOUT, [filled(0) for _ in LAYOUT.fragments], [(1, 0)] * len(LAYOUT.fragments)
    )


def commit(parameters: Parameters, fragment: int, step: int) -> None:
    parameters.commit(
        fragment,
        FragmentParameters(theta_N=filled(step), momentum_N=filled(0), version=(1, step)),
    )


def test_08_a_learner_that_missed_one_result_still_sends_a_delta(parameters: Parameters):
    """Its fragment is due again H rounds later, after every other fragment was merged."""
    fragments = len(LAYOUT.fragments)
    for step in range(1, 2 * fragments):
        commit(parameters, step % fragments, step)
    assert parameters.versions(0) == [(1, fragments), (1, 0)]
    kept = parameters.at(0, (1, 0))
    assert kept is not None
    np.testing.assert_array_equal(kept, filled(0))
    for fragment in range(1, fragments):
        assert parameters.versions(fragment) == [(1, fragments + fragment), (1, fragment)]


def test_versions_older_than_the_previous_one_are_dropped(parameters: Parameters):
    for step in (24, 48, 72):
        commit(parameters, 0, step)
    assert parameters.versions(0) == [(1, 72), (1, 48)]
    assert parameters.at(0, (1, 24)) is None
    assert parameters.at(0, (2, 72)) is None


def test_fragments_that_are_restored_have_no_earlier_versions(parameters: Parameters):
    before = parameters.all()
    commit(parameters, 0, 24)
    parameters.restore(before)
    assert parameters.versions(0) == [(1, 0)]
    assert parameters.current(0) is before[0]
    assert parameters.at(0, (1, 24)) is None
