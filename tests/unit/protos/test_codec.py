import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco.codec import formats, frames, kernels
from diloco.errors import ConfigError, DamagedError, NotFiniteError, ProtocolError
from diloco.model.fragments import BLOCK, Tensor, cut
from diloco.spec import UP_FORMATS
from diloco_testing.properties import examples

SCALED = {formats.INT8: 127, formats.INT4: 7}
NUMBERS = (formats.FP32, formats.BF16, formats.INT8, formats.INT4)
LARGEST = float(np.uint32(0x7F7F7FFF).view(np.float32))  # the next float rounds to a bf16 infinity
quickly = settings(max_examples=examples(60))

finite = st.floats(-LARGEST, LARGEST, width=32)
vectors = st.integers(1, 4).flatmap(
    lambda blocks: hnp.arrays(
        np.float32,
        blocks * BLOCK,
        elements=finite,
        fill=st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1.5e-38, 3e38]),
    )
)


def encoded(fmt: int, source_N: formats.F32, residual_N: formats.F32 | None = None) -> formats.U8:
    out = np.full(formats.encoded_bytes(fmt, source_N.size), 0xAA, np.uint8)
    assert formats.encode(fmt, source_N, out, residual_N=residual_N) == out.size
    return out


def decoded(fmt: int, payload: formats.Buffer, elements: int) -> formats.F32:
    out_N = np.full(elements, np.nan, np.float32)
    formats.decode(fmt, payload, out_N)
    return out_N


def normal(elements: int, seed: int = 0) -> formats.F32:
    return np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)


def bf16_reference(x_N: formats.F32) -> formats.F32:
    """
    The nearer of the two bf16 neighbours by exact distance; the one with the even last bit in a
    tie.
    """
    below = x_N.view(np.uint32) & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    exact = x_N.astype(np.float64)
    down = np.abs(exact - below.view(np.float32).astype(np.float64))
    up = np.abs(above.view(np.float32).astype(np.float64) - exact)
    odd = (below >> 16) & 1 == 1
    return np.where((up < down) | ((up == down) & odd), above, below).view(np.float32)


@quickly
@given(vectors)
def test_fp32_keeps_every_bit(x_N):
    assert decoded(formats.FP32, encoded(formats.FP32, x_N), x_N.size).tobytes() == x_N.tobytes()


@quickly
@given(vectors)
def test_bf16_rounds_to_the_nearest_and_ties_to_even(x_N):
    found_N = decoded(formats.BF16, encoded(formats.BF16, x_N), x_N.size)
    assert found_N.tobytes() == bf16_reference(x_N).tobytes()


def test_bf16_rounds_every_pattern_of_the_dropped_bits_as_the_reference():
    for top in (0x0000, 0x007F, 0x3F80, 0x3F81, 0xBF81, 0x7F7E):
        x_N = ((np.uint32(top) << np.uint32(16)) + np.arange(1 << 16, dtype=np.uint32)).view("f4")
        found_N = decoded(formats.BF16, encoded(formats.BF16, x_N), x_N.size)
        assert found_N.tobytes() == bf16_reference(x_N).tobytes()


@quickly
@given(vectors, st.sampled_from(sorted(SCALED)))
def test_scaled_formats_miss_by_at_most_half_a_scale(x_N, fmt):
    found_N = decoded(fmt, encoded(fmt, x_N), x_N.size).astype(np.float64)
    absmax_K = np.abs(x_N.astype(np.float64)).reshape(-1, BLOCK).max(1)
    scale_K = np.maximum(absmax_K / SCALED[fmt], 2.0**-126)
    miss_K = np.abs(found_N - x_N).reshape(-1, BLOCK).max(1)
    assert (miss_K <= 0.5001 * scale_K).all()


@pytest.mark.parametrize("fmt", sorted(SCALED))
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 2e-37])
def test_a_block_of_denormals_misses_by_at_most_half_of_the_smallest_scale(fmt, size):
    x_N = np.linspace(-size, size, BLOCK, dtype=np.float32)
    found_N = decoded(fmt, encoded(fmt, x_N), BLOCK)
    assert np.abs(found_N - x_N).max() <= 0.5001 * max(size / SCALED[fmt], 2.0**-126)


@quickly
@given(vectors, st.sampled_from(NUMBERS))
def test_zeros_stay_exactly_zero(x_N, fmt):
    found_N = decoded(fmt, encoded(fmt, x_N), x_N.size)
    assert (found_N[x_N == 0] == 0).all()


@pytest.mark.parametrize("fmt", NUMBERS)
def test_the_largest_value_of_a_block_keeps_its_size_and_sign(fmt):
    x_N = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    x_N[[3, 77]] = -5.0, 5.0
    assert decoded(fmt, encoded(fmt, x_N), BLOCK)[[3, 77]] == pytest.approx([-5.0, 5.0], rel=1e-6)


@pytest.mark.parametrize("fmt", sorted(SCALED))
def test_blocks_have_scales_of_their_own(fmt):
    x_N = np.concatenate([normal(BLOCK), normal(BLOCK) * np.float32(1e-6)])
    found_N = decoded(fmt, encoded(fmt, x_N), 2 * BLOCK)
    small = slice(BLOCK, None)
    assert np.abs(found_N[small] - x_N[small]).max() < 1e-6


@quickly
@given(vectors, st.sampled_from(NUMBERS), st.floats(-2, 2, width=32))
def test_accumulate_adds_the_decoded_values_once_scaled(x_N, fmt, scale):
    x_N = np.clip(x_N, -1e30, 1e30)
    payload, start_N = encoded(fmt, x_N), normal(x_N.size)
    acc_N = start_N.copy()
    formats.accumulate(fmt, payload, acc_N, scale)
    values_N = decoded(fmt, payload, x_N.size).astype(np.float64)
    expected_N = start_N + scale * values_N
    room_N = 4e-7 * (np.abs(start_N) + np.abs(scale * values_N))
    assert (np.abs(acc_N - expected_N) <= room_N + 1e-37).all()


@pytest.mark.parametrize("fmt", NUMBERS)
def test_accumulate_of_one_onto_zero_is_the_decoded_value_bit_for_bit(fmt):
    x_N = normal(4 * BLOCK)
    acc_N = np.zeros_like(x_N)
    formats.accumulate(fmt, encoded(fmt, x_N), acc_N, 1.0)
    assert acc_N.tobytes() == decoded(fmt, encoded(fmt, x_N), x_N.size).tobytes()


@quickly
@given(vectors, st.sampled_from(NUMBERS))
def test_decode_and_accumulate_return_the_sum_of_squares_of_the_values(x_N, fmt):
    payload, out_N = encoded(fmt, x_N), np.zeros_like(x_N)
    total = formats.decode(fmt, payload, out_N)
    assert total == pytest.approx(float((out_N.astype(np.float64) ** 2).sum()), rel=1e-6)
    assert formats.accumulate(fmt, payload, np.zeros_like(x_N), 0.0) == pytest.approx(
        total, rel=1e-12
    )


@pytest.mark.parametrize("fmt", NUMBERS)
def test_a_part_of_a_payload_is_that_part_of_its_values(fmt):
    x_N = normal(5 * BLOCK)
    payload, whole_N = encoded(fmt, x_N), decoded(fmt, encoded(fmt, x_N), x_N.size)
    part = slice(BLOCK, 3 * BLOCK)
    out_N, acc_N = np.zeros(2 * BLOCK, np.float32), np.zeros(2 * BLOCK, np.float32)
    total = formats.decode(fmt, payload, out_N, part=(BLOCK, 3 * BLOCK))
    assert formats.accumulate(fmt, payload, acc_N, 1.0, part=(BLOCK, 3 * BLOCK)) == total
    assert (out_N == whole_N[part]).all()
    assert (acc_N == whole_N[part]).all()


@pytest.mark.parametrize("fmt", NUMBERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 200, 255])
def test_nan_and_inf_are_not_encoded_wherever_they_are(fmt, bad, place):
    x_N, residual_N = normal(2 * BLOCK), normal(2 * BLOCK)
    x_N[place] = bad
    before = residual_N.tobytes()
    for residual in (None, residual_N):
        with pytest.raises(NotFiniteError, match="1 of 2 blocks"):
            encoded(fmt, x_N, residual)
    assert residual_N.tobytes() == before


@pytest.mark.parametrize("fmt", [formats.BF16, formats.INT8, formats.INT4])
def test_a_finite_value_that_would_come_out_infinite_is_not_encoded(fmt):
    x_N = normal(BLOCK)
    x_N[5] = np.finfo(np.float32).max
    with pytest.raises(NotFiniteError):
        encoded(fmt, x_N)
    x_N[5] = -LARGEST
    assert np.isfinite(decoded(fmt, encoded(fmt, x_N), BLOCK)).all()


@pytest.mark.parametrize("fmt", NUMBERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_in_a_payload_are_not_decoded_nor_accumulated(fmt, bad):
    payload = encoded(fmt, normal(2 * BLOCK))
    if fmt == formats.BF16:
        payload.view(np.uint16)[7] = np.float32(bad).view(np.uint32) >> 16
    else:
        payload.view(np.float32)[1] = bad  # a value, or a scale
    out_N = np.zeros(2 * BLOCK, np.float32)
    with pytest.raises(NotFiniteError):
        formats.decode(fmt, payload, out_N)
    with pytest.raises(NotFiniteError):
        formats.accumulate(fmt, payload, out_N, 0.5)


@quickly
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=20), st.sampled_from(NUMBERS))
def test_with_error_feedback_what_is_sent_plus_what_is_left_is_what_was_wanted(seeds, fmt):
    wanted_N, sent_N = np.zeros(2 * BLOCK), np.zeros(2 * BLOCK)
    residual_N = np.zeros(2 * BLOCK, np.float32)
    for seed in seeds:
        x_N = normal(2 * BLOCK, seed)
        payload = encoded(fmt, x_N, residual_N)
        wanted_N += x_N
        sent_N += decoded(fmt, payload, x_N.size)
    np.testing.assert_allclose(sent_N + residual_N, wanted_N, atol=1e-5 * len(seeds))


def test_with_error_feedback_the_loss_does_not_grow_and_without_it_a_bias_does():
    x_N = np.full(BLOCK, 0.4, np.float32)
    x_N[0] = 7.0  # int4's scale is 1: 0.4 is rounded to 0 every time
    residual_N, with_N, without_N = np.zeros_like(x_N), np.zeros_like(x_N), np.zeros_like(x_N)
    for _ in range(50):
        with_N += decoded(formats.INT4, encoded(formats.INT4, x_N, residual_N), BLOCK)
        without_N += decoded(formats.INT4, encoded(formats.INT4, x_N), BLOCK)
    assert np.abs(with_N - 50 * x_N).max() < 1.0
    assert np.abs(without_N - 50 * x_N).max() > 10.0


GOLDEN = {
    formats.FP32: "0000000000000000" + "0000803f" + "000000c0",
    formats.BF16: "00000000" + "803f" + "00c0",
    formats.INT8: "0402813c" + "0000" + "4081",  # scale 2 / 127, then 0, 0, 64, −127
    formats.INT4: "2549923e" + "8888" + "8c" + "81",  # scale 2 / 7; values 2, 3 are low nibbles
}


@pytest.mark.parametrize("fmt", NUMBERS)
def test_the_bytes_of_a_known_block_are_what_they_were_in_the_first_release(fmt):
    x_N = np.zeros(BLOCK, np.float32)
    x_N[2:4] = 1.0, -2.0
    golden = bytes.fromhex(GOLDEN[fmt])
    assert encoded(fmt, x_N).tobytes()[: len(golden)] == golden
    high_N = np.zeros(BLOCK, np.float32)
    high_N[66] = -2.0
    if fmt == formats.INT4:
        assert encoded(fmt, high_N).tobytes()[4 + 2] == 0x18


def test_every_word_of_the_spec_has_a_format():
    assert [formats.format_of(word) for word in UP_FORMATS] == list(NUMBERS)
    with pytest.raises(ConfigError, match="'fp8' is not one of FP32, BF16, Int8, Int4"):
        formats.format_of("fp8")


@pytest.mark.parametrize(
    ("fmt", "size"),
    [
        (formats.FP32, 1024),
        (formats.BF16, 512),
        (formats.INT8, 264),
        (formats.INT4, 136),
        (formats.RAW, 256),
    ],
)
def test_the_length_of_a_payload_is_known_from_its_format(fmt, size):
    assert formats.encoded_bytes(fmt, 2 * BLOCK) == size


@pytest.mark.parametrize("call", [(99, 128), (formats.BF16, 100), (formats.FP32, -128)])
def test_a_length_without_meaning_is_refused(call):
    with pytest.raises(ProtocolError):
        formats.encoded_bytes(*call)


@pytest.mark.parametrize("fmt", NUMBERS)
@pytest.mark.parametrize("change", [-1, 1, -BLOCK * 4, BLOCK * 4])
def test_a_payload_of_another_length_is_damaged(fmt, change):
    payload = encoded(fmt, normal(4 * BLOCK)).tobytes()
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(DamagedError, match=f"payload of {len(wrong)} bytes, expected"):
        decoded(fmt, wrong, 4 * BLOCK)
    with pytest.raises(DamagedError):
        formats.accumulate(fmt, wrong, np.zeros(4 * BLOCK, np.float32), 1.0)


def test_a_file_is_not_decoded_as_numbers():
    with pytest.raises(ProtocolError, match="RAW"):
        decoded(formats.RAW, bytes(BLOCK), BLOCK)


@pytest.mark.parametrize(
    "vector", [np.zeros(BLOCK), np.zeros(2 * BLOCK, "f4")[::2], np.zeros((1, BLOCK), "f4")]
)
def test_anything_but_a_contiguous_fp32_vector_is_a_type_error(vector):
    with pytest.raises(TypeError, match="contiguous fp32 vector"):
        formats.encode(formats.FP32, vector, np.zeros(4 * BLOCK, np.uint8))
    with pytest.raises(TypeError, match="contiguous fp32 vector"):
        formats.decode(formats.FP32, bytes(4 * BLOCK), vector)


def test_a_buffer_that_is_too_short_is_not_written():
    with pytest.raises(ProtocolError, match="buffer of 511 bytes for a payload of 512"):
        formats.encode(formats.FP32, normal(BLOCK), np.zeros(511, np.uint8))


@pytest.mark.parametrize("fmt", NUMBERS)
def test_a_payload_may_lie_at_any_address(fmt):
    payload = encoded(fmt, normal(BLOCK)).tobytes()
    expected = decoded(fmt, payload, BLOCK).tobytes()
    for shift in (1, 2, 3):
        moved = memoryview(bytes(shift) + payload)[shift:]
        assert decoded(fmt, moved, BLOCK).tobytes() == expected


def test_no_kernel_is_compiled_again_whatever_holds_the_payload():
    kernels.warm_up()
    signatures = signatures_of_kernels()
    assert len(signatures) >= 12
    x_N = normal(BLOCK)
    frozen_N = x_N.copy()
    frozen_N.flags.writeable = False
    for fmt in NUMBERS:
        payload = encoded(fmt, frozen_N)
        for holder in (payload, payload.tobytes(), bytearray(payload), memoryview(payload)):
            formats.accumulate(fmt, holder, decoded(fmt, holder, BLOCK), 1)
    assert signatures_of_kernels() == signatures


def signatures_of_kernels():
    """Of all that were compiled in this process, also by other tests."""
    return {n: k.signatures for n, k in vars(kernels).items() if hasattr(k, "signatures")}


def test_the_norms_of_a_fragment_are_those_of_its_tensors():
    tensors = [Tensor(name=n, shape=(size,), dtype="float32") for n, size in (("a", 5), ("b", 300))]
    (fragment,) = cut(tensors, num_fragments=1).fragments
    flat_N = np.zeros(fragment.elements, np.float32)
    flat_N[:5], flat_N[BLOCK : BLOCK + 300] = 2.0, 1e25  # squares beyond fp32
    assert formats.slot_norms(fragment, flat_N) == pytest.approx([math.sqrt(20), 1e25 * 300**0.5])
    flat_N[3] = np.nan
    assert math.isnan(formats.slot_norms(fragment, flat_N)[0])


@given(st.sampled_from(frames.Kind), st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_a_message_comes_out_as_it_was_packed(kind, index, payload):
    envelope = frames.unpack(frames.pack(kind, index, payload))
    assert (envelope.kind, envelope.index, bytes(envelope.payload)) == (kind, index, payload)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(200)), bytes(700)])
def test_every_flipped_bit_of_a_message_is_found(payload):
    message = frames.pack(frames.Kind.CHUNK, 5, payload)
    for bit in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            frames.unpack(bytes(damaged))


def test_every_truncation_of_a_message_is_found():
    message = frames.pack(frames.Kind.HEADER, 0, bytes(range(60)))
    for length in range(len(message)):
        with pytest.raises(DamagedError):
            frames.unpack(message[:length])
    with pytest.raises(DamagedError):
        frames.unpack(message + b"\0")


def test_a_message_of_an_unknown_kind_is_damaged():
    with pytest.raises(DamagedError, match="message kind: 9 is not one of"):
        frames.unpack(frames.pack(9, 0, b"new"))


def test_a_message_is_packed_from_whatever_holds_bytes_and_read_without_a_copy():
    payload = np.arange(100, dtype=np.uint8)
    message = frames.pack(0, 1, payload)
    assert message == frames.pack(0, 1, payload.tobytes()) == frames.pack(0, 1, memoryview(payload))
    assert frames.unpack(message).payload.obj is message


def test_the_bytes_of_a_known_message_are_what_they_were_in_the_first_release():
    assert frames.pack(frames.Kind.END, 7, b"abc").hex() == "0700000001000000e5c3e446ea3da54a616263"


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1)))))
def test_missing_is_what_never_arrived_whatever_the_order_and_however_often(case):
    chunks, order = case
    arrivals = frames.Arrivals(chunks)
    for position, index in enumerate(order):
        assert arrivals.received(index) == (index not in order[:position])
    assert arrivals.missing() == tuple(i for i in range(chunks) if i not in order)


def test_a_chunk_that_a_transfer_does_not_have_is_refused():
    with pytest.raises(ProtocolError, match="chunk 3 of a transfer of 3"):
        frames.Arrivals(3).received(3)


def test_a_kernel_works_where_its_machine_code_cannot_be_kept():
    scope: dict[str, object] = {}
    exec("def twice(x):\n    return 2 * x", scope)  # no file: numba has nowhere to put its cache
    assert kernels.kernel(scope["twice"])(21) == 42


@pytest.mark.slow
def test_one_command_compiles_every_kernel_for_the_processes_that_follow(tmp_path):
    code = (
        "import numpy as np; from diloco.codec import formats, kernels\n"
        "x, r, out = (np.zeros(n, k) for n, k in ((128, 'f4'), (128, 'f4'), (512, 'u1')))\n"
        "for fmt in (formats.FP32, formats.BF16, formats.INT8, formats.INT4):\n"
        "    size = formats.encode(fmt, x, out, residual_N=r)\n"
        "    formats.accumulate(fmt, bytes(out[:size]), x, 1.0)\n"
        "hits = [k for k in vars(kernels).values() if hasattr(k, 'stats')]\n"
        "assert len(hits) > 10, hits\n"
        "print(sum(sum(k.stats.cache_misses.values()) for k in hits))"
    )
    env = {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "diloco.codec.kernels"], check=True, env=env)
    after = subprocess.run(
        [sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True
    )
    assert after.stdout == "0\n"
