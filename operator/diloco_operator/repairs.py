"""
Children that another writer changes, or deletes, again after each repair.

Two writers that each restore their own state would write for ever, as often as the watches deliver. After
some repairs in a row, the operator waits before the next one, and names the child and the other writer.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from diloco.runtime.backoff import doubled

AT_ONCE = 10
"""Repairs in a row without a wait."""

IN_A_ROW_SECONDS = 600.0
"""Repairs further apart than this, beside the wait between them, are not of one row."""

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 60.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Repairs of one child in a row."""

    count: int
    last: datetime

    @property
    def wait(self) -> timedelta:
        """Before the next one."""
        more = self.count - AT_ONCE
        seconds = 0.0 if more < 0 else doubled(FIRST_WAIT_SECONDS, more, MAX_WAIT_SECONDS)
        return timedelta(seconds=seconds)


class Repairs:
    """The repairs of one job's children."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, _Row] = {}
        self._applied: dict[Hashable, str | None] = {}

    def applied(self, child: Hashable, content: str | None) -> None:
        """This process has applied this content, by its hash."""
        self._applied[child] = content

    def restores(self, child: Hashable, content: str | None) -> bool:
        """Whether this process applied the same content last, so that another writer undid that."""
        return content is not None and self._applied.get(child) == content

    def must_wait(self, child: Hashable, now: datetime) -> bool:
        """Whether the next repair of this child has to wait."""
        row = self._rows.get(child)
        return row is not None and row.last <= now < row.last + row.wait

    def record(self, child: Hashable, now: datetime) -> bool:
        """Record a repair; whether there have been so many in a row that the next one has to wait."""
        row = self._rows.get(child)
        if row is None or now - row.last > row.wait + timedelta(seconds=IN_A_ROW_SECONDS):
            row = _Row(count=0, last=now)
        self._rows[child] = row = _Row(count=row.count + 1, last=now)
        return row.count >= AT_ONCE

    def forget(self, child: Hashable) -> None:
        """The manifest changed the child: what was applied before no longer matters."""
        self._rows.pop(child, None)
        self._applied.pop(child, None)


def other_writer(child: Mapping[str, Any] | None, own: str) -> str:
    """What the other writer did: its field manager, other than those that begin with `own`, or that it deletes."""
    if child is None:
        return "deleted each time"
    entries = [
        entry
        for entry in (child.get("metadata") or {}).get("managedFields") or ()
        if not str(entry.get("manager") or own).startswith(own)
        and entry.get("subresource") != "status"
    ]
    newest = max(entries, key=lambda entry: str(entry.get("time") or ""), default=None)
    return f"field manager {newest['manager']}" if newest else "its field manager is not known"
