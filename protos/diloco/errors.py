"""
Every error a component may raise on purpose.

* DilocoError
  x ConfigError            the user's manifest, settings or environment are wrong; do not retry
  x ProtocolError          a peer violated the contract
    + StaleIncarnationError  the peer is a process that was replaced
    + StaleEpochError        the peer addresses a syncer that was replaced
    + UnknownLearnerError    the learner is not part of this job
    + DamagedError           bytes do not match their checksum, length or order
    + NotFiniteError         NaN or Inf where numbers are merged
  x MismatchError          model or spec differs from the syncer's: refused permanently (exit 78)
  x UnauthorisedError      the certificate does not allow it: retry with another certificate
  x UnavailableError       retry later; nothing was changed
    + AbortedError           the attempt of a round or its merge is over; discard its bytes
  x StorageError           a disk reported an error or lost something; the previous state is intact

`reason` is stable: it is a status reason, a metric label and a gRPC detail. The message states what
was seen, what was expected and what to do.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
EXIT_REFUSED = 78


class DilocoError(Exception):
    """Base of all errors raised on purpose; carries a stable `reason`."""

    reason = "Error"


class ConfigError(DilocoError):
    """The user's manifest, settings or environment are wrong; retrying cannot help."""

    reason = "Config"


class ProtocolError(DilocoError):
    """A peer violated the contract; its message was not used."""

    reason = "Protocol"


class StaleIncarnationError(ProtocolError):
    """The sender is a process whose successor has joined; it must stop."""

    reason = "StaleIncarnation"


class StaleEpochError(ProtocolError):
    """The sender addresses a syncer that was replaced; it must send Hello again."""

    reason = "StaleEpoch"


class UnknownLearnerError(ProtocolError):
    """The learner's name is not part of this job."""

    reason = "UnknownLearner"


class DamagedError(ProtocolError):
    """Bytes do not match their checksum, length or order."""

    reason = "Damaged"


class NotFiniteError(ProtocolError):
    """NaN or Inf where numbers are merged."""

    reason = "NotFinite"


class MismatchError(DilocoError):
    """Model or spec differs from the syncer's; this learner is refused permanently (exit 78)."""

    reason = "Mismatch"


class UnauthorisedError(DilocoError):
    """The peer's certificate does not cover the region it claims; another may be mounted later."""

    reason = "Unauthorised"


class UnavailableError(DilocoError):
    """Retry later; nothing was changed."""

    reason = "Unavailable"


class AbortedError(UnavailableError):
    """The attempt of a round, or its merge, is over; its bytes are discarded."""

    reason = "Aborted"


class StorageError(DilocoError):
    """A disk reported an error or lost something; the previous state is intact."""

    reason = "Storage"


ALL_ERRORS: tuple[type[DilocoError], ...] = (
    DilocoError,
    ConfigError,
    ProtocolError,
    StaleIncarnationError,
    StaleEpochError,
    UnknownLearnerError,
    DamagedError,
    NotFiniteError,
    MismatchError,
    UnauthorisedError,
    UnavailableError,
    AbortedError,
    StorageError,
)
"""The tree, flat, parents before children; a test compares it with the docstring."""

BY_REASON = {error.reason: error for error in ALL_ERRORS}
"""The class that a reason on the wire stands for."""
