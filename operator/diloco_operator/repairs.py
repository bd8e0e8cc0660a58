"""
Children that another writer changes, or deletes, again after each repair.

Two writers that each restore their own state would write forever, as often as the watches deliver. After
some repairs in a row, the operator waits before the next one, and a condition names the child and the
other writer until it has changed nothing for a while.

Pure: time is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from diloco.runtime.backoff import doubled

Child = tuple[str, str]
"""Kind and name."""

AT_ONCE = 10
"""Repairs in a row without a wait."""

IN_A_ROW_SECONDS = 600.0
"""Repairs further apart than this, beside the wait between them, are not of one row; and a child that
stays as it is for so long is no longer contested."""

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 60.0, 3600.0

_DESCRIBED = re.compile(r"([A-Z]\w+) (\S+) \((.+?)\)(?=[,;]| and )")

_UNKNOWN = ""
"""Instead of a hash: what another process has applied."""


@dataclass(slots=True, kw_only=True)
class _Row:
    """Repairs of one child in a row."""

    count: int
    last: datetime
    writer: str = ""
    """What the other writer did, before the last repair."""
    undone: datetime
    """When a repair was last seen to be undone."""

    @property
    def wait(self) -> timedelta:
        """Before the next one."""
        more = self.count - AT_ONCE
        seconds = 0.0 if more < 0 else doubled(FIRST_WAIT_SECONDS, more, MAX_WAIT_SECONDS)
        return timedelta(seconds=seconds)


class Repairs:
    """The repairs of one job's children."""

    def __init__(self) -> None:
        self._rows: dict[Child, _Row] = {}
        self._applied: dict[Child, str | None] = {}
        self._generation: object = None

    def begin(self, generation: object) -> None:
        """
        A reconcile of this generation of the manifest begins.

        A person who changes the manifest may have stopped the other writer: the next repair does not wait.
        """
        if generation != self._generation:
            self._rows.clear()
        self._generation = generation

    def resume(self, message: str, now: datetime) -> None:
        """Another process had found these children contested in this generation, as the status describes them."""
        for kind, name, writer in _DESCRIBED.findall(message):
            self._rows[kind, name] = _Row(count=AT_ONCE, last=now, undone=now, writer=writer)
            self._applied[kind, name] = _UNKNOWN

    def applied(self, child: Child, content: str | None) -> None:
        """This process has applied this content, by its hash."""
        self._applied[child] = content

    def restores(self, child: Child, content: str | None) -> bool:
        """Whether this process applied the same content last, so that another writer undid that."""
        return content is not None and self._applied.get(child) in (content, _UNKNOWN)

    def must_wait(self, child: Child, now: datetime) -> bool:
        """Whether the next repair of this child, which it needs, has to wait."""
        row = self._rows.get(child)
        waits = row is not None and row.last <= now < row.last + row.wait
        if row is not None and waits:
            row.undone = now
        return waits

    def record(self, child: Child, writer: str, now: datetime) -> None:
        """Record a repair of what this other writer did."""
        row = self._rows.get(child)
        if row is None or now - row.last > row.wait + timedelta(seconds=IN_A_ROW_SECONDS):
            row = _Row(count=0, last=now, undone=now)
        count = row.count + 1
        self._rows[child] = _Row(count=count, last=now, undone=now, writer=writer)

    def contested(self, now: datetime) -> Iterator[tuple[Child, str]]:
        """Children that are changed again after each repair, and by whom."""
        for child, row in self._rows.items():
            recently = now - row.undone < timedelta(seconds=IN_A_ROW_SECONDS)
            if row.count >= AT_ONCE and recently:
                yield child, row.writer

    def forget(self, child: Child) -> None:
        """The manifest changed the child: what was applied before no longer matters."""
        self._rows.pop(child, None)
        self._applied.pop(child, None)


def describe(child: Child, writer: str) -> str:
    """A contested child in a message."""
    kind, name = child
    return f"{kind} {name} ({writer})"


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
