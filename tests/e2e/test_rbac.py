"""
The operator's rights: no request of these runs was forbidden, and every right was used.

Reads the audit logs of all clusters of this session and, with DILOCO_E2E_AUDITS, of the sessions before it. It runs
last; alone it has nothing to read.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from diloco_testing.clusters.audit import AuditLog, Request
from diloco_testing.clusters.install import CHART, CLUSTER_ROLE, NAMESPACE, RELEASE
from diloco_testing.clusters.provision import cache

OPERATOR = "system:serviceaccount:diloco-system:diloco"

NEEDED = {
    *("test_cert_manager", "test_kueue", "test_learners_of_pods"),
    *("test_lifecycle", "test_two_clusters", "test_volumes"),
}
"""Files that together make the operator use all of its rights."""

POD_GROUPS = "test_pod_groups"
"""The file of the slow tier that alone uses the rights of rbac.podGroups."""

ENDING_SECONDS = 60.0
"""How long a pod may live after an upgrade has removed its rights: its termination grace, on busy cores."""

UNSEEN = {
    ("diloco.dev", "dilocojobs/finalizers", "update"):
        "asked by the API server itself, where OwnerReferencesPermissionEnforcement is on",
    ("", "secrets", "delete"): "the same, for the owner of the Secrets that cert-manager makes",
}  # fmt: skip
"""Rights whose use no audit log shows, and why they are needed."""


@pytest.fixture(scope="module")
def requests(local):
    """Everything that operators of this session asked for."""
    found = asked_for(local.audits())
    if not found:
        pytest.skip("no operator ran in this session; run it together with other files")
    return found


def asked_for(logs: Iterable[AuditLog]) -> list[Request]:
    return [request for log in logs for request in log.requests(user=OPERATOR)]


def test_nothing_was_forbidden(requests):
    refused = forbidden(requests)
    assert not refused, "\n".join(sorted(map(str, refused)))


def forbidden(requests: Iterable[Request]) -> list[Request]:
    """
    What was refused to operators that should have been allowed it.

    An uninstall or an upgrade removes rights before the pod that had them ends: it cannot release its
    Lease, and until it ends it is refused what it was allowed before. A pod that lacks a right continues.
    """
    others = [request for request in requests if request.resource != "leases"]
    last = {request.pod: request.at for request in others}
    last_allowed = {request.pod: request.at for request in others if request.code < 400}
    had: set[tuple[str, ...]] = set()
    found = []
    for request in others:
        right = (request.pod, request.group, request.resource, request.verb)
        if request.code < 400:
            had.add(right)
        elif request.forbidden:
            ends = (last[request.pod] - request.at).total_seconds() < ENDING_SECONDS
            lost = request.at > last_allowed.get(request.pod, request.at) or (ends and right in had)
            if not lost:
                found.append(request)
    return found


def test_every_right_was_used(local, request):
    ran = {item.path.stem for item in request.session.items}
    if shared := os.environ.get("DILOCO_E2E_AUDITS"):
        ran.update(*(path.read_text().split() for path in Path(shared).glob("*.ran")))
    if missing := NEEDED - ran:
        pytest.skip(
            f"{', '.join(sorted(missing))} did not run, and some rights are used only there"
        )
    granted = {
        (group, resource, verb)
        for rule in rules(pod_groups=POD_GROUPS in ran)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    # An older operator (test_older_version.py) may have used what this one does not.
    logs = [log for log in local.audits() if not log.path.name.startswith("older-")]
    assert granted - used(asked_for(logs)) - set(UNSEEN) == set()


def rules(*, pod_groups: bool):
    """The operator's, as the chart renders them: for jobs, and for its Lease."""
    command = (cache() / "bin/helm", "template", RELEASE, CHART, "--namespace", NAMESPACE)
    flags = (
        "--kube-version=1.31", "--set=rbac.tlsSecrets=true", "--set=rbac.certManager=true",
        "--set=jobs.networkPolicy.enabled=true", f"--set=rbac.podGroups={str(pod_groups).lower()}",
    )  # fmt: skip
    objects = yaml.safe_load_all(subprocess.check_output([*command, *flags]))
    own = (("ClusterRole", CLUSTER_ROLE), ("Role", f"{RELEASE}-leader-election"))
    return [
        rule
        for role in objects
        if role and (role["kind"], role["metadata"]["name"]) in own
        for rule in role["rules"]
    ]


def used(requests: Iterable[Request]) -> set[tuple[str, str, str]]:
    """Rights that these requests took: API group, resource, verb."""
    found = {(request.group, request.resource, request.verb) for request in requests}
    # An apply that creates an object needs both rights; the log has its verb alone.
    made = {
        (request.group, request.resource, "create") for request in requests if request.code == 201
    }
    return found | made
