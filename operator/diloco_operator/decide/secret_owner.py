"""
The Secret that cert-manager makes for a job: the job becomes an owner of it, so that it goes with the job.

Pure. cert-manager keeps the Secret of a deleted Certificate, and a secretTemplate has no owners. It applies only
fields of its own, and checks no owner but the Certificate (--enable-certificate-owner-ref), so ours stays.
"""

from __future__ import annotations

from typing import Any

from diloco_job import names
from diloco_operator.resources.common import reference
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import controller_uid, labels, owner_uids

CERTIFICATE = "cert-manager.io/certificate-name"
"""Annotation of a Secret that cert-manager made: the name of the Certificate."""


def to_own(state: JobState) -> tuple[dict[str, Any], ...]:
    """What to apply to the Secret; nothing if it has the owner, or is not of the job's own Certificate."""
    name, secret = names.tls_name(state.job.metadata.name), state.secret
    certificate = state.child("Certificate", name)
    if secret is None or certificate is None or controller_uid(certificate) != state.owner.uid:
        return ()
    metadata = secret["metadata"]
    if (metadata.get("annotations") or {}).get(CERTIFICATE) != name:
        return ()
    if labels(secret).get("diloco.dev/job") != state.job.metadata.name:
        return ()
    if state.owner.uid in owner_uids(secret):
        return ()
    return (
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": metadata["name"],
                "namespace": state.owner.namespace,
                # A precondition: neither is another Secret of this name changed, nor one created.
                "uid": metadata["uid"],
                # Not as the controller: with the flag above, that is the Certificate.
                "ownerReferences": [reference(state.job.metadata.name, state.owner.uid)],
            },
        },
    )
