"""Downloads over gRPC: one fragment (or the constants), requested until it has arrived."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from diloco.rpc.status_codes import error_of
from diloco_worker.link.assembly import Assembly, Outcome, Payloads
from diloco_worker.link.transfer import CancelToken

log = logging.getLogger("diloco.link")

METHOD = "/diloco.v1.Bulk/Download"

UNDECIDED_SECONDS = 0.5
"""Pause before a result is requested again whose round the syncer has not decided about, or that took too long."""

START_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 128 * 1024.0
"""A stream may take this long, and then the time at this rate: as an upload (core/upload_limits.py of the syncer)."""

MERGE_SECONDS = 300.0
"""The stream of a result may take longer by this: so long, the syncer waits for one more chunk of its merge."""


def fetch(channel: grpc.Channel, assembly: Assembly, cancel: CancelToken) -> Payloads | None:
    """
    Download one fragment.

    A stream that takes too long is replaced by another one, for what has not arrived. If the version has changed
    meanwhile, or the round is over, it begins again with what is current.

    Args:
        channel: bulk channel.
        assembly: what to download; `discard` is called on it if there are no payloads.
        cancel: stops the download.

    Returns:
        The payloads; None when the round was aborted, or the download stopped.

    Raises:
        DilocoError: the syncer refused, the connection broke, or chunks stayed damaged.
    """
    try:
        while not cancel.stopped:
            outcome = _request(channel, assembly, cancel)
            if outcome is Outcome.COMMITTED:
                return assembly.payloads()
            if outcome is Outcome.ABORTED:
                return None
            if outcome is Outcome.UNDECIDED:
                cancel.wait(UNDECIDED_SECONDS)
        return None
    finally:
        assembly.discard()


def _request(channel: grpc.Channel, assembly: Assembly, cancel: CancelToken) -> Outcome:
    method: Any = channel.unary_stream(METHOD)  # bytes in, bytes out: no serializers
    call = method(assembly.request(), timeout=allowed_seconds(assembly))
    cancel.on_stop(call.cancel)
    try:
        for message in call:
            assembly.add(message)
    except grpc.RpcError as problem:
        error = error_of(problem)
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not cancel.stopped:
            log.warning("%s: requested again: %s", assembly, error)
            return Outcome.UNDECIDED
        if cancel.stopped or not assembly.refused(error):
            raise error from None
        return Outcome.DAMAGED
    finally:
        call.cancel()
    return assembly.end()


def allowed_seconds(assembly: Assembly) -> float | None:
    """How long one stream of a download may take; None: its size is not known."""
    if assembly.expected_bytes is None:
        return None
    seconds = START_SECONDS + assembly.expected_bytes / MIN_BYTES_PER_SECOND
    return seconds + MERGE_SECONDS if assembly.of_round else seconds
