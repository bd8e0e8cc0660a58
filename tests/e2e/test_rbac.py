"""
The operator's rights: nothing was forbidden to it in any of these runs, and it has none that none of them used.

Reads the audit logs of all clusters of this session, ended ones included; it runs last.
"""

from __future__ import annotations

import pytest

OPERATOR = "system:serviceaccount:diloco-system:diloco"

UNSEEN = {
    ("diloco.dev", "dilocojobs/finalizers", "update"):
        "asked by the API server itself, where OwnerReferencesPermissionEnforcement is on",
}  # fmt: skip
"""Rights that no audit log can show in use, and why they are needed."""


@pytest.fixture(scope="module")
def requests(local):
    """Everything that operators of this session asked for."""
    return [one for log in local.audits() for one in log.requests(user=OPERATOR)]


def test_nothing_was_forbidden(requests):
    forbidden = {str(one) for one in requests if one.code == 403}
    assert not forbidden, "\n".join(sorted(forbidden))


def test_every_right_was_used(eu, requests):
    if len({one.namespace for one in requests}) < 5:
        pytest.skip("only some of the tests ran; run all of tests/e2e")
    rules = eu.kubectl.get("clusterrole", "diloco", "")
    assert rules is not None
    granted = {
        (group, resource, verb)
        for rule in rules["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = {(one.group, one.resource, one.verb) for one in requests}
    assert granted - used - set(UNSEEN) == set()
