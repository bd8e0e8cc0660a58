"""Elements of tensors in files, as numbers and as another type: bit by bit what torch computes."""

import numpy as np
import pytest
import torch

from diloco.errors import ConfigError
from diloco.model.elements import numbers, rounded


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_those_of_torch_bit_by_bit(dtype: str):
    any_bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    halves = np.arange(0x3F800000, 0x3F820000, 0x1000, dtype=np.uint32)  # ties between two bfloat16
    special = np.uint32([0, 1 << 31, 0x7F800000, 0xFF800000])
    values = np.concatenate([any_bits, halves, special]).view(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    fits = torch.isfinite(expected).numpy() | ~np.isfinite(values)
    real = ~np.isnan(values)
    wanted = expected[torch.from_numpy(fits & real)]
    assert rounded(values[fits & real], dtype) == bits(wanted)
    assert np.isnan(numbers(rounded(values[~real], dtype), dtype)).all()


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_widened_to_float32_exactly(source: torch.dtype):
    values = torch.linspace(-2, 2, 999).to(source)
    found = rounded(numbers(bits(values), str(source).removeprefix("torch.")), "float32")
    assert found == bits(values.float())


def test_integers_keep_their_type_also_those_of_16_bits():
    values = numbers(np.uint16([1, 0x3F80]).tobytes(), "uint16")
    assert (values.dtype, values.tolist()) == (np.uint16, [1, 0x3F80])


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 70000.0), ("bfloat16", 3.4e38), ("float32", 1e300)]
)
def test_a_finite_value_never_becomes_infinite(dtype: str, value: float):
    with pytest.raises(ConfigError, match=f"too large for {dtype}"):
        rounded(np.array([1.0, value]), dtype)


def test_a_type_that_numpy_lacks_is_named():
    with pytest.raises(ConfigError, match="type float8_e5m2 cannot be converted"):
        numbers(b"12", "float8_e5m2")
