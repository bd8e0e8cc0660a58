"""
Learners, counted region by region: own ones by their pods, the others by what the syncer says.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from diloco_operator.api import Region
from diloco_operator.before import time_text
from diloco_operator.observed import LearnerAnswer
from diloco_operator.situation import OwnRegion, Situation


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTally:
    """Learners of one region."""

    name: str
    desired: int
    ready: int | None
    """Registered with the syncer; None: nobody knows, the syncer does not answer."""
    training: int | None
    """Take part in rounds; None: nobody knows."""
    restarts: int
    last_seen: str
    """RFC 3339; "": never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Learners of a whole job."""

    regions: tuple[RegionTally, ...]
    """In the manifest's order."""
    reporting: int
    """Learners of the job that report to the syncer; 0 without an answer."""

    def of(self, name: str) -> RegionTally:
        """The region of that name."""
        return next(one for one in self.regions if one.name == name)


def tally(now: Situation) -> Tally:
    """Count the learners of all regions of the manifest."""
    said: dict[str, list[LearnerAnswer]] = {}
    for one in now.answer.learners if now.answer else ():
        said.setdefault(one.region, []).append(one)
    own = {one.region.name: one for one in now.regions}
    regions = tuple(
        _region(now, region, own.get(region.name), _of_region(region, said))
        for region in now.job.spec.regions
    )
    return Tally(
        regions=regions,
        reporting=sum(one.state == "Training" for some in said.values() for one in some),
    )


def _of_region(region: Region, said: dict[str, list[LearnerAnswer]]) -> dict[str, LearnerAnswer]:
    """What the syncer says of the learners that a region should have; it remembers more."""
    named = {f"{region.name}/{index}" for index in range(region.learners)}
    return {one.name: one for one in said.get(region.name, ()) if one.name in named}


def _region(
    now: Situation, region: Region, own: OwnRegion | None, said: dict[str, LearnerAnswer]
) -> RegionTally:
    before = now.before.region(region.name)
    training: int | None = sum(one.state == "Training" for one in said.values())
    ready: int | None = sum(one.state != "Gone" for one in said.values())
    if own is not None:
        ready = own.num_ready
        # Who is registered trains, as far as can be known without the syncer.
        training = training if now.answer else ready
    elif now.answer is None:
        ready = _count(before, "ready") if now.reachable else None
        training = _count(before, "training") if now.reachable else None
    return RegionTally(
        name=region.name,
        desired=region.learners,
        ready=ready,
        training=training,
        restarts=max(_restarts(own, said), 0 if now.answer else _count(before, "restarts") or 0),
        last_seen=_last_seen(now, said) or str(before.get("lastSeenTime", "")),
    )


def _restarts(own: OwnRegion | None, said: dict[str, LearnerAnswer]) -> int:
    """Lives as learners tell them; the kubelet's count where it saw more."""
    seen = {one.name: one.restarts for one in own.learners} if own else {}
    told = {name: one.restarts for name, one in said.items()}
    return sum(max(seen.get(name, 0), told.get(name, 0)) for name in {*seen, *told})


def _last_seen(now: Situation, said: dict[str, LearnerAnswer]) -> str:
    heard = [one.seconds_since_heard for one in said.values() if one.seconds_since_heard >= 0]
    if now.answer is None or not heard:
        return ""
    return time_text(now.answer.at - timedelta(seconds=min(heard)))


def _count(before: Any, field: str) -> int | None:
    value = before.get(field)
    return value if isinstance(value, int) else None
