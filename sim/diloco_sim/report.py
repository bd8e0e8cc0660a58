"""Runs worlds by seed and reports what was found: the output of the command `diloco sim`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable

from diloco_sim.description import Description, sample
from diloco_sim.faults import Kind
from diloco_sim.shrink import shrink
from diloco_sim.world import Outcome, World

SHRINK_RUNS = 300
"""Worlds that are run to find a smaller one."""


def seeds_of(text: str) -> range:
    """
    The seeds of "A..B", both included.

    >>> seeds_of("3..5")
    range(3, 6)

    Raises:
        ValueError: it is something else.
    """
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise ValueError(f"{text!r} is not a range of seeds, expected A..B")
    return range(int(first), int(last) + 1)


def outcome(seed: int, *, steps: int) -> Outcome:
    """
    Run the world of a seed.

    Raises:
        RuntimeError: the simulator itself failed; names the seed.
    """
    try:
        return World(sample(seed, steps=steps)).run()
    except Exception as error:
        raise RuntimeError(f"the world of seed {seed} failed: {error!r}") from error


def summary(
    outcomes: Iterable[Outcome], *, steps: int, failed: Callable[[Outcome], object],
    enough: Callable[[], bool] = lambda: False,
) -> tuple[str, int]:  # fmt: skip
    """
    Count what became of worlds.

    Args:
        outcomes: of the worlds, which are run as they are asked for.
        steps: global steps of each.
        failed: gets the outcome of each world that broke a promise.
        enough: whether to stop before the next one.

    Returns:
        A summary, and how many broke a promise.
    """
    worlds = failures = merges = stopped = 0
    seconds = 0.0
    injected: Counter[Kind] = Counter()
    for outcome in outcomes:
        worlds += 1
        merges += outcome.merges
        stopped += bool(outcome.stopped)
        seconds += outcome.seconds
        injected.update(outcome.injected)
        if not outcome.ok:
            failures += 1
            failed(outcome)
        if enough():
            break
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in injected.most_common())
    verdict = "all promises kept" if not failures else f"{failures} broke a promise"
    if stopped:
        verdict += f", {stopped} stopped for manual action"
    text = (
        f"{worlds} worlds of {steps} global steps: {verdict}; {merges} merges in "
        f"{seconds / 3600:.1f} virtual hours\nfaults: {kinds or 'none'}"
    )
    return text, failures


def smaller(outcome: Outcome) -> Outcome:
    """The outcome of a smaller world that breaks the same promise."""
    violation = outcome.violation
    if violation is None:
        return outcome

    def fails(candidate: Description) -> bool:
        found = World(candidate).run().violation
        return found is not None and found.checker == violation.checker

    return World(shrink(outcome.description, fails, most_runs=SHRINK_RUNS)).run()


def text_of(outcome: Outcome) -> str:
    """A failing world: how to run it again, its plan, its last events, and the broken promise."""
    of = outcome.description
    fields = {
        field.name: getattr(of, field.name)
        for field in dataclasses.fields(of)
        if field.name not in ("plan", "spec")
    }
    lines = [
        f"seed {of.seed}, {of.learners} learners, {of.steps} steps",
        *(f"  {name}: {value}" for name, value in fields.items()),
        f"  spec: {of.job}",
        "plan:" if len(of.plan) else "plan: no faults",
        *(f"  {fault}" for fault in of.plan),
        f"last {len(outcome.trace)} events:",
        *(f"  {line}" for line in outcome.trace),
        f"{outcome.violation}" if outcome.violation else "all promises kept",
    ]
    return "\n".join(lines)
