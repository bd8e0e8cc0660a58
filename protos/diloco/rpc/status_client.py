"""
Client of a syncer's status, with a deadline; used by the operator and the local supervisor.
"""

from __future__ import annotations

import grpc

from diloco.rpc.channels import channel
from diloco.rpc.status_codes import error_of
from diloco.rpc.tls import Tls
from diloco.v1 import syncer_pb2, syncer_pb2_grpc

STATUS_BYTES = 4 << 20
"""
Largest status that is read: that of 27,000 learners. An empty learner has 3 bytes in a message and 200
in memory, so a larger one would be a danger for the operator.
"""


class SyncerClient:
    """Reads the status of a syncer; connects on first use and after every loss."""

    def __init__(
        self, endpoint: str, *, tls: Tls | None = None, server_name: str | None = None
    ) -> None:
        """
        Does not connect yet. Other certificates need another client.

        Args:
            endpoint: host:port of the syncer.
            tls: the content of the job's Secret; None: no TLS.
            server_name: `diloco.rpc.tls.server_name(job)`, which the syncer's certificate must have;
                None: the endpoint's host.
        """
        self.endpoint = endpoint
        self.tls = tls
        self._channel = channel(
            endpoint, tls=tls, purpose="control", server_name=server_name, reply_bytes=STATUS_BYTES
        )
        self._stub = syncer_pb2_grpc.SyncerStub(self._channel)

    def status(self, *, timeout_seconds: float = 1.0) -> syncer_pb2.StatusReply:
        """
        The status of the syncer.

        Raises:
            UnavailableError: no answer within the deadline; `diloco.rpc.tls.explain(str(error))` gives
                the reason, if gRPC reports it.
            DilocoError: the syncer refused to answer.
        """
        try:
            return self._stub.GetStatus(syncer_pb2.StatusRequest(), timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def failed(self, reason: str, message: str, *, timeout_seconds: float = 1.0) -> None:
        """
        Report that the job failed; the certificate must be the syncer's own.

        Raises:
            UnavailableError: no answer within the deadline.
            DilocoError: the syncer refused, or its version has no such call.
        """
        failure = syncer_pb2.Failure(reason=reason, message=message)
        try:
            self._stub.Failed(failure, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def close(self) -> None:
        """Close the connection; the client cannot be used again."""
        self._channel.close()
