"""The API server's audit log: every request with its user and its response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

POD = "authentication.kubernetes.io/pod-name"
DECISION = "authorization.k8s.io/decision"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request with a response."""

    at: datetime
    """When it was answered, UTC."""
    user: str
    agent: str
    """Its User-Agent."""
    pod: str
    """The pod whose token it had; "" for people and components."""
    verb: str
    group: str
    """API group, "" for core."""
    resource: str
    """Such as "statefulsets" or "dilocojobs/status"."""
    namespace: str
    name: str
    code: int
    forbidden: bool
    """Refused for a lack of rights. Admission answers with 403 too, such as in a namespace that is being deleted."""

    @property
    def writes(self) -> bool:
        """Whether it asked for a change."""
        return self.verb in WRITES

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.at:%H:%M:%S} {self.verb} {self.resource} {where} → {self.code}"


@dataclass(frozen=True, slots=True)
class AuditLog:
    """One cluster's audit log; it may still grow."""

    path: Path

    def requests(
        self,
        *,
        user: str = "",
        namespace: str = "",
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[Request]:
        """
        Requests in the order of the log.

        Args:
            user: part of the user's name; "": any user.
            namespace: "": any.
            since: only those answered then or later.
            until: only those answered before.
        """
        with self.path.open() as file:
            for line in file:
                if (user and user not in line) or not line.endswith("\n"):
                    continue
                request = _request(json.loads(line))
                if (
                    request is None
                    or user not in request.user
                    or (namespace and request.namespace != namespace)
                ):
                    continue
                if (since is None or request.at >= since) and (until is None or request.at < until):
                    yield request


def _request(line: dict) -> Request | None:  # type: ignore[type-arg]
    target = line.get("objectRef")
    if target is None:
        return None
    part, answer = target.get("subresource"), line.get("responseStatus", {})
    return Request(
        at=datetime.fromisoformat(line["stageTimestamp"]),
        user=line["user"]["username"],
        agent=line.get("userAgent", ""),
        pod=next(iter(line["user"].get("extra", {}).get(POD, ())), ""),
        verb=line["verb"],
        group=target.get("apiGroup", ""),
        resource=target["resource"] + (f"/{part}" if part else ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=answer.get("code", 0),
        forbidden=line.get("annotations", {}).get(DECISION) == "forbid",
    )
