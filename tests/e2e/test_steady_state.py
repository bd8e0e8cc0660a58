"""
Ten minutes in which no job changes: the operator writes nothing, not even when it is restarted.

The jobs are created when a module before it begins (fixture `resting`, session), so that the minutes pass
while other tests run. Read from the API server's audit log, which records every write. A syncer that waits
for a core for 15 s does not reply meanwhile; status has to state that, so those writes do not count.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from diloco_testing.clusters.audit import AuditLog, Request
from diloco_testing.clusters.kubectl import until

OPERATOR = "system:serviceaccount:diloco-system:"
MINUTES = 10
TRAINING_MINUTES = 2
SILENT, REPLIES = "NoAnswer", "Answers"
"""Reasons of SyncerReachable."""


def writes(audit: AuditLog, namespace: str, since: datetime, until: datetime | None = None):
    """What the operator wrote in a namespace, and what it wrote about it elsewhere."""
    return [
        request
        for request in audit.requests(user=OPERATOR, namespace=namespace, since=since, until=until)
        if request.writes
    ]


def without_silence(found: Sequence[Request], reasons: dict[str, str]) -> list[Request]:
    """
    The writes other than those about a syncer that did not reply, or that replied again.

    Args:
        found: an Event and its status each.
        reasons: name of an Event → its reason.
    """
    about: Counter[str] = Counter()
    left = []
    for request in found:
        if request.resource == "events" and reasons.get(request.name) in (SILENT, REPLIES):
            about[request.name.rpartition(".")[0]] += 1
        else:
            left.append(request)
    for request in tuple(left):
        if request.resource == "dilocojobs/status" and about[request.name] > 0:
            about[request.name] -= 1
            left.remove(request)
    return left


def explained(found: Sequence[Request], events: Sequence[dict]) -> str:
    """Writes, and what the Events among them state."""
    texts = {
        e["metadata"]["name"]: f"{e['reason']}: {e.get('note', e.get('message'))}" for e in events
    }
    return "\n".join(f"{request} {texts.get(request.name, '')}" for request in found)


def test_writes_about_a_silent_syncer_do_not_count():
    at = datetime.now(UTC)
    same = {
        "at": at,
        "user": "",
        "agent": "",
        "pod": "",
        "verb": "patch",
        "group": "",
        "namespace": "n",
    }
    same |= {"code": 200, "forbidden": False}
    status, event = (
        [Request(**same, resource=resource, name=name) for name in names]
        for resource, names in {
            "dilocojobs/status": ("a", "a", "b", "c"), "events": ("a.1", "a.2", "c.3"),
        }.items()
    )  # fmt: skip
    reasons = {"a.1": SILENT, "a.2": REPLIES, "c.3": "Suspended"}
    assert without_silence([*status, *event], reasons) == [*status[2:], event[2]]


@pytest.fixture(scope="module")
def trained_since(training):
    """From when on a job trains and nothing else happens to it."""
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def settled(quiet, trained_since):
    """The quiet jobs, ten minutes after they came to rest; the minutes of the training job pass meanwhile."""
    left = quiet.since + timedelta(minutes=MINUTES) - datetime.now(UTC)
    time.sleep(max(0.0, left.total_seconds()))
    return quiet


def test_ten_minutes_without_a_single_write(settled):
    """A complete job, a suspended one, one that waits for learners and one that was refused."""
    found = writes(settled.cluster.audit, settled.namespace, settled.since)
    events = json.loads(
        settled.cluster.kubectl("get", "events", "-n", settled.namespace, "-o", "json")
    )["items"]
    left = without_silence(found, {e["metadata"]["name"]: e["reason"] for e in events})
    assert not left, explained(found, events)
    assert {job.name: job.status()["state"] for job in settled.jobs} == settled.states


def test_no_pod_was_restarted_meanwhile(settled):
    for job in settled.jobs:
        assert job.instances() == settled.instances[job.name]


def test_a_training_job_is_written_about_twice_a_minute_at_most(training, trained_since):
    """Mere progress; and nothing but its status."""
    end = trained_since + timedelta(minutes=TRAINING_MINUTES)
    time.sleep(max(0.0, (end - datetime.now(UTC)).total_seconds()))
    found = writes(training.cluster.audit, training.namespace, trained_since, end)
    about = {request.resource for request in found}
    assert about <= {"dilocojobs/status"}, "\n".join(map(str, found))
    assert 1 <= len(found) <= 2 * TRAINING_MINUTES + 1, "\n".join(map(str, found))


def test_a_restart_of_the_operator_writes_nothing(settled):
    kubectl, since = settled.cluster.kubectl, datetime.now(UTC)
    kubectl("rollout", "restart", "deployment/diloco", "-n", "diloco-system")
    kubectl("rollout", "status", "deployment/diloco", "-n", "diloco-system", "--timeout=120s")
    audit = settled.cluster.audit

    def read_all() -> bool:
        read = {
            request.name
            for request in audit.requests(user=OPERATOR, namespace=settled.namespace, since=since)
            if request.verb == "get" and request.resource == "dilocojobs"
        }
        return read >= {job.name for job in settled.jobs}

    until(read_all, 120, expected="the new operator has read every job")
    time.sleep(5.0)  # its reconciles end; nothing else shows that they did
    found = writes(audit, settled.namespace, since)
    assert not found, "\n".join(map(str, found))
