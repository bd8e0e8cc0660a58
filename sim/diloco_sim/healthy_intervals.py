"""Who is healthy when, and what may explain that nothing is merged: both by the plan of faults alone."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_sim.faults import CRASHES, DISK, LINK, POWER, Fault, Kind, Plan

BOOT_SECONDS = 10.0
"""After a crash of the syncer its disk decides when it serves again."""

BELIEVED_SECONDS = 60.0
"""The syncer believes no longer step without a measurement (core/learners.py, `UNMEASURED_SECONDS`)."""

MEASURED_STEPS = 20
"""After so many, a step of a day is a millionth of the moving average of steps (core/pacing.py, `ema`)."""

Window = tuple[float, float]


class Health:
    """
    Args:
        plan: of the world.
        syncer: its process.
        learners: that count for a quorum.
        quorum: K.
        all_learners: of the world, in the order of `Kind.SCALE`.
        trainer: suffix of the name of a trainer process.
    """

    def __init__(
        self, plan: Plan, *, syncer: str, learners: Sequence[str], all_learners: Sequence[str],
        quorum: int, trainer: str,
    ) -> None:  # fmt: skip
        self._syncer, self._learners, self._quorum = syncer, learners, quorum
        self._windows: dict[str, list[Window]] = {name: [] for name in (syncer, *all_learners)}
        for fault in plan:
            if fault.kind in DISK:
                continue  # no decision and no learner waits for a disk
            targets = {fault.target.removesuffix(trainer), fault.peer} - {"", POWER}
            if fault.kind is Kind.SCALE:
                targets = set(all_learners[max(1, int(fault.amount)) :])
            elif fault.kind in LINK:
                targets.discard(syncer)
            for name in targets & self._windows.keys():
                self._windows[name].append((fault.begin, fault.end))
        self._windows[syncer] += _boots(plan, syncer)

    def since(self, now: float) -> float | None:
        """Since when a quorum of learners and the syncer have had no fault; None: they have one now."""
        learners = sorted(
            since for name in self._learners if (since := self._since(name, now)) is not None
        )
        syncer = self._since(self._syncer, now)
        if syncer is None or len(learners) < self._quorum:
            return None
        return max(syncer, learners[self._quorum - 1])

    def of(self, name: str, now: float) -> float | None:
        """Since when a learner and the syncer have had no fault; None: they have one now."""
        since, syncer = self._since(name, now), self._since(self._syncer, now)
        return None if since is None or syncer is None else max(since, syncer)

    def _since(self, name: str, now: float) -> float | None:
        begun = [window for window in self._windows[name] if window[0] <= now]
        last = max((end for _, end in begun), default=0.0)
        return last if last <= now else None


def _boots(plan: Plan, syncer: str) -> list[Window]:
    """From a start of the syncer until no fault of its disk can delay it."""
    ends = (f for f in plan.only(*CRASHES, Kind.LEAVE) if f.target == syncer)
    starts = [(0.0, 0.0), *((fault.begin, fault.end) for fault in ends)]
    windows = []
    for begin, end in starts:
        for fault in plan:  # in the order of their beginning
            if fault.kind in DISK and fault.begin < end + BOOT_SECONDS and fault.end > begin:
                end = max(end, fault.end)
        if end > begin:
            windows.append((begin, end))
    return windows


class ExplainedGap:
    """
    How long nothing need be merged before the status must show it.

    It is what the syncer allows (docs/algorithm.md, "Failure detection") with the longest step that a
    learner can have measured, or that the syncer believes, and a tick.

    Args:
        plan: of the world.
        between: local steps between two merges, and τ.
        longest_step: seconds of the longest step that a learner trains.
    """

    def __init__(self, plan: Plan, *, between: float, longest_step: float) -> None:
        self._between, self._longest_step = between, longest_step
        # Who states no block as trained on gets no further one: its next step is as long as the fault.
        kinds = (Kind.JUMP, Kind.PAUSE, Kind.BLOCKS_KEPT)
        self._measured = [f for f in plan.only(*kinds) if _seconds(f) > 0]
        self._stated = plan.only(Kind.LIE_SECONDS)

    def seconds(self, since: float, now: float) -> float:
        """What explains that nothing was merged in this time."""
        longest = self._longest_step
        earlier = since - MEASURED_STEPS * longest
        paused = sum(_seconds(f) for f in self._measured if f.begin <= now and f.end >= earlier)
        if any(f.begin <= now and f.end >= earlier for f in self._stated):
            longest = max(longest, BELIEVED_SECONDS)
        return 35.0 + 10 * self._between * (longest + paused)


def _seconds(fault: Fault) -> float:
    """By how much a step seems longer."""
    return fault.amount if fault.kind is Kind.JUMP else fault.end - fault.begin
