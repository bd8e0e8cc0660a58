"""
What all plots share: colors, how many points are drawn, numbers, legends. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from diloco.runtime.formatting import printable
from diloco_local.report.run_files import F64

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, INK, FAINT = "#56B4E9", "#333333", "#8a8a8a"

LEARNER_COLORS = (BLUE, ORANGE, GREEN, "#CC79A7", SKY, "#B8860B", "#6A3D9A", FAINT)
"""With more learners, their curves have one color."""

BINS = 240
SHORT = 16
"""Characters of a label, of which five fit side by side."""


def literal(text: str) -> str:
    """Text of untrusted peers, in which matplotlib would find formulas."""
    return printable(text).replace("$", r"\$")


def binned(x: F64, y: F64, bins: int = BINS) -> tuple[F64, F64]:
    """Means of y over equal intervals of x; the points themselves if there are few."""
    finite = np.isfinite(x) & np.isfinite(y)
    order = np.argsort(x[finite], kind="stable")
    x, y = x[finite][order], y[finite][order]
    if x.size <= bins or x[-1] <= x[0]:
        return x, y
    place = np.minimum(((x - x[0]) / (x[-1] - x[0]) * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    some = count > 0
    total_x, total_y = (np.bincount(place, weights=v, minlength=bins) for v in (x, y))
    return total_x[some] / count[some], total_y[some] / count[some]


def quantity(value: float) -> str:
    """Three digits and a letter: 1.23M."""
    if not math.isfinite(value):
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What would be rounded to 1000 of a unit is 1 of the next.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def in_parts(
    x: F64, y: F64, gaps: Sequence[tuple[float, float]], bins: int = BINS
) -> tuple[F64, F64]:
    """As `binned`, with NaN in each gap of x, so that no line is drawn across it."""
    edges = [-math.inf, *(begin for begin, _ in gaps), math.inf]
    xs, ys = [], []
    for low, high in itertools.pairwise(edges):
        own = (x > low) & (x <= high)
        at, mean = (
            binned(x[own], y[own], bins=max(1, round(bins * own.mean())))
            if own.any()
            else (x[:0], y[:0])
        )
        xs += [at, np.array([math.nan])]
        ys += [mean, np.array([math.nan])]
    return np.concatenate(xs[:-1]), np.concatenate(ys[:-1])


def legend_above(axes: Axes) -> None:
    """A legend beside the heading, where it covers no data."""
    axes.legend(
        frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1.01, 1), ncols=4,
        borderaxespad=0.1, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip


def legend_below(axes: Axes) -> None:
    """A legend below the axes, where it covers no data; it must not be wider than they are."""
    _, labels = axes.get_legend_handles_labels()
    columns = 5 if max(map(len, labels), default=0) <= SHORT else 2
    legend = axes.legend(
        frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(-0.01, -0.16), ncols=columns,
        borderaxespad=0.1, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip
    for line in legend.get_lines():
        line.set_alpha(1.0)


def empty(axes: Axes, message: str) -> None:
    """Why there is nothing to draw."""
    axes.text(
        0.5,
        0.5,
        message,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=FAINT,
        fontsize=10,
    )
    axes.set_xticks([])
    axes.set_yticks([])


def duration(seconds: float) -> str:
    """Seconds or milliseconds."""
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"
