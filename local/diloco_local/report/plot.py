"""
The figure of a run: losses, which processes ran when, merge times, bytes on the wire.

Pure: a `Run` in, a matplotlib figure out. The colors are the color-blind safe palette of Okabe and
Ito, and series also differ in shape or position. Long runs are sampled to screen resolution.
"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from diloco.runtime.formatting import printable
from diloco_local.report.run_files import F64, LearnerRun, Run

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, INK, FAINT = "#56B4E9", "#333333", "#8a8a8a"
COLORS = ("#a9d0ee", "#80b8e0", "#5fa3d6")
"""Colors of the first incarnation of a learner, then of the others in turn."""

BINS = 240
TICKS = 500
"""Merge ticks drawn per learner; more are indistinguishable."""
FLOOR_SECONDS = 1e-4
"""Lower bound of the logarithmic axis; shorter times are drawn here."""


def draw(run: Run) -> Figure:
    """All plots of a run."""
    lanes = len(run.learners) + 1
    lifetimes_inches = min(9.0, 0.75 + (0.3 if lanes <= 12 else 0.17) * lanes)
    rows = [3.4, lifetimes_inches, 2.4, 1.3]
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12)
    figure = Figure(figsize=(13.5, sum(rows) + 2.9), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(title(run)), x=0.01, ha="left", fontsize=13, color=INK, weight="bold")
    grid = figure.add_gridspec(4, 2, height_ratios=rows)
    scale, unit = _time_unit(run.seconds)

    over_tokens = figure.add_subplot(grid[0, 0])
    over_time = figure.add_subplot(grid[0, 1])
    _losses(over_tokens, over_time, run, scale)
    _dress(over_tokens, "Loss over tokens", "tokens of all learners")
    _dress(over_time, "Loss over time", f"time ({unit})")
    over_tokens.xaxis.set_major_formatter(FuncFormatter(lambda x, _: quantity(x)))

    lifetimes = figure.add_subplot(grid[1, :])
    _lifetimes(lifetimes, run, scale)
    _dress(lifetimes, "Running processes", f"time ({unit})")

    seconds = figure.add_subplot(grid[2, 0])
    _durations(seconds, run)
    _dress(seconds, "Time per merge", "")
    members = figure.add_subplot(grid[3, 0], sharex=seconds)
    _members(members, run)
    _dress(members, "Learners per merge", "global step")

    wire = figure.add_subplot(grid[2:, 1])
    _bytes(wire, run, scale)
    _dress(wire, "Bytes on the wire, cumulative", f"time ({unit})")
    return figure


def _literal(text: str) -> str:
    """Text of untrusted peers, in which matplotlib would find formulas."""
    return printable(text).replace("$", r"\$")


def title(run: Run) -> str:
    """Job, state and progress in one line."""
    goal = f" of {run.steps:,}" if run.steps else ""
    return (
        f"{run.name}  ·  {run.state}  ·  step {run.step:,}{goal}  ·  {quantity(run.tokens)} tokens"
    )


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
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _losses(over_tokens: Axes, over_time: Axes, run: Run, scale: float) -> None:
    drawn: list[F64] = []
    curves = [(s.time, s.loss) for s in (learner.steps for learner in run.learners)]
    curves = [(time, loss) for time, loss in curves if np.isfinite(loss).any()]
    longest = max((time.size for time, _ in curves), default=0)
    for number, (time, loss) in enumerate(curves):
        at, mean = binned(time, loss)
        drawn.append(mean)
        label = f"each learner ({len(curves)})" if number == 0 else None
        for axes, x in ((over_tokens, run.tokens_at(at)), (over_time, at / scale)):
            axes.plot(
                x, mean, color=SKY, lw=0.8, alpha=max(0.15, min(0.6, 3 / len(curves))), label=label
            )
    if curves:
        together = [np.concatenate(parts) for parts in zip(*curves, strict=True)]
        at, mean = binned(together[0], together[1], bins=max(1, min(BINS, longest)))
        for axes, x in ((over_tokens, run.tokens_at(at)), (over_time, at / scale)):
            axes.plot(x, mean, color=BLUE, lw=1.8, label="training, mean of learners")
    scores = run.scores
    good = np.isfinite(scores.loss)
    if good.any():
        drawn.append(scores.loss[good])
        marker = "o" if good.sum() <= 60 else ""
        for axes, x in ((over_tokens, scores.tokens), (over_time, scores.time / scale)):
            axes.plot(
                x[good], scores.loss[good], color=RED, lw=2, marker=marker, ms=4.5,
                label="validation of Θ",
            )  # fmt: skip
        last = f"{scores.loss[good][-1]:.3f}"
        for axes, x in ((over_tokens, scores.tokens), (over_time, scores.time / scale)):
            axes.annotate(
                last, (x[good][-1], scores.loss[good][-1]), xytext=(6, 0), color=RED,
                textcoords="offset points", fontsize=9, va="center", weight="bold",
                annotation_clip=False,
            )  # fmt: skip
    values = np.concatenate(drawn) if drawn else np.zeros(0)
    for axes in (over_tokens, over_time):
        if not values.size:
            _empty(axes, "no step and no evaluation yet")
            continue
        axes.set_ylabel("loss")
        legend = axes.legend(frameon=False, fontsize=9, loc="upper right")
        for line in legend.get_lines():
            line.set_alpha(1.0)
        if values.min() > 0 and values.max() > 1.3 * values.min():
            _log_losses(axes)


def _log_losses(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = np.array([1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8])
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [t for d in decades for t in steps * d if low <= t <= high]
    while len(ticks) > 9:
        ticks = ticks[::2]
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([], minor=True)


def _lifetimes(axes: Axes, run: Run, scale: float) -> None:
    lanes = ["syncer", *(_literal(learner.name) for learner in run.learners)]
    for epoch in run.epochs:
        _bar(axes, 0, epoch.begin, epoch.end, run, scale, color=ORANGE)
        if len(run.epochs) > 1:
            axes.text(
                epoch.begin / scale, 0, f" epoch {epoch.number}", va="center", ha="left",
                fontsize=8, color=INK, clip_on=True,
            )  # fmt: skip
            if epoch is not run.epochs[0]:
                axes.axvline(epoch.begin / scale, color=ORANGE, lw=1, ls="--", zorder=0)
    for lane, learner in enumerate(run.learners, 1):
        for number, lifetime in enumerate(learner.lifetimes):
            shade = COLORS[0] if number == 0 else COLORS[1 + number % 2]
            _bar(axes, lane, lifetime.begin, lifetime.end, run, scale, color=shade)
        _ticks(axes, lane, learner, run, scale)
        restarts = learner.restart_times[np.isfinite(learner.restart_times)]
        axes.plot(
            restarts / scale, np.full(restarts.shape, lane), "x", color=RED, ms=7, mew=2, zorder=5
        )
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9 if len(lanes) <= 24 else 6.5)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, max(run.seconds / scale, 1e-3) * 1.01)
    if len(lanes) == 1 and not run.epochs:
        _empty(axes, "no syncer and no learner yet")
        return
    axes.plot([], [], color=COLORS[0], lw=7, label="running")
    axes.plot([], [], color=COLORS[2], lw=7, label="running, restarted")
    axes.plot([], [], "|", color=INK, ms=6, label="took part in a merge")
    axes.plot([], [], "x", color=RED, ms=6, mew=2, label="restart")
    _legend_above(axes)


def _bar(
    axes: Axes, lane: int, begin: float, end: float, run: Run, scale: float, *, color: str
) -> None:
    # A minimum width keeps short lifetimes visible.
    width = max(end - begin, run.seconds / 600)
    axes.barh(lane, width / scale, left=begin / scale, height=0.72, color=color, zorder=2)


def _ticks(axes: Axes, lane: int, learner: LearnerRun, run: Run, scale: float) -> None:
    times = learner.merge_times
    if times.size > TICKS and run.seconds > 0:
        times = np.unique(np.round(times / run.seconds * TICKS)) / TICKS * run.seconds
    axes.vlines(times / scale, lane + 0.06, lane + 0.36, color=INK, lw=0.6, alpha=0.75, zorder=3)


def _durations(axes: Axes, run: Run) -> None:
    merges = run.merges
    if not merges.step.size:
        _empty(axes, "no merge yet")
        return
    axes.set_yscale("log")
    for name, seconds, color, style in (
        ("wait for quorum", merges.quorum_seconds, BLUE, "-"),
        ("grace window", merges.grace_seconds, GREEN, "--"),
        ("sync", merges.sync_seconds, RED, "-."),
    ):
        shown = np.maximum(seconds, FLOOR_SECONDS)
        few = np.linspace(0, shown.size - 1, min(shown.size, 1500)).astype(np.int64)
        axes.plot(merges.step[few], shown[few], ".", color=color, ms=2, alpha=0.25)
        axes.plot(*binned(merges.step, shown, bins=80), style, color=color, lw=1.6, label=name)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _duration(y)))
    _legend_above(axes)
    axes.tick_params(labelbottom=False)


def _members(axes: Axes, run: Run) -> None:
    merges = run.merges
    if not merges.step.size:
        _empty(axes, "no merge yet")
        return
    order = np.argsort(merges.step, kind="stable")
    few = order[np.linspace(0, order.size - 1, min(order.size, 3000)).astype(np.int64)]
    axes.plot(merges.step[few], merges.members[few], ".", color=FAINT, ms=3, alpha=0.5)
    axes.plot(*binned(merges.step, merges.members, bins=80), color=INK, lw=1.6, label="mean")
    axes.step(
        merges.step[few], merges.quorum[few], color=RED, lw=1.2, ls="--", where="post",
        label="quorum",
    )  # fmt: skip
    axes.set_ylim(0, max(1.0, float(np.nanmax(merges.members))) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    _legend_above(axes)


def _bytes(axes: Axes, run: Run, scale: float) -> None:
    merges = run.merges
    if not merges.time.size:
        _empty(axes, "no merge yet")
        return
    few = np.linspace(0, merges.time.size - 1, min(merges.time.size, 1000)).astype(np.int64)
    for name, each, color, style in (
        ("up: learners to syncer", merges.bytes_up, BLUE, "-"),
        ("down: syncer to learners", merges.bytes_down, ORANGE, "--"),
    ):
        total = np.cumsum(each)
        label = f"{name}, {quantity(total[-1])}B"
        axes.plot(merges.time[few] / scale, total[few], style, color=color, lw=1.8, label=label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{quantity(y)}B" if y else "0"))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(run.seconds / scale, 1e-3) * 1.01)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _dress(axes: Axes, heading: str, label: str) -> None:
    axes.set_title(heading, loc="left", fontsize=11, color=INK, weight="bold")
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.yaxis.label.set_fontsize(9)
    axes.tick_params(labelsize=8.5 if len(axes.get_yticks()) <= 25 else 6.5, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#e6e6e6", lw=0.7)
    axes.set_axisbelow(True)


def _legend_above(axes: Axes) -> None:
    axes.legend(
        frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1.01, 1), ncols=4,
        borderaxespad=0.1, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip


def _empty(axes: Axes, message: str) -> None:
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


def _time_unit(seconds: float) -> tuple[float, str]:
    for size, name in ((2 * 86400, "days"), (2 * 3600, "hours"), (180, "minutes")):
        if seconds >= size:
            return {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}[name], name
    return 1.0, "seconds"


def _duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"
