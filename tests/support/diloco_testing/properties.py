"""How many examples a property is tried on."""

from hypothesis import settings

STANDARD = 100
"""Examples of a property that does not set its own number, outside the fast profile."""


def examples(full: int) -> int:
    """`full`, or in the fast profile the same fraction of it as of all other properties; at least 2."""
    return max(2, full * settings().max_examples // STANDARD)
