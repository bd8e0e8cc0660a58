"""Checkers bite in the worlds of `diloco sim`: each finds a broken core in the world of a seed, as it is drawn."""

from __future__ import annotations

import pytest

from diloco_sim.description import sample
from diloco_sim.world import World
from diloco_testing.sim import block_breaks, peer_breaks  # noqa: F401  # adds their breaks
from diloco_testing.sim.breaks import BREAKS, broken

pytestmark = pytest.mark.slow  # whole worlds

SEEDS = [
    ("another_weight", 0, 40),
    ("another_momentum", 4, 40),
    ("reports_that_count_twice", 8, 40),
    ("rounds_without_a_quorum", 3, 40),
    ("two_rounds_of_a_fragment", 95, 40),
    ("one_round_too_many", 0, 40),
    ("commits_out_of_order", 0, 40),
    ("members_that_left", 191, 40),
    ("false_tokens", 27, 40),
    ("false_steps", 66, 40),
    ("halved_credits", 1, 40),
    ("reports_that_differ", 0, 40),
    ("snapshots_that_are_not_written", 0, 40),
    ("oldest_snapshot", 0, 40),
    ("unchecked_snapshots", 52, 40),
    ("tokens_forgotten", 0, 40),
    ("used_reports_forgotten", 0, 40),
    ("used_reports_invented", 0, 40),
    ("merges_counted_anew", 0, 40),
    ("journal_not_synced", 38, 40),
    ("line_never_written", 4, 40),
    ("doubled_weight_in_the_journal", 0, 40),
    ("complete_too_early", 0, 40),
    ("model_not_synced", 0, 40),
    ("job_without_an_end", 0, 40),
    ("nothing_offered", 0, 40),
    ("no_member_is_late", 80, 40),
    ("no_learner_returns", 41, 40),
    ("results_not_fetched", 124, 40),
    ("lost_history_kept", 258, 200),
    ("deltas_of_a_lost_history", 15, 40),
    ("waits_for_nothing", 4, 40),
    ("never_stuck", 5, 40),
    ("engine_that_raises", 0, 40),
    ("incarnation_issued_twice", 0, 40),
    ("epoch_counted_twice", 0, 40),
    ("impersonators_admitted", 0, 40),
    ("joins_beyond_the_number", 27, 40),
    ("removed_learners_stay", 56, 40),
    ("more_learners_unnoticed", 56, 40),
    ("attempts_kept", 0, 40),
    ("buffers_kept", 0, 40),
    ("old_parameters_kept", 1, 40),
    ("old_parts_kept", 25, 40),
    ("too_many_lines", 0, 40),
    ("unreadable_snapshots_ignored", 52, 40),
    ("states_of_any_step", 130, 40),
    ("damaged_states", 514, 40),
    ("steps_of_the_header", 130, 40),
    ("peers_never_abandoned", 362, 40),
    ("one_peer_again_and_again", 7, 40),
    ("peers_stated_with_the_step_of_now", 39, 40),
    ("state_of_a_peer_not_loaded", 14, 40),
    ("endless_queue_of_lines", 896, 1000),
    ("one_left_out", 32, 1000),
    ("blocks_leased_twice", 28, 40),
    ("passes_that_overlap", 32, 40),
    ("blocks_lost", 38, 40),
    ("blocks_forgotten", 32, 40),
    ("blocks_counted_too_early", 3, 40),
]
"""
Break, seed and global steps. After a change of what worlds are drawn, search again:
`PYTHONPATH=tests/support python -m diloco_testing.sim.break_search` prints the rows.
"""

WITHOUT_SEED = {
    "endless_outbox", "undone_parts_kept", "starts_not_distinguished", "checkpoints_of_any_history",
    "one_learner_without_blocks",
}  # fmt: skip
"""
Half open for 105 s at ten steps a second, which no world of less than 5,000 steps is, and few of those.
`test_bounds_finds_messages_for_a_learner_that_is_gone` has a world for it, and
`test_bounds_finds_a_learner_that_downloads_without_a_pause` for a learner that joins a quorum of all
while the syncer crashes between two parts of the model, which no one of 6,000 seeds of 40 steps has.
`test_bases_finds_a_delta_against_an_equal_version_of_a_lost_history` has one for a learner that returns within
the two steps in which the restored syncer has a version of the same number, and
`test_bases_finds_a_checkpoint_with_equal_versions_of_a_lost_history` for one that then loads a checkpoint.
A loop must wait for eight minutes after all faults: `test_a_broken_ledger_is_found` has a world of 1,000 steps.
"""


def test_every_break_has_a_seed():
    assert sorted({name for name, _, _ in SEEDS} | WITHOUT_SEED) == sorted(BREAKS)


@pytest.mark.parametrize(
    ("name", "seed", "steps"),
    [pytest.param(*row, marks=[pytest.mark.slow_tier] if row[2] >= 1000 else []) for row in SEEDS],
)
def test_a_seed_finds_a_broken_core_and_passes_with_the_whole_one(name, seed, steps):
    description = sample(seed, steps=steps)
    outcome = broken(name, description)
    assert BREAKS[name].found(outcome), outcome.violation
    whole = World(description).run()
    assert whole.ok, whole.violation
