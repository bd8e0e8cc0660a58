"""
One accepted job at one moment: the observation in order, with the properties that decisions need.

Pure. `phase`, `conditions`, `status` and `changes` take a `JobState`; none of them reads an
`Observation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from diloco.rpc.certificates import CertificateFacts
from diloco.rpc.identity import server_name
from diloco_job import names
from diloco_job.plan import SharedPlan, shared_plan
from diloco_job.types import DiLoCoJob, Region
from diloco_operator.resources import LearnerSets, Owner
from diloco_operator.resources.extra_metadata import Metadata
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.state.objects import Object, identity, is_deleting, is_own, labels
from diloco_operator.state.observation import Answer, Observation, Unreachable
from diloco_operator.state.pods import LearnerPods, has_finished, learners_of
from diloco_operator.state.previous_status import PreviousStatus
from diloco_operator.state.queues import learner_sets

LOST_VOLUME = "diloco.dev/lost-volume"
"""Annotation of a job: the uid of the claim whose loss a person has acknowledged."""

REACHABLE_SECONDS = 30.0
"""How long an answer counts."""

SILENT_SECONDS = 15.0
"""How long the last report counts after the first request without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRegion:
    """A region whose learners this operator runs."""

    region: Region
    learners: tuple[LearnerPods, ...]

    @property
    def num_ready(self) -> int:
        """Learners that are registered with the syncer."""
        return sum(learner.ready for learner in self.learners)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything that is known of one job now."""

    job: DiLoCoJob
    plan: SharedPlan
    generation: int
    owner: Owner
    scope: OperatorScope
    now: datetime
    previous: PreviousStatus
    children: Mapping[tuple[str, str], Object]
    """Live children of this job, by kind and name."""
    taken: frozenset[tuple[str, str]]
    """Kind and name of the known objects of other owners."""
    pods: tuple[Object, ...]
    events: tuple[Object, ...]
    """About objects that are stuck."""
    workloads: tuple[Object, ...]
    """Kueue's, of objects that wait in a queue."""
    sets: LearnerSets
    """The StatefulSets of learners that the job should have."""
    regions: tuple[OwnRegion, ...]
    """The regions that this operator runs."""
    answer: Answer | None
    """The syncer's answer in this reconcile; None: there is none."""
    unreachable: Unreachable | None
    """Why the status request failed."""
    last_answer: datetime | None
    """When the syncer last answered; None: never, or in the future, by the clock of another operator."""
    certificate: CertificateFacts | None
    secret: Object | None
    """Metadata of the Secret with that certificate."""
    unknown_fields: tuple[str, ...]
    """Paths of fields of the stored spec that this version ignores."""
    refusals: tuple[str, ...]
    """Such as "StatefulSet a-eu: <the server's message>"."""
    contested: tuple[str, ...]
    """Such as "StatefulSet a-eu (field manager x)"."""
    acknowledged_loss: str
    """The uid of the claim whose loss a person has acknowledged; "": none."""

    @classmethod
    def of(
        cls, observation: Observation, job: DiLoCoJob, scope: OperatorScope, now: datetime
    ) -> JobState:
        """Put an observation in order."""
        raw = observation.stored.raw
        metadata, previous = raw["metadata"], PreviousStatus.of(raw)
        owner = Owner(
            namespace=metadata.get("namespace", ""),
            uid=metadata.get("uid", ""),
            metadata=Metadata(
                labels=metadata.get("labels") or {}, annotations=metadata.get("annotations") or {}
            ),
        )
        children = [child for child in observation.children if not _is_of_learner(child)]
        own = {
            identity(child): child
            for child in children
            if is_own(child, uid=owner.uid, job=metadata["name"], volume=previous.volume_uid)
        }
        sets = [
            child["metadata"].get("uid", "")
            for child in own.values()
            if child["kind"] == "StatefulSet"
        ]
        answer, unreachable = _answer_about(job, observation)
        # The shell records the time of every answer; an answer about another job does not count.
        counts = unreachable is observation.syncer or answer is not None
        last_answer = observation.last_answer if counts else None
        return cls(
            job=job,
            plan=shared_plan(job),
            generation=metadata.get("generation", 0),
            owner=owner,
            scope=scope,
            now=now,
            previous=previous,
            children=own,
            taken=frozenset(
                [
                    *(identity(child) for child in observation.foreign),
                    *(key for child in children if (key := identity(child)) not in own),
                ]
            ),
            pods=observation.pods,
            events=observation.events,
            workloads=observation.workloads,
            sets=learner_sets(owner.metadata, own.values()),
            regions=tuple(
                OwnRegion(region=region, learners=learners_of(job, region, observation.pods, sets))
                for region in scope.own_regions(job)
            ),
            answer=answer,
            unreachable=unreachable,
            last_answer=_past(last_answer, now) or _past(previous.time("lastSyncTime"), now),
            certificate=observation.certificate,
            secret=observation.secret,
            unknown_fields=observation.stored.unknown_fields,
            refusals=tuple(
                f"{refusal.child}: {refusal.message}" for refusal in observation.refusals
            ),
            contested=observation.contested,
            acknowledged_loss=str((metadata.get("annotations") or {}).get(LOST_VOLUME) or ""),
        )

    @property
    def learners(self) -> list[LearnerPods]:
        """The learners that this operator runs."""
        return [learner for own in self.regions for learner in own.learners]

    @property
    def has_syncer(self) -> bool:
        """Whether this operator runs the syncer."""
        return self.scope.has_syncer(self.job)

    @property
    def in_scope(self) -> bool:
        """Whether this operator runs some part of the job."""
        return bool(self.regions) or self.has_syncer

    @property
    def address(self) -> str:
        """host:port that this operator's learners dial; "": the manifest has none."""
        return self.scope.syncer_address(self.job, self.owner.namespace)

    @property
    def reachable(self) -> bool:
        """
        Whether the syncer answered within the last 30 s, or has not answered for less than 15 s.

        A job at rest is asked every 5 minutes: its last answer is old whenever one request fails.
        """
        return self.answer is not None or self.now < self.reachable_until

    @property
    def reachable_until(self) -> datetime:
        """When the last answer expires."""
        last = self.last_answer or datetime.min.replace(tzinfo=self.now.tzinfo)
        until = last + timedelta(seconds=REACHABLE_SECONDS)
        if self._silent_until is not None and self.previous.is_true("SyncerReachable"):
            until = max(until, self._silent_until)
        return until

    @property
    def is_silent_lately(self) -> bool:
        """Whether it has not answered for less than 15 s: the first request may fail in another way than the next."""
        return self._silent_until is not None and self.now < self._silent_until

    @property
    def _silent_until(self) -> datetime | None:
        """Until when what was last reported counts; None: the syncer is not silent."""
        since = _past(self.unreachable.silent_since if self.unreachable else None, self.now)
        return None if since is None else since + timedelta(seconds=SILENT_SECONDS)

    @property
    def awaits_answer(self) -> bool:
        """The syncer counts as reachable, but which learners train now is not known."""
        return self.answer is None and self.reachable

    @property
    def step(self) -> int:
        """Last known global step."""
        return self.answer.step if self.answer else self.previous.number("step")

    @property
    def spec_hash(self) -> str:
        """Hash of the spec that all regions must share."""
        return self.plan.spec.hash

    def child(self, kind: str, name: str) -> Object | None:
        """The job's live child of that name."""
        return self.children.get((kind, name))

    def syncer_child(self, kind: str) -> Object | None:
        """The syncer's live Deployment, Service or PersistentVolumeClaim."""
        return self.child(kind, names.syncer_name(self.job.metadata.name))

    def pods_of(self, role: str) -> list[Object]:
        """Pods of a role, learner, syncer or evaluator: those that run or start, and those that do not go."""
        return [
            pod
            for pod in self.pods
            if labels(pod).get("diloco.dev/role") == role
            and (is_deleting(pod) or not has_finished(pod))
        ]

    def certificate_problem(self) -> tuple[str, str] | None:
        """Reason and message of a problem with this cluster's certificate."""
        facts = self.certificate
        if facts is None:
            return None
        if facts.reason or facts.problem:
            return facts.reason or "CertificateUnreadable", facts.problem
        needed = [own.region.name for own in self.regions if own.region.learners]
        if not set(needed) <= set(facts.regions):
            return (
                "CertificateOfOtherRegion",
                f"the certificate is valid for {_listed(facts.regions) or 'no region of this job'}, "
                f"but learners of {_listed(needed)} use it",
            )
        name = server_name(self.job.metadata.name)
        if self.has_syncer and name not in facts.server_names:
            return (
                "CertificateNotForSyncer",
                f"the certificate has no DNS name {name}, which learners expect of the syncer",
            )
        return None


def _is_of_learner(child: Object) -> bool:
    """Whether it is a claim that a StatefulSet made for a pod, and that it or a person deletes."""
    role = labels(child).get("diloco.dev/role")
    return child["kind"] == "PersistentVolumeClaim" and role == "learner"


def _past(when: datetime | None, now: datetime) -> datetime | None:
    """The time, unless it lies in the future: such an answer would count until long after the last."""
    return when if when is not None and when <= now else None


def _answer_about(
    job: DiLoCoJob, observation: Observation
) -> tuple[Answer | None, Unreachable | None]:
    match observation.syncer:
        case Answer() as answer if answer.job not in ("", job.metadata.name):
            detail = f"the syncer of job {answer.job} answered"
            return None, Unreachable(reason="OtherJob", message=detail)
        case Answer() as answer:
            return answer, None
        case unreachable:
            return None, unreachable


def _listed(regions: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"region {name}" for name in regions)
