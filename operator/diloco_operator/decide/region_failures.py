"""
Regions of which learners failed: what to report to the syncer about the operator's own regions, and what
the syncer reports about the others.

Pure. The operator of a region knows why its learners ended; the syncer's region only observes that they
are gone, and fails the job when too few are left in all regions (`phase`). The syncer repeats each report
until its process ends, so every reconcile compares.
"""

from __future__ import annotations

from diloco.runtime.formatting import shorten
from diloco_operator.decide.phase import LEARNER_REASONS, MAX_REASON, Lifecycle, Phase
from diloco_operator.state.job_state import JobState, OwnRegion
from diloco_operator.state.learner_counts import LearnerCounts
from diloco_operator.state.observation import RegionFailure

_MAX_MESSAGE = 300


def to_report(state: JobState, lifecycle: Lifecycle) -> tuple[RegionFailure, ...]:
    """What to report to the syncer of another cluster, because its answer differs."""
    if state.answer is None or state.has_syncer:
        return ()
    known = {
        failure.region: (failure.reason, failure.learners)
        for failure in state.answer.region_failures
    }
    own = [_of_region(region, lifecycle) for region in state.regions]
    return tuple(
        failure for failure in own if not _is_known(failure, *known.get(failure.region, ("", 0)))
    )


def _is_known(own: RegionFailure, reason: str, num_learners: int) -> bool:
    """Whether the syncer has this failure; an older one drops the number of learners, and repeats 0."""
    return reason == own.reason and num_learners in (own.learners, 0)


def _of_region(own: OwnRegion, lifecycle: Lifecycle) -> RegionFailure:
    """Why learners of the region have failed, and how many; without a reason: none has."""
    name, failed, total = own.region.name, lifecycle.failed, len(own.learners)
    if failed is not None and not lifecycle.follows:
        # A job that failed there because of its learners has stopped all of them, until a person resumes it.
        counted = total if failed.reason in LEARNER_REASONS else 0
        return RegionFailure(
            region=name, reason=failed.reason, message=failed.message, learners=counted
        )
    names = {learner.name for learner in own.learners}
    ends = [end for end in lifecycle.failed_learners if end.learner in names]
    if lifecycle.phase is not Phase.RUNNING or not ends:
        return RegionFailure(region=name, reason="", message="")
    some = f"{len(ends)} of {total}" if len(ends) < total else "all its"
    message = f"{some} learners failed, {ends[0].learner}: {ends[0].message_and_log}"
    return RegionFailure(region=name, reason=ends[0].reason, message=message, learners=len(ends))


def describe_failed(state: JobState, counts: LearnerCounts) -> str:
    """
    Regions of other clusters of which all learners failed, and why; "": none.

    A region whose learners train has not failed, whatever its operator has reported before.
    """
    failures = state.answer.region_failures if state.answer else ()
    own = {region.region.name for region in state.regions}
    idle = {region.name for region in counts.regions if not region.training}
    return "; ".join(
        f"region {failure.region} failed: {shorten(failure.reason, MAX_REASON)}: "
        f"{shorten(failure.message, _MAX_MESSAGE)}"
        for failure in failures
        if failure.region in idle - own
        and (not failure.learners or failure.learners >= counts.of(failure.region).desired)
    )
