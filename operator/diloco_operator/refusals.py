"""
Requests about children that the API server refuses: they wait longer and longer before they are sent again.

The other children and the status of their job keep their usual pace. The refused ones wait together: a job of
which a policy refuses hundreds is reconciled no more often than one with a single refused child.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from diloco.runtime.backoff import Backoff


class _Refused(NamedTuple):
    content: Hashable
    message: str


class Refusals:
    """The refused requests of one job."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._refused: dict[Hashable, _Refused] = {}
        self._repeated = False
        """Whether a request was refused since the last `end`."""
        self._at = self._until = datetime.min.replace(tzinfo=UTC)

    def waits(self, request: Hashable, content: Hashable, now: datetime) -> str | None:
        """The server's message, if the request has to wait; None: send it. Other content never waits."""
        return self.last(request, content) if self._at <= now < self._until else None

    def last(self, request: Hashable, content: Hashable) -> str | None:
        """The server's message, if it refused the request with this content when it was sent last."""
        known = self._refused.get(request)
        return known.message if known is not None and known.content == content else None

    def record(self, request: Hashable, content: Hashable, message: str) -> None:
        """The server refused a request with this content."""
        known = self._refused.get(request)
        if known is None or known.content != content:
            self._backoff.reset()
        self._refused[request] = _Refused(content, message)
        self._repeated = True

    def end(self, now: datetime, *, refused: Collection[Hashable]) -> None:
        """A reconcile ends, in which these requests were refused or had to wait."""
        self._refused = {key: known for key, known in self._refused.items() if key in refused}
        if not self._refused:
            self._backoff.reset()
        elif self._repeated:
            self._at, self._until = now, now + timedelta(seconds=self._backoff.next())
        self._repeated = False

    def seconds(self, now: datetime) -> float | None:
        """Until the refused requests are sent again; None: there are none."""
        return max(0.0, (self._until - now).total_seconds()) if self._refused else None
