"""Integers as digits of fp32."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diloco.model.integers import DIGITS, from_digits, to_digits

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(INTEGERS, max_size=9))
def test_digits_give_back_every_integer_of_64_bits(values):
    digits_N = to_digits(np.array(values, np.int64))
    assert digits_N.size == DIGITS * len(values)
    assert from_digits(digits_N).tolist() == values


@given(INTEGERS, INTEGERS)
def test_a_delta_of_digits_leads_exactly_to_the_other_integer(old, new):
    old_N, new_N = to_digits(np.array([old])), to_digits(np.array([new]))
    delta_N = (old_N - new_N).astype(np.float32)
    assert from_digits(old_N - delta_N).tolist() == [new]


def test_what_is_no_digit_becomes_the_nearest_one():
    digits_N = np.array([-3.0, 1.4, 1e9, 0.0], np.float32)
    assert from_digits(digits_N).tolist() == [(1 << 16) + (0xFFFF << 32)]


def test_integers_get_the_type_of_their_buffer():
    digits_N = to_digits(np.array([1, 0]))
    assert from_digits(digits_N, "bool").tolist() == [True, False]
    assert from_digits(digits_N, "uint8").dtype == np.uint8
