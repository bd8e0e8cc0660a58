"""
How many learners each region may have. Pure.

The only part of the spec document that a syncer takes over while it runs: the manifest's numbers of
learners change more often than anything else, and a restart of the syncer would stop every merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diloco.errors import ConfigError
from diloco.spec import RunSpec

MAX_LEARNERS_PER_REGION = 1000
"""As in the manifest."""


def beyond(learner: str, limits: Mapping[str, int]) -> str:
    """
    Why a learner, by its name, is not one of those that may join; empty: it is one.

    Args:
        learner: its name, "<region>/<index>".
        limits: region → number of its learners.
    """
    region, _, index = learner.rpartition("/")
    if region not in limits:
        return (
            f"{learner} belongs to region {region}, but this syncer's spec has {', '.join(sorted(limits))}; "
            "add the region in the cluster of the syncer"
        )
    if index.isdecimal() and int(index) < limits[region]:
        return ""
    return (
        f"{learner} is beyond the {limits[region]} learners of region {region} in this syncer's spec; "
        "raise regions[].learners in the cluster of the syncer"
    )


def parse(text: str, spec: RunSpec, *, source: str = "spec document") -> dict[str, int]:
    """
    The limits of a new version of the spec document.

    Args:
        text: the document.
        spec: what this syncer runs; everything but the numbers of learners must be the same.
        source: of the text, for messages.

    Raises:
        ConfigError: it is torn or another spec, a number is out of bounds, or no quorum could form.
    """
    new = RunSpec.from_json(text, source=source)
    if replace(new, learners=spec.learners) != spec:
        raise ConfigError(
            f"{source}: more than the numbers of learners has changed; restart the syncer"
        )
    for region, number in new.learners.items():
        if type(number) is not int or not 0 <= number <= MAX_LEARNERS_PER_REGION:
            raise ConfigError(
                f"{source}: learners of region {region} is {number!r}, expected a whole number from 0 "
                f"to {MAX_LEARNERS_PER_REGION}"
            )
    if (total := sum(new.learners.values())) < spec.quorum:
        raise ConfigError(f"{source}: {total} learners cannot form the quorum of {spec.quorum}")
    return new.learners
