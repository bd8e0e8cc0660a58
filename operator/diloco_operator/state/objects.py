"""
Reading Kubernetes objects that stay the plain dicts which the API server sends.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object, with apiVersion and kind (a LIST omits them: fill them in)."""


def identity(item: Object) -> tuple[str, str]:
    """Kind and name, which identify an object within its namespace."""
    return item["kind"], item["metadata"]["name"]


def labels(item: Object) -> Mapping[str, str]:
    """Its labels; empty where there are none."""
    return item["metadata"].get("labels") or {}


def controller(item: Object) -> Object:
    """Reference to the owner that controls the object; empty: it has no controller."""
    owners = item["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def controller_uid(item: Object) -> str:
    """uid of the owner that controls the object; "": it has no controller."""
    return str(controller(item).get("uid", ""))


def owner_uids(item: Object) -> tuple[str, ...]:
    """uids of all its owners."""
    owners = item["metadata"].get("ownerReferences") or ()
    return tuple(str(owner.get("uid", "")) for owner in owners)


def is_own(item: Object, *, uid: str, job: str, volume: str = "") -> bool:
    """
    Whether the object is a child of the job with this uid and name.

    One without a controller was orphaned on purpose (--cascade=orphan), retained or restored: the job
    adopts it if it has the label, which a person gives to no object by accident. The claim with the
    uid `volume`, which the status records, needs none.
    """
    if controller := controller_uid(item):
        return controller == uid
    if volume and item["metadata"].get("uid") == volume:
        return True
    return labels(item).get("diloco.dev/job") == job


def is_deleting(item: Object) -> bool:
    """Whether the object has a deletion timestamp."""
    return bool(item["metadata"].get("deletionTimestamp"))
