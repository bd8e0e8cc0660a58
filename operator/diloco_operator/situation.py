"""
One accepted job at one moment: what was read, sorted, with the questions everybody asks about it.

Pure. `course`, `conditions`, `status` and `children` are made from a `Situation`; none of them looks
into `Observed` by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from diloco.tls import server_name
from diloco_operator import names, plan
from diloco_operator.api import DiLoCoJob, Region
from diloco_operator.before import Before
from diloco_operator.manifests import Owner
from diloco_operator.observed import (
    Answer,
    CertificateFacts,
    Object,
    Observed,
    Silence,
    controller_uid,
    identity,
)
from diloco_operator.podfacts import LearnerPods, learners_of
from diloco_operator.view import View

REACHABLE_SECONDS = 30.0
"""An answer counts for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRegion:
    """A region whose learners this operator runs."""

    region: Region
    learners: tuple[LearnerPods, ...]

    @property
    def num_ready(self) -> int:
        """Learners that are registered with the syncer."""
        return sum(one.ready for one in self.learners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that is known of one job now."""

    job: DiLoCoJob
    generation: int
    owner: Owner
    view: View
    now: datetime
    before: Before
    children: Mapping[tuple[str, str], Object]
    """Live children that are this job's, by kind and name."""
    taken: frozenset[tuple[str, str]]
    """Kind and name of objects of others, as far as they are known."""
    pods: tuple[Object, ...]
    regions: tuple[OwnRegion, ...]
    """This operator's own."""
    answer: Answer | None
    """What the syncer said just now; None: nothing."""
    silence: Silence | None
    """Why it said nothing though it was asked."""
    last_answer: datetime | None
    certificate: CertificateFacts | None
    refusals: tuple[str, ...]
    """Such as "StatefulSet a-eu: the server's words"."""

    @classmethod
    def of(cls, observed: Observed, job: DiLoCoJob, view: View, now: datetime) -> Situation:
        """Sort what was read."""
        metadata = observed.job["metadata"]
        owner = Owner(namespace=metadata.get("namespace", ""), uid=metadata.get("uid", ""))
        # One without a controller was left behind on purpose (--cascade=orphan): it is taken back.
        mine = [one for one in observed.children if controller_uid(one) in ("", owner.uid)]
        others = [one for one in observed.children if controller_uid(one) not in ("", owner.uid)]
        sets = [one["metadata"].get("uid", "") for one in mine if one["kind"] == "StatefulSet"]
        answer, silence = _heard(observed, job)
        before = Before.of(observed.job)
        # The shell counts every answer; one about another job is none.
        last_answer = observed.last_answer if silence is observed.syncer or answer else None
        return cls(
            job=job,
            generation=metadata.get("generation", 0),
            owner=owner,
            view=view,
            now=now,
            before=before,
            children={identity(one): one for one in mine},
            taken=frozenset(
                [*map(identity, others), *(_foreign(text) for text in observed.foreign)]
            ),
            pods=observed.pods,
            regions=tuple(
                OwnRegion(region=region, learners=learners_of(job, region, observed.pods, sets))
                for region in view.own_regions(job)
            ),
            answer=answer,
            silence=silence,
            last_answer=last_answer or before.time("lastSyncTime"),
            certificate=observed.certificate,
            refusals=tuple(f"{one.child}: {one.message}" for one in observed.refusals),
        )

    @property
    def has_syncer(self) -> bool:
        """The syncer is this operator's."""
        return self.view.has_syncer(self.job)

    @property
    def concerned(self) -> bool:
        """Some part of the job is this operator's."""
        return bool(self.regions) or self.has_syncer

    @property
    def address(self) -> str:
        """host:port that this operator's learners dial; "": the manifest does not say."""
        return self.view.syncer_address(self.job, self.owner.namespace)

    @property
    def reachable(self) -> bool:
        """The syncer answered within the last 30 s."""
        return self.answer is not None or self.now < self.reachable_until

    @property
    def reachable_until(self) -> datetime:
        """When the last answer is too old."""
        last = self.last_answer or datetime.min.replace(tzinfo=self.now.tzinfo)
        return last + timedelta(seconds=REACHABLE_SECONDS)

    @property
    def step(self) -> int:
        """Global step, as far as it is known."""
        return self.answer.step if self.answer else self.before.number("step")

    @property
    def spec_hash(self) -> str:
        """Hash of what all regions must share."""
        return plan.run_spec(self.job).hash

    def child(self, kind: str, name: str) -> Object | None:
        """The job's live child of that name."""
        return self.children.get((kind, name))

    def syncer_child(self, kind: str) -> Object | None:
        """The syncer's live Deployment, Service or PersistentVolumeClaim."""
        return self.child(kind, names.syncer_name(self.job.metadata.name))

    def pods_of(self, role: str) -> list[Object]:
        """Pods of a role; of the syncer, its evaluator."""
        return [
            pod
            for pod in self.pods
            if (pod["metadata"].get("labels") or {}).get("diloco.dev/role") == role
        ]

    def certificate_fault(self) -> tuple[str, str] | None:
        """Reason and sentence of what is wrong with this cluster's certificate."""
        facts = self.certificate
        if facts is None:
            return None
        if facts.reason or facts.problem:
            return facts.reason or "CertificateUnreadable", facts.problem
        needed = [own.region.name for own in self.regions if own.region.learners]
        if not set(needed) <= set(facts.regions):
            return (
                "CertificateOfOtherRegion",
                f"the certificate speaks for {_listed(facts.regions) or 'no region of this job'}, "
                f"and learners of {_listed(needed)} are to use it",
            )
        name = server_name(self.job.metadata.name)
        if self.has_syncer and name not in facts.names:
            return (
                "CertificateNotForSyncer",
                f"the certificate has no DNS name {name}, by which learners know the syncer",
            )
        return None


def _heard(observed: Observed, job: DiLoCoJob) -> tuple[Answer | None, Silence | None]:
    match observed.syncer:
        case Answer() as answer if answer.job not in ("", job.metadata.name):
            detail = f"the syncer of job {answer.job} answered"
            return None, Silence(reason="OtherJob", message=detail)
        case Answer() as answer:
            return answer, None
        case silence:
            return None, silence


def _foreign(text: str) -> tuple[str, str]:
    kind, _, name = text.partition(" ")
    return kind, name


def _listed(regions: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"region {name}" for name in regions)
