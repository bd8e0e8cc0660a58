"""The numbers of a merge, against a float64 reference that shares nothing with it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco.codec import formats, frames
from diloco.model.fragments import CHUNK, Fragment
from diloco_syncer.core.contribution import ContributionError
from diloco_syncer.core.outer import OuterOptimizer, weight
from diloco_syncer.merging.arithmetic import MergeResult
from diloco_testing.properties import examples
from diloco_testing.syncers.merging import (
    F32,
    PLAIN,
    Upload,
    feed,
    fragment_of,
    merge_of,
    upload,
    values_of,
)
from diloco_testing.syncers.whole_merge import merge_slot

# Small tensors that share a chunk, one that spans three chunks, an embedding across a chunk's end.
MANY = fragment_of(100, 1, 2 * CHUNK, 130, CHUNK // 2, 5, CHUNK // 2, average=(4, 5))
ONE = fragment_of(1000)
FORMATS = {"fp32": formats.FP32, "bf16": formats.BF16, "int8": formats.INT8, "int4": formats.INT4}
NESTEROV = OuterOptimizer(learning_rate=0.7, momentum=0.5, nesterov=True)
HEAVY_BALL = OuterOptimizer(learning_rate=0.4, momentum=0.9, nesterov=False)


def reference(
    fragment: Fragment, uploads: list[Upload], theta_N: F32, momentum_N: F32,
    merge: str, outer: OuterOptimizer,
) -> tuple[np.ndarray, np.ndarray, float]:  # fmt: skip
    """New Θ, new momentum and ‖Δ‖ in float64, straight from paper D.2 and docs/algorithm.md (Outer optimizer)."""
    delta = np.zeros(fragment.elements)
    total = sum(u.contribution.weight for u in uploads)
    for slot in fragment.slots:
        here = slice(slot.offset, slot.end)
        rows = [(u.contribution.weight, u.values_N[here].astype(np.float64)) for u in uploads]
        mean = sum(w * v for w, v in rows) / total
        if merge == "Radial" and not slot.average:
            lengths = [(w, np.linalg.norm(v)) for w, v in rows]
            direction = sum(w * v / np.linalg.norm(v) for w, v in rows if v.any()) / total
            radius = sum(w * n for w, n in lengths) / total
            mean = radius * direction / np.linalg.norm(direction)
        delta[here] = mean
    momentum = outer.momentum * momentum_N.astype(np.float64) + delta
    ahead = delta + outer.momentum * momentum if outer.nesterov else momentum
    return theta_N - outer.learning_rate * ahead, momentum, float(np.linalg.norm(delta))


def merged(fragment: Fragment, uploads: list[Upload], **kwargs) -> MergeResult:
    merge = merge_of(fragment, [u.contribution for u in uploads], **kwargs)
    feed(merge, uploads)
    return merge.result()


@pytest.mark.parametrize("merge", ["Average", "Radial"])
@pytest.mark.parametrize("outer", [NESTEROV, HEAVY_BALL], ids=["nesterov", "heavy-ball"])
@pytest.mark.parametrize(
    "formats", [*(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS), "mixed"]
)
@pytest.mark.parametrize("num_members", [2, 7])
def test_equals_the_float64_reference(merge, outer, formats, num_members):
    names = list(FORMATS) * 2 if formats == "mixed" else [formats] * num_members
    uploads = [
        upload(
            MANY,
            f"region/{m}",
            values_of(MANY, seed=m, size=10.0**-m),
            weight=round(weight(tokens=1000 * (m + 1), steps=24 - m)),
            fmt=FORMATS[names[m]],
        )
        for m in range(num_members)
    ]
    theta_N, momentum_N = values_of(MANY, seed=90), values_of(MANY, seed=91, size=0.1)
    ours = merged(MANY, uploads, theta_N=theta_N, momentum_N=momentum_N, merge=merge, outer=outer)
    theta, momentum, norm = reference(MANY, uploads, theta_N, momentum_N, merge, outer)
    np.testing.assert_allclose(ours.momentum_N, momentum, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(ours.theta_N, theta, rtol=3e-6, atol=3e-6)
    assert ours.delta_norm == pytest.approx(norm, rel=1e-6)


def test_rounds_that_follow_each_other_equal_the_reference():
    theta_N = values_of(MANY, seed=90)
    momentum_N = np.zeros_like(theta_N)
    theta, momentum = theta_N.astype(np.float64), momentum_N.astype(np.float64)
    for round_ in range(4):
        uploads = [
            upload(MANY, f"a/{m}", values_of(MANY, seed=10 * round_ + m), weight=m + 1)
            for m in range(3)
        ]
        ours = merged(
            MANY, uploads, theta_N=theta_N, momentum_N=momentum_N, merge="Radial", outer=NESTEROV
        )
        theta_N, momentum_N = ours.theta_N, ours.momentum_N
        theta, momentum, _ = reference(MANY, uploads, theta, momentum, "Radial", NESTEROV)
    np.testing.assert_allclose(theta_N, theta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_downloads_hold_the_new_parameters_in_the_down_format(down):
    uploads = [upload(MANY, f"a/{m}", values_of(MANY, seed=m)) for m in range(2)]
    merge = merge_of(MANY, [u.contribution for u in uploads], down=FORMATS[down])
    feed(merge, uploads)
    result = merge.result()
    sizes = 0
    for index in range(MANY.chunks):
        lo, hi = MANY.chunk(index)
        expected = np.zeros(formats.encoded_bytes(FORMATS[down], hi - lo), np.uint8)
        formats.encode(FORMATS[down], result.theta_N[lo:hi], expected)
        envelope = frames.unpack(merge.output(index, 0))
        assert (envelope.kind, envelope.index) == (frames.Kind.CHUNK, index)
        assert bytes(envelope.payload) == expected.tobytes()
        sizes += len(envelope.payload)
    assert result.encoded_bytes == sizes


@settings(max_examples=examples(12))
@given(
    order=st.permutations(range(5)),
    shuffle=st.integers(0, 2**32),
    merge=st.sampled_from(["Average", "Radial"]),
)
def test_order_of_members_and_of_arrival_changes_no_bit(order, shuffle, merge):
    fmts = [formats.FP32, formats.BF16, formats.INT8, formats.INT4, formats.FP32]
    uploads = [
        upload(MANY, f"a/{m}", values_of(MANY, seed=m, size=m + 0.1), weight=m + 1, fmt=fmts[m])
        for m in range(5)
    ]
    straight = merged(MANY, uploads, merge=merge, outer=NESTEROV)
    arrivals = [(u, index) for u in uploads for index in range(MANY.chunks)]
    random.Random(shuffle).shuffle(arrivals)
    other = merge_of(MANY, [uploads[m].contribution for m in order], merge=merge, outer=NESTEROV)
    for each, index in arrivals:
        other.add(each.contribution.learner, index, each.chunks[index])
    result = other.result()
    assert result.theta_N.tobytes() == straight.theta_N.tobytes()
    assert result.momentum_N.tobytes() == straight.momentum_N.tobytes()
    assert result.delta_norm == straight.delta_norm


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_single_learner_merges_to_its_delta_exactly(fmt):
    only = upload(MANY, "a/0", values_of(MANY, seed=1), weight=12346, fmt=FORMATS[fmt])
    idle = upload(MANY, "a/1", values_of(MANY, seed=2), weight=0)
    rounded = tuple(n * 1.0005 for n in only.contribution.norms)
    coarse = replace(only, contribution=replace(only.contribution, norms=rounded))
    for mine in (only, coarse):
        assert np.array_equal(merged(MANY, [mine, idle]).momentum_N, only.values_N)


def test_orthogonal_deltas_of_equal_length_keep_it_where_the_average_loses_it():
    uploads = []
    for m in range(4):
        delta_N = np.zeros(ONE.elements, np.float32)
        delta_N[m * 250 : (m + 1) * 250] = 3 / math.sqrt(250)
        uploads.append(upload(ONE, f"a/{m}", delta_N))
    assert merged(ONE, uploads, merge="Radial").delta_norm == pytest.approx(3.0)
    assert merged(ONE, uploads, merge="Average").delta_norm == pytest.approx(1.5)
    assert np.linalg.norm(merged(ONE, uploads, merge="Radial").momentum_N) == pytest.approx(3.0)


# fp32 on the wire carries Θ − θ as a learner computes it; ranges are what parameters may ever be.
parameters = hnp.arrays(
    np.float32, 128, elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
)


@settings(max_examples=examples(200))
@given(theta_N=parameters, local_N=parameters, merge=st.sampled_from(["Average", "Radial"]))
@pytest.mark.parametrize("nesterov", [False, True])
def test_one_learner_without_momentum_gets_back_what_it_reported(theta_N, local_N, merge, nesterov):
    fragment = fragment_of(128)
    outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=nesterov)
    only = upload(fragment, "a/0", theta_N - local_N, weight=7)
    back_N = merged(fragment, [only], theta_N=theta_N, merge=merge, outer=outer).theta_N
    largest_N = np.maximum(np.maximum(abs(theta_N), abs(local_N)), abs(theta_N - local_N))
    assert (abs(back_N.astype(np.float64) - local_N) <= np.spacing(largest_N)).all()


def test_members_without_weight_change_nothing_and_are_not_waited_for():
    uploads = [upload(MANY, f"a/{m}", values_of(MANY, seed=m), weight=m + 1) for m in range(2)]
    idle = upload(MANY, "a/9", values_of(MANY, seed=9), weight=0)
    without = merged(MANY, uploads)
    merge = merge_of(MANY, [u.contribution for u in [idle, *uploads]])
    merge.add("a/9", 0, idle.chunks[0])
    feed(merge, uploads)
    assert merge.finished
    assert merge.result().theta_N.tobytes() == without.theta_N.tobytes()


def test_all_weights_zero_is_finished_at_once_and_changes_nothing():
    idle = upload(MANY, "a/0", values_of(MANY, seed=1), weight=0)
    theta_N, momentum_N = values_of(MANY, seed=2), values_of(MANY, seed=3)
    merge = merge_of(
        MANY, [idle.contribution], theta_N=theta_N, momentum_N=momentum_N, outer=NESTEROV
    )
    assert merge.finished
    assert merge.wait_for_room("a/0", 10**6, 0)
    merge.add("a/0", 0, idle.chunks[0])
    result = merge.result()
    assert np.array_equal(result.theta_N, values_of(MANY, seed=2))
    assert np.array_equal(result.momentum_N, values_of(MANY, seed=3))
    assert result.delta_norm == 0
    first = frames.unpack(merge.output(0, 0)).payload
    assert bytes(first) == theta_N[:CHUNK].tobytes()


@pytest.mark.parametrize("fragment", [ONE, fragment_of(3 * CHUNK + 5)], ids=["small", "chunks"])
@pytest.mark.parametrize("ratio", [0.25, 0.3], ids=["exactly", "but for rounding"])
def test_directions_that_cancel_fall_back_to_the_weighted_mean(fragment, ratio):
    v_N = values_of(fragment, seed=1)
    uploads = [upload(fragment, "a/0", v_N), upload(fragment, "a/1", -v_N * np.float32(ratio))]
    result = merged(fragment, uploads, merge="Radial")
    expected_N = v_N * (1 - ratio) / 2
    np.testing.assert_allclose(result.momentum_N, expected_N, rtol=1e-6)
    assert result.delta_norm == pytest.approx(
        float(np.linalg.norm(expected_N.astype(np.float64))), rel=1e-6
    )


def test_nearly_cancelling_directions_still_keep_the_length():
    v_N, other_N = values_of(ONE, seed=1), values_of(ONE, seed=2, size=0.01)
    uploads = [upload(ONE, "a/0", v_N), upload(ONE, "a/1", other_N - v_N)]
    lengths = [u.contribution.norms[0] for u in uploads]
    assert merged(ONE, uploads, merge="Radial").delta_norm == pytest.approx(sum(lengths) / 2)


def test_a_zero_delta_has_no_direction_but_shortens_the_step():
    v_N = values_of(ONE, seed=1)
    uploads = [upload(ONE, "a/0", v_N), upload(ONE, "a/1", np.zeros_like(v_N), weight=3)]
    np.testing.assert_allclose(merged(ONE, uploads).momentum_N, v_N / 4, rtol=1e-6)


def test_zero_deltas_of_all_learners_leave_only_the_momentum():
    nothing_N = np.zeros(MANY.elements, np.float32)
    uploads = [upload(MANY, f"a/{m}", nothing_N) for m in range(3)]
    theta_N, momentum_N = values_of(MANY, seed=2), values_of(MANY, seed=3)
    result = merged(MANY, uploads, theta_N=theta_N, momentum_N=momentum_N, outer=HEAVY_BALL)
    np.testing.assert_allclose(result.momentum_N, momentum_N * 0.9, rtol=1e-6)
    assert result.delta_norm == 0


@settings(max_examples=examples(60))
@given(st.lists(st.integers(-44, 37), min_size=2, max_size=6))
def test_lengths_of_any_size_meet_without_overflow(exponents):
    rows = [np.float32(10.0**e) * values_of(ONE, seed=e + 50, size=0.1) for e in exponents]
    uploads = [upload(ONE, f"a/{m}", row_N) for m, row_N in enumerate(rows)]
    result = merged(ONE, uploads, merge="Radial")
    mean_length = sum(u.contribution.norms[0] for u in uploads) / len(uploads)
    assert np.isfinite(result.momentum_N).all()
    if mean_length > 1e-30:  # below, fp32 itself has few digits left
        assert result.delta_norm == pytest.approx(mean_length, rel=1e-4)


def test_padding_stays_zero_whatever_was_sent_in_it():
    fragment = fragment_of(100, 5, average=(1,))
    dirty_N = values_of(fragment, seed=1)
    dirty_N[100:128] = dirty_N[133:] = 1e-3
    uploads = [upload(fragment, f"a/{m}", dirty_N * (m + 1)) for m in range(2)]
    result = merged(fragment, uploads, outer=NESTEROV)
    for array_N in (result.theta_N, result.momentum_N):
        assert array_N[:100].all()
        assert not array_N[100:128].any()
        assert not array_N[133:].any()


def test_padding_that_counts_in_a_norm_is_refused():
    fragment = fragment_of(100)
    dirty_N = values_of(fragment, seed=1)
    dirty_N[100:] = 1.0
    with pytest.raises(ContributionError, match="a/0: the delta of t0 has norm"):
        merged(fragment, [upload(fragment, "a/0", dirty_N)])


def test_parameters_and_momentum_that_came_in_are_never_modified():
    theta_N, momentum_N = values_of(MANY, seed=2), values_of(MANY, seed=3)
    uploads = [upload(MANY, f"a/{m}", values_of(MANY, seed=m)) for m in range(2)]
    result = merged(MANY, uploads, theta_N=theta_N, momentum_N=momentum_N, outer=NESTEROV)
    assert np.array_equal(theta_N, values_of(MANY, seed=2))
    assert np.array_equal(momentum_N, values_of(MANY, seed=3))
    assert not np.shares_memory(result.theta_N, theta_N)


@pytest.mark.parametrize("radial", [False, True])
def test_the_merge_in_one_piece_agrees_with_the_streaming_one(radial):
    fragment = fragment_of(2 * CHUNK + 77)
    uploads = [
        upload(fragment, f"a/{m}", values_of(fragment, seed=m, size=m + 1), weight=3 - m)
        for m in range(4)
    ]
    whole_MN = np.stack([u.values_N for u in uploads])
    weights = [u.contribution.weight for u in uploads]
    streamed = merged(fragment, uploads, merge="Radial" if radial else "Average", outer=PLAIN)
    piece_N = merge_slot(whole_MN, weights, radial=radial)
    np.testing.assert_allclose(streamed.momentum_N, piece_N, rtol=2e-6, atol=2e-6)


def test_the_merge_in_one_piece_without_members_is_zero():
    assert not merge_slot(np.ones((2, 5), np.float32), [0.0, 0.0], radial=True).any()


def test_weights_are_tokens_squared_by_steps_and_zero_without_either():
    assert weight(tokens=600, steps=3) == 120000.0
    assert weight(tokens=0, steps=3) == 0.0
    assert weight(tokens=600, steps=0) == 0.0
