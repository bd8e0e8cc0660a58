"""
What one reconcile read: the job, its children, their pods, the syncer's answer, the certificate.

Pure values. The shell fills an `Observed` from fresh reads; `decide` takes nothing else in but a
`View` and the time. Kubernetes objects stay the plain dicts that the API server sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from diloco.v1 import syncer_pb2 as pb

Object = Mapping[str, Any]
"""A Kubernetes object as plain data, with apiVersion and kind (a LIST leaves them out: fill in)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that one reconcile knows."""

    job: Object
    """The DiLoCoJob, from a fresh GET."""
    children: tuple[Object, ...] = ()
    """Live objects with the label diloco.dev/job of this job, whoever owns them."""
    foreign: tuple[str, ...] = ()
    """Such as "StatefulSet a-b-c": exists under a name that this job needs, with another owner."""
    pods: tuple[Object, ...] = ()
    """Pods with the label diloco.dev/job of this job."""
    syncer: Answer | Silence | None = None
    """What asking the syncer gave; None: it was not asked."""
    last_answer: datetime | None = None
    """When this operator had its last answer; None: none since it was started."""
    certificate: CertificateFacts | None = None
    """The certificate of this cluster; None: spec.tls.mode is Disabled."""
    refusals: tuple[Refusal, ...] = ()
    """What the API server refused of the decisions just carried out: they become a condition, so
    `foreign` and `refusals` are given again as long as they are true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A StatusReply, as far as the operator needs it."""

    at: datetime
    """When it came, UTC."""
    job: str = ""
    """Name of the job it is about."""
    epoch: int = 0
    step: int = 0
    steps: int = 0
    """T as the syncer has it."""
    tokens: int = 0
    spec_hash: str = ""
    state: str = ""
    """Initialising | Waiting | Training | Complete."""
    merges: int = 0
    quorum: int = 0
    """K as the syncer has it."""
    seconds_since_merge: float = -1.0
    """-1 before the first merge of this syncer process."""
    learners: tuple[LearnerAnswer, ...] = ()
    model_path: str = ""
    """Set once the model is exported."""
    model_sha256: str = ""
    waiting_for: str = ""
    """One sentence for people when nothing can proceed."""
    eval_step: int = 0
    differing: tuple[tuple[str, str], ...] = ()
    """Learners that were refused because of another spec, and its hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAnswer:
    """One learner as the syncer knows it."""

    name: str
    """"<region>/<index>"."""
    region: str
    state: str
    """Joining | Training | Gone."""
    seconds_since_heard: float = -1.0
    """-1: it is gone."""
    restarts: int = 0
    """Lives before this one, as the learner said itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Why asking the syncer gave no answer."""

    reason: str
    """A reason of the condition SyncerReachable: DialTimeout, ConnectionRefused, ..."""
    message: str = ""
    """What was seen, in the transport's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What the certificate of this cluster says about itself."""

    reason: str = ""
    """CertificateMissing, CertificateExpired, ... (`reasons.py`); "": nothing is wrong with it."""
    problem: str = ""
    """The same in one sentence, with what to do; "": nothing."""
    expires: datetime | None = None
    regions: tuple[str, ...] = ()
    """Regions of this job for which its holder may speak."""
    names: tuple[str, ...] = ()
    """DNS names; the syncer's has "<job>-syncer"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A child that the API server did not take."""

    child: str
    """Such as "StatefulSet a-eu"."""
    message: str
    """The server's words."""


def answer_of(reply: pb.StatusReply, at: datetime) -> Answer:
    """The reply as plain values; `at` is when it came."""
    return Answer(
        at=at,
        job=reply.job,
        epoch=reply.epoch,
        step=reply.step,
        steps=reply.steps,
        tokens=reply.tokens,
        spec_hash=reply.spec_hash,
        state=reply.state,
        merges=reply.merges,
        quorum=reply.quorum,
        seconds_since_merge=reply.seconds_since_merge,
        learners=tuple(
            LearnerAnswer(
                name=one.name,
                region=one.region,
                state=one.state,
                seconds_since_heard=one.seconds_since_heard,
                restarts=one.restarts,
            )
            for one in reply.learners
        ),
        model_path=reply.model_path,
        model_sha256=reply.model_sha256,
        waiting_for=reply.waiting_for,
        eval_step=reply.eval_step,
        differing=tuple((one.learner, one.spec_hash) for one in reply.differing),
    )


def identity(child: Object) -> tuple[str, str]:
    """Kind and name: what tells the children of one namespace apart."""
    return child["kind"], child["metadata"]["name"]


def controller_uid(child: Object) -> str:
    """uid of the owner that controls the object; "": nobody does."""
    owners = child["metadata"].get("ownerReferences") or ()
    return next((str(one.get("uid", "")) for one in owners if one.get("controller")), "")
