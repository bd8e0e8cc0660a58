"""The limits that docs/algorithm.md states, and those that users feel, are those of the code."""

import pytest

from diloco.journal import audit
from diloco_syncer import coordinator
from diloco_syncer.core import (
    announcements,
    contribution,
    durability,
    ejection,
    engine,
    guard,
    initialisation,
    pacing,
    rounds,
    upload_limits,
    used_reports,
)
from diloco_syncer.merging import blend, buffers
from diloco_worker.core import link_protocol, trainer, updates
from diloco_worker.link import assembly


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        # Grace window; Pacing
        (pacing, {"EMA_FACTOR": 0.5, "PACE_LAG_STEPS": 2}),
        # Reports and quorum: "repeated after 0.05 s, doubled each time up to 5 s"
        (rounds, {"RETRY_SECONDS": 0.05, "MAX_RETRY_SECONDS": 5.0}),
        (used_reports, {"MAX_MERGED": 256}),
        (announcements, {"LAG_DECAY": 0.95}),
        # Radial-directional merge
        (contribution, {"NORM_TOLERANCE": 1e-3, "NORM_FLOOR": 1e-12}),
        (blend, {"VANISHED": 1e-6, "NEGLIGIBLE": 1e-30}),
        # Failure detection
        (
            upload_limits,
            {
                "START_SECONDS": 30.0, "MIN_BYTES_PER_SECOND": 128 * 1024.0, "HOLD_WINDOWS": 2.0,
                "FREE_WINDOWS": 1.25, "JITTER_SECONDS": 0.25,
                "MIN_HOLD_SECONDS": 3.0, "MAX_HOLD_SECONDS": 30.0,
            },
        ),
        (
            engine,
            {
                "HEARTBEAT_SECONDS": 2.0, "LATE_HEARTBEATS": 3, "OWN_PAUSE_SECONDS": 3.0,
                "STUCK_SECONDS": 30.0, "STUCK_STEPS": 10.0,
            },
        ),
        (
            ejection,
            {
                "BACKOFF_SECONDS": 5.0, "MAX_BACKOFF_SECONDS": 600.0, "FORGIVEN_AFTER_MERGES": 16,
                "LATE_WINDOWS": 2.5, "MIN_LATE_SECONDS": 4.5,
                "PROBE_ATTEMPT": 1 << 20,
            },
        ),
        (initialisation, {"STALL_SECONDS": 60.0}),
        # Snapshots: "repeated after 5 s, doubled up to 60 s"
        (durability, {"RETRY_SECONDS": 5.0, "MAX_RETRY_SECONDS": 60.0}),
        (coordinator, {"MERGE_WINDOW_BYTES": 16 << 20}),
        (buffers, {"SLACK": 1.25}),
        # The learner: Recovery; Failure detection
        (
            link_protocol,
            {"DOWNLOAD_TRIES": 3, "RETRY_SECONDS": 0.5, "WELCOME_TIMEOUT_SECONDS": 20.0},
        ),
        (updates, {"RETRY_SECONDS": 0.5, "MAX_RETRY_SECONDS": 10.0}),
        (trainer, {"PROGRESS_SECONDS": 5.0}),
        (assembly, {"MAX_REPEATS": 5}),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else "",
)  # fmt: skip
def test_a_limit_changes_with_its_documentation_only(module, numbers):
    assert {name: getattr(module, name) for name in numbers} == numbers


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (guard, ("RATE_MULTIPLE", "GUARDED_MEMBERS")),
        (contribution, ("NORM_FLOOR", "NORM_TOLERANCE")),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else "",
)
def test_the_audit_holds_merges_to_the_limits_of_the_core(module, names):
    """It may not import the syncer, so it has copies: a change of one is a change of both."""
    assert {n: getattr(audit, n) for n in names} == {n: getattr(module, n) for n in names}
