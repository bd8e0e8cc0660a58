"""
Every condition of a job, every reason it may have, its words and its Event: one table.

Pure. A pair of condition and reason has one status, one message template and at most one type of
Event. The reference page is made from this table; nothing else in the operator names a reason's
status or words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["True", "False", "Unknown"]
EventType = Literal["", "Normal", "Warning"]

_Row = tuple[str, EventType, str] | tuple[str, EventType, str, str]
"""Reason, type of its Event, message, advice where there is one."""

MESSAGE_MOST = 1000
"""Longest message of a condition or an Event, in characters; an Event's may be 1024."""

CONDITIONS: dict[str, str] = {
    "Accepted": "the spec passed what only the operator can check",
    "SyncerReady": "the syncer serves; Unknown outside its region",
    "SyncerReachable": "this operator had an answer from the syncer within the last 30 s",
    "LearnersReady": "all learners of this operator's regions are training",
    "QuorumMet": "at least spec.sync.quorum learners report to the syncer",
    "SpecConsistent": "every region runs the same shared spec (status.specHash)",
    "Suspended": "spec.runPolicy.suspend is set, and the job stands still",
    "Complete": "the syncer has done spec.steps steps; until steps is raised",
    "Failed": "the job ended without a result; final",
}
"""Condition → when it is True, in the order in which status lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason of one condition."""

    condition: str
    status: Status
    reason: str
    message: str
    """Template; what stands in braces is filled in."""
    event: EventType
    """Type of the Event when the condition turns to this reason; "": none."""
    advice: str
    """What to do about it; "": nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said of one condition now."""

    condition: str
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
        ("CertificateMissing", "make the Secret (diloco certs) or look at cert-manager"),
        (
            "CertificateUnreadable",
            "make the Secret anew (diloco certs), or let the operator read it (rbac.tlsSecrets)",
        ),
        ("CertificateExpired", "renew the Secret (diloco certs); it is taken up by itself"),
        ("CertificateNotYetValid", "look at the clocks of both clusters"),
        ("CertificateOfOtherAuthority", "take the Secrets of all clusters from one authority"),
        ("CertificateOfOtherRegion", "apply the Secret that was made for this region"),
        ("CertificateNotForSyncer", "give the syncer's region a certificate for <job>-syncer"),
        ("CertificateUsage", "issue it for client auth and server auth"),
        ("KeyOfOtherCertificate", "replace tls.crt and tls.key together"),
    )
)
"""What may be wrong with a certificate, for the conditions that suffer from it."""

_OVER: tuple[_Row, ...] = (
    ("Suspended", "", "the job is suspended"),
    ("Complete", "", "the job is complete"),
    ("Failed", "", "the job failed"),
)
"""For conditions of what is no longer wanted: said once, by the condition of that name."""

_NOT_LOOKED: _Row = ("NotLooked", "", "not looked at: the job is not accepted")

REASONS: tuple[Reason, ...] = (
    *_of("Accepted", "True", ("Valid", "Normal", "the job can be run")),
    *_of(
        "Accepted",
        "False",
        ("InvalidSpec", "Warning", "{problems}", "correct the manifest; nothing was changed"),
        (
            "RegionNotInSpec",
            "Warning",
            "this operator runs region {region}, and spec.regions has {regions}",
            "add the region, or leave the job out of this cluster",
        ),
        (
            "VolumeGone",
            "Warning",
            "spec.steps was raised to {steps}, but the job was complete at step {step} and its "
            "volume {volume} is gone: there is nothing to go on from",
            "make a new job",
        ),
        (
            "NoEndpoint",
            "Warning",
            "spec.syncer.endpoint is empty, but the syncer lives in region {syncer_region}: the "
            "learners of region {region} have nowhere to dial",
            "set spec.syncer.endpoint in every region's manifest",
        ),
        (
            "NameTaken",
            "Warning",
            "{children} exists and belongs to somebody else; it is left alone",
            "remove it, or give the job or the region another name",
        ),
        ("Refused", "Warning", "the API server refused {refusals}", "see the server's words"),
    ),
    *_of(
        "SyncerReady",
        "True",
        ("Serving", "Normal", "the syncer serves"),
        (
            "WaitingForAddress",
            "Normal",
            "the syncer serves; its Service {service} of type LoadBalancer waits for an address "
            "from the cluster, and other clusters cannot dial it before",
            "install a load balancer, or use type NodePort",
        ),
    ),
    *_of(
        "SyncerReady",
        "False",
        ("Starting", "", "the syncer's pod is not ready yet: {detail}"),
        ("NotReady", "Warning", "the syncer's pod is no longer ready: {detail}"),
        ("PodTrouble", "Warning", "{detail}", "see kubectl describe pod"),
        *_OVER,
    ),
    *_of(
        "SyncerReady",
        "Unknown",
        ("OtherRegion", "", "the syncer lives in region {region}: its operator knows"),
        _NOT_LOOKED,
    ),
    *_of("SyncerReachable", "True", ("Answers", "Normal", "{endpoint} answers")),
    *_of(
        "SyncerReachable",
        "False",
        ("NotStarted", "", "the syncer has not been started: {detail}"),
        ("NoEndpoint", "Warning", "spec.syncer.endpoint is empty", "set it in the manifest"),
        *(
            (reason, "Warning", "{endpoint}: {detail}", advice)
            for reason, advice in (
                ("DialTimeout", "look at the network between the clusters and at firewalls"),
                ("ConnectionRefused", "look at the syncer's pod and at the address"),
                ("ConnectionClosed", "look at the load balancer in front of the syncer"),
                ("NameUnknown", "look at spec.syncer.endpoint and DNS"),
                ("Unreachable", "look at routes and firewalls"),
                ("HandshakeRefused", "look at tls.crt here and at the log of the syncer"),
                ("PlainText", "look at the address and at spec.tls in both clusters"),
                ("OtherJob", "look at spec.syncer.endpoint"),
                ("NoAnswer", "look at the log of the syncer"),
            )
        ),
        *_CERTIFICATE,
        *_OVER,
    ),
    *_of("SyncerReachable", "Unknown", ("NotAsked", "", "not asked yet"), _NOT_LOOKED),
    *_of(
        "LearnersReady", "True", ("AllTraining", "Normal", "{training} of {desired} are training")
    ),
    *_of(
        "LearnersReady",
        "False",
        ("Starting", "", "{training} of {desired} are training{detail}"),
        (
            "SomeNotTraining",
            "Warning",
            "{training} of {desired} are training{detail}",
            "those that are not are restarted and rejoin by themselves; see kubectl get pods",
        ),
        ("PodTrouble", "Warning", "{detail}", "see kubectl describe pod"),
        ("NoEndpoint", "", "not started: spec.syncer.endpoint is empty"),
        *_CERTIFICATE,
        *_OVER,
    ),
    *_of("LearnersReady", "Unknown", _NOT_LOOKED),
    *_of(
        "QuorumMet",
        "True",
        ("EnoughLearners", "Normal", "{reporting} learners report, the quorum is {quorum}"),
    ),
    *_of(
        "QuorumMet",
        "False",
        ("Starting", "", "{reporting} learners report, the quorum is {quorum}"),
        (
            "TooFewLearners",
            "Warning",
            "{reporting} learners report, the quorum is {quorum}: the syncer waits",
            "bring learners back, or lower spec.sync.quorum",
        ),
        *_OVER,
    ),
    *_of("QuorumMet", "Unknown", ("NoAnswer", "", "the syncer does not answer"), _NOT_LOOKED),
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
    *_of("SpecConsistent", "Unknown", ("NoAnswer", "", "the syncer does not answer"), _NOT_LOOKED),
    *_of("Suspended", "True", ("Suspended", "Normal", "spec.runPolicy.suspend is set")),
    *_of(
        "Suspended",
        "False",
        ("NotSuspended", "", "spec.runPolicy.suspend is not set"),
        ("Resumed", "Normal", "spec.runPolicy.suspend was taken back"),
    ),
    *_of("Complete", "True", ("StepsDone", "Normal", "all {steps} steps are done")),
    *_of(
        "Complete",
        "False",
        ("NotComplete", "", "there are steps to do"),
        ("StepsRaised", "Normal", "spec.steps was raised to {steps}: the job goes on"),
        (
            "SyncerDone",
            "Warning",
            "the syncer is complete at step {step}, this manifest asks for {steps}",
            "apply the same manifest in the syncer's region",
        ),
    ),
    *_of(
        "Failed",
        "True",
        (
            "LearnerRefused",
            "Warning",
            "learner {learner} was refused for good: {detail}",
            "correct the manifest or the program and make a new job",
        ),
        (
            "LearnerRestartLimit",
            "Warning",
            "learner {learner} is given up (spec.runPolicy.learnerRestartLimit is {limit}): {detail}",
            "see kubectl logs of its pod; make a new job",
        ),
        (
            "DeadlineExceeded",
            "Warning",
            "the job ran {seconds} s, the limit of spec.runPolicy.activeDeadlineSeconds",
            "make a new job with a higher limit",
        ),
    ),
    *_of("Failed", "False", ("NotFailed", "", "the job did not fail")),
)

_TABLE = {(one.condition, one.reason): one for one in REASONS}


def is_known(condition: str, reason: str) -> bool:
    """Whether the condition may have this reason."""
    return (condition, reason) in _TABLE


def say(condition: str, reason: str, **values: object) -> Verdict:
    """
    The condition with this reason; `values` fill its message.

    Raises:
        KeyError: the table has no such reason, or the message needs a value that is not given.
    """
    row = _TABLE[condition, reason]
    return Verdict(
        condition=condition,
        status=row.status,
        reason=reason,
        message=clip(row.message.format(**values)),
    )


def event_type(condition: str, reason: str) -> EventType:
    """Type of the Event that tells of a turn to this reason; "": there is none."""
    row = _TABLE.get((condition, reason))
    return row.event if row else ""


def clip(text: str) -> str:
    """The text, cut where a message has to end."""
    return text if len(text) <= MESSAGE_MOST else text[: MESSAGE_MOST - 3] + "..."
