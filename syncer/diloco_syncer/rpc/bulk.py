"""
The bulk service (bulk.proto) as a gRPC handler: raw bytes, no serializers.

Learners use a connection of its own for it, so bulk data cannot delay a heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import grpc

from diloco.errors import DilocoError, ProtocolError
from diloco.rpc.status_codes import aborting
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.rpc.authorizer import Authorizer
from diloco_syncer.rpc.call_limits import CallLimits
from diloco_syncer.rpc.downloads import Downloads
from diloco_syncer.rpc.transfers import check_sender, check_size, unpack
from diloco_syncer.rpc.uploads import Uploads
from diloco_syncer.runner import Runner


class BulkService:
    """
    The limits in front of uploads and downloads.

    Args:
        runner: the syncer.
        authorizer: checks who may act for a learner.
        limits: limits streams and records refusals.
    """

    def __init__(self, runner: Runner, authorizer: Authorizer, limits: CallLimits) -> None:
        self._runner, self._authorizer, self._limits = runner, authorizer, limits
        self._uploads = Uploads(runner, authorizer, limits.refusals)
        self._downloads = Downloads(runner, authorizer, limits.refusals)

    def handler(self) -> grpc.GenericRpcHandler:
        """For the server: methods without serializers, so nothing is copied on the way."""
        return grpc.method_handlers_generic_handler(
            "diloco.v1.Bulk",
            {
                "Upload": self._limits.bulk.handler(self.upload),
                "Download": self._limits.bulk.handler(self.download),
            },
        )

    def upload(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """As `Uploads.upload`, for a sender that has no more streams than it may."""
        with aborting(context):
            first = self._first(requests, context)
            with self._slot(first, bulk.UploadHeader, context):
                messages = chain(() if first is None else (first,), requests)
                for reply in self._uploads.upload(messages, context):
                    with self._limits.replying(self._limits.bulk, context):
                        yield reply

    def download(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """As `Downloads.download`, for a receiver that has no more streams than it may."""
        with aborting(context):
            first = self._first(requests, context)
            if first is None:
                raise ProtocolError("a download without a request; send DownloadRequest first")
            with self._slot(first, bulk.DownloadRequest, context) as learner:
                frames = self._downloads.download(first, context)
                yield from self._limits.sending(frames, context, learner)

    def _first(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        first: bytes | None = self._limits.first(self._limits.bulk, requests, context)
        if first is not None:
            check_size(first)
        return first

    def _slot(
        self, first: bytes | None, kind: type[bulk.UploadHeader | bulk.DownloadRequest],
        context: grpc.ServicerContext,
    ) -> AbstractContextManager[str]:  # fmt: skip
        """
        A place for the stream of the learner that the first message names, if the peer may act for it.

        A wrong identity is left to the transfer, which refuses it at once and in its own form.
        """
        try:
            sender = unpack(first or b"", kind)
            if isinstance(sender, bulk.DownloadRequest) and not sender.learner:
                self._authorizer.check_observer(context)
            else:
                self._authorizer.check(context, sender.learner)
                check_sender(self._runner, sender)
        except DilocoError:
            return nullcontext("")
        return self._limits.slot(sender.learner)
