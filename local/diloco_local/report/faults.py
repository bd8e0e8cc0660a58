"""
The figure of injected faults: which faults when, above the loss and the goodput.

Pure: a `Run` in, a matplotlib figure out.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from diloco_local.faults import KILLS, SYNCER, Kind
from diloco_local.report.costs import goodput
from diloco_local.report.run_files import Chaos, Run
from diloco_local.report.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LEARNER_COLORS,
    RED,
    binned,
    empty,
    in_parts,
    legend_above,
    literal,
)


def draw(run: Run, chaos: Chaos) -> Figure:
    """Faults, loss and goodput over the same time."""
    lanes = [SYNCER, *(learner.name for learner in run.learners)]
    heights = [min(6.0, 0.8 + 0.25 * len(lanes)), 2.2, 1.8]
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.12)
    figure = Figure(figsize=(13.5, sum(heights) + 1.6), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 1, height_ratios=heights)
    top = figure.add_subplot(grid[0])
    loss, share = (figure.add_subplot(grid[row], sharex=top) for row in (1, 2))
    unit, scale = ("minutes", 60.0) if run.seconds >= 180 else ("seconds", 1.0)
    _faults(top, lanes, chaos, run, scale)
    _loss(loss, run, scale)
    _goodput(share, run, chaos, scale)
    top.set_xlim(0, max(run.seconds / scale, 1e-3) * 1.01)
    for axes, heading in ((top, "Injected faults"), (loss, "Loss"), (share, "Goodput")):
        axes.set_title(heading, loc="left", fontsize=11, color=INK, weight="bold")
        axes.tick_params(labelsize=8.5, colors=INK, labelbottom=axes is share)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e6e6e6", lw=0.7)
        axes.set_axisbelow(True)
    share.set_xlabel(f"time ({unit})", fontsize=9, color=INK)
    return figure


def _faults(axes: Axes, lanes: list[str], chaos: Chaos, run: Run, scale: float) -> None:
    colors = dict(zip(Kind, (RED, RED, *LEARNER_COLORS), strict=False))
    for kind in Kind:
        own = [f for f in chaos.faults if f.kind == kind and f.target in lanes]
        if not own:
            continue
        places = [lanes.index(fault.target) for fault in own]
        begins = np.array([fault.begin for fault in own]) / scale
        if kind in KILLS:
            axes.plot(begins, places, "x", color=colors[kind], ms=8, mew=2, label=kind)
            continue
        widths = [max(f.end - f.begin, run.seconds / 400) / scale for f in own]
        axes.barh(places, widths, left=begins, height=0.6, color=colors[kind], label=kind)
    axes.set_yticks(range(len(lanes)), [literal(name) for name in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    if chaos.faults:
        legend_above(axes)


def _loss(axes: Axes, run: Run, scale: float) -> None:
    curves = [(r.steps.time, r.steps.loss) for r in run.learners if r.steps.time.size]
    if curves:
        time, loss = (np.concatenate(parts) for parts in zip(*curves, strict=True))
        at, mean = in_parts(time, loss, run.suspensions)
        axes.plot(at / scale, mean, color=BLUE, lw=1.2, label="mean of learners")
    if run.scores.time.size:
        at, score = binned(run.scores.time, run.scores.loss)
        axes.plot(at / scale, score, color=RED, lw=2, marker=".", label="validation of Θ")
    if curves or run.scores.time.size:
        legend_above(axes)
    else:
        empty(axes, "no step and no evaluation yet")


def _goodput(axes: Axes, run: Run, chaos: Chaos, scale: float) -> None:
    found = goodput(run, chaos)
    known = found.available > 0
    if not known.any():
        empty(axes, "no step yet")
        return
    middle = (found.edges[1:] + found.edges[:-1]) / 2 / scale
    share = np.full(middle.shape, np.nan)
    share[known] = found.useful[known] / found.available[known]
    axes.plot(middle, share, color=GREEN, lw=1.8, drawstyle="steps-mid")
    axes.axhline(found.share, color=FAINT, lw=1, ls="--", label=f"{found.share:.1%} of all time")
    axes.set_ylim(0, 1.15)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_above(axes)
