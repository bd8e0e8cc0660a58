"""
Ten minutes in which nothing happens to jobs: the operator writes nothing, not even when it is restarted.

The jobs are made when the module before this one begins (fixture `quiet`, session), so that the minutes pass
while other tests run. Read from the API server's audit log: it is the one who was written to.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from diloco_testing.clusters_audit import AuditLog
from diloco_testing.kubectl import until

OPERATOR = "system:serviceaccount:diloco-system:"
MINUTES = 10


def writes(audit: AuditLog, namespace: str, since: datetime, until: datetime | None = None):
    """What the operator wrote in a namespace, and what it wrote about it elsewhere."""
    return [
        one
        for one in audit.requests(user=OPERATOR, namespace=namespace, since=since, until=until)
        if one.writes
    ]


@pytest.fixture(scope="module")
def settled(quiet):
    """The quiet jobs, ten minutes after they came to rest."""
    left = quiet.since + timedelta(minutes=MINUTES) - datetime.now(UTC)
    time.sleep(max(0.0, left.total_seconds()))
    return quiet


def test_ten_minutes_without_a_single_write(settled):
    """A complete job, a suspended one, one that waits for learners and one that was refused."""
    found = writes(settled.cluster.audit, settled.namespace, settled.since)
    assert not found, "\n".join(map(str, found))
    assert {job.name: job.status()["state"] for job in settled.jobs} == settled.states


def test_nobody_was_restarted_meanwhile(settled):
    for job in settled.jobs:
        assert job.lives() == settled.lives[job.name]


def test_a_restart_of_the_operator_writes_nothing(settled):
    kubectl, since = settled.cluster.kubectl, datetime.now(UTC)
    kubectl("rollout", "restart", "deployment/diloco", "-n", "diloco-system")
    kubectl("rollout", "status", "deployment/diloco", "-n", "diloco-system", "--timeout=120s")
    audit = settled.cluster.audit

    def looked_at_all() -> bool:
        read = {
            one.name
            for one in audit.requests(user=OPERATOR, namespace=settled.namespace, since=since)
            if one.verb == "get" and one.resource == "dilocojobs"
        }
        return read >= {job.name for job in settled.jobs}

    until(looked_at_all, 120, saying="the new operator has looked at every job")
    time.sleep(5.0)  # its reconciles end; nothing else tells that they did
    found = writes(audit, settled.namespace, since)
    assert not found, "\n".join(map(str, found))


def test_a_training_job_is_written_about_twice_a_minute_at_most(training):
    """Mere progress; and nothing but its status."""
    minutes = 2
    since = datetime.now(UTC)
    time.sleep(60.0 * minutes)
    found = writes(training.cluster.audit, training.namespace, since)
    about = {one.resource for one in found}
    assert about <= {"dilocojobs/status"}, "\n".join(map(str, found))
    assert 1 <= len(found) <= 2 * minutes + 1, "\n".join(map(str, found))
