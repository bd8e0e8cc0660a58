"""
How errors travel over gRPC: `DilocoError` ↔ status code, message and a trailing reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc

from diloco.errors import (
    BY_REASON,
    ConfigError,
    DamagedError,
    DilocoError,
    MismatchError,
    NotFiniteError,
    ProtocolError,
    StaleEpochError,
    StaleIncarnationError,
    StorageError,
    UnauthorisedError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.rpc.connection_reasons import advice, explain

log = logging.getLogger(__name__)

REASON_KEY = "diloco-reason"
"""Trailing metadata that carries `DilocoError.reason`."""


_MESSAGE_BYTES = 2000  # gRPC refuses trailers above 8 KiB, and percent-encoding may triple this


_STATUS: dict[type[DilocoError], grpc.StatusCode] = {
    DilocoError: grpc.StatusCode.INTERNAL,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    StaleIncarnationError: grpc.StatusCode.ABORTED,
    StaleEpochError: grpc.StatusCode.ABORTED,
    UnknownLearnerError: grpc.StatusCode.NOT_FOUND,
    DamagedError: grpc.StatusCode.DATA_LOSS,
    NotFiniteError: grpc.StatusCode.OUT_OF_RANGE,
    MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    UnauthorisedError: grpc.StatusCode.PERMISSION_DENIED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    StorageError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def status_of(error: DilocoError) -> grpc.StatusCode:
    """The gRPC status of an error; a subclass without an entry has its parent's."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def abort(context: grpc.ServicerContext, error: DilocoError) -> NoReturn:
    """
    End the call with the error's status, message and reason; `error_of` restores it from them.
    """
    context.set_trailing_metadata(((REASON_KEY, error.reason),))
    message = str(error).encode()[:_MESSAGE_BYTES].decode(errors="ignore")
    context.abort(status_of(error), message)
    raise error  # not reached: abort raises


@contextmanager
def aborting(context: grpc.ServicerContext) -> Iterator[None]:
    """
    Every error of the body ends the call: a DilocoError as it is, any other as INTERNAL with its
    trace in the log.
    """
    try:
        yield
    except DilocoError as error:
        abort(context, error)
    except Exception as error:
        # After the call (the peer disconnected, or abort was called) there is no peer to report to.
        if context.is_active() and context.code() is None:  # type: ignore[attr-defined]
            log.exception("call ended by an unexpected error")
            abort(
                context,
                DilocoError(f"unexpected {type(error).__name__}; see the log of this program"),
            )
        raise


def sent_error(error: grpc.RpcError) -> DilocoError | None:
    """The error that the peer sent; None: the call ended otherwise, such as by a proxy in between."""
    if isinstance(error, grpc.Call):
        for key, value in error.trailing_metadata() or ():
            if key == REASON_KEY and value in BY_REASON:
                return BY_REASON[str(value)](error.details() or "")
    return None


def error_of(error: grpc.RpcError) -> DilocoError:
    """
    The error that the peer sent, of the same class and with the same message.

    Anything else is UnavailableError where a retry may help (UNAVAILABLE, DEADLINE_EXCEEDED,
    CANCELLED), and ProtocolError where it cannot.
    """
    if (sent := sent_error(error)) is not None:
        return sent
    if not isinstance(error, grpc.Call):
        return UnavailableError(f"call ended without a status: {error!r}")
    code, details = error.code(), error.details() or ""
    if code in _PASSING:
        meaning = advice(explain(details)) if code is not grpc.StatusCode.CANCELLED else ""
        return UnavailableError(f"{code.name}: {details}{meaning and f'; {meaning}'}")
    return ProtocolError(f"{code.name if code else 'no status'}: {details}")
