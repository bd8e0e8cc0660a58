"""The tape of a run as sentences, in the order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.journal import reader, tape
from diloco.journal.records import Join, Leave, Merge, RecordError, Restart, Start, decode
from diloco.journal.replay_files import EVENTS, LEARNERS


def sentences(run: Path) -> Iterator[str]:
    """
    What each worker decided, one line each; local steps without a result are left out.

    Raises:
        OSError: the disk reported an error.
    """
    tapes = sorted((run / LEARNERS).glob(f"*/{tape.TAPE}"))
    learners = (_of_learner(path.parent.name, reader.read(path)) for path in tapes)
    sources = (_of_syncer(reader.read(run / EVENTS)), *learners)
    for time, text in heapq.merge(*sources, key=lambda pair: pair[0]):
        yield f"{time[:23].replace('T', ' '):23}  {text}"


def _of_syncer(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for line in lines:
        try:
            record = decode(line)
        except RecordError as error:
            yield _time(line), f"syncer   damaged line: {line.get('event')} {error}"
            continue
        text = ""
        match record:
            case Start():
                text = f"epoch {line.get('epoch')} begins at step {record.step} of {record.steps}"
            case Join(fresh=True):
                text = f"{record.learner} joins as incarnation {record.incarnation}"
            case Leave():
                text = f"{record.learner} leaves: {record.reason}"
            case Restart():
                text = f"{record.process} exits ({record.reason}) and restarts"
            case Merge():
                text = _merge(record)
            case _ if line.get("event") == "initialised":
                text = f"{line.get('learner')} has uploaded the initial parameters"
        if text:
            yield _time(line), f"syncer   {text}"


def _merge(merge: Merge) -> str:
    members = ", ".join(f"{m.learner} at {m.step} ({_base(m.base)})" for m in merge.members)
    clock = ", ".join(f"{name} {step}" for name, step in sorted((merge.clock or {}).items()))
    aborted = f"; aborted before: {merge.abandoned}" if merge.abandoned else ""
    return (
        f"step {merge.step}: merges fragment {merge.fragment} of {members}; clock {clock}{aborted}"
    )


def _base(base: int | None) -> str:
    return "whole" if base is None else f"from {base}"


def _of_learner(place: str, lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    name, epoch = place, 0
    for line in lines:
        kind = line.get("event")
        record = tape.KINDS.get(kind) if isinstance(kind, str) else None
        try:
            found = record.from_json(line) if record is not None else None
        except RecordError as error:
            yield _time(line), f"{name:8} damaged line: {kind} {error}"
            continue
        match found:
            case tape.Begin():
                name, epoch = found.learner, found.epoch
                text = (
                    f"incarnation {found.incarnation} begins at local step {found.local_step}: parameters of the "
                    f"{found.source}, {found.optimizers} state of the optimizers"
                )
            case tape.Step(results=None) | None:
                continue
            case tape.Step():
                results = ", ".join(_held(held, epoch) for held in found.results or ())
                text = f"local step {found.local_step}, global step {found.step}: applies fragment {results}"
            case tape.End():
                text = f"ends at local step {found.local_step}: {found.reason}"
            case _:
                continue
        yield _time(line), f"{name:8} {text}"


def _held(held: tape.Held, epoch: int) -> str:
    of = f" of epoch {held.epoch}" if held.epoch not in (None, epoch) else ""
    return f"{held.fragment} of step {held.step}{of}"


def _time(line: Mapping[str, Any]) -> str:
    return str(line.get("time", ""))
