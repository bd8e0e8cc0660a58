"""
Plots about single learners and merges: weights, throughput, step times, learning rates, norms, versions. Pure.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from diloco_local.report.run_files import F64, Run
from diloco_local.report.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LEARNER_COLORS,
    SKY,
    binned,
    duration,
    empty,
    in_parts,
    legend_above,
    literal,
    quantity,
)

COLUMNS = 400
"""Of the weights; more merges are averaged."""
INTERVALS = 80
"""Of the throughput."""
MAX_DOTS = 1500
MAX_BOXES = 32


def weights(axes: Axes, run: Run) -> None:
    """Learner × merge: the learner's part of the weights, white where it was no member."""
    count = run.merges.step.size
    if not count or not run.learners:
        empty(axes, "no merge yet")
        return
    columns = min(COLUMNS, count)
    place = np.arange(count) * columns // count
    merges = np.bincount(place, minlength=columns)
    shares = np.stack(
        [
            np.bincount(
                place[learner.merge_numbers.astype(np.int64)],
                weights=learner.merge_shares,
                minlength=columns,
            )
            / merges
            for learner in run.learners
        ]
    )
    shown = np.ma.masked_equal(shares, 0.0)
    image = axes.imshow(
        shown, aspect="auto", interpolation="nearest", cmap="viridis_r", vmin=0, vmax=float(shares.max()) or 1.0,
        extent=(0, count, len(run.learners) - 0.5, -0.5),
    )  # fmt: skip
    names = [literal(learner.name) for learner in run.learners]
    axes.set_yticks(range(len(names)), names, fontsize=9 if len(names) <= 24 else 6.5)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=10)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))


def throughput(axes: Axes, run: Run, scale: float) -> None:
    """Tokens that learners trained on, and those of them that a merge took, per second."""
    grid = np.linspace(0, run.seconds, INTERVALS + 1)
    middle, width = (grid[1:] + grid[:-1]) / 2, run.seconds / INTERVALS
    if width <= 0 or not any(learner.steps.time.size for learner in run.learners):
        empty(axes, "no step yet")
        return
    axes.plot(
        middle / scale, np.diff(run.tokens_at(grid)) / width, color=BLUE, lw=1.6, label="trained"
    )
    fragments = run.spec.get("fragments")
    if run.merges.time.size and isinstance(fragments, int) and fragments > 0:
        # Each merge is of one fragment, a part of 1/P of the model.
        each = run.merges.tokens / fragments
        merged, _ = np.histogram(run.merges.time, bins=grid, weights=each)
        axes.plot(middle / scale, merged / width, "--", color=GREEN, lw=1.6, label="merged")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: quantity(y)))
    legend_above(axes)


def step_times(axes: Axes, run: Run, scale: float) -> None:
    """Per learner: median, quartiles, and the 5th and 95th percentile."""
    found = [
        (learner.name, learner.steps.seconds[learner.steps.seconds > 0]) for learner in run.learners
    ]
    found = [(name, seconds) for name, seconds in found if seconds.size]
    if not found:
        empty(axes, "no step yet")
        return
    if len(found) > MAX_BOXES:
        note = f"the first {MAX_BOXES} of {len(found)} learners"
        axes.set_title(note, loc="right", fontsize=8.5, color=INK)
        found = found[:MAX_BOXES]
    for row, (_, own) in enumerate(found):
        low, q1, middle, q3, high = np.percentile(own, (5, 25, 50, 75, 95))
        axes.hlines(row, low, high, color=INK, lw=1)
        axes.barh(row, max(q3 - q1, 1e-9), left=q1, height=0.6, color=SKY, edgecolor=INK, lw=0.8)
        axes.vlines(middle, row - 0.3, row + 0.3, color=INK, lw=2)
    names = [literal(name) for name, _ in found]
    axes.set_yticks(range(len(names)), names, fontsize=9 if len(names) <= 12 else 6.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: duration(round(x, 6))))


def learning_rates(axes: Axes, run: Run, scale: float) -> None:
    """Of each learner: they agree where the schedule follows the global step."""
    curves = [(learner.steps.time, learner.steps.learning_rate) for learner in run.learners]
    curves = [(time, rate) for time, rate in curves if np.isfinite(rate).any()]
    if not curves:
        empty(axes, "no learning rate known")
        return
    for number, (time, rate) in enumerate(curves):
        at, mean = in_parts(time, rate, run.suspensions)
        apart = len(curves) <= len(LEARNER_COLORS)
        color = LEARNER_COLORS[number] if apart else SKY
        axes.plot(at / scale, mean, color=color, lw=1.2, alpha=0.7)
    axes.set_xlim(0, max(run.seconds / scale, 1e-3) * 1.01)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def result_ages(axes: Axes, run: Run, scale: float) -> None:
    """Global steps from a merge to the step that applied its result: median and largest of all learners."""
    time = np.concatenate([np.zeros(0), *(learner.steps.time for learner in run.learners)])
    age = np.concatenate([np.zeros(0), *(learner.steps.result_age for learner in run.learners)])
    time, age = time[np.isfinite(age)], age[np.isfinite(age)]
    if not age.size or run.seconds <= 0:
        empty(axes, "no result applied yet")
        return
    place = np.clip(time / run.seconds * INTERVALS, 0, INTERVALS - 1).astype(np.int64)
    filled = np.unique(place)
    middle = (filled + 0.5) / INTERVALS * run.seconds / scale
    for statistic, style, label in ((np.max, "--", "largest"), (np.median, "-", "median")):
        values = [statistic(age[place == interval]) for interval in filled]
        axes.plot(middle, values, style, color=INK, lw=1.4, marker=".", ms=3, label=label)
    axes.set_xlim(0, run.seconds / scale * 1.01)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("global steps")
    legend_above(axes)


def delta_norms(axes: Axes, run: Run, scale: float) -> None:
    """Of each merge; its growth is the first sign of divergence."""
    norms = run.merges.delta_norm
    _over_steps(axes, run.merges.step, np.where(norms > 0, norms, np.nan), "no norm yet")
    if axes.lines:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def base_ages(axes: Axes, run: Run, scale: float) -> None:
    """H plus the overlap, unless a member missed results."""
    _over_steps(axes, run.merges.step, run.merges.base_age, "no merge of deltas yet")
    if axes.lines:
        axes.set_ylim(bottom=0)
        axes.set_ylabel("global steps")


def _over_steps(axes: Axes, step: F64, values: F64, nothing: str) -> None:
    good = np.isfinite(step) & np.isfinite(values)
    if not good.any():
        empty(axes, nothing)
        return
    step, values = step[good], values[good]
    few = np.linspace(0, step.size - 1, min(step.size, MAX_DOTS)).astype(np.int64)
    axes.plot(step[few], values[few], ".", color=FAINT, ms=2.5, alpha=0.5)
    axes.plot(*binned(step, values, bins=80), color=INK, lw=1.6)
