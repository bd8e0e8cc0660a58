"""What a run leaves in its directory, written line by line: for readers of it, such as the report."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGIN = 1_760_000_000.0


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(BEGIN + seconds, UTC).isoformat(timespec="milliseconds")


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def suspended(directory: Path) -> Path:
    """A run of two learners that was suspended for 100 s; one of them was killed before."""
    events = [
        {"time": stamp(0), "epoch": 1, "event": "start", "fragments": 2, "interval": 2},
        *(
            {"time": stamp(at), "epoch": epoch, "event": kind, "learner": name, "incarnation": number}
            for at, epoch, kind, name, number in (
                *((1, 1, "join", "eu/0", 1), (1, 1, "join", "us/0", 2), (4, 1, "leave", "us/0", 2)),
                *((5, 1, "join", "us/0", 3), (10, 1, "leave", "eu/0", 1), (10, 1, "leave", "us/0", 3)),
                *((111, 2, "join", "eu/0", 4), (111, 2, "join", "us/0", 5)),
            )
        ),
        {"time": stamp(4), "epoch": 0, "event": "restart", "process": "us/0", "restarts": 1},
        {"time": stamp(10.5), "epoch": 1, "event": "stop", "step": 10},
        {"time": stamp(110), "epoch": 2, "event": "start", "fragments": 2, "interval": 2},
        *(
            {"time": stamp(at), "epoch": epoch, "event": "refuse", "learner": "us/0", "reason": "NotFinite"}
            for at, epoch in ((6, 1), (7, 1), (112, 2))
        ),
        *(
            {
                "time": stamp(at), "epoch": 1 if at < 50 else 2, "event": "merge", "step": step, "fragment": 0,
                "attempt": 1, "quorum": 1, "quorumSeconds": 0.1, "graceSeconds": 0.0, "syncSeconds": 0.1,
                "bytesUp": 1, "bytesDown": 1, "deltaNorm": 0.5,
                "members": [
                    {"learner": "eu/0", "incarnation": 1 if at < 50 else 4, "step": step, "steps": 2, "tokens": 30,
                     "weight": 30.0, "base": step - 2},
                    {"learner": "us/0", "incarnation": 3 if at < 50 else 5, "step": step, "steps": 2, "tokens": 10,
                     "weight": 10.0, "base": step - 4},
                ][: 1 if step == 8 else 2],
            }
            for at, step in ((6, 6), (8, 8), (112, 12))
        ),
    ]  # fmt: skip
    append(directory / "events.jsonl", sorted(events, key=lambda event: event["time"]))
    for name in ("eu-0", "us-0"):
        rows = [
            {
                "time": stamp(at),
                "localStep": i + 1,
                "tokens": 8,
                "loss": 2.0,
                "seconds": 0.5,
                "learningRate": 0.1 * (i + 1),
                **({"resultAge": i} if i > 2 else {}),
            }
            for i, at in enumerate((2, 3, 6, 9, 112, 113))
        ]
        append(directory / "learners" / name / "steps.jsonl", rows)
    scores = [
        {"time": stamp(at), "step": at, "tokens": at, "loss": 2.0, "accuracy": at / 200}
        for at in (5, 10, 112)
    ]
    append(directory / "eval.jsonl", scores)
    (directory / "spec.json").write_text('{"job": "small", "steps": 20, "fragments": 2}')
    return directory
