"""
The figure of a run: losses, which processes ran when, merge times, bytes on the wire, and (`details`) weights,
throughput, step times, norms.

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

from diloco_local.report import details
from diloco_local.report.run_files import F64, LearnerRun, Run
from diloco_local.report.style import (
    BINS,
    BLUE,
    FAINT,
    GREEN,
    INK,
    LEARNER_COLORS,
    ORANGE,
    RED,
    SKY,
    binned,
    duration,
    empty,
    in_parts,
    legend_above,
    legend_below,
    literal,
    quantity,
)

COLORS = ("#a9d0ee", "#80b8e0", "#5fa3d6")
"""Colors of the first incarnation of a learner, then of the others in turn."""

TICKS = 500
"""Merge ticks drawn per learner; more are indistinguishable."""

LABELLED = 0.06
"""Part of the run that an epoch must last to have its label, which would overlap the next one."""
FLOOR_SECONDS = 1e-4
"""Lower bound of the logarithmic axis; shorter times are drawn here."""


def draw(run: Run) -> Figure:
    """All plots of a run."""
    lanes = len(run.learners) + 1
    lifetimes_inches = min(9.0, 0.75 + (0.3 if lanes <= 12 else 0.17) * lanes)
    rows = [3.4, lifetimes_inches, 0.8 * lifetimes_inches, 2.4, 1.3, 2.2, 2.2, 2.2]
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12)
    figure = Figure(figsize=(13.5, sum(rows) + 5.2), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(literal(title(run)), x=0.01, ha="left", fontsize=13, color=INK, weight="bold")
    grid = figure.add_gridspec(len(rows), 2, height_ratios=rows)
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

    weights = figure.add_subplot(grid[2, :])
    details.weights(weights, run)
    _dress(weights, "Part of the weight in each merge", "merge")
    weights.grid(visible=False)

    seconds = figure.add_subplot(grid[3, 0])
    _durations(seconds, run)
    _dress(seconds, "Time per merge", "")
    members = figure.add_subplot(grid[4, 0], sharex=seconds)
    _members(members, run)
    _dress(members, "Learners per merge", "global step")

    wire = figure.add_subplot(grid[3:5, 1])
    _bytes(wire, run, scale)
    _dress(wire, "Bytes on the wire, cumulative", f"time ({unit})")

    for place, plot, heading, label in (
        ((5, 0), details.throughput, "Tokens per second", f"time ({unit})"),
        ((5, 1), details.step_times, "Duration of a step", ""),
        ((6, 0), details.delta_norms, "Norm of the merged delta", "global step"),
        ((6, 1), details.base_ages, "Age of the oldest base in a merge", "global step"),
        ((7, 0), details.learning_rates, "Learning rate of each learner", f"time ({unit})"),
        ((7, 1), details.result_ages, "Age of results when learners apply them", f"time ({unit})"),
    ):
        axes = figure.add_subplot(grid[place])
        plot(axes, run, scale)
        _dress(axes, heading, label)
    return figure


def title(run: Run) -> str:
    """Job, state and progress in one line."""
    goal = f" of {run.steps:,}" if run.steps else ""
    return (
        f"{run.name}  ·  {run.state}  ·  step {run.step:,}{goal}  ·  {quantity(run.tokens)} tokens"
    )


def _losses(over_tokens: Axes, over_time: Axes, run: Run, scale: float) -> None:
    drawn: list[F64] = []
    curves = [(learner.name, learner.steps.time, learner.steps.loss) for learner in run.learners]
    curves = [curve for curve in curves if np.isfinite(curve[2]).any()]
    longest = max((time.size for _, time, _ in curves), default=0)
    apart = len(curves) <= len(LEARNER_COLORS)
    for number, (name, time, loss) in enumerate(curves):
        at, mean = in_parts(time, loss, run.suspensions)
        drawn.append(mean[np.isfinite(mean)])
        label = f"each learner ({len(curves)})" if number == 0 else None
        for axes, x in ((over_tokens, run.tokens_at(at)), (over_time, at / scale)):
            axes.plot(
                x, mean, color=LEARNER_COLORS[number] if apart else SKY, lw=0.9,
                alpha=0.7 if apart else max(0.15, min(0.6, 3 / len(curves))),
                label=literal(name) if apart else label,
            )  # fmt: skip
    if len(curves) > 1:
        together = [np.concatenate(parts) for parts in list(zip(*curves, strict=True))[1:]]
        at, mean = in_parts(
            together[0], together[1], run.suspensions, bins=max(1, min(BINS, longest) // 3)
        )
        for axes, x in ((over_tokens, run.tokens_at(at)), (over_time, at / scale)):
            axes.plot(x, mean, color=INK, lw=1.8, label="mean of learners")
    scores = run.scores
    good = np.isfinite(scores.loss)
    if good.any():
        drawn.append(scores.loss[good])
        marker = "o" if good.sum() <= 60 else ""
        at, loss = in_parts(scores.time[good], scores.loss[good], run.suspensions)
        # A clock that was set back leaves times that do not ascend.
        order = np.argsort(scores.time[good], kind="stable")
        tokens = np.interp(at, scores.time[good][order], scores.tokens[good][order])
        for axes, x in ((over_tokens, tokens), (over_time, at / scale)):
            axes.plot(x, loss, color=RED, lw=2, marker=marker, ms=4.5, label="validation of Θ")
        last = f"{scores.loss[good][-1]:.3f}"
        for axes, x in ((over_tokens, scores.tokens), (over_time, scores.time / scale)):
            axes.annotate(
                last, (x[good][-1], scores.loss[good][-1]), xytext=(6, 0), color=RED,
                textcoords="offset points", fontsize=9, va="center", weight="bold",
                annotation_clip=False,
            )  # fmt: skip
    if drawn:
        legend_below(over_tokens)
    values = np.concatenate(drawn) if drawn else np.zeros(0)
    for axes in (over_tokens, over_time):
        if not values.size:
            empty(axes, "no step and no evaluation yet")
            continue
        axes.set_ylabel("loss")
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
    lanes = ["syncer", *(literal(learner.name) for learner in run.learners)]
    for epoch in run.epochs:
        _bar(axes, 0, epoch.begin, epoch.end, run, scale, color=ORANGE)
        if len(run.epochs) > 1:
            if epoch.end - epoch.begin >= LABELLED * run.seconds:
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
        refused = learner.refusal_times[:TICKS] / scale
        axes.plot(refused, np.full(refused.shape, lane - 0.25), "v", color=RED, ms=4, zorder=4)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9 if len(lanes) <= 24 else 6.5)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, max(run.seconds / scale, 1e-3) * 1.01)
    if len(lanes) == 1 and not run.epochs:
        empty(axes, "no syncer and no learner yet")
        return
    axes.plot([], [], color=COLORS[0], lw=7, label="running")
    axes.plot([], [], color=COLORS[2], lw=7, label="running, restarted")
    axes.plot([], [], "|", color=INK, ms=6, label="took part in a merge")
    axes.plot([], [], "x", color=RED, ms=6, mew=2, label="restart")
    if any(learner.refusal_times.size for learner in run.learners):
        axes.plot([], [], "v", color=RED, ms=4, label="refusal")
    for begin, end in run.suspensions:
        axes.axvspan(begin / scale, end / scale, color="#eeeeee", zorder=0)
    if run.suspensions:
        axes.plot([], [], color="#dddddd", lw=7, label="suspended")
    legend_above(axes)


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
        empty(axes, "no merge yet")
        return
    axes.set_yscale("log")
    for name, seconds, color, style in (
        ("wait for quorum", merges.quorum_seconds, BLUE, "-"),
        ("grace, as waited", merges.grace_seconds, GREEN, "--"),
        ("sync", merges.sync_seconds, RED, "-."),
    ):
        shown = np.maximum(seconds, FLOOR_SECONDS)
        few = np.linspace(0, shown.size - 1, min(shown.size, 1500)).astype(np.int64)
        axes.plot(merges.step[few], shown[few], ".", color=color, ms=2, alpha=0.25)
        axes.plot(*binned(merges.step, shown, bins=80), style, color=color, lw=1.6, label=name)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: duration(y)))
    legend_above(axes)
    axes.tick_params(labelbottom=False)


def _members(axes: Axes, run: Run) -> None:
    merges = run.merges
    if not merges.step.size:
        empty(axes, "no merge yet")
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
    legend_above(axes)


def _bytes(axes: Axes, run: Run, scale: float) -> None:
    merges = run.merges
    if not merges.time.size:
        empty(axes, "no merge yet")
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
    legend_below(axes)


def _dress(axes: Axes, heading: str, label: str) -> None:
    axes.set_title(heading, loc="left", fontsize=11, color=INK, weight="bold")
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.yaxis.label.set_fontsize(9)
    axes.tick_params(labelsize=8.5 if len(axes.get_yticks()) <= 25 else 6.5, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#e6e6e6", lw=0.7)
    axes.set_axisbelow(True)


def _time_unit(seconds: float) -> tuple[float, str]:
    for size, name in ((2 * 86400, "days"), (2 * 3600, "hours"), (180, "minutes")):
        if seconds >= size:
            return {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}[name], name
    return 1.0, "seconds"
