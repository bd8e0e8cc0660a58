"""
Downloads: the gRPC thread of each stream, which waits so that its source need not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from diloco.errors import DilocoError
from diloco.rpc.status_codes import aborting
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.authorizer import Authorizer
from diloco_syncer.rpc.source import DownloadSource, open_download
from diloco_syncer.rpc.transfers import unpack
from diloco_syncer.runner import Runner

log = logging.getLogger(__name__)


class Downloads:
    """The method `Download` of the bulk service (bulk.proto)."""

    def __init__(self, runner: Runner, authorizer: Authorizer, refusals: RefusalLog) -> None:
        self._runner, self._authorizer, self._refusals = runner, authorizer, refusals
        self._lock = threading.Lock()
        self._open: dict[grpc.ServicerContext, DownloadSource] = {}

    def download(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send what the request asks for."""
        with aborting(context):
            wanted = unpack(request, bulk.DownloadRequest)
            # An observer (no learner) only reads: any certificate of the job will do.
            self._authorize(wanted.learner, context)
            source = open_download(self._runner, wanted)
            with self._listed(source, context):
                while not source.over:
                    frame = source.next_frame(time.monotonic())
                    if frame is not None:
                        self._runner.metrics.sent(wanted.learner, len(frame))
                        yield frame
                    elif (waiting := source.waiting) is not None:
                        waiting.until(waiting.seconds)

    @contextmanager
    def _listed(self, source: DownloadSource, context: grpc.ServicerContext) -> Iterator[None]:
        """
        While a download is open, a later one may end it.

        One that its peer hardly reads keeps a version, or the whole merge, in memory. So each download that
        begins ends those whose versions the syncer does not need any longer.
        """
        with self._lock:
            parameters, now = self._runner.facts.parameters, time.monotonic()
            unread = [c for c, s in self._open.items() if parameters and s.may_end(parameters, now)]
            self._open[context] = source
        for each in unread:
            each.cancel()
        try:
            yield
        finally:
            with self._lock:
                del self._open[context]

    def _authorize(self, learner: str, context: grpc.ServicerContext) -> None:
        try:
            if learner:
                self._authorizer.check(context, learner)
            else:
                self._authorizer.check_observer(context)
        except DilocoError as error:
            self._refusals.refuse("a download", learner, error)
            raise
