"""
A seeded plan of faults.

Pure: the same options and learners give the same plan. A longer plan begins with the same faults.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diloco.errors import ConfigError
from diloco_local.faults import KILLS, SYNCER, SYNCER_KINDS, Fault, Kind

RATES: Mapping[Kind, float] = {
    Kind.KILL: 0.5, Kind.SYNCER_KILL: 0.1, Kind.SYNCER_FULL: 0.1, Kind.PAUSE: 0.25, Kind.SLOW: 0.25,
    Kind.CUT: 0.5, Kind.HANG: 0.25, Kind.DELAY: 0.25, Kind.CORRUPT: 0.25,
}  # fmt: skip
"""Faults per minute of a whole run on this machine, if no rate is given."""

CLUSTER_RATES: Mapping[Kind, float] = {
    Kind.KILL: 0.5, Kind.SYNCER_KILL: 0.1, Kind.PAUSE: 0.25, Kind.SLOW: 0.25, Kind.DELETE: 0.1,
}  # fmt: skip
"""The same of a job in a cluster."""

MAX_RATE = 60.0
MAX_MINUTES = 7 * 24 * 60.0
MAX_SECONDS = 3600.0

RECOVERY_SECONDS = 30.0
"""A killed process counts as disturbed for so long, while it starts and rejoins."""
REPLACEMENT_SECONDS = 90.0
"""The same of a learner whose pods are deleted: they end, and others are scheduled and started."""
SETTLE_SECONDS = 5.0
"""Between two faults of one target."""
SHORTEST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chooses."""

    seed: int = 0
    rates: Mapping[Kind, float] = field(default_factory=lambda: RATES)
    """Per minute, over all learners together."""
    spare: int = 1
    """Learners that are not disturbed at any time."""
    longest_seconds: float = 20.0
    minutes: float = 60.0
    """After this, the job continues undisturbed."""

    def check(self, learners: int) -> None:
        """
        Check all values against a job with this number of learners.

        Raises:
            ConfigError: one of them is out of its bounds.
        """
        for kind, rate in self.rates.items():
            _within(f"--{kind}-rate", rate, 0.0, MAX_RATE, "faults per minute, such as 0.5")
        _within("--longest", self.longest_seconds, SHORTEST_SECONDS, MAX_SECONDS, "seconds")
        _within("--minutes", self.minutes, 0.0, MAX_MINUTES, "minutes")
        if not 0 <= self.spare <= learners:
            raise ConfigError(
                f"--spare {self.spare}: expected a number of learners from 0 to {learners}, those of the job"
            )
        wanted = [kind for kind, rate in self.rates.items() if rate and kind not in SYNCER_KINDS]
        if wanted and self.spare == learners:
            raise ConfigError(
                f"--spare {self.spare}: leaves none of the {learners} learners for {wanted[0]}; give at most "
                f"--spare {learners - 1}, or only rates of the syncer, such as --syncer-kill-rate"
            )


def _within(option: str, value: float, least: float, most: float, what: str) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(
            f"{option} {value:g}: expected a number from {least:g} to {most:g}: {what}"
        )


def plan(options: Options, learners: Sequence[str]) -> tuple[Fault, ...]:
    """
    The faults in order of time.

    At most `len(learners) - options.spare` learners are disturbed at once, and no target has two faults at once.
    All faults are undone at the latest when `options.minutes` are over. A fault for which there is no room
    begins later.
    """
    horizon = 60.0 * options.minutes
    busy = dict.fromkeys((*learners, SYNCER), 0.0)
    faults: list[Fault] = []
    for wanted, choice in _drawn(options, horizon):
        syncer = wanted.kind in SYNCER_KINDS
        ends = [busy[SYNCER]] if syncer else sorted(busy[name] for name in learners)
        # When, after the faults that have a place, one more target than are spared is undisturbed.
        at = max(wanted.at, ends[0 if syncer else options.spare])
        if at >= horizon:
            continue
        free = [SYNCER] if syncer else [name for name in learners if busy[name] <= at]
        target, until = free[int(choice * len(free))], at + wanted.until - wanted.at
        busy[target] = until + SETTLE_SECONDS
        faults.append(replace(wanted, target=target, at=at, until=min(until, horizon)))
    faults.sort(key=lambda fault: (fault.at, fault.kind))
    return tuple(replace(fault, number=number) for number, fault in enumerate(faults, 1))


def _drawn(options: Options, horizon: float) -> list[tuple[Fault, float]]:
    """Faults without a target in order of time, each with a number in [0, 1) that chooses it."""
    drawn = [found for kind in Kind for found in _of_kind(kind, options, horizon)]
    return sorted(drawn, key=lambda found: (found[0].at, found[0].kind))


def _of_kind(kind: Kind, options: Options, horizon: float) -> Iterator[tuple[Fault, float]]:
    rate = options.rates.get(kind, 0.0)
    # Each kind has its own numbers, so that its faults do not change with the rates of the others.
    numbers, at = random.Random(f"{options.seed}:{kind}"), 0.0  # noqa: S311
    while rate:
        at += 60.0 * (numbers.expovariate(1.0) / rate)
        if at >= horizon:
            return
        seconds = numbers.uniform(SHORTEST_SECONDS, options.longest_seconds)
        share, choice, bandwidth = numbers.random(), numbers.random(), 0.0
        if kind in KILLS:
            seconds = REPLACEMENT_SECONDS if kind is Kind.DELETE else RECOVERY_SECONDS
        if kind is Kind.DELAY:
            bandwidth = 1e6 * 16.0 ** numbers.random()
        amount = {
            Kind.SLOW: 0.5 + 0.4 * share,
            Kind.DELAY: 0.05 * 10.0**share,
            Kind.CORRUPT: 0.2 + 1.8 * share,
        }.get(kind, 0.0)
        fault = Fault(
            number=0, kind=kind, target="", at=at, until=at + seconds, amount=amount, bandwidth=bandwidth
        )  # fmt: skip
        yield fault, choice


def lines(faults: Sequence[Fault], options: Options, learners: int) -> Iterator[str]:
    """The plan as text."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    yield (
        f"seed {options.seed}: {count} in {options.minutes:g} min of training, "
        f"of at most {learners - options.spare} of {learners} learners at once"
    )
    for fault in faults:
        minutes, seconds = divmod(fault.at, 60)
        yield f"{int(minutes):4d}:{seconds:04.1f}  {fault}"
