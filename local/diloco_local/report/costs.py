"""
What injected faults cost: goodput, restarts, merges.

Pure. The goodput is the part of their time that learners spent on steps that count. A learner has the time from its
first step until the job is complete. A step counts once, even if it is repeated after a restart, and for as long as
it took: a step during a fault at most for as long as this learner's steps take without one, any other at most for
`MAX_STEPS` times as long.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from diloco.runtime.formatting import duration
from diloco_local.report.run_files import F64, Chaos, LearnerRun, Run

INTERVALS = 80
MAX_STEPS = 3.0
MIN_UNDISTURBED = 10
"""With fewer steps without a fault, all steps are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds of all learners together, in equal intervals of the run."""

    edges: F64
    useful: F64
    available: F64

    @property
    def share(self) -> float:
        """Of the whole run; NaN without a step."""
        total = self.available.sum()
        return float(self.useful.sum() / total) if total > 0 else float("nan")


def goodput(run: Run, chaos: Chaos) -> Goodput:
    """The goodput over the time of a run."""
    edges = np.linspace(0.0, max(run.seconds, 1e-9), INTERVALS + 1)
    useful, available = np.zeros(INTERVALS), np.zeros(INTERVALS)
    end = max((float(r.steps.time[-1]) for r in run.learners if r.steps.time.size), default=0.0)
    if run.state == "Complete" and run.merges.time.size:
        end = float(np.nanmax(run.merges.time))
    for learner in run.learners:
        steps = learner.steps
        if not steps.time.size:
            continue
        took = np.nan_to_num(steps.seconds + np.nan_to_num(steps.sync_seconds))
        # Steps that each line stands for, of those that no line before it has.
        progress = np.nan_to_num(np.diff(np.fmax.accumulate(steps.local_step), prepend=np.nan))
        progress[0], progress[steps.time > end] = 1.0, 0.0
        counted = np.minimum(took, _most_seconds(learner, chaos, took))
        useful += np.histogram(steps.time, edges, weights=progress * counted)[0]
        available += _overlap(edges, float(steps.time[0] - took[0]), end)
        for begin, until in run.suspensions:
            available -= _overlap(edges, max(begin, float(steps.time[0])), min(until, end))
    return Goodput(edges=edges, useful=useful, available=np.maximum(available, 0.0))


def _most_seconds(learner: LearnerRun, chaos: Chaos, took: F64) -> F64:
    """For how long each step counts at most."""
    calm = np.ones(took.shape, bool)
    for fault in chaos.faults:
        if fault.target == learner.name:
            calm &= (learner.steps.time < fault.begin) | (learner.steps.time - took > fault.end)
    # The median: the first steps of a process take longer.
    usual = float(np.median(took[calm] if np.count_nonzero(calm) >= MIN_UNDISTURBED else took))
    return np.where(calm, MAX_STEPS * usual, usual)


def _overlap(edges: F64, begin: float, end: float) -> F64:
    """Seconds of each interval that are between `begin` and `end`."""
    inside = np.clip(edges, begin, max(begin, end))
    return np.asarray(np.diff(inside))


def summary(run: Run, chaos: Chaos) -> list[str]:
    """Number of the faults of the last plan and the cost of all, as lines of text."""
    last = chaos.faults[chaos.earlier :]
    counts = Counter(fault.kind for fault in last)
    listed = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    text = f"faults: {len(last)} (seed {chaos.seed}){': ' if listed else ''}{listed}"
    if flipped := sum(fault.flipped for fault in last):
        text += f" ({flipped} bytes inverted)"
    if skipped := sum(chaos.skipped.values()):
        text += f"; {skipped} skipped"
    if chaos.earlier:
        text += f"; {chaos.earlier} more by earlier plans"
    found, learners = goodput(run, chaos), len(run.learners)
    lines = [text]
    if found.available.sum() > 0:
        lines.append(
            f"goodput: {found.share:.1%}: {duration(float(found.useful.sum()))} of useful steps in "
            f"{duration(float(found.available.sum()))} of {learners} {'learner' if learners == 1 else 'learners'}"
        )
    restarts = sum(learner.restarts for learner in run.learners)
    of_syncer = max(0, len(run.epochs) - 1 - len(run.suspensions))
    merges = run.merges
    members = f" of {np.mean(merges.members):.2f} learners on average" if merges.step.size else ""
    lines.append(
        f"restarts: {restarts} of learners, {of_syncer} of the syncer; {merges.step.size} merges{members}"
    )
    return lines
