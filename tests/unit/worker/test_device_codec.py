"""The codec in operations of torch: the bytes of the compiled one, for every kind of value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.codec import formats
from diloco.errors import NotFiniteError, ProtocolError
from diloco.model.fragments import BLOCK
from diloco_testing.properties import examples
from diloco_worker.trainer import device_codec

FORMATS = {"fp32": formats.FP32, "bf16": formats.BF16, "int8": formats.INT8, "int4": formats.INT4}

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]

SPECIAL = np.array(
    [
        0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 2.0**-126, -(2.0**-126), 2.0**-133, 1.0, -1.0,
        3.3895314e38, -3.3895314e38, 3.3961e38, 3.4028235e38, np.inf, -np.inf, np.nan,
        # Halfway between two values of bf16, from below and above; halfway between steps of int8 and int4.
        1.00390625, 1.01171875, 1.0039064, 0.5, 1.5, -0.5, -1.5, 63.5, -63.5, 127.0, -127.0, 7.0, -7.0, 3.5, -3.5,
    ],
    np.float32,
)  # fmt: skip


def cpu(fmt: int, source_N: np.ndarray, residual_N: np.ndarray | None) -> bytes | None:
    out = np.empty(formats.encoded_bytes(fmt, source_N.size), np.uint8)
    try:
        formats.encode(fmt, source_N, out, residual_N=residual_N)
    except NotFiniteError:
        return None
    return out.tobytes()


def compare(fmt: int, source_N: np.ndarray, residual_N: np.ndarray | None, device: str) -> None:
    on_device = torch.from_numpy(source_N.copy()).to(device)
    rest = None if residual_N is None else torch.from_numpy(residual_N.copy()).to(device)
    known_N = None if residual_N is None else residual_N.copy()
    expected = cpu(fmt, source_N, known_N)
    found = device_codec.encode(fmt, on_device, residual_N=rest)
    assert (int(found.bad) == 0) == (expected is not None)
    if expected is not None:
        assert found.payload.cpu().numpy().tobytes() == expected
        values_N = np.empty(source_N.size, np.float32)
        formats.decode(fmt, expected, values_N)
        decoded = device_codec.decode(fmt, found.payload).cpu().numpy()
        assert decoded.tobytes() == values_N.tobytes()
    if rest is not None:
        assert rest.cpu().numpy().tobytes() == known_N.tobytes(), "error feedback"


any_bits = st.integers(0, 2**32 - 1)
special = st.sampled_from(SPECIAL.view(np.uint32).tolist())
finite = st.builds(
    lambda sign, rest: sign << 31 | rest, st.integers(0, 1), st.integers(0, 0x72000000)
)


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    """Of 1, 2, 3 or 5 blocks, mostly of values that can be encoded."""
    blocks = draw(st.sampled_from([1, 2, 3, 5]))
    kind = draw(st.sampled_from([special, finite, st.one_of(special, finite), any_bits]))
    head = draw(st.lists(kind, min_size=1, max_size=24))
    seed = draw(st.integers(0, 2**32 - 1))
    numbers = np.random.default_rng(seed)
    scale = np.float32(10.0 ** draw(st.integers(-44, 38)))
    source_N = numbers.standard_normal(blocks * BLOCK, np.float32) * scale
    places = numbers.choice(source_N.size, len(head), replace=False)
    source_N.view(np.uint32)[places] = head
    return source_N


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@settings(deadline=None, max_examples=examples(80))
@given(source_N=vectors(), seed=st.none() | st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_the_bytes_are_those_of_the_compiled_codec(fmt, device, source_N, seed):
    residual_N = None
    if seed is not None:
        largest = np.abs(source_N[np.isfinite(source_N)]).max(initial=0)
        random_N = np.random.default_rng(seed).standard_normal(source_N.size, np.float32)
        residual_N = random_N * np.float32(largest / 200)
    compare(fmt, source_N, residual_N, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_special_value_alone_in_a_block_of_each_size_of_others(fmt, device):
    for value in SPECIAL:
        for others in (0.0, 1e-42, 1.0, -7.0, 3e38):
            source_N = np.full(2 * BLOCK, others, np.float32)
            source_N[3] = value
            compare(fmt, source_N, None, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [7, 127])
def test_ties_between_two_steps_are_rounded_the_same_way(steps, device):
    halves_B = (np.arange(BLOCK, dtype=np.float32) % (2 * steps) - steps) / 2
    halves_B[0] = steps
    for scale in (1.0, 0.1, 3.0, 1e-30):
        compare(formats.INT8, halves_B * np.float32(scale), None, device)
        compare(formats.INT4, halves_B * np.float32(scale), None, device)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("elements", [1, 127, 129, 3 * BLOCK - 1])
def test_values_that_do_not_fill_their_blocks_are_refused(fmt, elements):
    with pytest.raises(ProtocolError, match="not a multiple of the block"):
        device_codec.encode(fmt, torch.zeros(elements))


def test_what_cannot_be_encoded_is_refused_in_a_sentence():
    with pytest.raises(ProtocolError, match="carries a file"):
        device_codec.encode(formats.RAW, torch.zeros(BLOCK))
    with pytest.raises(ProtocolError, match="wire format 99 is not one of"):
        device_codec.encode(99, torch.zeros(BLOCK))
    with pytest.raises(TypeError, match=r"contiguous fp32 vector, got torch\.float64"):
        device_codec.encode(formats.BF16, torch.zeros(BLOCK, dtype=torch.float64))
    with pytest.raises(ProtocolError, match="expected a multiple of 68"):
        device_codec.decode(formats.INT4, torch.zeros(67, dtype=torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_no_value_is_no_payload(fmt):
    found = device_codec.encode(fmt, torch.zeros(0))
    assert (found.payload.numel(), int(found.bad)) == (0, 0)
