"""What `diloco chaos` does around the supervisor: when its plan begins, its journal, and what it prints at the end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_local.chaos import run
from diloco_local.chaos.fault_injector import Injector
from diloco_local.chaos.fault_plan import Options
from diloco_local.faults import SYNCER, Fault, Kind
from diloco_local.manifest import load_job

EXAMPLE = Path(__file__).parents[3] / "examples/01-text/job.yaml"
LEARNERS = ("eu/0", "eu/1", "us/0", "us/1")
"""Of the example."""


class Running:
    """Processes that are only names."""

    def __init__(self):
        self.killed = []

    def pid(self, name):
        return 1

    def kill(self, name):
        self.killed.append(name)


def training(*names):
    return {"processes": [{"name": name, "state": "Training"} for name in names]}


def fault(number, kind, target, at, until):
    return Fault(number=number, kind=kind, target=target, at=at, until=until, amount=1.0)


def injector(folder, *faults, spare, clock=None):
    journal = folder / "faults.jsonl"
    return Injector(faults, LEARNERS, journal, seed=1, spare=spare, clock=clock)


def notes(text):
    pass


def journal(folder):
    lines = (folder / "faults.jsonl").read_text().splitlines()
    return [(line["event"], line.get("number")) for line in map(json.loads, lines)]


def test_a_plan_that_spares_all_learners_begins_when_all_train(tmp_path):
    processes = Running()
    plan = injector(tmp_path, fault(1, Kind.SYNCER_KILL, SYNCER, 0, 9), spare=4, clock=lambda _: 1)
    plan.turn(processes, training(*LEARNERS[:3]), notes, serves=True)
    assert processes.killed == []
    plan.turn(processes, training(*LEARNERS), notes, serves=True)
    assert processes.killed == [SYNCER]


def test_bytes_inverted_by_a_fault_are_kept_when_the_next_begins_in_the_turn_of_its_end(tmp_path):
    now = [0.0]
    plan = injector(
        tmp_path, fault(1, Kind.CORRUPT, "eu/0", 0, 2), fault(2, Kind.CUT, "eu/0", 2, 3),
        spare=0, clock=lambda _: now[0],
    )  # fmt: skip
    try:
        plan.turn(Running(), training(*LEARNERS), notes, serves=True)
        plan._proxies._proxies["eu/0"].flipped = 3
        now[0] = 2.0
        plan.turn(Running(), training(*LEARNERS), notes, serves=True)
    finally:
        plan.close()
    assert journal(tmp_path) == [("plan", None), ("begin", 1), ("end", 1), ("begin", 2)]
    assert '"number":1,"flipped":3' in (tmp_path / "faults.jsonl").read_text()


# ---------------------------------------------------------------------------------- the end


@pytest.fixture
def ended(monkeypatch, tmp_path, capfd):
    """Calls `run.run` on turns of a supervisor; returns its exit code and what it prints."""

    def end(*turns, spare=1):
        def supervise(*_, chaos, **__):
            for status in turns:
                chaos.turn(Running(), status, notes, serves=True)
            return 0

        monkeypatch.setattr(run, "supervisor", SimpleNamespace(run=supervise))
        options = Options(seed=6, spare=spare)
        code = run.run(EXAMPLE, load_job(EXAMPLE), tmp_path, options, faults=(CUT,), clock=lambda _: 1)  # fmt: skip
        return code, capfd.readouterr().out

    return end


CUT = fault(1, Kind.CUT, "eu/0", 0, 9)
EARLIER = """\
{"time": "2026-01-01T00:00:00Z", "event": "plan", "seed": 5, "planned": 2, "spare": 1}
{"time": "2026-01-01T00:00:01Z", "event": "begin", "number": 1, "fault": "pause", "target": "eu/0", "seconds": 1}
{"time": "2026-01-01T00:00:02Z", "event": "skip", "number": 2, "fault": "pause", "target": "eu/0", "reason": ""}
"""


def test_a_run_without_faults_states_why_whatever_an_earlier_one_left(ended, tmp_path):
    for earlier in ("", EARLIER):
        (tmp_path / "faults.jsonl").write_text(earlier)
        assert "faults: none, because training did not begin\n" in ended()[1]
        some = ended(training("eu/0"), training(*LEARNERS[:2]), training(), spare=3)[1]
        assert (
            "faults: none, because never more than 2 of 4 learners trained at once, and 3 are spared\n"
            in some
        )


def test_faults_of_an_earlier_run_are_not_counted_as_those_of_this_one(ended, tmp_path):
    (tmp_path / "faults.jsonl").write_text(EARLIER)
    assert "faults: 1 (seed 6): 1 cut; 1 more by earlier plans\n" in ended(training(*LEARNERS))[1]


def test_faults_that_could_not_be_written_are_not_reported_as_none(ended, tmp_path):
    (tmp_path / "faults.jsonl").mkdir()
    assert (
        "faults: unknown, because not all of them could be written\n"
        in ended(training(*LEARNERS))[1]
    )


def test_neither_ctrl_c_nor_a_closed_terminal_at_the_summary_changes_the_exit_status(
    ended, monkeypatch
):
    hangups = []

    def load(_):
        os.kill(os.getpid(), signal.SIGHUP)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load", load)
    before = signal.signal(signal.SIGHUP, lambda *_: hangups.append(1))
    try:
        code, out = ended()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, hangups) == (0, [])
    assert "stopped before the audit\n" in out
