"""
What one reconcile observed: the job, its children and pods, the syncer's answer, the certificate.

Pure values. `cluster.observe` fills an `Observation` from fresh reads; `decide` gets nothing else
but an `OperatorScope` and the time. Kubernetes objects stay the plain dicts that the API server
sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from diloco.rpc.certificates import CertificateFacts
from diloco.runtime.formatting import shorten
from diloco.v1 import syncer_pb2 as pb
from diloco_job.names import MAX_REGIONS
from diloco_operator.state.objects import Object
from diloco_operator.state.stored_job import StoredJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that one reconcile knows."""

    stored: StoredJob
    """The DiLoCoJob, from a fresh GET."""
    children: tuple[Object, ...] = ()
    """Live objects with the label diloco.dev/job of this job, whatever their owner."""
    foreign: tuple[Object, ...] = ()
    """Live objects of other owners that have a name which this job needs."""
    pods: tuple[Object, ...] = ()
    """Pods with the label diloco.dev/job of this job."""
    events: tuple[Object, ...] = ()
    """Events about those of its objects that are stuck (`pending_events.stuck_objects`)."""
    workloads: tuple[Object, ...] = ()
    """Kueue's Workloads of those of its objects that wait in a queue (`queues.queued_uids`)."""
    syncer: Answer | Unreachable | None = None
    """Result of the status request; None: none was sent."""
    last_answer: datetime | None = None
    """Time of the syncer's last answer; None: none since this process started."""
    certificate: CertificateFacts | None = None
    """The certificate of this cluster; None: spec.tls.mode is Disabled."""
    secret: Object | None = None
    """Metadata of the Secret with that certificate."""
    refusals: tuple[Refusal, ...] = ()
    """Children that the API server rejected in this reconcile; a condition reports them, so
    `foreign` and `refusals` are passed again as long as they hold."""
    contested: tuple[str, ...] = ()
    """Children that another writer changes or deletes again after each repair, with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fields of a StatusReply that the operator uses."""

    at: datetime
    """When it arrived, UTC."""
    job: str = ""
    """Name of the syncer's job."""
    epoch: int = 0
    step: int = 0
    tokens: int = 0
    spec_hash: str = ""
    state: str = ""
    """Initialising | Waiting | Training | Complete."""
    quorum: int = 0
    """K as the syncer has it."""
    seconds_since_merge: float = -1.0
    """-1 before the first merge of this syncer process."""
    waiting_for: str = ""
    """What the syncer waits for, for people, while nothing can proceed; else empty."""
    learners: tuple[LearnerAnswer, ...] = ()
    model_path: str = ""
    """Set once the model is exported."""
    model_sha256: str = ""
    unchanged: bool = False
    """No merge has changed a trained parameter: the model is that of step 0."""
    eval_step: int = 0
    differing: tuple[tuple[str, str], ...] = ()
    """Learners that were refused because of another spec, with its hash."""
    failure: Failure | None = None
    """The operator of the syncer's region reported that the job failed."""
    region_failures: tuple[RegionFailure, ...] = ()
    """Regions whose operators reported that learners of theirs failed."""
    not_copied_to: str = ""
    """Place of the copies of snapshots, while copying fails lastingly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job failed, as operators report it to each other through the syncer."""

    reason: str
    """Of the condition Failed there."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFailure:
    """Why learners of a region failed, as operators report it to each other through the syncer."""

    region: str
    reason: str
    """Of the condition there; "": they have not failed."""
    message: str
    learners: int = 0
    """How many of them failed; 0: all, as reported by an operator that does not count, or the region ended
    for another reason, such as its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAnswer:
    """One learner as the syncer reports it."""

    name: str
    """"<region>/<index>"."""
    state: str
    """Joining | Training | Ejected | Gone."""
    seconds_since_heard: float = -1.0
    """-1: it is gone."""
    restarts: int = 0
    """Its number of restarts, as the learner reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """Why the syncer gave no answer."""

    reason: str
    """A reason of the condition SyncerReachable: DialTimeout, ConnectionRefused, ..."""
    message: str = ""
    """The transport's message."""
    silent_since: datetime | None = None
    """When the first request after its last answer to this process failed; None: none was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A child that the API server rejected, or gave no answer about."""

    child: str
    """Such as "StatefulSet a-eu"."""
    message: str
    """The server's message."""


MAX_SENTENCE = 500
"""Characters of a sentence of the reply."""

MAX_LEARNERS_OF_REPLY = 32_000
"""Further learners of a reply are not read: the program that replies is the job's own, not the operator's."""


def answer_of(reply: pb.StatusReply, at: datetime) -> Answer:
    """The reply as plain values; `at` is its time of arrival."""
    return Answer(
        at=at,
        job=reply.job,
        epoch=reply.epoch,
        step=reply.step,
        tokens=reply.tokens,
        spec_hash=reply.spec_hash,
        state=reply.state,
        quorum=reply.quorum,
        seconds_since_merge=reply.seconds_since_merge,
        waiting_for=shorten(reply.waiting_for, MAX_SENTENCE),
        learners=tuple(
            LearnerAnswer(
                name=learner.name,
                state=learner.state,
                seconds_since_heard=learner.seconds_since_heard,
                restarts=learner.restarts,
            )
            for learner in reply.learners[:MAX_LEARNERS_OF_REPLY]
        ),
        model_path=reply.model_path,
        model_sha256=reply.model_sha256,
        unchanged=reply.unchanged,
        eval_step=reply.eval_step,
        not_copied_to=shorten(reply.copies.url, MAX_SENTENCE) if reply.copies.lasting else "",
        differing=tuple((other.learner, other.spec_hash) for other in reply.differing),
        failure=Failure(reason=reply.failure.reason, message=reply.failure.message)
        if reply.HasField("failure")
        else None,
        region_failures=tuple(
            RegionFailure(
                region=failed.region,
                reason=failed.reason,
                message=failed.message,
                learners=failed.learners,
            )
            for failed in reply.region_failures[:MAX_REGIONS]
        ),
    )
