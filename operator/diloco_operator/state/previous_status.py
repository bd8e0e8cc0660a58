"""
The status of the last reconcile, read without trusting its shape.

Pure. Decisions depend on only these facts of it: as with Kubernetes' own Job, whether the job was
Complete or Failed, when it started and when it ended; its step; the generation that it saw; which
installation runs it; the uid of the claim that holds its state, and whether that was lost. The rest
preserves transition times of conditions, which show how long a component has not been ready, what an
expired Event reported, which objects another writer contests, and the syncer's last answer while it does not
reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from diloco_job.reasons import CONDITIONS


def time_text(when: datetime) -> str:
    """
    A time as the status stores it: RFC 3339, UTC, whole seconds.

    >>> time_text(datetime(2026, 3, 1, 12, 0, 5, 900000, tzinfo=UTC))
    '2026-03-01T12:00:05Z'
    """
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_of(text: object) -> datetime | None:
    """Parse a time of the status; None: it is not a time."""
    try:
        when = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousStatus:
    """The last status of a job; empty before the first one."""

    status: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]
    """By type."""

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> PreviousStatus:
        """The status in a job object."""
        status = job.get("status")
        # `operator` is applied separately (cluster.client.Cluster.claim), and never by a status.
        status = (
            {key: value for key, value in status.items() if key != "operator"}
            if isinstance(status, Mapping)
            else {}
        )
        return cls(
            status=status, conditions={entry["type"]: entry for entry in _named(status, "type")}
        )

    def is_true(self, condition: str) -> bool:
        """Whether the condition was True."""
        return self.conditions.get(condition, {}).get("status") == "True"

    @property
    def is_at_rest(self) -> bool:
        """Whether the job did not run: Suspended, Complete or Failed."""
        return any(map(self.is_true, ("Suspended", "Complete", "Failed")))

    def reason(self, condition: str) -> str:
        """The condition's reason; "" before the first status."""
        return str(self.conditions.get(condition, {}).get("reason", ""))

    def message(self, condition: str) -> str:
        """The condition's message."""
        return str(self.conditions.get(condition, {}).get("message", ""))

    def false_since(self, condition: str) -> datetime | None:
        """
        Since when the condition has been False while the job runs; None: it is not False.

        A resumed job starts over, although conditions of a suspended job are False too.
        """
        entry = self.conditions.get(condition, {})
        if entry.get("status") != "False":
            return None
        times = (time_of(entry.get("lastTransitionTime")), self.time("startTime"))
        return max((when for when in times if when is not None), default=None)

    def true_since(self, condition: str) -> datetime | None:
        """Since when the condition has been True; None: it is not True."""
        entry = self.conditions.get(condition, {})
        return time_of(entry.get("lastTransitionTime")) if entry.get("status") == "True" else None

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

    @property
    def volume_uid(self) -> str:
        """The uid of the claim that holds the job's state; "": none is recorded."""
        return str(self.part("syncer").get("volumeUid", ""))

    def region(self, name: str) -> Mapping[str, Any]:
        """The status of a region."""
        regions = _named(self.status, "name", "regions")
        return next((region for region in regions if region["name"] == name), {})


def conditions_of_others(status: Mapping[str, Any]) -> list[Any]:
    """Conditions of other types, which other controllers may add."""
    entries = status.get("conditions")
    return [
        entry
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, Mapping) and entry.get("type") not in CONDITIONS
    ]


def removal(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """
    The JSON merge patch that removes from a stored status what the one that was applied lacks; {}: nothing.

    It keeps which installation runs the job, and conditions of others.

    >>> removal({"step": 3, "startTime": "x", "operator": "y"}, {"step": 3})
    {'startTime': None}
    """
    kept = {**wanted, "operator": stored.get("operator")}
    if others := conditions_of_others(stored):
        kept["conditions"] = [*wanted.get("conditions", ()), *others]
    return _removal(stored, kept)


def _removal(stored: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for key, value in stored.items():
        part = kept.get(key)
        if key not in kept:
            patch[key] = None
        elif isinstance(value, Mapping) and isinstance(part, Mapping):
            if inner := _removal(value, part):
                patch[key] = inner
        elif (
            isinstance(value, list)
            and isinstance(part, list)
            and any(item not in part for item in value)
        ):
            patch[key] = part  # a merge patch replaces lists
    return patch


def _named(
    status: Mapping[str, Any], key: str, field: str = "conditions"
) -> list[Mapping[str, Any]]:
    entries = status.get(field)
    entries = entries if isinstance(entries, list) else []
    return [
        entry for entry in entries if isinstance(entry, Mapping) and isinstance(entry.get(key), str)
    ]
