"""Buffers that change while training: averaged over the members, integers from the newest one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diloco.codec import formats
from diloco.model import integers
from diloco.model.fragments import Fragment, Tensor, cut
from diloco_syncer.core.contribution import NotFiniteContributionError
from diloco_syncer.core.guard import guarded
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging.arithmetic import MergeResult
from diloco_testing.syncers.merging import F32, Upload, feed, fragment_of, merge_of, upload

NESTEROV = OuterOptimizer(learning_rate=0.7, momentum=0.9, nesterov=True)


def buffers_of(*tensors: Tensor) -> Fragment:
    """The fragment of these buffers."""
    parameter = Tensor(name="weight", shape=(1,), dtype="float32")
    return cut([parameter, *tensors], num_fragments=2).fragments[1]


def floats(name: str, size: int) -> Tensor:
    return Tensor(name=name, shape=(size,), dtype="float32", buffer=True)


COUNT = Tensor(name="count", shape=(), dtype="int64", buffer=True)
MEAN, VAR = floats("mean", 200), floats("var", 5)
FRAGMENT = buffers_of(COUNT, MEAN, VAR)


def state(
    fragment: Fragment = FRAGMENT, *, count: int = 0, mean: float = 0.0, var: float = 1.0
) -> F32:
    """A fragment of these values."""
    flat_N = np.zeros(fragment.elements, np.float32)
    digits, at_mean, at_var = (slot.offset for slot in fragment.slots)
    flat_N[digits : digits + integers.DIGITS] = integers.to_digits(np.array([count]))
    flat_N[at_mean : at_mean + 200] = mean * np.arange(200)
    flat_N[at_var : at_var + 5] = var
    return flat_N


def named(theta_N: F32) -> dict[str, np.ndarray]:
    return {slot.tensor.name: slot.values(theta_N) for slot in FRAGMENT.slots}


def sent(
    learner: str, base_N: F32, theta_N: F32, *, weight: int = 1, local_step: int = 1
) -> Upload:
    found = upload(FRAGMENT, learner, base_N - theta_N, weight=weight)
    contribution = replace(found.contribution, local_step=local_step, buffers=True)
    return replace(found, contribution=contribution)


def merged(theta_N: F32, uploads: list[Upload], **changes: object) -> MergeResult:
    contributions = guarded([u.contribution for u in uploads], 10.0)
    merge = merge_of(FRAGMENT, contributions, theta_N=theta_N, outer=NESTEROV, **changes)
    feed(merge, uploads)
    return merge.result()


@pytest.mark.parametrize("merge", ["Radial", "Average"])
def test_the_result_is_the_weighted_mean_of_the_members_without_an_outer_optimizer(merge):
    base_N = state(mean=1.0, var=1.0)
    uploads = [
        sent("eu/0", base_N, state(mean=2.0, var=4.0), weight=3),
        sent("eu/1", base_N, state(mean=-6.0, var=2.0), weight=1),
    ]
    momentum_N = np.full(FRAGMENT.elements, 100.0, np.float32)
    found = named(merged(base_N, uploads, merge=merge, momentum_N=momentum_N).theta_N)
    np.testing.assert_allclose(found["mean"], 0.0 * np.arange(200), atol=1e-5)
    np.testing.assert_allclose(found["var"], 3.5, rtol=1e-6)


def test_a_parameter_of_the_same_deltas_has_an_outer_optimizer():
    """Without this, the test above would pass with a fragment of parameters."""
    fragment = fragment_of(128)
    found = upload(fragment, "eu/0", np.full(fragment.elements, -1.0, np.float32))
    merge = merge_of(fragment, [found.contribution], outer=NESTEROV)
    feed(merge, [found])
    assert merge.result().theta_N[0] == pytest.approx(0.7 * 1.9)


def test_an_integer_is_that_of_the_member_with_the_largest_local_step_whatever_its_weight():
    base_N = state(count=70_000)
    uploads = [
        sent("eu/0", base_N, state(count=70_010), weight=100, local_step=10),
        sent("eu/1", base_N, state(count=(1 << 40) + 5), weight=1, local_step=12),
        sent("us/0", base_N, state(count=-3), weight=100, local_step=12),
    ]
    result = merged(base_N, uploads)
    found = named(result.theta_N)["count"]
    assert found.dtype == np.int64
    assert found == (1 << 40) + 5  # of two equally new ones, the first by name


def test_a_member_of_weight_zero_is_not_the_newest():
    base_N = state(count=5)
    uploads = [
        sent("eu/0", base_N, state(count=6), local_step=1),
        sent("eu/1", base_N, state(count=9), weight=0, local_step=50),
    ]
    assert named(merged(base_N, uploads).theta_N)["count"] == 6


def test_the_guard_limits_a_weight_but_clips_no_statistics():
    base_N = state()
    uploads = [
        sent(f"eu/{m}", base_N, state(mean=mean)) for m, mean in enumerate((1e-6, 1e-6, 30.0))
    ]
    contributions = guarded([u.contribution for u in uploads], 10.0)
    assert [c.clipped for c in contributions] == [0, 0, 0]
    assert all(c.weight_limit < np.inf for c in contributions)
    found = named(merged(base_N, uploads).theta_N)
    np.testing.assert_allclose(found["mean"], 10.0 * np.arange(200), rtol=1e-5)
    of_parameters = [replace(u.contribution, buffers=False) for u in uploads]
    assert [c.clipped for c in guarded(of_parameters, 10.0)] == [0, 0, 1]


def test_norms_leave_out_digits_and_sizes_leave_out_buffers():
    base_N = state(count=1, var=1.0)
    result = merged(base_N, [sent("eu/0", base_N, state(count=60_000, var=1e4))])
    assert result.delta_norm == pytest.approx(np.sqrt(5) * 9999.0, rel=1e-6)
    assert result.confirmed[0].norm == pytest.approx(result.delta_norm)
    assert result.sizes == (0.0, 0.0)  # a job of large inputs must not halt (core/growth.py)


def test_statistics_that_are_not_finite_are_refused_with_their_name():
    base_N = state()
    bad_N = state()
    bad_N[FRAGMENT.slots[2].offset] = np.nan
    merge = merge_of(FRAGMENT, [sent("eu/0", base_N, state(var=2.0)).contribution])
    assert FRAGMENT.chunks == 1
    with pytest.raises(NotFiniteContributionError, match="var holds NaN or Inf"):
        merge.add("eu/0", 0, (base_N - bad_N).tobytes())


@pytest.mark.parametrize("members", [3, 5, 7])
def test_the_mean_of_variances_of_zero_is_zero(members):
    base_N = state(var=8500.0029296875)
    uploads = [sent(f"eu/{m}", base_N, state(var=0.0)) for m in range(members)]
    assert named(merged(base_N, uploads).theta_N)["var"].tolist() == [0.0] * 5


def test_a_mean_is_between_the_values_of_the_members():
    rng = np.random.default_rng(0)
    for _ in range(20):
        base_N, values = state(var=rng.uniform(0, 1e4)), rng.uniform(0, 1e-6, 6)
        uploads = [
            sent(f"eu/{m}", base_N, state(var=v), weight=m + 1) for m, v in enumerate(values)
        ]
        arrived = [named(base_N - u.values_N)["var"] for u in uploads]
        found = named(merged(base_N, uploads).theta_N)["var"]
        assert (np.min(arrived, axis=0) <= found).all()
        assert (found <= np.max(arrived, axis=0)).all()


@pytest.mark.parametrize("name", ["BF16", "Int8", "Int4"])
def test_a_small_variance_stays_positive_since_buffers_travel_in_fp32(name):
    base_N, theta_N = state(var=1.0), state(var=1e-4)
    theta_N[FRAGMENT.slots[2].offset] = 5.0
    delta_N = base_N - theta_N

    def least(fmt: int) -> float:
        """Of the variances as the syncer has them."""
        received_N = base_N - upload(FRAGMENT, "eu/0", delta_N, fmt=fmt).values_N
        return float(named(received_N)["var"].min())

    assert formats.of_fragment(name, FRAGMENT) == formats.FP32
    assert formats.of_fragment(name, fragment_of(5)) == formats.format_of(name)
    assert least(formats.of_fragment(name, FRAGMENT)) == pytest.approx(1e-4, rel=1e-3)
    assert least(formats.format_of(name)) <= 0


def test_the_size_of_one_value_is_the_value_itself():
    fragment = fragment_of(1)
    theta_N = np.zeros(fragment.elements, np.float32)
    theta_N[0] = -3.0
    delta_N = np.zeros(fragment.elements, np.float32)
    delta_N[0] = 1.0
    each = upload(fragment, "a", delta_N)
    merge = merge_of(fragment, [each.contribution], theta_N=theta_N)
    feed(merge, [each])
    assert merge.result().sizes == (3.0, 4.0)
