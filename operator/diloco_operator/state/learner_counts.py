"""
Learner counts by region: from pods in the operator's own regions, else from the syncer's answer.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from diloco_job.names import learner_name
from diloco_job.types import Region
from diloco_operator.state.job_state import JobState, OwnRegion
from diloco_operator.state.observation import LearnerAnswer
from diloco_operator.state.previous_status import time_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCounts:
    """Learners of one region."""

    name: str
    desired: int
    ready: int | None
    """Registered with the syncer; None: unknown, because the syncer does not reply."""
    training: int | None
    """Take part in rounds; None: unknown."""
    restarts: int
    last_seen: str
    """RFC 3339; "": never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCounts:
    """Learners of a whole job."""

    regions: tuple[RegionCounts, ...]
    """In the manifest's order."""
    reporting: int
    """Learners of the job that report to the syncer; 0 without an answer."""

    def of(self, name: str) -> RegionCounts:
        """The region of that name."""
        return next(region for region in self.regions if region.name == name)


def count_learners(state: JobState) -> LearnerCounts:
    """Count the learners of all regions of the manifest."""
    answers = state.answer.learners if state.answer else ()
    by_name = {learner.name: learner for learner in answers}
    own = {region.region.name: region for region in state.regions}
    return LearnerCounts(
        regions=tuple(
            _region(state, region, own.get(region.name), _desired(region, by_name))
            for region in state.job.spec.regions
        ),
        reporting=sum(learner.state == "Training" for learner in answers),
    )


def _desired(region: Region, by_name: Mapping[str, LearnerAnswer]) -> list[LearnerAnswer]:
    """Answers about the learners that a region should have; the syncer also remembers others."""
    desired = (learner_name(region.name, index) for index in range(region.learners))
    return [by_name[name] for name in desired if name in by_name]


def _region(
    state: JobState, region: Region, own: OwnRegion | None, answers: Sequence[LearnerAnswer]
) -> RegionCounts:
    previous = state.previous.region(region.name)
    training: int | None = sum(learner.state == "Training" for learner in answers)
    ready: int | None = sum(learner.state != "Gone" for learner in answers)
    if own is not None:
        ready = own.num_ready
        if state.answer is None:
            # A registered learner counts as training, unless the last answer, which still counts, had fewer.
            last = _count(previous, "training") if state.reachable else None
            training = ready if last is None else min(ready, last)
    elif state.answer is None:
        ready = _count(previous, "ready") if state.reachable else None
        training = _count(previous, "training") if state.reachable else None
    return RegionCounts(
        name=region.name,
        desired=region.learners,
        ready=ready,
        training=training,
        restarts=max(
            _restarts(own, answers), 0 if state.answer else _count(previous, "restarts") or 0
        ),
        last_seen=_last_seen(state, answers) or str(previous.get("lastSeenTime", "")),
    )


def _restarts(own: OwnRegion | None, answers: Sequence[LearnerAnswer]) -> int:
    """Restarts as learners report them, or as the kubelet counts them where that is more."""
    counted = {learner.name: learner.restarts for learner in own.learners} if own else {}
    reported = {learner.name: learner.restarts for learner in answers}
    return sum(max(counted.get(name, 0), reported.get(name, 0)) for name in {*counted, *reported})


def _last_seen(state: JobState, answers: Sequence[LearnerAnswer]) -> str:
    ages = [learner.seconds_since_heard for learner in answers if learner.seconds_since_heard >= 0]
    if state.answer is None or not ages:
        return ""
    return time_text(state.answer.at - timedelta(seconds=min(ages)))


def _count(previous: Mapping[str, Any], field: str) -> int | None:
    value = previous.get(field)
    return value if isinstance(value, int) else None
