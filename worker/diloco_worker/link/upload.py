"""Uploads over gRPC: stream what the encoder made, resend what arrived damaged."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc

from diloco.errors import NotFiniteError, ProtocolError
from diloco.rpc.status_codes import error_of
from diloco_worker.core.events import Pulled
from diloco_worker.link.encoder import REPORT_POLL_SECONDS, REPORT_SECONDS, Encoder
from diloco_worker.link.transfer import CancelToken, Identity
from diloco_worker.link.upload_messages import UploadMessages

METHOD = "/diloco.v1.Bulk/Upload"


class Uploader:
    """
    Sends fragments; safe to use from several threads.

    Args:
        channel: returns the bulk channel for uploads; another one after certificates changed.
        encoder: makes the uploads.
    """

    def __init__(self, channel: Callable[[], grpc.Channel], encoder: Encoder) -> None:
        self._channel, self._encoder = channel, encoder

    def pull(self, pull: Pulled, identity: Identity, cancel: CancelToken) -> None:
        """
        Answer a pull from the newest host copy (`Encoder.pull`).

        Raises:
            DilocoError: refused, or the connection broke.
            NotFiniteError: the fragment holds NaN or Inf; the syncer was notified.
        """
        self._wait_for_another_report(pull, cancel)
        upload = self._encoder.pull(pull, identity, stopped=lambda: cancel.stopped)
        if upload is None:
            return
        with closing(upload):
            self._send(upload, cancel)
        if any(not math.isfinite(n) for n in upload.header.norms):
            raise NotFiniteError(f"fragment {pull.fragment} was not sent: it holds NaN or Inf")

    def _wait_for_another_report(self, pull: Pulled, cancel: CancelToken) -> None:
        deadline = time.monotonic() + REPORT_SECONDS
        while self._encoder.repeats(pull) and time.monotonic() < deadline:
            if cancel.wait(REPORT_POLL_SECONDS):
                return

    def initial(self, identity: Identity, cancel: CancelToken) -> None:
        """
        Upload every host copy as Θ^(0), and the constants.

        Raises:
            DilocoError: refused, or the connection broke; start over.
        """
        for upload in self._encoder.initial(identity):
            with closing(upload):
                self._send(upload, cancel)

    def _send(self, upload: UploadMessages, cancel: CancelToken) -> None:
        """
        Stream one upload until the syncer has all of it.

        Raises:
            DilocoError: refused, or the connection broke.
        """
        if cancel.stopped:
            return
        requested: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        method: Any = self._channel().stream_stream(METHOD)  # bytes in, bytes out: no serializers
        call = method(_messages(upload, requested))
        cancel.on_stop(call.cancel)
        try:
            for message in call:
                again = upload.reply(message)
                if again is None:
                    return
                requested.put(again)
            raise ProtocolError(
                "the syncer ended an upload without a reply; expected `done` or a reason"
            )
        except grpc.RpcError as error:
            if call.code() is grpc.StatusCode.CANCELLED and not cancel.stopped:
                upload.refused()  # the syncer cancels the uploads of an aborted attempt
            raise error_of(error) from None
        finally:
            requested.put(None)
            call.cancel()


def _messages(
    upload: UploadMessages, requested: queue.SimpleQueue[tuple[int, ...] | None]
) -> Iterator[bytes]:
    """Everything to send; `requested` gives the chunks to resend, None at the end."""
    yield from upload.messages()
    while (again := requested.get()) is not None:
        yield from upload.repeat(again)
