"""
The files of a replay: the document that names a run, and the tape of that run.

    {"run": "/home/me/runs/job", "to": 120}      `to` null: the whole run
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.journal import reader, tape
from diloco.journal.records import RecordError
from diloco.journal.replay import Plan, plan_of
from diloco.spec import RunSpec

EVENTS = "events.jsonl"
LEARNERS = "learners"


def plan_in(document: Path) -> Plan:
    """
    The plan of the run that a document names.

    Raises:
        ConfigError: the document or the tape cannot be read, or nothing of the run can be replayed.
    """
    try:
        found: Any = json.loads(document.read_text())
        run, to = Path(found["run"]), found["to"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{document}: {error!r}; expected {{"run": "<directory>", "to": <step or null>}}'
        ) from None
    return plan_from(run, to=to)


def plan_from(run: Path, *, to: int | None = None) -> Plan:
    """
    The plan of the run in a directory.

    Raises:
        ConfigError: its files cannot be read, or nothing of it can be replayed.
    """
    spec = run / "spec.json"
    try:
        feedback = RunSpec.from_json(spec.read_text(), source=str(spec)).error_feedback
        events = reader.read(run / EVENTS)
        return plan_of(events, tapes_in(run), feedback=feedback, to=to)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or run}: {error.strerror}; give the directory of a run"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from None


def processor() -> str:
    """Name of this machine's processor, as the kernel has it."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            found = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found.partition(":")[2].strip() or platform.machine()


def tapes_in(run: Path) -> Mapping[str, Sequence[tape.Process]]:
    """
    The tapes of all learners in a run directory, by name.

    Raises:
        ConfigError: a tape is damaged.
        OSError: the disk reported an error.
    """
    found: dict[str, Sequence[tape.Process]] = {}
    for path in sorted((run / LEARNERS).glob(f"*/{tape.TAPE}")):
        try:
            processes = tape.processes(reader.read(path))
        except RecordError as error:
            raise ConfigError(f"{path}: {error}") from None
        if processes:
            found[processes[0].begin.learner] = processes
    return found
