"""
The figure of a study: loss over global steps, and the distance of each group to synchronous training. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from diloco_experiment.results import Result, Status
from diloco_experiment.summary import Group, label_of
from diloco_local.report.style import BLUE, FAINT, GREEN, INK, ORANGE, RED, SKY, empty, literal

COLORS = (BLUE, ORANGE, GREEN, RED, SKY, "#CC79A7", "#B8860B", "#6A3D9A", INK, FAINT)
STYLES = ("-", "--", ":", "-.")
MAX_GROUPS = 40
"""Drawn; the table has all."""


def draw(name: str, groups: Sequence[Group], results: Mapping[str, Result]) -> Figure:
    """Both plots, of the first groups of a study."""
    shown = groups[:MAX_GROUPS]
    height = 4.2 + 0.28 * len(shown)
    figure = Figure(
        figsize=(12.5, height),
        facecolor="white",
        layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12),
    )
    FigureCanvasAgg(figure)
    figure.suptitle(literal(name), x=0.01, ha="left", fontsize=13, color=INK, weight="bold")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    compared = any(math.isfinite(group.distance) for group in shown)
    for number, group in enumerate(shown):
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        _curve(curves, group, results, color, style)
        _point(bars, number, group, color, compared=compared)
    if not any(group.losses for group in shown):
        empty(curves, "no cell has ended yet")
        empty(bars, "no cell has ended yet")
        return figure
    _zoom(curves, shown)
    curves.set_title(
        "Validation loss, mean over the seeds", loc="left", fontsize=11, color=INK, weight="bold"
    )
    curves.set_xlabel("global step", fontsize=9, color=INK)
    what = "Distance to synchronous training, %" if compared else "Loss"
    bars.set_title(what, loc="left", fontsize=11, color=INK, weight="bold")
    bars.set_yticks(range(len(shown)), [literal(label_of(group)) for group in shown], fontsize=8)
    bars.set_ylim(len(shown) - 0.4, -0.6)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both", color="#e6e6e6", lw=0.7)
        axes.set_axisbelow(True)
    return figure


def _curve(axes: Axes, group: Group, results: Mapping[str, Result], color: str, style: str) -> None:
    by_step: dict[int, list[float]] = {}
    for cell in group.cells:
        result = results.get(cell.digest)
        for step, loss in result.curve if result is not None and result.status is Status.OK else ():
            by_step.setdefault(step, []).append(loss)
    steps = sorted(by_step)
    axes.plot(
        steps, [np.mean(by_step[s]) for s in steps], style, color=color, lw=1.5, marker="o", ms=3
    )


def _point(axes: Axes, row: int, group: Group, color: str, *, compared: bool) -> None:
    """Losses of the seeds, or their distances if any group has one: the axis has one unit."""
    if not group.losses or (compared and not math.isfinite(group.distance)):
        return
    values = [100 * (x / group.reference - 1) if compared else x for x in group.losses]
    axes.plot(values, [row] * len(values), ".", color=color, ms=6, alpha=0.5)
    middle = group.distance if compared else group.mean
    axes.plot([middle], [row], "|", color=color, ms=14, mew=2.5)


def _zoom(axes: Axes, groups: Sequence[Group]) -> None:
    """The end matters: the first losses, which are many times as large, may be cut off."""
    least = min(loss for group in groups for loss in group.losses)
    most = max(loss for group in groups for loss in group.losses)
    axes.set_ylim(
        least - 0.1 * (most - least) - 0.01 * least, most + max(most - least, 0.35 * least)
    )
