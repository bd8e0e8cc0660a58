"""
Uploads of learners: the gRPC thread of each stream, which waits so that its receiver need not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc

from diloco.rpc.status_codes import aborting
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.authorizer import Authorizer
from diloco_syncer.rpc.initial import InitialParameters
from diloco_syncer.rpc.receiver import UploadReceiver
from diloco_syncer.runner import Runner


class Uploads:
    """The method `Upload` of the bulk service (bulk.proto)."""

    def __init__(self, runner: Runner, authorizer: Authorizer, refusals: RefusalLog) -> None:
        self._runner, self._authorizer, self._refusals = runner, authorizer, refusals
        self._initial = InitialParameters(runner)

    def upload(
        self, request_iterator: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Receive one fragment (or the constants); the last reply has `done` or `refused`."""
        with aborting(context):
            receiver = UploadReceiver(
                self._runner,
                self._initial,
                authorise=lambda learner: self._authorizer.check(context, learner),
                cancel=lambda: _cancel(context),
                refuse=lambda learner, error: self._refusals.refuse("an upload", learner, error),
            )
            try:
                while not receiver.done:
                    yield from _proceed(receiver, request_iterator)
            finally:
                receiver.lost()  # unless it is done


def _proceed(receiver: UploadReceiver, requests: Iterator[bytes]) -> list[bytes]:
    """
    Wait for the next message, or for what the receiver waits for; returns what it replies.

    Raises:
        Exception: the peer is gone. An error of this program ends the upload instead.
    """
    waiting = receiver.waiting
    message: bytes | None = None
    if waiting is None:
        message = next(requests, None)
    try:
        if waiting is None:
            replies = receiver.receive(message, time.monotonic())
        else:
            waiting.until(waiting.seconds)
            replies = receiver.resume(time.monotonic())
        if receiver.waiting is None:
            receiver.awaits(time.monotonic())  # from now on, also until the peer reads the replies
        return replies
    except Exception as error:
        return receiver.failed(error)


def _cancel(context: grpc.ServicerContext) -> None:
    context.cancel()
