"""
The operator's view of a syncer: one question, answered before a deadline.

Shell: the only place of this package that dials a syncer.
"""

from __future__ import annotations

import grpc

from diloco.transport import Tls, channel, error_of
from diloco.v1 import syncer_pb2, syncer_pb2_grpc


class SyncerClient:
    """Asks one syncer for its status; connects when first asked, and again after every loss."""

    def __init__(
        self, endpoint: str, *, tls: Tls | None = None, server_name: str | None = None
    ) -> None:
        """
        Nothing is dialled yet. With other certificates, make another client.

        Args:
            endpoint: host:port of the syncer.
            tls: what the job's Secret holds; None: no TLS.
            server_name: `diloco.tls.server_name(job)`, which the syncer's certificate must have;
                None: the endpoint's host.
        """
        self.endpoint = endpoint
        self.tls = tls
        self._channel = channel(endpoint, tls=tls, purpose="control", server_name=server_name)
        self._stub = syncer_pb2_grpc.SyncerStub(self._channel)

    def status(self, *, timeout_seconds: float = 1.0) -> syncer_pb2.StatusReply:
        """
        What the syncer says about itself.

        Raises:
            UnavailableError: no answer within the deadline; `diloco.tls.explain(str(error))` is the
                reason, as far as gRPC knows it.
            DilocoError: the syncer refused to answer.
        """
        try:
            return self._stub.GetStatus(syncer_pb2.StatusRequest(), timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def close(self) -> None:
        """Close the connection; the client cannot be asked again."""
        self._channel.close()
