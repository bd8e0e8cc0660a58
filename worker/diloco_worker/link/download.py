"""Downloads over gRPC: one fragment (or the constants), requested until it has arrived."""

from __future__ import annotations

from typing import Any

import grpc

from diloco.rpc.status_codes import error_of
from diloco_worker.link.assembly import Assembly, Outcome, Payloads
from diloco_worker.link.transfer import CancelToken

METHOD = "/diloco.v1.Bulk/Download"

UNDECIDED_SECONDS = 0.5
"""Pause before a result is requested again whose round the syncer has not decided about."""


def fetch(channel: grpc.Channel, assembly: Assembly, cancel: CancelToken) -> Payloads | None:
    """
    Download one fragment.

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
    call = method(assembly.request())
    cancel.on_stop(call.cancel)
    try:
        for message in call:
            assembly.add(message)
    except grpc.RpcError as problem:
        error = error_of(problem)
        if cancel.stopped or not assembly.refused(error):
            raise error from None
        return Outcome.DAMAGED
    finally:
        call.cancel()
    return assembly.end()
