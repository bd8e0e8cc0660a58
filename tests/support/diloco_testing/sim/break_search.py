"""
The search for a seed whose world finds a broken core.

    PYTHONPATH=tests/support python -m diloco_testing.sim.break_search [NAME ...]

prints rows for tests/unit/sim/test_broken_seeds.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from diloco_sim.description import sample
from diloco_sim.world import World
from diloco_testing.sim import block_breaks, peer_breaks  # noqa: F401  # adds their breaks
from diloco_testing.sim.breaks import BREAKS, broken

SEARCHED = ((40, 400), (200, 400))
"""Global steps, and how many seeds from 0 on."""


def first_seed(name: str, seeds: Iterable[int], steps: int) -> tuple[int, int] | None:
    """
    The first seed whose world finds a break, and passes with the whole core; and its number of events.

    Returns:
        None: none of the seeds does.
    """
    needs = BREAKS[name].needs
    for seed in seeds:
        description = sample(seed, steps=steps)
        if not {fault.kind for fault in description.plan}.issuperset(needs):
            continue
        if BREAKS[name].found(broken(name, description)):
            outcome = World(description).run()
            if outcome.ok:
                return seed, outcome.events
    return None


def _main(names: Iterable[str]) -> None:
    for name in names:
        found = None
        for steps, most in SEARCHED:
            found = first_seed(name, range(most), steps)
            if found is not None:
                print(f'    ("{name}", {found[0]}, {steps}),  # {found[1]} events', flush=True)
                break
        if found is None:
            print(f"    # {name}: no seed finds it", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:] or BREAKS)
