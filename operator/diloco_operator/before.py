"""
The status that was written before, read with care.

Pure. Only four things of it matter for decisions, as with Kubernetes' own Job: that a job was
Complete or Failed, when it was started, when it ended, and how far it had come. The rest keeps times
of conditions and what the syncer said last while it does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


def time_text(when: datetime) -> str:
    """
    A time as status has it: RFC 3339, UTC, whole seconds.

    >>> time_text(datetime(2026, 3, 1, 12, 0, 5, 900000, tzinfo=UTC))
    '2026-03-01T12:00:05Z'
    """
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_of(text: object) -> datetime | None:
    """The time that a text stands for; None: it is none."""
    try:
        when = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The last status of a job; everything is empty before the first."""

    status: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]
    """By type."""

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Before:
        """The status in a job object."""
        status = job.get("status")
        status = status if isinstance(status, Mapping) else {}
        return cls(status=status, conditions={one["type"]: one for one in _named(status, "type")})

    def is_true(self, condition: str) -> bool:
        """Whether the condition was True."""
        return self.conditions.get(condition, {}).get("status") == "True"

    def reason(self, condition: str) -> str:
        """The condition's reason; "" before the first status."""
        return str(self.conditions.get(condition, {}).get("reason", ""))

    def message(self, condition: str) -> str:
        """The condition's message."""
        return str(self.conditions.get(condition, {}).get("message", ""))

    def number(self, name: str) -> int:
        """An integer of the status; 0 where there is none."""
        value = self.status.get(name)
        return value if isinstance(value, int) else 0

    def time(self, name: str) -> datetime | None:
        """A time of the status."""
        return time_of(self.status.get(name))

    def part(self, name: str) -> Mapping[str, Any]:
        """An object of the status, such as `syncer`."""
        value = self.status.get(name)
        return value if isinstance(value, Mapping) else {}

    def region(self, name: str) -> Mapping[str, Any]:
        """What was said of a region."""
        regions = _named(self.status, "name", "regions")
        return next((one for one in regions if one["name"] == name), {})


def _named(
    status: Mapping[str, Any], key: str, field: str = "conditions"
) -> list[Mapping[str, Any]]:
    entries = status.get(field)
    entries = entries if isinstance(entries, list) else []
    return [one for one in entries if isinstance(one, Mapping) and isinstance(one.get(key), str)]
