"""How many examples a property is tried on."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

STANDARD = 100
"""Examples of a property that does not set its own number, outside the fast profile."""


def examples(full: int) -> int:
    """`full`, or in the fast profile the same fraction of it as of all other properties; at least 2."""
    return max(2, full * settings().max_examples // STANDARD)


def seeds(fast: int, full: Iterable[int]) -> list[ParameterSet]:
    """The seeds of a parametrized test; those after the first `fast` are slow."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if number >= fast else [])
        for number, seed in enumerate(full)
    ]
