"""Checkers bite: what a syncer loses in a restart is found."""

from __future__ import annotations

import pytest

from diloco.journal.writer import JournalWriter
from diloco_sim.world import World
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.learners import LearnerRecords
from diloco_syncer.core.used_reports import UsedReports
from diloco_testing.worlds import every_step, small, violation

pytestmark = pytest.mark.slow  # whole worlds


def test_durable_finds_a_learner_whose_tokens_a_restart_forgets(monkeypatch):
    from_json = LearnerRecords.from_json

    def without_tokens(data: dict) -> LearnerRecords:
        return from_json({name: {**facts, "tokens": 0} for name, facts in data.items()})

    monkeypatch.setattr(LearnerRecords, "from_json", without_tokens)
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "other facts of eu/0" in found.sentence) == ("durable", True), found
    assert "tokens 0 instead of" in found.sentence


def test_durable_finds_used_reports_that_a_restart_forgets(monkeypatch):
    monkeypatch.setattr(UsedReports, "from_json", lambda data: UsedReports())
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "counts as not merged" in found.sentence) == ("durable", True), found


def test_durable_finds_used_reports_that_a_restart_invents(monkeypatch):
    from_json = UsedReports.from_json
    monkeypatch.setattr(
        UsedReports, "from_json", lambda data: from_json({**data, "merged": [*data["merged"], 999]})
    )
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "999 counts as merged" in found.sentence) == ("durable", True), found


def test_durable_finds_a_merge_count_that_a_restart_begins_anew(monkeypatch):
    resume = Engine.resume.__func__

    def forgetful(cls: type[Engine], *args: object, state: dict, **how: object) -> Engine:
        return resume(cls, *args, state={**state, "merges": 0}, **how)

    monkeypatch.setattr(Engine, "resume", classmethod(forgetful))
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "the restart has merges 0" in found.sentence) == ("durable", True), found


def test_journalled_finds_merges_that_a_power_failure_took_from_below_a_snapshot(monkeypatch):
    description = every_step(small("12..13 crash syncer power"))
    assert World(description).run().ok
    monkeypatch.setattr(JournalWriter, "sync", lambda self: True)
    found = violation(description)
    assert (found.checker, "is not in events.jsonl" in found.sentence) == ("journalled", True), (
        found
    )


def test_journalled_finds_a_line_that_was_never_written(monkeypatch):
    append = JournalWriter.append

    def leave_out(self: JournalWriter, event: dict) -> None:
        if (event["event"], event.get("step")) != ("merge", 7):
            append(self, event)

    monkeypatch.setattr(JournalWriter, "append", leave_out)
    found = violation(small())
    assert (found.checker, "the merge of step 7" in found.sentence) == ("journalled", True), found


def test_a_part_of_the_journal_may_be_deleted_once_no_snapshot_needs_it():
    assert World(every_step(small("12..13 crash syncer", part_bytes=400))).run().ok
