"""The factors of a merge, and what one contribution weighs, in plain numbers."""

import dataclasses

import numpy as np
import pytest

from diloco.codec import formats
from diloco.errors import DamagedError, NotFiniteError
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco_syncer.core.contribution import (
    NORM_FLOOR,
    NORM_TOLERANCE,
    Contribution,
    ContributionError,
)
from diloco_syncer.core.outer import OuterOptimizer, weight
from diloco_syncer.merging.blend import NEGLIGIBLE, VANISHED, blend
from diloco_testing.syncers.whole_merge import merge_slot

FRAGMENT = cut(
    [Tensor(name="a", shape=(CHUNK + 100,), dtype="float32")], num_fragments=1
).fragments[0]


def contribution(**changes):
    values = {
        "learner": "eu/0", "incarnation": 1, "round": 7, "attempt": 1, "local_step": 9, "steps": 4,
        "tokens": 8, "base": None, "format": formats.FP32, "norms": (2.0,), **changes,
    }  # fmt: skip
    return Contribution(**values)


# ---------------------------------------------------------------- how deltas become one


def test_an_average_weighs_each_delta_by_its_share():
    how = blend([3.0, 4.0], [1.0, 3.0], radial=False)
    np.testing.assert_array_equal(how.factors, np.float32([0.25, 0.75]))
    np.testing.assert_array_equal(how.shares, np.float32([0.25, 0.75]))
    assert not how.radial
    assert how.scale(0.0) == how.scale(123.0) == 1.0


def test_a_radial_merge_has_the_mean_length_and_directions_of_the_longest_length():
    how = blend([3.0, 4.0], [1.0, 3.0], radial=True)
    assert how.radial
    np.testing.assert_allclose(how.factors, [0.25 * 4 / 3, 0.75], rtol=1e-6)
    assert how.length == pytest.approx(0.25 * 3 + 0.75 * 4)
    assert how.terms == pytest.approx(4.0), "what ‖u‖ is if all directions agree"
    assert how.scale(2.0) == pytest.approx(how.length / 2.0)


@pytest.mark.parametrize(
    ("norms", "weights"), [([3.0], [2.0]), ([0.0, 0.0], [1.0, 1.0])], ids=["one member", "all zero"]
)
def test_one_member_and_members_without_a_direction_are_averaged(norms, weights):
    how = blend(norms, weights, radial=True)
    assert not how.radial
    np.testing.assert_array_equal(how.factors, how.shares)


def test_directions_that_cancel_have_no_scale():
    how = blend([3.0, 4.0], [1.0, 3.0], radial=True)
    assert how.scale(VANISHED * how.terms) is None
    assert how.scale(1.01 * VANISHED * how.terms) is not None


def test_a_delta_without_a_direction_counts_for_the_length_only():
    how = blend([0.0, 4.0], [1.0, 1.0], radial=True)
    np.testing.assert_array_equal(how.factors, np.float32([0.0, 0.5]))
    assert how.length == 2.0
    for longest, least in ((4.0, NORM_FLOOR), (4e19, 4e19 * NEGLIGIBLE)):
        assert blend([least, longest], [1.0, 1.0], radial=True).factors[0] == 0.0
        assert blend([1.01 * least, longest], [1.0, 1.0], radial=True).factors[0] > 0.0


def test_the_merge_in_one_piece_leaves_out_members_without_weight():
    deltas = np.float32([[1, 0], [0, 2], [9, 9]])
    np.testing.assert_allclose(
        merge_slot(deltas, [1.0, 3.0, 0.0], radial=False), [0.25, 1.5], rtol=1e-6
    )
    merged = merge_slot(deltas, [1.0, 1.0, 0.0], radial=True)
    np.testing.assert_allclose(merged, 1.5 * np.float32([1, 1]) / np.sqrt(2), rtol=1e-6)
    np.testing.assert_array_equal(merge_slot(deltas, [0.0, 0.0, 0.0], radial=True), [0, 0])
    opposite = np.float32([[1, 0], [-1, 0]])
    np.testing.assert_array_equal(merge_slot(opposite, [1.0, 1.0], radial=True), [0, 0])


# ---------------------------------------------------------------- weight and outer optimizer


@pytest.mark.parametrize(
    ("tokens", "steps", "expected"),
    [(600, 3, 120000.0), (1, 1, 1.0), (0, 3, 0.0), (600, 0, 0.0), (-600, 3, 0.0), (600, -3, 0.0)],
)
def test_a_weight_is_tokens_squared_by_steps_and_never_negative(tokens, steps, expected):
    assert weight(tokens=tokens, steps=steps) == expected
    assert contribution(tokens=tokens, steps=steps).weight == expected


@pytest.mark.parametrize(("nesterov", "of_delta", "of_momentum"), [(True, 1, 0.5), (False, 0, 1)])
def test_the_factors_of_the_outer_step(nesterov, of_delta, of_momentum):
    outer = OuterOptimizer(learning_rate=0.7, momentum=0.5, nesterov=nesterov)
    assert outer.factors == (np.float32(0.7), np.float32(0.5), of_delta, of_momentum)
    assert all(isinstance(factor, np.float32) for factor in outer.factors)


@pytest.mark.parametrize(
    ("steps", "tokens", "credited"),
    [(10, 101, (10, 101)), (11, 121, (10, 110)), (1000, 1999, (10, 19)), (3, 7, (3, 7))],
)
def test_at_most_so_many_steps_are_credited_at_the_own_tokens_per_step(steps, tokens, credited):
    found = contribution(steps=steps, tokens=tokens).credited(10)
    assert (found.steps, found.tokens) == credited
    assert found == contribution(steps=credited[0], tokens=credited[1])


# ---------------------------------------------------------------- what is checked


@pytest.mark.parametrize("norms", [(), (1.0, 2.0)])
def test_a_header_has_one_norm_for_each_tensor(norms):
    with pytest.raises(ContributionError, match=f"{len(norms)} norms for a fragment of 1 tensors"):
        contribution(norms=norms).check_norms(FRAGMENT)


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_is_finite(norm):
    with pytest.raises(ContributionError, match="the norm of a is") as caught:
        contribution(norms=(norm,)).check_norms(FRAGMENT)
    assert isinstance(caught.value, NotFiniteError)
    assert (caught.value.learner, caught.value.reason) == ("eu/0", NotFiniteError.reason)


def test_a_norm_is_not_negative_and_may_be_zero():
    with pytest.raises(ContributionError, match="less than 0"):
        contribution(norms=(-1e-9,)).check_norms(FRAGMENT)
    contribution(norms=(0.0,)).check_norms(FRAGMENT)


def test_a_chunk_exists_and_has_the_length_of_its_format():
    it = contribution(format=formats.BF16)
    first, last = 2 * CHUNK, 2 * 128
    it.check_chunk(FRAGMENT, 0, first)
    it.check_chunk(FRAGMENT, 1, last)
    for index, size in ((0, first - 1), (1, first), (1, last + 1)):
        with pytest.raises(DamagedError, match=f"chunk {index} has {size} bytes"):
            it.check_chunk(FRAGMENT, index, size)
    for index in (-1, 2):
        with pytest.raises(ContributionError, match=f"chunk {index} of a fragment of 2"):
            it.check_chunk(FRAGMENT, index, last)


@pytest.mark.parametrize("stated", [2.0, 1e6, 2 * NORM_FLOOR])
def test_a_norm_may_differ_by_the_tolerance_and_no_more(stated):
    it = contribution(norms=(stated,))
    room = NORM_TOLERANCE * stated
    for sign in (1, -1):
        it.check_norm(0, "a", stated + sign * 0.99 * room)
        with pytest.raises(ContributionError, match="the delta of a has norm"):
            it.check_norm(0, "a", stated + sign * 1.01 * room)


def test_an_error_names_the_learner_first():
    error = ContributionError("too long", learner="us/3")
    assert (str(error), error.learner) == ("us/3: too long", "us/3")


def test_a_contribution_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        contribution().tokens = 9


@pytest.mark.parametrize("radial", [True, False])
def test_factors_are_fp32_as_the_compiled_loops_expect_them(radial):
    """With another type, each loop would be compiled again, in the middle of a merge."""
    found = blend([1.0, 2.0], [1.0, 3.0], radial=radial)
    assert [found.factors.dtype, found.shares.dtype] == [np.float32, np.float32]
