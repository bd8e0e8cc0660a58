"""
Rules between fields, and what may not change: two tables.

Pure. One rule is one entry: the field it is reported at, what it reads, the predicate, the message.
The CRD carries the same entries as CEL with the same words, so a message is a template with values,
as CEL's `format` has it, and leaves out the path (the server puts it before).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from diloco_operator import names
from diloco_operator.api import DiLoCoJob

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule between fields of one manifest."""

    path: str
    """Where it is reported."""
    reads: tuple[str, ...]
    """Every field the predicate looks at; the rule is silent while one has no usable value."""
    holds: Callable[[DiLoCoJob], bool]
    message: str
    """What was seen, what is allowed; `{}` stands for one of `values`."""
    values: Callable[[DiLoCoJob], tuple[object, ...]] = lambda job: ()


def _longest_region(job: DiLoCoJob) -> str:
    return max((region.name for region in job.spec.regions), key=len)


def _overlap_most(job: DiLoCoJob) -> int:
    return max(1, job.spec.sync.interval - 1)


RULES: tuple[Rule, ...] = (
    Rule(
        path="metadata.name",
        reads=("metadata.name", "spec.regions"),
        holds=lambda job: (
            len(names.child_name(job.metadata.name, _longest_region(job))) <= names.CHILD_MOST
        ),
        message='"{}", "-" and the longest region "{}" are {} characters; at most {} are allowed',
        values=lambda job: (
            job.metadata.name,
            _longest_region(job),
            len(names.child_name(job.metadata.name, _longest_region(job))),
            names.CHILD_MOST,
        ),
    ),
    Rule(
        path="spec.sync.interval",
        reads=("spec.sync.interval", "spec.sync.fragments"),
        holds=lambda job: job.spec.sync.interval >= job.spec.sync.fragments,
        message="{} is less than the {} fragments",
        values=lambda job: (job.spec.sync.interval, job.spec.sync.fragments),
    ),
    Rule(
        path="spec.sync.overlap",
        reads=("spec.sync.overlap", "spec.sync.interval"),
        holds=lambda job: job.spec.sync.overlap <= _overlap_most(job),
        message="{} is more than {}, the most with an interval of {}",
        values=lambda job: (job.spec.sync.overlap, _overlap_most(job), job.spec.sync.interval),
    ),
    Rule(
        path="spec.sync.quorum",
        reads=("spec.sync.quorum", "spec.regions"),
        holds=lambda job: job.spec.sync.quorum <= job.spec.num_learners,
        message="{} is more than the {} learners of all regions together",
        values=lambda job: (job.spec.sync.quorum, job.spec.num_learners),
    ),
    Rule(
        path="spec.learner",
        reads=("spec.learner.recipe", "spec.learner.command"),
        holds=lambda job: (job.spec.learner.recipe is None) != (job.spec.learner.command is None),
        message="has {} command; exactly one of the two is allowed",
        values=lambda job: (
            "both recipe and" if job.spec.learner.recipe else "neither recipe nor",
        ),
    ),
    Rule(
        path="spec.syncer.region",
        reads=("spec.syncer.region", "spec.regions"),
        holds=lambda job: job.spec.syncer_region in {region.name for region in job.spec.regions},
        message='"{}" is none of the regions: {}',
        values=lambda job: (
            job.spec.syncer.region,
            ", ".join(region.name for region in job.spec.regions),
        ),
    ),
    Rule(
        path="spec.evaluation.command",
        reads=("spec.evaluation", "spec.learner.recipe", "spec.learner.command"),
        holds=lambda job: (
            job.spec.evaluation is None
            or job.spec.evaluation.command is not None
            or job.spec.learner.command is None
        ),
        message="missing; with spec.learner.command only a program of yours can score the model",
    ),
    Rule(
        path="spec.tls.mode",
        reads=("spec.tls.mode", "spec.syncer.endpoint"),
        holds=lambda job: job.spec.tls.mode != "Disabled" or not job.spec.syncer.endpoint,
        message='Disabled, but spec.syncer.endpoint is "{}"; use Secret or CertManager',
        values=lambda job: (job.spec.syncer.endpoint,),
    ),
    Rule(
        path="spec.tls.secretName",
        reads=("spec.tls.mode", "spec.tls.secretName"),
        holds=lambda job: job.spec.tls.mode != "Secret" or bool(job.spec.tls.secret_name),
        message="missing; spec.tls.mode Secret needs it",
    ),
    Rule(
        path="spec.tls.issuerRef",
        reads=("spec.tls.mode", "spec.tls.issuerRef"),
        holds=lambda job: job.spec.tls.mode != "CertManager" or job.spec.tls.issuer_ref is not None,
        message="missing; spec.tls.mode CertManager needs it",
    ),
)


def rule_problems(job: DiLoCoJob, *, unusable: Iterable[Location] = ()) -> list[str]:
    """
    Every rule between fields that the job breaks, as `path: what was seen, what is allowed`.

    Args:
        job: a job whose fields are good, except for those named in `unusable`.
        unusable: places that hold a stand-in; rules that read one of them are left out.
    """
    bad = tuple(unusable)
    return [
        f"{rule.path}: {rule.message.format(*rule.values(job))}"
        for rule in RULES
        if not _touches(rule.reads, bad) and not rule.holds(job)
    ]


def _touches(paths: Iterable[str], bad: tuple[Location, ...]) -> bool:
    """Whether a place of `bad` lies at, above or below one of the paths."""
    places: list[Location] = [tuple(path.split(".")) for path in paths]
    return any(one[: len(two)] == two[: len(one)] for one in places for two in bad)


# ------------------------------------------------------------------------------ changes

FIXED = (
    "metadata.name",
    "spec.seed",
    "spec.sync.fragments",
    "spec.sync.interval",
    "spec.sync.overlap",
    "spec.sync.grace.maxSteps",
    "spec.sync.grace.safety",
    "spec.sync.merge",
    "spec.sync.averageParameters",
    "spec.sync.outer.learningRate",
    "spec.sync.outer.momentum",
    "spec.sync.outer.nesterov",
    "spec.sync.wire.up",
    "spec.sync.wire.down",
    "spec.sync.wire.errorFeedback",
    "spec.learner.recipe",
    "spec.learner.command",
    "spec.learner.podsPerLearner",
    "spec.syncer.storage.size",
    "spec.syncer.storage.storageClassName",
    "spec.tls.mode",
)
"""Fields that keep the value they had when the job was made. Decimals are compared as text."""


def transition_problems(old: DiLoCoJob, new: DiLoCoJob) -> list[str]:
    """What `new` changes in `old` that may not change, as `path: message`; empty: go on."""
    before = old.model_dump(by_alias=True)
    after = new.model_dump(by_alias=True)
    said = []
    for path in FIXED:
        was, is_ = _text(_at(before, path)), _text(_at(after, path))
        if was != is_:
            said.append(f"{path}: cannot change from {_short(was)} to {_short(is_)}")
    if new.spec.steps < old.spec.steps:
        said.append(
            f"spec.steps: cannot go down from {old.spec.steps} to {new.spec.steps}; only up"
        )
    if new.spec.syncer_region != old.spec.syncer_region:
        said.append(
            f"spec.syncer.region: cannot change from {old.spec.syncer_region} to "
            f"{new.spec.syncer_region} (empty: the first region)"
        )
    return said


def _at(data: dict[str, Any], path: str) -> object:
    value: Any = data
    for part in path.split("."):
        value = value[part]
    return value


def _text(value: object) -> str:
    # Text, because Python holds 1 and true for equal and the manifest does not.
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
