"""
The operator's rights: nothing was forbidden to it in any of these runs, and it has none that none of them used.

Reads the audit logs of all clusters of this session, ended ones included; it runs last. Alone it has nothing to read.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from diloco_testing.clusters_audit import Request
from diloco_testing.clusters_install import CLUSTER_ROLE

OPERATOR = "system:serviceaccount:diloco-system:diloco"

NEEDED = {"test_lifecycle", "test_two_clusters"}
"""Files that together make the operator use all of its rights."""

UNSEEN = {
    ("diloco.dev", "dilocojobs/finalizers", "update"):
        "asked by the API server itself, where OwnerReferencesPermissionEnforcement is on",
}  # fmt: skip
"""Rights that no audit log can show in use, and why they are needed."""


@pytest.fixture(scope="module")
def requests(local):
    """Everything that operators of this session asked for."""
    found = [one for log in local.audits() for one in log.requests(user=OPERATOR)]
    if not found:
        pytest.skip("no operator ran in this session; run it together with other files")
    return found


def test_nothing_was_forbidden(requests):
    # What is applied while a namespace goes away is refused whatever the rights are.
    forbidden = {str(one) for one in requests if one.code == 403 and not one.ending}
    assert not forbidden, "\n".join(sorted(forbidden))


def test_every_right_was_used(eu, requests, request):
    ran = {item.path.stem for item in request.session.items}
    if missing := NEEDED - ran:
        pytest.skip(
            f"{', '.join(sorted(missing))} did not run, and some rights are used only there"
        )
    rules = eu.kubectl.get("clusterrole", CLUSTER_ROLE, "")
    assert rules is not None
    granted = {
        (group, resource, verb)
        for rule in rules["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted - used(requests) - set(UNSEEN) == set()


def used(requests: Iterable[Request]) -> set[tuple[str, str, str]]:
    """Rights that these requests took: API group, resource, verb."""
    found = {(one.group, one.resource, one.verb) for one in requests}
    # An apply that makes an object takes both rights; the log has its verb alone.
    made = {(one.group, one.resource, "create") for one in requests if one.code == 201}
    return found | made
