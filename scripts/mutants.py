"""
A random sample of mutants of the pure cores, run by mutmut against the unit tests.

    python scripts/mutants.py --seed 7 --count 150

What is mutated and which tests run is in pyproject.toml, [tool.mutmut]. mutmut names a mutant after the path of its
file, so it needs packages beside each other: this lays out links to them in build/mutants. Exits with 1 if fewer than
95 % of the sample are killed. Survivors are printed as diffs; docs/testing.md lists those with a reason.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
LINKS = {
    "src/diloco": "protos/diloco",
    "src/diloco_syncer": "syncer/diloco_syncer",
    "src/diloco_worker": "worker/diloco_worker",
    "tests": "tests",
    "pyproject.toml": "pyproject.toml",
}
ANY_MUTANT = "diloco_syncer.core.outer.x_weight__mutmut_1"
"""mutmut makes all mutants, and records which test calls which function, when it runs one."""

MIN_KILLED = 0.95


def mutmut(*arguments: str, show: bool = False) -> str:
    """Run mutmut in its folder; returns its output."""
    command = [str(Path(sys.executable).with_name("mutmut")), *arguments]
    done = subprocess.run(command, cwd=FOLDER, stdout=None if show else subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{done.stdout or ''}")
    return done.stdout or ""


def lay_out() -> None:
    """Link what mutmut copies. Its own copies of an earlier run are kept: it renews what changed."""
    for name, target in LINKS.items():
        link = FOLDER / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(ROOT / target)


def statuses() -> dict[str, str]:
    """Status by mutant."""
    lines = (line.strip().rpartition(": ") for line in mutmut("results", "--all", "1").splitlines())
    return {name: status for name, colon, status in lines if colon}


def main() -> int:
    """Run a sample; 0 if enough of it was killed."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    args = parser.parse_args()
    lay_out()
    print(
        "making mutants, and running the tests once to learn which of them calls what", flush=True
    )
    mutmut("run", "--max-children", "1", ANY_MUTANT)
    names = sorted(statuses())
    sample = random.Random(args.seed).sample(names, min(args.count, len(names)))
    print(f"{len(sample)} of {len(names)} mutants, seed {args.seed}", flush=True)
    mutmut("run", "--max-children", "1", *sample)
    found = statuses()
    survivors = [name for name in sorted(sample) if found[name] not in ("killed", "timeout")]
    for name in survivors:
        print(mutmut("show", name))
    killed = len(sample) - len(survivors)
    print(f"{dict(Counter(found[name] for name in sample))}")
    print(f"{killed} of {len(sample)} killed: {killed / len(sample):.1%}")
    return 0 if killed / len(sample) >= MIN_KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
