"""
The tape that a process of a replay executes, as its supervisor names it.

The document of a replay is JSON: `run`, the run directory whose tape is executed, and `to`, the last global step.
All processes of the replay make the same plan from it.
"""

from __future__ import annotations

from diloco.errors import ConfigError
from diloco.journal.replay import Life
from diloco.journal.replay_files import plan_in
from diloco_worker.settings import LearnerSettings


def life_of(config: LearnerSettings, *, found: int) -> Life:
    """
    What this process must do.

    Args:
        config: names the document, the learner and its restarts.
        found: local step of the newest local checkpoint; 0: there is none.

    Raises:
        ConfigError: there is no such process on the tape, or it found another checkpoint.
    """
    if config.replay is None:
        raise AssertionError("this process is of no replay")
    plan = plan_in(config.replay)
    life = plan.lives.get((config.learner, config.restarts))
    if life is None:
        raise ConfigError(
            f"DILOCO_REPLAY: {config.replay}: the tape has no process of {config.learner} after {config.restarts} "
            "restarts; expected one that `diloco replay` starts"
        )
    if life.process.begin.found != found:
        raise ConfigError(
            f"{config.learner} found a local checkpoint of local step {found}, on the tape one of local step "
            f"{life.process.begin.found}: the replay cannot continue"
        )
    return life
