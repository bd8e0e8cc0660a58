"""How a stream carries the error that ended it: what gRPC's status and trailing metadata do."""

from __future__ import annotations

from diloco.errors import BY_REASON, DilocoError, UnavailableError

CANCELLED = "CANCELLED"
"""The other end has cancelled the stream."""

_MARK = "error "


def reason_of(error: DilocoError) -> str:
    """The reason with which a server ends a stream."""
    return f"{_MARK}{error.reason} {error}"


def error_of(reason: str) -> DilocoError:
    """What the client raises for it; an UnavailableError if the connection broke."""
    if reason.startswith(_MARK):
        name, _, text = reason[len(_MARK) :].partition(" ")
        return BY_REASON.get(name, UnavailableError)(text)
    return UnavailableError(reason or "the stream ended")
