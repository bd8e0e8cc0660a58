"""Entry point of the simulator: `python -m diloco_sim`, started by `diloco sim`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from diloco_sim import pool, report
from diloco_sim.world import Outcome

STEPS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run worlds; 0 if all promises were kept, 1 if not, 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="diloco sim")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", type=report.seeds_of, metavar="A..B")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shrink", action="store_true")
    options = parser.parse_args(arguments)
    seeds = options.seeds if options.seed is None else (options.seed,)

    def failed(outcome: Outcome) -> None:
        print(report.text_of(report.smaller(outcome) if options.shrink else outcome), flush=True)

    outcomes = pool.outcomes(seeds, steps=options.steps, jobs=options.jobs)
    text, failures = report.summary(outcomes, steps=options.steps, failed=failed)
    print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
