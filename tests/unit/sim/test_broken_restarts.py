"""Checkers bite: what a syncer loses in a restart is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim.checkers.bases import Bases
from diloco_sim.faults import Kind
from diloco_sim.lost_merges import LostMerges
from diloco_sim.world import World
from diloco_syncer.core.growth import Growth
from diloco_testing.sim import breaks
from diloco_testing.sim.worlds import every_step, small, violation

pytestmark = pytest.mark.slow  # whole worlds


def test_durable_finds_a_learner_whose_tokens_a_restart_forgets(monkeypatch):
    breaks.tokens_forgotten(monkeypatch)
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "other facts of eu/0" in found.sentence) == ("durable", True), found
    assert "tokens 0 instead of" in found.sentence


def test_durable_finds_used_reports_that_a_restart_forgets(monkeypatch):
    breaks.used_reports_forgotten(monkeypatch)
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "counts as not merged" in found.sentence) == ("durable", True), found


def test_durable_finds_used_reports_that_a_restart_invents(monkeypatch):
    breaks.used_reports_invented(monkeypatch)
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "999 counts as merged" in found.sentence) == ("durable", True), found


def test_durable_finds_a_merge_count_that_a_restart_begins_anew(monkeypatch):
    breaks.merges_counted_anew(monkeypatch)
    found = violation(every_step(small("12..13 crash syncer")))
    assert (found.checker, "the restart has merges 0" in found.sentence) == ("durable", True), found


HALTED = """
    15..16 leave syncer
    20..21 crash syncer
"""
"""The last snapshot of the first start is of step 8, after the halt."""


def test_durable_finds_a_halt_that_a_restart_forgets(monkeypatch):
    """The merge of step 9 would make the parameters grow, with snapshots of steps 0 and 6."""
    check = Growth.check
    checks = iter(range(9))
    monkeypatch.setattr(
        Growth,
        "check",
        lambda *args: "it would grow" if next(checks, None) == 8 else check(*args),
    )
    monkeypatch.setattr(LostMerges, "may_halt", True)
    kept = replace(small().spec.syncer_checkpoint, every_steps=6, keep=3)
    description = small(HALTED)
    description = replace(description, spec=replace(description.spec, syncer_checkpoint=kept))
    outcome = World(description).run()
    assert (outcome.ok, outcome.merges, outcome.stopped) == (True, 8, "it would grow")
    checks = iter(range(9))
    breaks.halt_forgotten(monkeypatch)
    found = violation(description)
    assert (found.checker, "the restart has no halt" in found.sentence) == ("durable", True), found


def test_journalled_finds_merges_that_a_power_failure_took_from_below_a_snapshot(monkeypatch):
    description = every_step(small("12..13 crash syncer power"))
    assert World(description).run().ok
    breaks.journal_not_synced(monkeypatch)
    found = violation(description)
    assert (found.checker, "is not in events.jsonl" in found.sentence) == ("journalled", True), (
        found
    )


def test_journalled_finds_a_line_that_was_never_written(monkeypatch):
    breaks.line_never_written(monkeypatch)
    found = violation(small())
    assert (found.checker, "the merge of step 7" in found.sentence) == ("journalled", True), found


def test_a_part_of_the_journal_may_be_deleted_once_no_snapshot_needs_it():
    assert World(every_step(small("12..13 crash syncer", part_bytes=400))).run().ok


RESTORED = """
    50..50.1 crash syncer
    53..53.1 crash syncer
    100..101 disk-restored syncer 80
"""
"""The copy is of epoch 1, the learners have versions of epoch 3, and the syncer begins epoch 2 again."""


def test_liveness_finds_learners_that_keep_what_a_restored_copy_does_not_have(monkeypatch):
    description = replace(every_step(small(RESTORED)), steps=300)
    whole = World(description).run()
    assert whole.ok, whole.violation
    assert whole.injected[Kind.DISK_RESTORED] == 1
    breaks.lost_history_kept(monkeypatch)
    found = violation(description)
    assert (found.checker, "eu/0 holds (3, " in found.sentence) == ("liveness", True), found


LATE = """
    50..50.1 crash syncer
    55..75.5 crash eu/0
    60..61 disk-restored syncer 15
"""
"""The copy is of epoch 1. A learner that comes late has (2, 54), and so has the syncer by then: another one."""


def test_bases_finds_a_delta_against_an_equal_version_of_a_lost_history(monkeypatch):
    description = replace(every_step(small(LATE)), steps=90)
    whole = World(description, checkers=[bases := Bases(description.spec, description.layout)])
    outcome = whole.run()
    assert (outcome.ok, bases.compared > 200) == (True, True), outcome.violation
    breaks.starts_not_distinguished(monkeypatch)
    found = violation(description)
    assert (found.checker, found.sentence) == (
        "bases",
        "eu/0 sends a delta of fragment 0 against (2, 54) of another history",
    )


def test_bases_finds_a_checkpoint_with_equal_versions_of_a_lost_history(monkeypatch):
    description = replace(
        every_step(small(LATE.replace("eu/0", "eu/0+trainer"))), steps=90, checkpoint_every=1
    )
    outcome = World(description).run()
    assert outcome.ok, outcome.violation
    breaks.checkpoints_of_any_history(monkeypatch)
    found = violation(description)
    assert (found.checker, found.sentence) == (
        "bases",
        "eu/0 sends the parameters of a checkpoint of fragment 0 against (2, 54) of another history",
    )


@pytest.mark.parametrize("down", ["FP32", "BF16"])
def test_bases_finds_learners_that_keep_what_a_restored_copy_does_not_have(monkeypatch, down):
    description = every_step(small(LATE.replace("crash eu/0", "cut eu/0 syncer")))
    spec = replace(description.spec, wire_down=down)
    description = replace(description, steps=90, spec=spec)
    outcome = World(description).run()
    assert outcome.ok, outcome.violation
    breaks.lost_history_kept(monkeypatch)
    found = violation(description)
    assert (found.checker, "of another history" in found.sentence) == ("bases", True), found


def test_durable_finds_a_restored_copy_whose_newest_snapshot_is_not_used(monkeypatch):
    breaks.oldest_snapshot(monkeypatch)
    found = violation(every_step(small("30..31 disk-restored syncer 10")))
    assert (found.checker, "the newest durable snapshot is of" in found.sentence) == (
        "durable",
        True,
    )
