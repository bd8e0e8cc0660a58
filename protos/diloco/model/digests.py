"""
Digests of a fragment's values, tensor by tensor, so that a replay names the first tensor that differs. Pure.

A fragment of many tensors has one digest for several that follow each other: a line of a tape stays short.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from diloco.model.fragments import Fragment, Slot

GROUPS = 64
"""Most digests of a fragment."""

DIGEST_BYTES = 4
"""Of each: two that differ are equal by chance once in 4 billion."""

MAX_BYTES = GROUPS * DIGEST_BYTES

F32 = npt.NDArray[np.float32]


def groups(fragment: Fragment) -> list[Sequence[Slot]]:
    """The tensors that share a digest, in the order of the digests: one each, of up to GROUPS."""
    slots = fragment.slots
    count = min(GROUPS, len(slots))
    edges = [number * len(slots) // count for number in range(count + 1)] if count else [0]
    return [slots[lo:hi] for lo, hi in pairwise(edges)]


def names(fragment: Fragment) -> list[str]:
    """What each digest is of, for people."""
    return [
        first.tensor.name if first is last else f"{first.tensor.name} … {last.tensor.name}"
        for first, last in ((group[0], group[-1]) for group in groups(fragment))
    ]


def digests(fragment: Fragment, *vectors_N: F32) -> bytes:
    """
    One digest for each of `groups`, of the values of one vector or of several together.

    Args:
        fragment: where the tensors lie.
        vectors_N: of shape (N,), contiguous, such as Θ and momentum.
    """
    out = bytearray()
    for group in groups(fragment):
        state = xxhash.xxh3_64()
        for vector_N in vectors_N:
            state.update(vector_N[group[0].offset : group[-1].end].view(np.uint8).data)
        out += state.digest()[-DIGEST_BYTES:]
    return bytes(out)
