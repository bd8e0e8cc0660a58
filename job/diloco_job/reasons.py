"""
The table of conditions and reasons: status, message and Event of each.

Pure. A pair of condition and reason has one status, one message template and at most one type of
Event. The reference page is generated from this table; no other module of the operator defines the
status or the message of a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco.runtime.formatting import printable

Status = Literal["True", "False", "Unknown"]
EventType = Literal["", "Normal", "Warning"]

_Row = tuple[str, EventType, str] | tuple[str, EventType, str, str]
"""Reason, type of its Event, message, optional advice."""

MAX_MESSAGE = 1000
"""Longest message of a condition or an Event, in characters; Kubernetes limits Events to 1024."""

CONDITIONS: dict[str, str] = {
    "Accepted": "the spec passed the checks that only the operator can make",
    "SyncerReady": "the syncer is serving; Unknown outside its region",
    "SyncerReachable": "the syncer replied to this operator within the last 30 s",
    "LearnersReady": "all learners of this operator's regions are training",
    "QuorumMet": "at least spec.sync.quorum learners report to the syncer",
    "SpecConsistent": "every region runs the same shared spec (status.specHash)",
    "Suspended": "spec.runPolicy.suspend is set and the job does not run",
    "Complete": "the syncer completed spec.steps steps; False again when steps is raised",
    "Failed": "the job ended without a result, until it is suspended",
}
"""Condition → when it is True, in the order in which status lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason of one condition."""

    condition: str
    status: Status
    reason: str
    message: str
    """Template with fields in braces."""
    event: EventType
    """Type of the Event posted when the condition changes to this reason; "": none."""
    advice: str
    """What to do about it; "": nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionState:
    """The state of a condition; `status_types.Condition` is its form in the CRD."""

    type: str
    status: Status
    reason: str
    message: str


def _of(condition: str, status: Status, *rows: _Row) -> tuple[Reason, ...]:
    return tuple(
        Reason(
            condition=condition,
            status=status,
            reason=row[0],
            event=row[1],
            message=row[2],
            advice=row[3] if len(row) == 4 else "",
        )
        for row in rows
    )


_CERTIFICATE: tuple[_Row, ...] = tuple(
    (reason, "Warning", "{detail}", advice)
    for reason, advice in (
        ("CertificateMissing", "create the Secret (diloco certs) or check cert-manager"),
        (
            "CertificateUnreadable",
            "recreate the Secret (diloco certs), or let the operator read it (rbac.tlsSecretNamespaces)",
        ),
        ("CertificateExpired", "renew the Secret (diloco certs); no restart is needed"),
        ("CertificateNotYetValid", "check the clocks of both clusters"),
        ("CertificateOfOtherAuthority", "issue the Secrets of all clusters from one authority"),
        ("CertificateOfOtherRegion", "apply the Secret that was created for this region"),
        ("CertificateNotForSyncer", "give the syncer's region a certificate for <job>-syncer"),
        ("CertificateUsage", "issue it for client auth and server auth"),
        ("KeyOfOtherCertificate", "replace tls.crt and tls.key together"),
    )
)
"""Problems of a certificate, for the conditions that depend on it."""

CERTIFICATE_REASONS = tuple(row[0] for row in _CERTIFICATE)
"""Their reasons."""

_OVER: tuple[_Row, ...] = (
    ("Suspended", "", "the job is suspended"),
    ("Complete", "", "the job is complete"),
    ("Failed", "", "the job failed"),
)
"""For conditions of components that should not run; only the condition of that name has an Event."""

_NOT_EVALUATED: _Row = ("NotEvaluated", "", "not evaluated: the job is not accepted")

REASONS: tuple[Reason, ...] = (
    *_of(
        "Accepted",
        "True",
        ("Valid", "Normal", "the job can run"),
        (
            "FieldsIgnored",
            "Warning",
            "the job can run, but this version of the operator ignores fields that it does not know: {fields}",
            "upgrade the operator to the version of the CRD",
        ),
        (
            "StorageNotApplied",
            "Warning",
            "the job can run, but StatefulSet {sets} was created with other volumeClaimTemplates, "
            "which cannot change: it keeps them and its pod template",
            "delete the StatefulSet: the operator creates it again with spec.learner.storage",
        ),
        (
            "Contested",
            "Warning",
            "the job can run, but another writer reverts the operator's repairs of these objects: {children}; "
            "the operator waits before it repairs them again",
            "exclude the job's objects from that writer, for example an autoscaler or a mutating admission policy",
        ),
        (
            "ChildTerminating",
            "Warning",
            "the job can run, but these objects are being deleted: {children}; the operator does not "
            "change them, and recreates them after the deletion",
            "find the controller that must remove the finalizer, or what blocks the deletion",
        ),
    ),
    *_of(
        "Accepted",
        "False",
        ("InvalidSpec", "Warning", "{problems}", "correct the manifest; nothing was changed"),
        (
            "RegionNotInSpec",
            "Warning",
            "this operator runs region {region}, but spec.regions has {regions}; "
            "if region.name was changed by mistake, set it back",
            "add the region, set region.name back, or delete the job from this cluster",
        ),
        (
            "RegionChanged",
            "Warning",
            "this operator runs with {own}, but objects of this job were created with {others}; nothing was changed",
            "set region.name back, or delete the job in this cluster and apply it again",
        ),
        (
            "PodFieldForbidden",
            "Warning",
            "this cluster does not allow {fields}; nothing was changed",
            "remove the field, or see forbiddenPodFields of the operator's chart",
        ),
        (
            "NameTooLongForQueue",
            "Warning",
            "in a queue each learner has a StatefulSet of its own, and {name} has {length} characters; "
            "the maximum is {most}",
            "give the job or the region a shorter name",
        ),
        (
            "TooManyForQueue",
            "Warning",
            "in a queue or with PodGroups each learner has a StatefulSet of its own, and this cluster has "
            "{learners} learners; the maximum is {most}",
            "reduce spec.regions[].learners, or suspend the job, remove the queue's label or the annotation, "
            "and resume it",
        ),
        (
            "TemplatesTooLarge",
            "Warning",
            "{sets} pod templates of learners have {size} bytes in all; the maximum is {most}. Each region has one, "
            "or, in a queue or with PodGroups, each learner",
            "make env, recipe.config or podTemplate of the learners shorter (a ConfigMap can hold large values), "
            "reduce spec.regions or their learners, or suspend the job, remove the queue's label or the annotation, "
            "and resume it",
        ),
        (
            "OtherOperator",
            "Warning",
            "operator {other} runs this job (status.operator); operator {own} leaves it alone",
            "an Event only; hand the job over as described in docs/operations.md, or separate the "
            "operators with watchNamespaces",
        ),
        (
            "VolumeGone",
            "Warning",
            "spec.steps was raised to {steps}, but the job was complete at step {step} and its "
            "volume {volume} was deleted: there is no state to resume from",
            "create a new job",
        ),
        (
            "NoEndpoint",
            "Warning",
            "spec.syncer.endpoint is empty, but the syncer runs in region {syncer_region}: the "
            "learners of region {region} cannot connect to it",
            "set spec.syncer.endpoint in every region's manifest",
        ),
        (
            "NameTaken",
            "Warning",
            "{children} already exists and belongs to another owner; the operator does not change it",
            "delete it, or rename the job or the region",
        ),
        (
            "Refused",
            "Warning",
            "the API server did not accept {refusals}",
            "see the server's message and correct the manifest",
        ),
    ),
    *_of(
        "SyncerReady",
        "True",
        ("Serving", "Normal", "the syncer is serving"),
        (
            "WaitingForAddress",
            "Normal",
            "the syncer is serving, but its Service {service} of type LoadBalancer has no address "
            "yet; other clusters cannot connect to it until then",
            "install a load balancer, or use type NodePort",
        ),
        (
            "VolumeTerminating",
            "Warning",
            "the syncer is serving, but PersistentVolumeClaim {claim} is being deleted: the claim, and "
            "with it the job's state, is lost when the syncer's pod ends",
            "copy the volume now; the deletion of a claim cannot be undone",
        ),
        (
            "VolumeNotResized",
            "Warning",
            "the syncer is serving, but Kubernetes cannot expand the volume of PersistentVolumeClaim {claim} to {size}",
            "see kubectl describe pvc; if it will never succeed, reduce the size in the manifest and in the claim",
        ),
        (
            "EvaluatorTrouble",
            "Warning",
            "the syncer is serving, but the evaluator is not running, so there are no scores: {detail}",
            "see kubectl describe pod; the job trains without it, and completes without its scores",
        ),
        (
            "SnapshotsNotCopied",
            "Warning",
            "the syncer is serving, but its snapshots are not copied to {url}: without its volume, the "
            "job would continue from an older one",
            "the syncer's log shows why; the job trains and completes without the copies",
        ),
    ),
    *_of(
        "SyncerReady",
        "False",
        ("Starting", "", "the syncer's pod is not ready yet: {detail}"),
        ("NotReady", "Warning", "the syncer's pod is no longer ready: {detail}"),
        ("PodTrouble", "Warning", "{detail}", "see kubectl describe pod"),
        (
            "VolumeGone",
            "Warning",
            "PersistentVolumeClaim {claim} with uid {uid}, which held the job's state up to step "
            "{step}, {seen}: the syncer does not start, and learners train alone. To continue with "
            "{instead}: {command}",
            "restore the volume from a copy, or confirm the loss of its state with the annotation",
        ),
        *_OVER,
    ),
    *_of(
        "SyncerReady",
        "Unknown",
        ("OtherRegion", "", "the syncer runs in region {region}; see the job's status there"),
        _NOT_EVALUATED,
    ),
    *_of(
        "SyncerReachable",
        "True",
        ("Answers", "Normal", "{endpoint} replies"),
        (
            "CertificateExpires",
            "Warning",
            "{endpoint} replies, but {detail}",
            "renew the Secret (diloco certs) or check cert-manager; no restart is needed",
        ),
    ),
    *_of(
        "SyncerReachable",
        "False",
        ("NotStarted", "", "the syncer has not started: {detail}"),
        ("NoEndpoint", "Warning", "spec.syncer.endpoint is empty", "set it in the manifest"),
        *(
            (reason, "Warning", "{endpoint}: {detail}", advice)
            for reason, advice in (
                ("DialTimeout", "check the network between the clusters and the firewalls"),
                ("ConnectionRefused", "check the syncer's pod and the address"),
                ("ConnectionClosed", "check the load balancer in front of the syncer"),
                ("NameUnknown", "check spec.syncer.endpoint and DNS"),
                ("Unreachable", "check routes and firewalls"),
                ("HandshakeRefused", "check tls.crt here and the log of the syncer"),
                ("PlainText", "check the address and spec.tls in both clusters"),
                ("OtherJob", "check spec.syncer.endpoint"),
                ("NoAnswer", "check the log of the syncer"),
            )
        ),
        *_CERTIFICATE,
        *_OVER,
    ),
    *_of(
        "SyncerReachable",
        "Unknown",
        ("NotAsked", "", "the operator has not contacted the syncer yet"),
        _NOT_EVALUATED,
    ),
    *_of(
        "LearnersReady", "True", ("AllTraining", "Normal", "{training} of {desired} are training")
    ),
    *_of(
        "LearnersReady",
        "False",
        ("Starting", "", "{training} of {desired} are training{detail}"),
        (
            "WaitingInQueue",
            "Normal",
            "{training} of {desired} are training; waiting in queue{queue}: {learners}{detail}",
            "they join when the queue admits them: see kubectl get workloads",
        ),
        (
            "SomeNotTraining",
            "Warning",
            "{training} of {desired} are training{detail}",
            "the others restart and rejoin automatically; see kubectl get pods",
        ),
        (
            "LearnersFailed",
            "Warning",
            "{training} of {desired} are training; failed: {detail}",
            "correct the manifest or the program; the others continue",
        ),
        ("PodTrouble", "Warning", "{detail}", "see kubectl describe pod"),
        ("NoEndpoint", "", "not started: spec.syncer.endpoint is empty"),
        *_CERTIFICATE,
        *_OVER,
    ),
    *_of("LearnersReady", "Unknown", _NOT_EVALUATED),
    *_of(
        "QuorumMet",
        "True",
        ("EnoughLearners", "Normal", "{reporting} learners report (quorum: {quorum})"),
        (
            "NothingMerges",
            "Warning",
            "{reporting} learners report (quorum: {quorum}), but nothing is merged: the syncer waits for {detail}",
            "see the log of the syncer",
        ),
        (
            "RegionFailed",
            "Warning",
            "{reporting} learners report (quorum: {quorum}); {failed}",
            "correct the manifest or the program for that region; the others continue",
        ),
    ),
    *_of(
        "QuorumMet",
        "False",
        ("Starting", "", "{reporting} learners report (quorum: {quorum})"),
        (
            "WaitingInQueue",
            "Normal",
            "{reporting} learners report (quorum: {quorum}); {waiting} wait in a queue",
            "see the condition LearnersReady",
        ),
        (
            "TooFewLearners",
            "Warning",
            "{reporting} learners report (quorum: {quorum}): the syncer waits for more",
            "restore learners, or lower spec.sync.quorum",
        ),
        (
            "RegionMissing",
            "Warning",
            "{reporting} learners report (quorum: {quorum}): the syncer waits for more; {failed}",
            "correct the manifest or the program for that region, then suspend and resume the job there",
        ),
        *_OVER,
    ),
    *_of("QuorumMet", "Unknown", ("NoAnswer", "", "the syncer does not reply"), _NOT_EVALUATED),
    *_of("SpecConsistent", "True", ("SameHash", "", "the syncer runs this manifest's spec")),
    *_of(
        "SpecConsistent",
        "False",
        (
            "OtherHash",
            "Warning",
            "this manifest's spec is {own}, {others}",
            "apply the same manifest in every cluster",
        ),
    ),
    *_of(
        "SpecConsistent", "Unknown", ("NoAnswer", "", "the syncer does not reply"), _NOT_EVALUATED
    ),
    *_of("Suspended", "True", ("Suspended", "Normal", "spec.runPolicy.suspend is set")),
    *_of(
        "Suspended",
        "False",
        ("NotSuspended", "", "spec.runPolicy.suspend is not set"),
        ("Resumed", "Normal", "spec.runPolicy.suspend was cleared"),
        (
            "VolumeGone",
            "Warning",
            "spec.runPolicy.suspend is set, but the job failed and PersistentVolumeClaim {claim} with its state "
            "no longer exists: it stays Failed, and cannot be resumed",
            "restore the claim from a copy and confirm the loss of the former one, or create a new job",
        ),
    ),
    *_of(
        "Complete",
        "True",
        ("StepsDone", "Normal", "all {steps} steps are complete"),
        (
            "ParametersUnchanged",
            "Warning",
            "all {steps} steps are complete, but no learner changed the parameters: the model is that of step 0",
            "train the model that Learner.connect is given, in place and not a copy of its parameters, and check "
            "the learning rate",
        ),
    ),
    *_of(
        "Complete",
        "False",
        ("NotComplete", "", "the job has steps left"),
        ("StepsRaised", "Normal", "spec.steps was raised to {steps}: the job continues"),
        (
            "SyncerDone",
            "Warning",
            "the syncer completed at step {step}, but this manifest has spec.steps {steps}",
            "apply the same manifest in the syncer's region",
        ),
    ),
    *_of(
        "Failed",
        "True",
        (
            "LearnerRefused",
            "Warning",
            "{others}: learner {learner} was permanently refused: {detail}",
            "correct the manifest or the program, then suspend and resume the job",
        ),
        (
            "LearnerNeverJoined",
            "Warning",
            "{others}: {detail}",
            "correct the program or the manifest, then suspend and resume the job",
        ),
        (
            "LearnerRestartLimit",
            "Warning",
            "{others}: {detail}",
            "correct the manifest or the program, then suspend and resume the job",
        ),
        (
            "LearnersFailed",
            "Warning",
            "{others}: {detail}",
            "correct the manifest or the program for the regions that are named, then suspend and resume "
            "the job: first in the regions where it failed independently, last in the syncer's region",
        ),
        (
            "DeadlineExceeded",
            "Warning",
            "the job ran longer than spec.runPolicy.activeDeadlineSeconds ({seconds} s)",
            "raise the limit, then suspend and resume the job",
        ),
        (
            "SyncerRegionFailed",
            "Warning",
            "the job failed in region {region}, which has the syncer: {detail}",
            "correct and resume it there; this region follows",
        ),
    ),
    *_of("Failed", "False", ("NotFailed", "", "the job did not fail")),
)

_TABLE = {(reason.condition, reason.reason): reason for reason in REASONS}


def has_reason(condition: str, reason: str) -> bool:
    """Whether the condition may have this reason."""
    return (condition, reason) in _TABLE


def condition(kind: str, reason: str, **values: object) -> ConditionState:
    """
    The condition with this reason; `values` fill its message.

    Raises:
        KeyError: the table has no such reason, or the message needs a value that is not given.
    """
    row = _TABLE[kind, reason]
    return ConditionState(
        type=kind,
        status=row.status,
        reason=reason,
        message=clip(printable(row.message.format(**values))),
    )


def event_type(condition: str, reason: str) -> EventType:
    """Type of the Event posted when the condition changes to this reason; "": none."""
    row = _TABLE.get((condition, reason))
    return row.event if row else ""


def clip(text: str) -> str:
    """The text, shortened to MAX_MESSAGE characters."""
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
