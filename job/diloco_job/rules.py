"""
Rules between fields, and rules about changes: two tables.

Pure. One rule is one entry: the field it is reported at, the fields it reads, the predicate in
Python and in CEL, and the message. `crd.py` writes the same entries into the CRD, so that the API
server rejects the same jobs with the same messages. A message is a template for CEL's `format`,
without the path, which the server prepends.

In CEL `self` is the spec, except at a path of metadata, where it is the whole job; `oldSelf` is the
previous value. Every predicate is total: it also runs on a spec that violates bounds, for example
one without regions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from diloco_job import names
from diloco_job.cel import quoted
from diloco_job.quantities import amount
from diloco_job.types import DiLoCoJob, Service

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule between fields of one manifest."""

    path: str
    """Where it is reported."""
    reads: tuple[str, ...]
    """Every field that the predicate reads; the rule is skipped if one of them is invalid."""
    holds: Callable[[DiLoCoJob], bool]
    message: str
    """What was found, what is allowed; `{}` stands for one of `values`."""
    values: Callable[[DiLoCoJob], tuple[object, ...]] = lambda job: ()
    cel: str
    """`holds` in CEL."""
    cel_values: tuple[str, ...] = ()
    """`values` in CEL."""

    @property
    def missing(self) -> bool:
        """Whether a job violates it by omitting the field."""
        return self.message.startswith("missing;")


def _longest_region(job: DiLoCoJob) -> str:
    return max((region.name for region in job.spec.regions), key=len)


def _overlap_max(job: DiLoCoJob) -> int:
    # Two rounds of one fragment in flight would overwrite each other.
    sync = job.spec.sync
    return max(1, min(sync.interval - 1, sync.fragments))


def _distinct(role: str, *ports: str) -> Rule:
    """The rule that the ports of a pod differ; its role is a field of the spec, which may be absent."""

    def numbers(job: DiLoCoJob) -> tuple[int, ...]:
        own = getattr(job.spec, role)
        return () if own is None else tuple(getattr(own.ports, port) for port in ports)

    path, here = f"spec.{role}.ports", f"self.{role}.ports"
    differ = " && ".join(f"{here}.{a} != {here}.{b}" for a, b in combinations(ports, 2))
    optional = f"!has(self.{role}) || " if role == "evaluation" else ""
    return Rule(
        path=path,
        reads=(f"spec.{role}",) if optional else (path,),
        holds=lambda job: len(set(numbers(job))) == len(numbers(job)),
        message=", ".join(f"{port} {{}}" for port in ports) + "; use a different port for each",
        values=numbers,
        cel=f"{optional}({differ})",
        cel_values=tuple(f"{here}.{port}" for port in ports),
    )


_LONGEST_REGION_CEL = (
    "self.spec.regions.filter(r, self.spec.regions.all(s, size(s.name) <= size(r.name)))[0].name"
)
_MAX_OVERLAP_CEL = (
    "(self.sync.interval > self.sync.fragments ? self.sync.fragments"
    " : self.sync.interval > 2 ? self.sync.interval - 1 : 1)"
)
_NUM_LEARNERS_CEL = "self.regions.map(r, r.learners).sum()"
# The server cannot bound a join: cut a template for the maximum number of names to length instead.
_REGION_NAMES_CEL = (
    f"{quoted(', '.join(['%s'] * names.MAX_REGIONS))}.substring(0, 4 * size(self.regions) - 2)"
    ".format(self.regions.map(r, r.name))"
)


def _only_with_load_balancer(
    field: str, *, unset: Callable[[Service], bool], unset_cel: str
) -> Rule:
    """A field of the syncer's Service that means something for type LoadBalancer only."""
    return Rule(
        path=f"spec.syncer.service.{field}",
        reads=("spec.syncer.service.type", f"spec.syncer.service.{field}"),
        holds=lambda job: (
            job.spec.syncer.service.type == "LoadBalancer" or unset(job.spec.syncer.service)
        ),
        message="is for type LoadBalancer; the type is {}",
        values=lambda job: (job.spec.syncer.service.type,),
        cel=f"self.syncer.service.type == 'LoadBalancer' || {unset_cel}",
        cel_values=("self.syncer.service.type",),
    )


RULES: tuple[Rule, ...] = (
    Rule(
        path="metadata.name",
        reads=("metadata.name", "spec.regions"),
        holds=lambda job: (
            len(names.child_name(job.metadata.name, _longest_region(job))) <= names.MAX_CHILD_NAME
        ),
        message='"{}", "-" and the longest region "{}" are {} characters; the maximum is {}',
        values=lambda job: (
            job.metadata.name,
            _longest_region(job),
            len(names.child_name(job.metadata.name, _longest_region(job))),
            names.MAX_CHILD_NAME,
        ),
        cel=(
            "self.spec.regions.all(r, size(self.metadata.name) + 1 + size(r.name) <= "
            f"{names.MAX_CHILD_NAME})"
        ),
        cel_values=(
            "self.metadata.name",
            _LONGEST_REGION_CEL,
            f"size(self.metadata.name) + 1 + size({_LONGEST_REGION_CEL})",
            str(names.MAX_CHILD_NAME),
        ),
    ),
    Rule(
        path="spec.sync.interval",
        reads=("spec.sync.interval", "spec.sync.fragments"),
        holds=lambda job: job.spec.sync.interval >= job.spec.sync.fragments,
        message="{} is less than the {} fragments",
        values=lambda job: (job.spec.sync.interval, job.spec.sync.fragments),
        cel="self.sync.interval >= self.sync.fragments",
        cel_values=("self.sync.interval", "self.sync.fragments"),
    ),
    Rule(
        path="spec.sync.overlap",
        reads=("spec.sync.overlap", "spec.sync.interval", "spec.sync.fragments"),
        holds=lambda job: job.spec.sync.overlap <= _overlap_max(job),
        message="{} is more than {}, the maximum with interval {} and fragments {}",
        values=lambda job: (
            job.spec.sync.overlap,
            _overlap_max(job),
            job.spec.sync.interval,
            job.spec.sync.fragments,
        ),
        cel=f"self.sync.overlap <= {_MAX_OVERLAP_CEL}",
        cel_values=(
            "self.sync.overlap",
            _MAX_OVERLAP_CEL,
            "self.sync.interval",
            "self.sync.fragments",
        ),
    ),
    Rule(
        path="spec.sync.quorum",
        reads=("spec.sync.quorum", "spec.regions"),
        holds=lambda job: job.spec.sync.quorum <= job.spec.num_learners,
        message="{} is more than {}, the number of learners in all regions",
        values=lambda job: (job.spec.sync.quorum, job.spec.num_learners),
        cel=f"self.sync.quorum <= {_NUM_LEARNERS_CEL}",
        cel_values=("self.sync.quorum", _NUM_LEARNERS_CEL),
    ),
    Rule(
        path="spec.regions",
        reads=("spec.regions",),
        holds=lambda job: job.spec.num_learners <= names.MAX_LEARNERS,
        message="{} learners in all regions; the maximum is {}",
        values=lambda job: (job.spec.num_learners, names.MAX_LEARNERS),
        cel=f"{_NUM_LEARNERS_CEL} <= {names.MAX_LEARNERS}",
        cel_values=(_NUM_LEARNERS_CEL, str(names.MAX_LEARNERS)),
    ),
    Rule(
        path="spec.learner",
        reads=("spec.learner.recipe", "spec.learner.command"),
        holds=lambda job: (job.spec.learner.recipe is None) != (job.spec.learner.command is None),
        message="has {} command; set exactly one of them",
        values=lambda job: (
            "both recipe and" if job.spec.learner.recipe else "neither recipe nor",
        ),
        cel="has(self.learner.recipe) != has(self.learner.command)",
        cel_values=("has(self.learner.recipe) ? 'both recipe and' : 'neither recipe nor'",),
    ),
    Rule(
        path="spec.learner.podsPerLearner",
        reads=("spec.learner.recipe", "spec.learner.podsPerLearner"),
        holds=lambda job: job.spec.learner.recipe is None or job.spec.learner.pods_per_learner == 1,
        message="{}, but a recipe trains in one pod; use your own program in spec.learner.command",
        values=lambda job: (job.spec.learner.pods_per_learner,),
        cel="!has(self.learner.recipe) || self.learner.podsPerLearner == 1",
        cel_values=("self.learner.podsPerLearner",),
    ),
    _distinct("learner", "health", "metrics", "rendezvous", "peer"),
    _distinct("syncer", "health", "metrics", "sync"),
    _distinct("evaluation", "health", "metrics"),
    Rule(
        path="spec.syncer.region",
        reads=("spec.syncer.region", "spec.regions"),
        holds=lambda job: job.spec.syncer_region in {region.name for region in job.spec.regions},
        message='"{}" is not one of the regions: {}',
        values=lambda job: (
            job.spec.syncer.region,
            ", ".join(region.name for region in job.spec.regions),
        ),
        cel=(
            "self.syncer.region == '' || self.regions.size() == 0"
            " || self.regions.exists(r, r.name == self.syncer.region)"
        ),
        cel_values=("self.syncer.region", _REGION_NAMES_CEL),
    ),
    _only_with_load_balancer(
        "loadBalancerClass",
        unset=lambda service: not service.load_balancer_class,
        unset_cel="self.syncer.service.loadBalancerClass == ''",
    ),
    _only_with_load_balancer(
        "loadBalancerSourceRanges",
        unset=lambda service: not service.load_balancer_source_ranges,
        unset_cel=(
            "!has(self.syncer.service.loadBalancerSourceRanges)"
            " || size(self.syncer.service.loadBalancerSourceRanges) == 0"
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
        message="missing; spec.learner.command requires your own evaluation program",
        cel=("!has(self.evaluation) || has(self.evaluation.command) || !has(self.learner.command)"),
    ),
    Rule(
        path="spec.tls.mode",
        reads=("spec.tls.mode", "spec.syncer.endpoint"),
        holds=lambda job: job.spec.tls.mode != "Disabled" or not job.spec.syncer.endpoint,
        message='Disabled, but spec.syncer.endpoint is "{}"; use Secret or CertManager',
        values=lambda job: (job.spec.syncer.endpoint,),
        cel="self.tls.mode != 'Disabled' || self.syncer.endpoint == ''",
        cel_values=("self.syncer.endpoint",),
    ),
    Rule(
        path="spec.tls.secretName",
        reads=("spec.tls.mode", "spec.tls.secretName"),
        holds=lambda job: job.spec.tls.mode != "Secret" or bool(job.spec.tls.secret_name),
        message="missing; required by spec.tls.mode Secret",
        cel="self.tls.mode != 'Secret' || self.tls.secretName != ''",
    ),
    Rule(
        path="spec.tls.issuerRef",
        reads=("spec.tls.mode", "spec.tls.issuerRef"),
        holds=lambda job: job.spec.tls.mode != "CertManager" or job.spec.tls.issuer_ref is not None,
        message="missing; required by spec.tls.mode CertManager",
        cel="self.tls.mode != 'CertManager' || has(self.tls.issuerRef)",
    ),
    Rule(
        path="spec.managedBy",
        reads=("spec.managedBy", "spec.runPolicy.managedBy"),
        holds=lambda job: (
            not (job.spec.managed_by and job.spec.run_policy.managed_by)
            or job.spec.managed_by == job.spec.run_policy.managed_by
        ),
        message='"{}", but spec.runPolicy.managedBy, its former place, is "{}"; set only one of them',
        values=lambda job: (job.spec.managed_by, job.spec.run_policy.managed_by),
        cel=(
            "self.managedBy == '' || self.runPolicy.managedBy == ''"
            " || self.managedBy == self.runPolicy.managedBy"
        ),
        cel_values=("self.managedBy", "self.runPolicy.managedBy"),
    ),
)


def rule_problems(job: DiLoCoJob, *, unusable: Iterable[Location] = ()) -> list[str]:
    """
    The rules between fields that the job violates, as `path: what was found, what is allowed`.

    Args:
        job: a job whose fields are valid, except those in `unusable`.
        unusable: locations of stand-ins; rules that read one of them are skipped.
    """
    invalid = tuple(unusable)
    return [
        f"{rule.path}: {rule.message.format(*rule.values(job))}"
        for rule in RULES
        if not _touches(rule.reads, invalid) and not rule.holds(job)
    ]


def _touches(paths: Iterable[str], locations: tuple[Location, ...]) -> bool:
    """Whether one of `locations` is at, above or below one of the paths."""
    read: list[Location] = [tuple(path.split(".")) for path in paths]
    return any(a[: len(b)] == b[: len(a)] for a in read for b in locations)


# ------------------------------------------------------------------------------ changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One rule about a change of a job."""

    path: str
    """Where it is reported."""
    holds: Callable[[DiLoCoJob, DiLoCoJob], bool]
    """Given the old and the new job."""
    message: str
    """What was found, what is allowed; `{}` stands for one of `values`."""
    values: Callable[[DiLoCoJob, DiLoCoJob], tuple[object, ...]]
    cel: str
    """`holds` in CEL."""
    cel_values: tuple[str, ...]
    """`values` in CEL."""


def _syncer_region_cel(spec: str) -> str:
    return f"({spec}.syncer.region != '' ? {spec}.syncer.region : {spec}.regions[0].name)"


_SAME_CLUSTER_CEL = (
    "r.cluster == o.cluster"
    " || (r.cluster == '' && o.cluster == o.name) || (o.cluster == '' && r.cluster == r.name)"
)
# A conditional text has no size estimate: comparing it for each region exceeds the cost budget.
_STAYS_CEL = (
    "self.regions.all(r, !(r.name == self.syncer.region"
    " || (self.syncer.region == '' && r.name == self.regions[0].name))"
    f" || oldSelf.regions.all(o, o.name != r.name || {_SAME_CLUSTER_CEL}))"
)


def _size_cel(spec: str) -> str:
    size = f"{spec}.syncer.storage.size"
    text = f"isQuantity({size}) ? quantity({size}).asApproximateFloat() : 0.0"
    return f"(type({size}) == string ? ({text}) : double({size}))"


CHANGES: tuple[Change, ...] = (
    Change(
        path="spec.steps",
        holds=lambda old, new: new.spec.steps >= old.spec.steps,
        message="cannot be reduced from {} to {}; it can only be raised",
        values=lambda old, new: (old.spec.steps, new.spec.steps),
        cel="self.steps >= oldSelf.steps",
        cel_values=("oldSelf.steps", "self.steps"),
    ),
    Change(
        path="spec.syncer.region",
        holds=lambda old, new: new.spec.syncer_region == old.spec.syncer_region,
        message="cannot change from {} to {} (empty: the first region)",
        values=lambda old, new: (old.spec.syncer_region, new.spec.syncer_region),
        cel=(
            "self.regions.size() == 0"
            f" || {_syncer_region_cel('self')} == {_syncer_region_cel('oldSelf')}"
        ),
        cel_values=(_syncer_region_cel("oldSelf"), _syncer_region_cel("self")),
    ),
    Change(
        # Its volume stays where it is: the job would start over in the other cluster.
        path="spec.syncer.region",
        holds=lambda old, new: (
            new.spec.syncer_region != old.spec.syncer_region
            or new.spec.syncer_cluster == old.spec.syncer_cluster
        ),
        message="its cluster cannot change, because the volume of the syncer would stay behind",
        values=lambda old, new: (),
        cel=_STAYS_CEL,
        cel_values=(),
    ),
    Change(
        path="spec.syncer.storage.size",
        holds=lambda old, new: (
            (amount(new.spec.syncer.storage.size) or 0)
            >= (amount(old.spec.syncer.storage.size) or 0)
        ),
        message="cannot be reduced from {} to {}; a volume can only grow",
        values=lambda old, new: (old.spec.syncer.storage.size, new.spec.syncer.storage.size),
        cel=f"{_size_cel('self')} >= {_size_cel('oldSelf')}",
        cel_values=("oldSelf.syncer.storage.size", "self.syncer.storage.size"),
    ),
    Change(
        path="spec.learner.storage",
        holds=lambda old, new: (
            (new.spec.learner.storage is None) == (old.spec.learner.storage is None)
        ),
        message="cannot be {} after the job is created",
        values=lambda old, new: ("removed" if new.spec.learner.storage is None else "added",),
        cel="has(self.learner.storage) == has(oldSelf.learner.storage)",
        cel_values=("has(self.learner.storage) ? 'added' : 'removed'",),
    ),
)

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
    "spec.sync.frozen",
    "spec.sync.buffers",
    "spec.sync.movingBuffers",
    "spec.sync.outer.learningRate",
    "spec.sync.outer.momentum",
    "spec.sync.outer.nesterov",
    "spec.sync.wire.up",
    "spec.sync.wire.down",
    "spec.sync.wire.errorFeedback",
    "spec.learner.recipe",
    "spec.learner.command",
    "spec.learner.podsPerLearner",
    "spec.learner.storage.size",
    "spec.learner.storage.storageClassName",
    "spec.learner.storage.accessMode",
    "spec.syncer.storage.storageClassName",
    "spec.tls.mode",
)
"""Fields that cannot change after the job is created. Decimals are compared as text."""

CANNOT_CHANGE = "cannot change from {} to {}"
OTHER_RECIPE = "cannot change after the job is created"
"""CEL cannot show a recipe's config, because its settings are not in the schema."""


def transition_problems(old: DiLoCoJob, new: DiLoCoJob) -> list[str]:
    """The changes from `old` to `new` that are not allowed, as `path: message`."""
    before = old.model_dump(by_alias=True)
    after = new.model_dump(by_alias=True)
    problems = []
    for path in FIXED:
        old_value, new_value = _at(before, path), _at(after, path)
        old_text, new_text = _text(old_value), _text(new_value)
        # An optional object that is added or removed is a change of its own.
        if old_text != new_text and _ABSENT not in (old_value, new_value):
            problems.append(f"{path}: {fixed_message(path).format(old_text, new_text)}")
    problems += [
        f"{change.path}: {change.message.format(*change.values(old, new))}"
        for change in CHANGES
        if not change.holds(old, new)
    ]
    return problems


def fixed_message(path: str) -> str:
    """Message about a change of a field of FIXED; `{}` stands for the old and the new value."""
    return OTHER_RECIPE if path == "spec.learner.recipe" else CANNOT_CHANGE


_ABSENT = "(absent)"


def _at(data: dict[str, Any], path: str) -> object:
    """The value of a field; _ABSENT if it is in an optional object that is not there."""
    value: Any = data
    for part in path.split("."):
        if value is None:
            return _ABSENT
        value = value[part]
    return value


def _text(value: object) -> str:
    # As text, because 1 == True in Python but not in a manifest.
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
