"""
Who may speak for which region: what the peer's certificate says, never what the peer says.

Everything else that a syncer serves (GetStatus, the evaluator's calls) is for any certificate of the
job's authority.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from diloco.errors import UnauthorisedError
from diloco.tls import region_uri, regions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Asked before anything is done in the name of a learner."""

    job: str
    tls: bool
    """Peers have certificates; without, nobody can be told from anybody."""

    def admit(self, context: grpc.ServicerContext, learner: str) -> None:
        """
        May this peer speak for this learner ("<region>/<index>")?

        Raises:
            UnauthorisedError: its certificate does not name the learner's region.
        """
        if not self.tls:
            return
        found: Iterable[bytes] = context.auth_context().get("peer_uri", ())  # type: ignore[assignment]
        names = [name.decode(errors="replace") for name in found]
        region = learner.partition("/")[0]
        if region_uri(self.job, region) in names:
            return
        allowed = regions_of(names, self.job)
        seen = f"region {', '.join(allowed)}" if allowed else "no region"
        raise UnauthorisedError(
            f"{learner} presented a certificate for {seen} of job {self.job}, expected one with the "
            f"URI name {region_uri(self.job, region)}: apply the Secret of region {region} in its "
            "cluster (diloco certs writes one per region)"
        )
