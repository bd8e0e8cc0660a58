"""
What is known about the distance of a job to synchronous training: measurements of the studies that fit it. Pure.

The figures are those of benchmarks/studies, in virtual time: learners of one speed, no failures, equal tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """The fields of a spec that a distance was measured for."""

    interval: int
    merge: str
    learning_rate: float
    momentum: float

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Setting | None:
        """None: the spec lacks a field, as that of a run directory that is incomplete."""
        interval, merge = spec.get("interval"), spec.get("merge")
        rate, momentum = spec.get("outer_learning_rate"), spec.get("outer_momentum")
        if not isinstance(interval, int) or interval < 1 or not isinstance(merge, str):
            return None
        if not isinstance(rate, int | float) or not isinstance(momentum, int | float):
            return None
        return cls(interval, merge, float(rate), float(momentum))

    def __str__(self) -> str:
        means = "outer learning rate"
        return f"H = {self.interval}, {self.merge}, {means} {self.learning_rate:g}, momentum {self.momentum:g}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """
    Distance of the validation loss to that of synchronous training with equal tokens.

    Args:
        percent: mean over the seeds.
        parameters: of the model.
        source: file in benchmarks/studies, and its variant.
    """

    setting: Setting
    learners: int
    parameters: str
    steps: int
    seeds: int
    percent: float
    source: tuple[str, str]

    def __str__(self) -> str:
        seeds = f"{self.seeds} seeds" if self.seeds > 1 else "one seed"
        return (
            f"{self.percent:+.1f} % ({self.parameters} parameters, {self.steps:,} steps, {seeds})"
        )


_DEFAULTS = Setting(24, "Radial", 0.7, 0.5)
_SHORT = Setting(6, "Average", 1.0, 0.0)
_MIDDLE = Setting(12, "Average", 1.0, 0.0)

MEASURED = (
    Measurement(_DEFAULTS, 4, "0.85 million", 600, 1, 6.4, ("interval/example", "2-h24")),
    Measurement(_DEFAULTS, 4, "41 thousand", 600, 3, 6.2, ("interval/", "3-h24")),
    Measurement(_DEFAULTS, 4, "41 thousand", 3000, 3, 5.5, ("interval/long", "3-h24")),
    Measurement(_DEFAULTS, 1, "41 thousand", 600, 3, -0.4, ("learners/", "1-m1")),
    Measurement(_DEFAULTS, 2, "41 thousand", 600, 3, 3.0, ("learners/", "2-m2")),
    Measurement(_DEFAULTS, 8, "41 thousand", 600, 3, 11.2, ("learners/", "4-m8")),
    Measurement(_DEFAULTS, 16, "41 thousand", 600, 3, 16.1, ("learners/many", "3-m16")),
    Measurement(_MIDDLE, 4, "41 thousand", 600, 3, 4.9, ("interval/", "6-h12-average")),
    Measurement(_SHORT, 4, "0.85 million", 600, 3, 1.9, ("interval/example", "4-h6-average-20")),
    Measurement(_SHORT, 4, "41 thousand", 600, 3, 2.5, ("interval/", "5-h6-average")),
    Measurement(_SHORT, 4, "41 thousand", 3000, 3, 2.5, ("interval/long", "6-h6-average-024")),
    Measurement(_SHORT, 2, "41 thousand", 600, 3, 1.8, ("learners/", "5-m2-h6")),
    Measurement(_SHORT, 8, "41 thousand", 600, 3, 6.0, ("learners/", "7-m8-h6")),
    Measurement(_SHORT, 16, "41 thousand", 600, 3, 10.4, ("learners/many", "4-m16-h6")),
)
"""A test compares each figure with the results of its study."""


def known(spec: Mapping[str, Any]) -> list[str]:
    """Sentences on what was measured for the M, H, merge and outer optimizer of a job; empty without a spec."""
    setting, learners = Setting.of(spec), _learners(spec)
    if setting is None or not learners:
        return []
    own = [m for m in MEASURED if m.setting == setting and m.learners == learners]
    job = f"M = {learners}, {setting}"
    if own:
        found = f"Measured for {job}: {'; '.join(map(str, own))}."
    else:
        nearest = min(MEASURED, key=lambda m: _difference(m, setting, learners))
        same = [
            m for m in MEASURED if (m.setting, m.learners) == (nearest.setting, nearest.learners)
        ]
        near = f"M = {nearest.learners}, {nearest.setting}"
        found = (
            f"Not measured for {job}. The closest settings are {near}: {'; '.join(map(str, same))}."
        )
    return [
        found,
        "Validation loss against that of synchronous training on the same tokens; learners of one speed, no failures, "
        "no slow links. Other models can differ; measure yours with diloco experiment.",
    ]


def _difference(measured: Measurement, setting: Setting, learners: int) -> tuple[float, ...]:
    """The merge counts first: the outer optimizer of one does not suit the other."""
    return (
        measured.setting.merge != setting.merge,
        abs(math.log(measured.setting.interval / setting.interval)),
        abs(measured.setting.learning_rate - setting.learning_rate),
        abs(measured.setting.momentum - setting.momentum),
        abs(math.log(measured.learners / learners)),
    )


def _learners(spec: Mapping[str, Any]) -> int:
    regions = spec.get("learners")
    if not isinstance(regions, Mapping):
        return 0
    return sum(count for count in regions.values() if isinstance(count, int) and count > 0)
