"""
Client of a syncer's status, with a deadline; used by the operator and the local supervisor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from diloco.errors import UnavailableError
from diloco.rpc.channels import channel
from diloco.rpc.status_codes import error_of
from diloco.rpc.tls import Tls
from diloco.v1 import syncer_pb2, syncer_pb2_grpc

STATUS_BYTES = 4 << 20
"""
Largest status that is read: that of 27,000 learners, even if all are ejected; a job has at most 10,000. An
empty learner has 3 bytes in a message and 200 in memory, so a larger one would be a danger for the operator.
"""


class StatusRequest:
    """A status request that was sent."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def ended(self) -> bool:
        """Whether there is an answer, or an error."""
        return bool(self._call.done())

    def timed_out(self) -> bool:
        """Whether it ended without an answer within its deadline."""
        return self.ended() and self._call.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    def when_answered(self, answered: Callable[[], object]) -> None:
        """Call once if there is an answer, from a thread of gRPC; no call after an error."""

        def ended(call: Any) -> None:
            if call.code() is grpc.StatusCode.OK:
                answered()

        self._call.add_done_callback(ended)

    def reply(self) -> syncer_pb2.StatusReply:
        """
        Wait for the status.

        Raises:
            UnavailableError: no answer within the deadline; `connection_reasons.explain(str(error))` gives
                the reason, if gRPC reports it.
            DilocoError: the syncer refused to answer.
        """
        try:
            reply: syncer_pb2.StatusReply = self._call.result()
            return reply
        except grpc.RpcError as error:
            raise error_of(error) from None
        except grpc.FutureCancelledError:
            raise UnavailableError("CANCELLED: the connection was closed") from None


class SyncerClient:
    """Reads the status of a syncer; connects on first use and after every loss."""

    def __init__(
        self,
        endpoint: str,
        *,
        tls: Tls | None = None,
        server_name: str | None = None,
        proxy: str = "",
    ) -> None:
        """
        Does not connect yet. Other certificates need another client.

        Args:
            endpoint: host:port of the syncer.
            tls: the content of the job's Secret; None: no TLS.
            server_name: `diloco.rpc.identity.server_name(job)`, which the syncer's certificate must have;
                None: the endpoint's host.
            proxy: as of `channels.channel`.
        """
        self.endpoint = endpoint
        self.tls = tls
        self._channel = channel(
            endpoint,
            tls=tls,
            purpose="control",
            server_name=server_name,
            reply_bytes=STATUS_BYTES,
            proxy=proxy,
        )
        self._stub = syncer_pb2_grpc.SyncerStub(self._channel)

    def status(self, *, timeout_seconds: float = 1.0) -> syncer_pb2.StatusReply:
        """
        The status of the syncer.

        Raises:
            DilocoError: as StatusRequest.reply.
        """
        return self.request(timeout_seconds=timeout_seconds).reply()

    def request(self, *, timeout_seconds: float) -> StatusRequest:
        """Ask for the status, without the model's tensors, without waiting for it."""
        # Its tensors may be as many bytes as a whole status, and are of no use without a download.
        request = syncer_pb2.StatusRequest(without_model=True)
        call = self._stub.GetStatus.future(request, timeout=timeout_seconds)
        return StatusRequest(call)

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

    def region_failed(
        self,
        region: str,
        reason: str,
        message: str,
        *,
        learners: int = 0,
        timeout_seconds: float = 1.0,
    ) -> None:
        """
        Report that learners of a region failed; "" as reason: none has.

        Args:
            region: in which they failed.
            reason: of the condition of the job there.
            message: of that condition.
            learners: how many failed; 0: the region ended for another reason.
            timeout_seconds: for the whole call.

        Raises:
            UnavailableError: no answer within the deadline.
            DilocoError: the certificate is not the region's, the syncer has no such region, or its
                version has no such call.
        """
        failure = syncer_pb2.RegionFailure(
            region=region, reason=reason, message=message, learners=learners
        )
        try:
            self._stub.RegionFailed(failure, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def close(self) -> None:
        """Close the connection; the client cannot be used again."""
        self._channel.close()
