"""
Requests about children that the API server refuses: each waits longer and longer before it is sent again.

Only the refused request waits: the other children and the status of its job keep their usual pace.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from datetime import datetime, timedelta

from diloco.runtime.backoff import Backoff


@dataclass(slots=True)
class _Refused:
    """A request that was refused, again and again."""

    content: Hashable
    message: str
    backoff: Backoff
    at: datetime
    until: datetime


class Refusals:
    """The refused requests of one job."""

    def __init__(self, new_backoff: Callable[[], Backoff]) -> None:
        """Pauses after consecutive refusals of a request are those of a new back-off."""
        self._new_backoff = new_backoff
        self._refused: dict[Hashable, _Refused] = {}

    def record(self, request: Hashable, content: Hashable, message: str, now: datetime) -> None:
        """The server refused a request with this content."""
        known = self._refused.get(request)
        backoff = known.backoff if known and known.content == content else self._new_backoff()
        until = now + timedelta(seconds=backoff.next())
        self._refused[request] = _Refused(content, message, backoff, now, until)

    def waits(self, request: Hashable, content: Hashable, now: datetime) -> str | None:
        """The server's message, if the request has to wait; None: send it. Other content never waits."""
        known = self._refused.get(request)
        if known is None or known.content != content or not known.at <= now < known.until:
            return None
        return known.message

    def forget(self, *, but: Collection[Hashable]) -> None:
        """These requests were not refused again; the others are no longer needed."""
        self._refused = {key: known for key, known in self._refused.items() if key in but}

    def seconds(self, now: datetime) -> float | None:
        """Until the next request may be sent again; None: none waits."""
        left = [(known.until - now).total_seconds() for known in self._refused.values()]
        return max(0.0, min(left)) if left else None
