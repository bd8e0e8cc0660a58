"""What the report shows of injected faults: their number, their cost, their figure."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from diloco_local.report import costs
from diloco_local.report.page import write_report
from diloco_local.report.run_files import load

BEGIN = 1_760_000_000.0


def stamp(seconds):
    return datetime.fromtimestamp(BEGIN + seconds, UTC).isoformat(timespec="milliseconds")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def steps(folder, learner, rows):
    """Lines of steps.jsonl: (time of the end, local step, seconds)."""
    lines = [
        {"time": stamp(end), "incarnation": 1, "localStep": step, "globalStep": step, "tokens": 10,
         "loss": 2.0, "seconds": seconds, "syncSeconds": 0.0}
        for end, step, seconds in rows
    ]  # fmt: skip
    write(folder / "events.jsonl", [{"time": stamp(0), "epoch": 1, "event": "start"}])
    write(folder / "learners" / learner.replace("/", "-") / "steps.jsonl", lines)


def fault(number, kind, target, begin, end=None, **fields):
    begun = {"time": stamp(begin), "event": "begin", "number": number, "fault": kind, "target": target,
             "step": 1, "seconds": 10.0}  # fmt: skip
    ended = {"time": stamp(end or begin), "event": "end", "number": number, **fields}
    return [begun] if end is None else [begun, ended]


PLAN = {"time": stamp(0), "event": "plan", "seed": 5, "planned": 3, "spare": 1}
CALM = [(float(end), end, 1.0) for end in range(1, 101)]
"""A hundred steps of one second."""


def goodput(folder):
    run = load(folder)
    return costs.goodput(run, run.chaos).share


@pytest.mark.slow
def test_a_run_without_faults_has_no_chaos(tmp_path):
    steps(tmp_path, "eu/0", CALM)
    assert load(tmp_path).chaos is None
    write_report(tmp_path)
    assert "Injected faults" not in (tmp_path / "report.html").read_text()


def test_without_a_fault_that_began_the_goodput_is_the_whole_time(tmp_path):
    steps(tmp_path, "eu/0", CALM)
    write(tmp_path / "faults.jsonl", [PLAN])
    assert goodput(tmp_path) == pytest.approx(1.0)


def test_a_step_that_a_pause_prolonged_counts_as_a_usual_step(tmp_path):
    paused = [
        *CALM[:50],
        (70.0, 51, 20.0),
        *((float(end), end - 19, 1.0) for end in range(71, 101)),
    ]
    steps(tmp_path, "eu/0", paused)
    write(tmp_path / "faults.jsonl", [PLAN, *fault(1, "pause", "eu/0", 50.5, 69.5)])
    assert goodput(tmp_path) == pytest.approx(0.81)


def test_the_time_of_a_restart_and_repeated_steps_do_not_count(tmp_path):
    killed = [*CALM[:50], *((float(end), end - 30, 1.0) for end in range(71, 101))]
    steps(tmp_path, "eu/0", killed)
    steps(tmp_path, "us/0", CALM)
    write(tmp_path / "faults.jsonl", [PLAN, *fault(1, "kill", "eu/0", 50.2)])
    # 50 steps, then 20 s without one, then steps 41 to 50 again, then 20 others.
    assert goodput(tmp_path) == pytest.approx((70 + 100) / 200)


@pytest.mark.slow
def test_all_faults_in_the_directory_are_read_and_the_summary_counts_those_of_the_last_plan(
    tmp_path,
):
    steps(tmp_path, "eu/0", CALM)
    skip = {
        "time": stamp(9),
        "event": "skip",
        "number": 2,
        "fault": "kill",
        "target": "eu/0",
        "reason": "",
    }
    corrupt = fault(3, "corrupt", "eu/0", 20, 25, flipped=4)
    lines = [PLAN, *fault(1, "cut", "eu/0", 5), skip, PLAN | {"seed": 6}, skip, *corrupt, {"event": 3},
             *fault(1, "cut", "eu/0", 40, 42)]  # fmt: skip
    write(tmp_path / "faults.jsonl", lines)
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('{"event": "beg')  # a kill of the supervisor
    run = load(tmp_path)
    assert [(f.begin, f.end) for f in run.chaos.faults] == [(5, 15), (20, 25), (40, 42)]
    first, second, third = costs.summary(run, run.chaos)
    assert first == (
        "faults: 2 (seed 6): 1 corrupt, 1 cut (4 bytes inverted); 1 skipped; 1 more by earlier plans"
    )
    assert second == "goodput: 100.0%: 1 min 40 s of useful steps in 1 min 40 s of 1 learner"
    assert third == "restarts: 0 of learners, 0 of the syncer; 0 merges"
    write_report(tmp_path)
    assert first in (tmp_path / "report.html").read_text()
