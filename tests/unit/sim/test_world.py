"""Whole worlds by seed: they repeat themselves, and none breaks a promise."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from diloco_sim import pool, report
from diloco_sim.__main__ import main
from diloco_sim.checkers.checker import Violation
from diloco_sim.description import sample
from diloco_sim.world import Outcome, World
from diloco_syncer.core import scheduler

pytestmark = pytest.mark.slow  # whole worlds

FIXED = range(20)

SECONDS = float(
    os.environ.get("DILOCO_SIM_SECONDS", "240" if os.environ.get("CI") == "true" else "20")
)
"""How long seeds that change with the commit are run, at least."""

MIN_WORLDS = 500 if os.environ.get("CI") == "true" else 1
"""How many of them are run, if the machine makes as many within LONGEST_SECONDS."""

LONGEST_SECONDS = SECONDS + 960
"""After so long, those that ran are enough: other tests and their clusters get most of the cores."""


def checked(outcome: Outcome) -> Outcome:
    assert outcome.ok, report.text_of(outcome)
    return outcome


@pytest.mark.parametrize("seed", FIXED)
def test_no_promise_is_broken(seed):
    outcome = checked(World(sample(seed)).run())
    assert outcome.merges > 0 or outcome.stopped  # a bit of the first snapshot may flip


def test_a_delta_for_another_round_is_not_taken_for_what_was_encoded_for_that_one():
    """A learner states the round for which it has encoded another fragment before the syncer restarted."""
    checked(World(sample(4110317793, steps=100)).run())


@pytest.mark.parametrize("seed", [3, 11])
def test_a_world_repeats_itself(seed):
    first, second = (World(sample(seed)).run() for _ in range(2))
    assert (first.digest, first.events, first.merges) == (
        second.digest,
        second.events,
        second.merges,
    )


def test_a_world_repeats_itself_in_another_process():
    code = (
        "from diloco_sim.world import World; from diloco_sim.description import sample\n"
        "print(World(sample(3, steps=20)).run().digest)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1] == f"{World(sample(3, steps=20)).run().digest}\n"


@pytest.mark.timeout(LONGEST_SECONDS + 600)
def test_seeds_of_this_commit(capsys):
    begun, ran = time.monotonic(), count(1)
    failed: list[str] = []
    # One process: other tests use the other cores.
    outcomes = pool.outcomes(count(_first_seed()), steps=100, jobs=1)
    with contextlib.closing(outcomes):
        text, failures = report.summary(
            outcomes, steps=100, failed=lambda outcome: failed.append(report.text_of(outcome)),
            enough=lambda: enough(next(ran), time.monotonic() - begun) or bool(failed),
        )  # fmt: skip
    with capsys.disabled():
        print(f"\nfrom seed {_first_seed()}: {text}")
    assert not failures, failed[0]


def enough(worlds: int, seconds: float) -> bool:
    return seconds >= LONGEST_SECONDS or (worlds >= MIN_WORLDS and seconds >= SECONDS)


def _first_seed() -> int:
    """Another one for each commit, so that each commit tries other worlds."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, check=False, capture_output=True, text=True,
    )  # fmt: skip
    return int(done.stdout[:8] or "0", 16) if done.returncode == 0 else 1000


def test_the_command_prints_a_summary_and_its_exit_code_is_0(capsys):
    assert main(["--seeds", "3..4", "--steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "2 worlds of 10 global steps: all promises kept" in out


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that counts every report of one learner as merged twice."""
    line = scheduler.merge_line

    def changed(*facts: Any, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = line(*facts, **more)
        found["members"] = [*found["members"], found["members"][0]]
        return found

    monkeypatch.setattr(scheduler, "merge_line", changed)


def test_a_world_that_fails_prints_its_seed_plan_events_and_sentence_and_the_exit_code_is_1(
    capsys, monkeypatch
):
    broken(monkeypatch)
    assert main(["--seeds", "3..4", "--steps", "10"]) == 1
    out = capsys.readouterr().out
    of = sample(3, steps=10)
    assert f"seed 3, {of.learners} learners, 10 steps" in out
    assert f"spec: {of.job}" in out
    assert all(f"  {fault}\n" in out for fault in of.plan)
    events, _, rest = out.partition("\nreports: the report of ")
    assert "events:\n" in events
    assert re.search(r"line merge epoch=\d step=1 ", events.splitlines()[-1])
    assert "of local step" in rest
    assert "is merged at global step 1, it was merged at 1 before (global step 1, " in rest
    assert "2 worlds of 10 global steps: 2 broke a promise" in out


def test_with_shrink_the_command_prints_a_smaller_world_that_fails_in_the_same_way(
    capsys, monkeypatch
):
    broken(monkeypatch)
    seed = next(
        s for s in range(100) if len((of := sample(s, steps=40)).plan) > 3 and of.learners > 2
    )
    assert main(["--seed", f"{seed}", "--steps", "40", "--shrink"]) == 1
    out = capsys.readouterr().out
    assert f"seed {seed}, 1 learners, 1 steps\n" in out
    assert "plan: no faults\n" in out
    assert "\nreports: the report of eu/0 " in out


def test_a_plan_without_faults_and_a_kept_promise_have_texts_of_their_own():
    text = report.text_of(World(sample(1, steps=5, faults=False)).run())
    assert "plan: no faults\n" in text
    assert text.endswith("all promises kept")


def test_a_learner_that_gets_a_new_result_in_each_of_its_steps_need_not_take_part():
    """Seed 100042: one fragment, which the others merge twice within a step of the slowest."""
    found = sample(0, faults=False)
    spec = dataclasses.replace(found.spec, fragments=1, interval=2, overlap=1)
    found = dataclasses.replace(found, spec=spec, learners=3, step_seconds=(1.0, 1.9, 2.1))
    assert found.too_slow == {found.names[2]}


def test_several_processes_find_what_one_finds(capsys):
    """In the same order, also where a world breaks a promise."""
    failing = Violation("bounds", "too many", step=3, now=1.5)
    assert str(pickle.loads(pickle.dumps(failing))) == str(failing)
    for jobs in ("1", "2"):
        assert main(["--seeds", "3..8", "--steps", "5", "--jobs", jobs]) == 0
    alone, side_by_side = capsys.readouterr().out.split("6 worlds")[1:]
    assert alone == side_by_side


@pytest.mark.parametrize("text", ["3", "5..3", "a..b", "-1..2"])
def test_what_is_not_a_range_of_seeds_is_refused(text):
    with pytest.raises(ValueError, match=r"expected A\.\.B"):
        report.seeds_of(text)
