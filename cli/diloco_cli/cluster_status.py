"""`diloco status --job`: the status of a job in a cluster, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.runtime.formatting import printable

MAX_ROWS = 64
"""The status of a job has at most as many regions, and fewer conditions."""

PROBLEM = ("learner", "problem", "detail")


def status_table(job: Mapping[str, Any]) -> RenderableType:
    """A DiLoCoJob as the API server returns it: progress, regions, and conditions with messages."""
    status = job.get("status") or {}
    learners = status.get("learners") or {}
    head = "   ".join(
        [
            str(job["metadata"]["name"]),
            str(status.get("state") or "Pending, no operator has seen it yet"),
            f"step {status.get('progress', '-')}",
            f"{learners.get('summary', '-')} learners training",
        ]
    )
    return Group(_text(head), _regions(status.get("regions") or ()), _conditions(status))


def problem_table(problems: Sequence[tuple[str, str, str]]) -> RenderableType:
    """The problems of learners that run: name, kind and message of each."""
    return _table(PROBLEM, [[*problem] for problem in problems])


def document(
    job: Mapping[str, Any], problems: Sequence[tuple[str, str, str]], unknown: str
) -> dict[str, Any]:
    """
    The status of a DiLoCoJob, and what the API server does not know.

    Args:
        job: as the API server returns it.
        problems: of learners that run: name, kind and message of each.
        unknown: of which learners they are not known; "": none.
    """
    return {
        **(job.get("status") or {}),
        "learnerProblems": [dict(zip(PROBLEM, problem, strict=True)) for problem in problems],
        "learnerProblemsUnknown": unknown,
    }


def _regions(regions: Iterable[Mapping[str, Any]]) -> Table:
    columns = {
        **{"region": "name", "learners": "desired", "ready": "ready", "training": "training"},
        **{"restarts": "restarts", "last seen": "lastSeenTime"},
    }
    rows = [[region.get(field, "-") for field in columns.values()] for region in regions]
    return _table(columns, rows)


def _conditions(status: Mapping[str, Any]) -> Table:
    fields = ("type", "status", "reason", "message")
    rows = [[found.get(field, "") for field in fields] for found in status.get("conditions") or ()]
    return _table(("condition", "status", "reason", "message"), rows)


def _table(columns: Iterable[str], rows: list[list[Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows[:MAX_ROWS]:
        table.add_row(*map(_text, row))
    return table


def _text(value: Any) -> Text:
    return Text(printable(str(value)))
