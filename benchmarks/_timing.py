"""
What every benchmark shares: paired timing, medians, and a results file that records how it was made.

The machine's speed moves while a benchmark runs, so a time alone means little. Here every run of a
variant sits between two runs of its baseline, and what is reported is the median of the ratios of
the rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

Run = Callable[[], float | None]
"""
Does the work once; returns its seconds if it measured them itself (in another process), else None.
"""

LOAD = os.getloadavg()[0]
"""How busy others kept the machine when the benchmark began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The rounds of one variant against its baseline."""

    seconds: tuple[float, ...]
    base_seconds: tuple[float, ...]
    """Mean of the baseline runs before and after."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Speed of the variant as a multiple of its baseline's, per round; above 1 is faster."""
        return tuple(b / s for b, s in zip(self.base_seconds, self.seconds, strict=True))

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)

    @property
    def median_seconds(self) -> float:
        """Median time of the variant."""
        return statistics.median(self.seconds)


def seconds_of(run: Run) -> float:
    """Run once; wall time, or what the run measured itself."""
    start = time.perf_counter()
    measured = run()
    return time.perf_counter() - start if measured is None else measured


def paired(
    variants: Mapping[str, Run], base: Run | Mapping[str, Run], *, rounds: int, warmup: int = 1
) -> dict[str, Paired]:
    """
    Time each variant between two runs of its baseline; the order rotates from round to round.

    Args:
        variants: name → work.
        base: one baseline for all, or name → baseline.
        rounds: measured rounds.
        warmup: rounds before them that are thrown away.
    """
    bases = base if isinstance(base, Mapping) else dict.fromkeys(variants, base)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(-warmup, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            before = seconds_of(bases[name])
            seconds = seconds_of(variants[name])
            after = seconds_of(bases[name])
            if number >= 0:
                times[name].append((seconds, (before + after) / 2))
    return {
        name: Paired(seconds=tuple(s for s, _ in pairs), base_seconds=tuple(b for _, b in pairs))
        for name, pairs in times.items()
    }


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats with two digits after the point."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(ratios: Sequence[float]) -> str:
    """Lowest and highest round."""
    return f"{min(ratios):.2f} … {max(ratios):.2f}"


def write_results(
    topic: str, title: str, body: str, *, packages: Sequence[str] = (), timed: bool = True
) -> Path:
    """
    Write benchmarks/results/<topic>.md: the body with how, where and with what it was measured.

    On a machine with more work than cores the first line warns: the ratios are noise.

    Args:
        topic: file name without the ending.
        title: first heading.
        body: Markdown; tables and what to read from them.
        packages: distributions whose versions matter, besides Python.
        timed: False: no figure depends on time, so other work on the machine changes nothing.
    """
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    noisy = timed and 0.75 * (os.cpu_count() or 1) < LOAD
    busy = f"**Not to be cited: load {LOAD:.1f} on {os.cpu_count()} cores.**\n\n" if noisy else ""
    text = f"""# {title}

{busy}{body.strip()}

## How this was made

- command: `{_command()}`
- commit: {_commit()}
- when: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load before it {LOAD:.1f}
- hardware: {_hardware()}
- versions: Python {platform.python_version()}{", " if versions else ""}{versions}
"""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{topic}.md"
    path.write_text(text)
    print(text)
    return path


def judge(
    goals: Mapping[str, tuple[float, float]], *, at_most: frozenset[str] = frozenset()
) -> int:
    """
    Print whether each goal {name: (measured, wanted)} is met; return the exit status for `main`.

    Args:
        goals: wanted is a lower bound, or an upper bound for the names in `at_most`.
    """
    missed = 0
    for name, (measured, wanted) in goals.items():
        good = measured <= wanted if name in at_most else measured >= wanted
        missed += not good
        sign = "≤" if name in at_most else "≥"
        print(f"{'met   ' if good else 'MISSED'} {name}: {measured:.2f}, wanted {sign} {wanted:g}")
    return 1 if missed else 0


def _command() -> str:
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return " ".join(["python", str(name), *sys.argv[1:]])


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    # The results of the benchmark before this one are no change of what is measured.
    changes = git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        " with uncommitted changes" if changes else ""
    )


def _hardware() -> str:
    def first(file: str, key: str) -> str:
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            return "unknown"
        return next(
            (line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown"
        )

    memory_kib = first("/proc/meminfo", "MemTotal").split()[0]
    memory = f"{int(memory_kib) / 2**20:.0f} GiB" if memory_kib.isdigit() else "unknown memory"
    return (
        f"{os.cpu_count()} × {first('/proc/cpuinfo', 'model name')}, {memory}, {platform.release()}"
    )
