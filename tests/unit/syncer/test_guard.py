"""
No member owns a merge: weights and norms are limited by those of the others.

Numbers such as a01 are those of defects (tests/unit/test_defects.py).
"""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.codec import formats
from diloco_syncer.core.contribution import (
    MAX_EXCESS,
    NORM_FLOOR,
    Contribution,
    ContributionError,
)
from diloco_syncer.core.events import ConfirmedNorm
from diloco_syncer.core.guard import MINOR_SHARE, RATE_MULTIPLE, explained_members, guarded
from diloco_syncer.merging.blend import blend
from diloco_testing.syncers.merging import feed, fragment_of, merge_of, upload, values_of

MULTIPLE = 10.0


def member(learner, norms, *, steps=24, tokens=2400):
    return Contribution(
        learner=learner, incarnation=1, round=1, attempt=1, local_step=1, steps=steps, tokens=tokens,
        base=(1, 0), format=formats.FP32, norms=tuple(norms),
    )  # fmt: skip


def honest(count, **changes):
    return [member(f"eu/{m}", (1.0 + 0.1 * m, 2.0), **changes) for m in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_contributions_of_equal_learners_keep_weight_and_norms_bit_by_bit(count):
    members = honest(count)
    limited = guarded(members, MULTIPLE)
    assert [c.weight for c in limited] == [c.weight for c in members]
    assert [c.merged_norms for c in limited] == [c.norms for c in members]
    assert not any(c.clipped for c in limited)


def test_a_learner_of_many_times_the_steps_and_one_of_twice_the_batch_are_not_limited():
    # Norms grow with the root of the steps, or faster (docs/algorithm.md, "Guard").
    members = [
        member("eu/0", (1.0,), steps=1, tokens=100),
        member("eu/1", (1.0,), steps=1, tokens=100),
        member("us/0", (27.0,), steps=27, tokens=2700),
        member("us/1", (2.0,), steps=4, tokens=800),
    ]
    limited = guarded(members, MULTIPLE)
    assert [c.weight for c in limited] == [c.weight for c in members]
    assert not any(c.clipped for c in limited)


def test_an_expert_that_one_member_trains_and_the_others_only_decay_is_not_clipped():
    # Norms of a layer and of an expert: 24 steps of AdamW, and of its weight decay alone.
    members = [
        member("eu/0", (1.0, 0.006)), member("eu/1", (1.1, 0.006)), member("us/0", (1.0, 0.63)),
    ]  # fmt: skip
    assert not any(c.clipped for c in guarded(members, MULTIPLE))
    members[2] = member("us/0", (1.0, 6.3))
    assert guarded(members, MULTIPLE)[2].merged_norms == (1.0, pytest.approx(1.1, rel=1e-3))


def test_falsely_reported_tokens_count_at_most_about_twice_the_usual_per_step():
    # defect a01, with reports of the same false count; also two of them together
    for misbehaving, most in ((1, 0.36), (2, 0.53)):
        members = [
            *honest(8),
            *(member(f"us/{m}", (1.0, 2.0), tokens=2**50) for m in range(misbehaving)),
        ]
        limited = guarded(members, MULTIPLE)
        assert limited[8].weight == pytest.approx(RATE_MULTIPLE**2 * members[0].weight)
        share = sum(c.weight for c in limited[8:]) / sum(c.weight for c in limited)
        assert share < most


def test_a_huge_delta_is_clipped_to_the_multiple_of_the_median():
    # defect a03
    members = [*honest(2), member("us/0", (1e30, 3e38))]
    limited = guarded(members, MULTIPLE)[2]
    assert limited.merged_norms == pytest.approx((11.0, 20.0))
    assert limited.clipped == 2
    assert limited.excess * MULTIPLE == pytest.approx(1.5e38)


def test_the_guard_is_off_at_zero_and_with_fewer_than_three_members():
    members = [*honest(2), member("us/0", (1e30, 1.0), tokens=2**50)]
    assert guarded(members, 0.0) == tuple(members)
    assert guarded(members[1:], MULTIPLE) == tuple(members[1:])
    idle = member("us/1", (0.0, 0.0), tokens=0)
    assert guarded([*members[1:], idle], MULTIPLE) == (*members[1:], idle)


@pytest.mark.parametrize("multiple", [0.5, 1.0])
def test_the_guard_is_on_at_any_multiple_above_zero(multiple):
    members = [*honest(2), member("us/0", (1e9, 2.0))]
    assert guarded(members, multiple)[2].merged_norms[0] == pytest.approx(1.1 * multiple)


def test_a_norm_beyond_a_limit_of_zero_exceeds_it_by_the_most_that_json_can_state():
    members = [*(member(f"eu/{m}", (0.0, 0.0)) for m in range(2)), member("us/0", (1.0, 0.0))]
    limited = guarded(members, MULTIPLE)
    assert limited[2].norm_limits == (0.0, 0.0)
    assert [c.excess for c in limited] == [0.0, 0.0, MAX_EXCESS]


def test_the_excess_of_a_norm_is_its_multiple_of_a_limit_however_small():
    limited = member("us/0", (1.0, 0.0), steps=1)
    assert dataclasses.replace(limited, norm_limits=(0.25, 0.25)).excess == 4.0


@pytest.mark.parametrize(
    ("norms", "steps", "multiple", "explained"),
    [
        ((20.0, 20.0, 2.0), (4, 4, 4), 10.0, {0, 1, 2}),
        ((20.0, 20.0, 1.99), (4, 4, 4), 10.0, {0, 1}),
        ((20.0, 20.0, 1.0), (4, 4, 1), 10.0, {0, 1, 2}),
        ((20.0, 20.0, 1.0), (4, 4, 4), 10.0, {0, 1}),
        ((20.0, 0.0, 1.0), (4, 4, 4), 10.0, {0, 2}),  # the lower of two is the median
        ((3.0, 2.0, 1.0), (1, 1, 1), 1.0, {0, 1}),
        ((3.0, 2.0, 0.1), (1, 1, 1), 0.0, {0, 1, 2}),
        ((3.0, 1e-3), (1, 1), 10.0, {0, 1}),
        ((3.0, NORM_FLOOR), (1, 1), 10.0, {0}),
        ((0.0, 0.0, 0.0), (1, 1, 1), 10.0, set()),
    ],
)
def test_steps_are_explained_by_a_delta_of_a_part_of_the_median_per_root_of_a_step(
    norms, steps, multiple, explained
):
    names = [f"eu/{m}" for m in range(len(norms))]
    members = {n: member(n, (1.0,), steps=s) for n, s in zip(names, steps, strict=True)}
    confirmed = [
        ConfirmedNorm(learner=name, norm=norm, deviation=0.0)
        for name, norm in zip(names, norms, strict=True)
    ]
    assert explained_members(members, confirmed, multiple) == {names[m] for m in explained}


def test_of_a_tensor_that_most_members_did_not_change_the_fragment_is_the_measure():
    members = [member(f"eu/{m}", (0.0, 2.0)) for m in range(3)]
    alone = guarded([*members, member("us/0", (3.0, 2.0))], MULTIPLE)[3]
    assert not alone.clipped
    misbehaving = guarded([*members, member("us/0", (1e9, 2.0))], MULTIPLE)[3]
    assert misbehaving.merged_norms == pytest.approx((20.0, 2.0))


def longest(norms, steps):
    """By the definition: per member, the largest norm of each tensor."""
    most = np.zeros((len(norms), len(norms[0])))
    for scales in ([math.sqrt(s) for s in steps], steps):
        whole = statistics.median_low(
            math.hypot(*own) / scale for own, scale in zip(norms, scales, strict=True)
        )
        for slot in range(len(norms[0])):
            usual = statistics.median_low(
                own[slot] / scale for own, scale in zip(norms, scales, strict=True)
            )
            usual = max(usual, MINOR_SHARE * whole) if usual else whole
            most[:, slot] = np.maximum(most[:, slot], [MULTIPLE * usual * s for s in scales])
    return most.tolist()


def test_a_learner_that_left_the_warm_up_behind_is_not_clipped_beside_two_in_their_first_step():
    # bench_guard.py: 19 times the median per √step
    slow = [member(f"eu/{m}", (1.0,), steps=1, tokens=100) for m in range(2)]
    fast = member("us/0", (19.0 * math.sqrt(24),), steps=24, tokens=2400)
    assert not any(c.clipped for c in guarded([*slow, fast], MULTIPLE))
    misbehaving = member("us/0", (1e9,), steps=24, tokens=2400)
    assert guarded([*slow, misbehaving], MULTIPLE)[2].merged_norms == (240.0,)


def test_a_learner_in_its_first_step_is_not_clipped_beside_two_of_many_steps():
    fast = [member(f"us/{m}", (math.sqrt(200),), steps=200, tokens=20000) for m in range(2)]
    slow = member("eu/0", (9.0,), steps=1, tokens=100)
    assert not any(c.clipped for c in guarded([*fast, slow], MULTIPLE))


NORMS = st.floats(0, 1e300)
MEMBERS = st.lists(
    st.tuples(NORMS, NORMS, st.integers(1, 30), st.integers(1, 2**50)), min_size=3, max_size=9
)


@given(MEMBERS)
def test_whatever_members_state_none_exceeds_the_multiple_of_the_median_or_owns_the_weights(rows):
    members = [
        member(f"eu/{m}", (a, b), steps=steps, tokens=tokens)
        for m, (a, b, steps, tokens) in enumerate(rows)
    ]
    limited = guarded(members, MULTIPLE)
    most = longest([c.norms for c in members], [c.steps for c in members])
    rate = RATE_MULTIPLE * statistics.median_low(c.tokens / c.steps for c in members)
    for c, limits in zip(limited, most, strict=True):
        for norm, limit in zip(c.merged_norms, limits, strict=True):
            assert norm <= limit * (1 + 1e-9)
        assert c.weight <= rate**2 * c.steps * (1 + 1e-9)


# ---------------------------------------------------------------- factors and the streaming merge


@pytest.mark.parametrize("radial", [True, False])
def test_limits_that_are_not_reached_change_no_bit_of_the_factors(radial):
    norms, weights = [1.0, 1.3, 0.7], [3.0, 1.0, 2.0]
    plain, limited = (
        blend(norms, weights, radial=radial, clipped=clipped) for clipped in (None, norms)
    )
    assert plain.factors.tobytes() == limited.factors.tobytes()
    assert plain.shares.tobytes() == limited.shares.tobytes()
    assert (plain.length, plain.terms) == (limited.length, limited.terms)


def test_a_norm_that_cannot_be_confirmed_gives_no_direction():
    # defect a02: the header stated 1e-29 for a delta of 0.9e-12, which multiplied it by 1e29
    how = blend([1.0, 1.0, 1.0, 1e-29], [1.0] * 4, radial=True)
    assert how.factors[3] == 0.0
    assert blend([1e-13, 1e-29], [1.0, 1.0], radial=True).radial is False


def test_norms_are_confirmed_relatively_above_the_floor_and_not_at_all_below():
    c = member("us/0", (1e-29, 1.0, 2e-12))
    c.check_norm(0, "t", 0.9 * NORM_FLOOR)
    c.check_norm(1, "t", 1.0005)
    member("us/0", (1000.0,)).check_norm(0, "t", 1001.0)
    for slot, found in ((0, 2 * NORM_FLOOR), (1, 1.01), (2, 2.1e-12), (1, math.nan)):
        with pytest.raises(ContributionError, match="header states"):
            c.check_norm(slot, "t", found)


FRAGMENT = fragment_of(500, 300, 40, average=(1,))


def limited_merge(deltas, *, merge, tokens=None, **changes):
    """Δ of a guarded merge, and Δ by the definition in float64."""
    steps = changes.get("steps") or [1] * len(deltas)
    uploads = [upload(FRAGMENT, f"eu/{m}", d, weight=steps[m]) for m, d in enumerate(deltas)]
    contributions = guarded([u.contribution for u in uploads], MULTIPLE)
    streaming = merge_of(FRAGMENT, contributions, merge=merge)
    feed(streaming, uploads)
    found_N = -streaming.result().theta_N  # Θ was zero, the rate is 1
    weights = [c.weight for c in contributions]
    expected_N = np.zeros(FRAGMENT.elements)
    values = [u.values_N.astype(np.float64) for u in uploads]
    places = [slice(slot.offset, slot.end) for slot in FRAGMENT.slots]
    norms = [[float(np.linalg.norm(v[here])) for here in places] for v in values]
    most = longest(norms, steps)
    for index, slot in enumerate(FRAGMENT.slots):
        here = places[index]
        rows = [
            v[here] * min(1.0, limits[index] / own[index])
            for v, own, limits in zip(values, norms, most, strict=True)
        ]
        shares = [w / sum(weights) for w in weights]
        mean_N = sum(s * v for s, v in zip(shares, rows, strict=True))
        if merge == "Radial" and not slot.average:
            lengths = [np.linalg.norm(v) for v in rows]
            unit_N = sum(s * v / n for s, v, n in zip(shares, rows, lengths, strict=True))
            mean_N = sum(s * n for s, n in zip(shares, lengths, strict=True)) * (
                unit_N / np.linalg.norm(unit_N)
            )
        expected_N[here] = mean_N
    return found_N, expected_N, streaming.result()


@pytest.mark.parametrize("merge", ["Radial", "Average"])
@pytest.mark.parametrize("size", [1e6, 1e30, 3e36])
def test_a_clipped_merge_is_the_float64_merge_of_clipped_deltas(merge, size):
    # defect a03
    deltas = [values_of(FRAGMENT, seed=m) for m in range(3)]
    deltas.append((size * values_of(FRAGMENT, seed=9) / 10).astype(np.float32))
    found_N, expected_N, result = limited_merge(deltas, merge=merge)
    np.testing.assert_allclose(found_N, expected_N, rtol=1e-4, atol=1e-4)
    assert result.confirmed[3].norm == pytest.approx(np.linalg.norm(deltas[3].astype(np.float64)))
    assert all(c.deviation < 1e-6 for c in result.confirmed)


@pytest.mark.parametrize("merge", ["Radial", "Average"])
def test_an_honest_merge_is_the_same_bit_by_bit_with_and_without_the_guard(merge):
    uploads = [
        upload(
            FRAGMENT, f"eu/{m}", values_of(FRAGMENT, seed=m, size=math.sqrt(m + 1)), weight=m + 1
        )
        for m in range(4)
    ]
    results = []
    for multiple in (0.0, MULTIPLE):
        streaming = merge_of(
            FRAGMENT, guarded([u.contribution for u in uploads], multiple), merge=merge
        )
        feed(streaming, uploads)
        results.append(streaming.result())
    assert results[0].theta_N.tobytes() == results[1].theta_N.tobytes()
    assert results[0].momentum_N.tobytes() == results[1].momentum_N.tobytes()


@given(st.lists(st.floats(0, 1e30), min_size=3, max_size=6), st.booleans())
def test_no_term_of_a_sum_is_longer_than_its_limit_whatever_norms_are_stated(norms, radial):
    members = [member(f"eu/{m}", (n,)) for m, n in enumerate(norms)]
    limited = guarded(members, MULTIPLE)
    how = blend(
        norms,
        [c.weight for c in limited],
        radial=radial,
        clipped=[c.merged_norms[0] for c in limited],
    )
    most = MULTIPLE * statistics.median_low(norms)
    lengths = [float(f) * n for f, n in zip(how.shares, norms, strict=True)]
    assert max(lengths) <= most * (1 + 1e-5) + 1e-30
    if how.radial:
        assert how.length <= most * (1 + 1e-9)
