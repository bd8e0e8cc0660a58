"""
Random numbers of a world, all from its seed.

Each part of a world gets a source of its own. What one part draws then changes no other, so a plan
with a fault less is the same world without that fault, which is what makes shrinking work.
"""

from __future__ import annotations

import random


def fork(source: random.Random) -> random.Random:
    """A source seeded from another."""
    return random.Random(source.getrandbits(64))
