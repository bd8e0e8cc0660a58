"""The codec in operations of torch: the bytes of the compiled one, for every kind of value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.codec import formats
from diloco.errors import NotFiniteError, ProtocolError
from diloco.model.fragments import BLOCK, CHUNK
from diloco_testing.properties import examples
from diloco_worker.trainer import device_codec

FORMATS = {"bf16": formats.BF16, "int8": formats.INT8, "int4": formats.INT4}

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


def on_host(fmt: int, delta_N: np.ndarray) -> bytes | None:
    """The payloads of all chunks, as the link encodes them."""
    payloads = []
    for lo in range(0, delta_N.size, CHUNK):
        chunk_N = delta_N[lo : lo + CHUNK]
        payload = np.empty(formats.encoded_bytes(fmt, chunk_N.size), np.uint8)
        try:
            formats.encode(fmt, chunk_N, payload)
        except NotFiniteError:
            return None
        payloads.append(payload.tobytes())
    return b"".join(payloads)


def compare(fmt: int, base_N: np.ndarray, values_N: np.ndarray, device: str) -> None:
    base = torch.from_numpy(base_N.copy()).to(device)
    values = torch.from_numpy(values_N.copy()).to(device)
    device_codec.encode_delta(fmt, base, values)
    found = values.cpu().numpy().tobytes()
    size = device_codec.encoded_bytes(fmt, values_N.size)
    payload, bad = found[: size - 8], int.from_bytes(found[size - 8 : size], "little")
    expected = on_host(fmt, base_N - values_N)
    assert (bad == 0) == (expected is not None)
    if expected is not None:
        assert payload == expected


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
@given(values_N=vectors(), seed=st.none() | st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_the_bytes_are_those_of_the_compiled_codec(fmt, device, values_N, seed):
    base_N = np.zeros_like(values_N)
    if seed is not None:
        largest = np.abs(values_N[np.isfinite(values_N)]).max(initial=0)
        random_N = np.random.default_rng(seed).standard_normal(values_N.size, np.float32)
        base_N = random_N * np.float32(largest / 200)
    compare(fmt, base_N, values_N, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("rest", [0, BLOCK, CHUNK - BLOCK])
def test_each_chunk_is_a_payload_of_its_own(monkeypatch, fmt, device, chunks, rest):
    monkeypatch.setattr(device_codec, "_CHUNKS_AT_ONCE", 2)
    numbers = np.random.default_rng(chunks)
    base_N, values_N = numbers.standard_normal((2, chunks * CHUNK + rest), np.float32)
    compare(fmt, base_N, values_N, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_special_value_alone_in_a_block_of_each_size_of_others(fmt, device):
    for value in SPECIAL:
        for others in (0.0, 1e-42, 1.0, -7.0, 3e38):
            base_N = np.full(2 * BLOCK, others, np.float32)
            base_N[3] = value
            compare(fmt, base_N, np.zeros_like(base_N), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [7, 127])
def test_ties_between_two_steps_are_rounded_the_same_way(steps, device):
    halves_B = (np.arange(BLOCK, dtype=np.float32) % (2 * steps) - steps) / 2
    halves_B[0] = steps
    for scale in (1.0, 0.1, 3.0, 1e-30):
        base_B = halves_B * np.float32(scale)
        compare(formats.INT8, base_B, np.zeros_like(base_B), device)
        compare(formats.INT4, base_B, np.zeros_like(base_B), device)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("elements", [1, 127, 129, 3 * BLOCK - 1])
def test_values_that_do_not_fill_their_blocks_are_refused(fmt, elements):
    with pytest.raises(ProtocolError, match="not a multiple of the block"):
        device_codec.encode_delta(fmt, torch.zeros(elements), torch.zeros(elements))


@pytest.mark.parametrize("fmt", [formats.RAW, formats.FP32, 99])
def test_other_formats_are_refused_in_a_sentence(fmt):
    with pytest.raises(ProtocolError, match=f"wire format {fmt} is none that a device encodes"):
        device_codec.encode_delta(fmt, torch.zeros(BLOCK), torch.zeros(BLOCK))


def test_other_vectors_are_refused_in_a_sentence():
    with pytest.raises(TypeError, match=r"contiguous fp32 vector, got torch\.float64"):
        device_codec.encode_delta(
            formats.BF16, torch.zeros(BLOCK), torch.zeros(BLOCK, dtype=torch.float64)
        )
    with pytest.raises(TypeError, match=r"contiguous fp32 vector, got torch\.float32 \(2, 128\)"):
        device_codec.encode_delta(formats.BF16, torch.zeros(2, BLOCK), torch.zeros(2 * BLOCK))
