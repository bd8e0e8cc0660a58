"""
Learners and the syncer are killed with SIGKILL: the job reaches step T, no upload is merged twice, and the model
is as good as that of an undisturbed run.
"""

import itertools
import json

import pytest

from diloco.journal.audit import audit
from diloco_testing.local.run_process import LocalRun, longest_wait, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2500)]

STEPS = 600
EVALUATION = {"everySteps": STEPS // 3}
TIMEOUT_SECONDS = 1200.0
LOSS_TOLERANCE = 1.02
"""
Five undisturbed runs of 900 steps ended between 1.529 and 1.545 (1.0 %), since which reports meet in a merge
depends on the scheduler. 1 % of a single one would fail in one of ten runs, also when the disturbed model is better.
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = LocalRun(
        tmp_path_factory.mktemp("undisturbed"), manifest("calm", steps=STEPS, evaluation=EVALUATION)
    )
    try:
        assert run.wait(TIMEOUT_SECONDS) == 0, run.tail()
        yield run
    finally:
        run.stop()


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    run = LocalRun(
        tmp_path_factory.mktemp("disturbed"), manifest("storm", steps=STEPS, evaluation=EVALUATION)
    )
    try:
        run.until(lambda: run.stepped("eu/1") > 20, 200, expected="eu/1 trains")
        run.kill_learner("eu/1")
        run.until(lambda: run.stepped("us/0") > 40, 200, expected="us/0 trains")
        run.kill_learner("us/0")
        for name in ("eu/1", "us/0"):
            run.until(lambda n=name: run.incarnations(n) > 1, 200, expected=f"{name} trains again")
        run.kill_syncer()
        assert run.wait(TIMEOUT_SECONDS) == 0, run.tail()
        yield run
    finally:
        run.stop()


def final_loss(run):
    lines = run.lines("eval.jsonl")
    assert lines[-1]["step"] == STEPS
    return lines[-1]["loss"]


def test_a_run_leaves_all_of_its_files(undisturbed):
    for name in (
        "job.yaml", "spec.json", "status.json", "events.jsonl", "eval.jsonl", "report.html", "report.png",
        "model/model.safetensors", "model/model.json", "logs/syncer.log", "logs/eu-0.log",
        "learners/us-1/steps.jsonl",
    ):  # fmt: skip
        assert (undisturbed.dir / name).stat().st_size > 0, name
    status = undisturbed.status()
    assert status["state"] == "Complete"
    assert status["step"] == STEPS
    losses = [line["loss"] for line in undisturbed.lines("eval.jsonl")]
    assert losses[-1] < 0.75 * losses[0], "the validation loss falls"


def test_the_disturbed_run_ends_at_t_with_a_model_as_good(undisturbed, disturbed):
    assert disturbed.step() == STEPS
    assert json.loads((disturbed.dir / "model/model.json").read_text())["step"] == STEPS
    assert final_loss(disturbed) <= LOSS_TOLERANCE * final_loss(undisturbed)


def test_both_audits_are_clean(undisturbed, disturbed):
    for run in (undisturbed, disturbed):
        verdict = audit((run.dir / "events.jsonl").read_text().splitlines())
        assert verdict.ok, verdict.violations
    events = disturbed.lines("events.jsonl")
    assert max(line["epoch"] for line in events if "epoch" in line) == 2
    # Joins do not tell: a Hello whose answer is late on a busy machine is sent again, as a fresh one.
    trained = {name: disturbed.incarnations(name) for name in ("eu/0", "eu/1", "us/0", "us/1")}
    assert trained == {"eu/0": 1, "eu/1": 2, "us/0": 2, "us/1": 1}, "only killed learners restarted"


def test_the_guard_is_never_active(undisturbed, disturbed):
    """
    No tensor of a member is clipped, its weight is tokens² / steps, and no counters are refused: from the
    first merge of the warm-up on, also while learners return from a crash.
    """
    for run in (undisturbed, disturbed):
        events = run.lines("events.jsonl")
        merges = [line["members"] for line in events if line["event"] == "merge"]
        assert sum(len(members) >= 3 for members in merges) >= 100, "merges that the guard checks"
        for member in itertools.chain.from_iterable(merges):
            assert member["clipped"] == 0, member
            assert member["weight"] == member["tokens"] ** 2 / member["steps"], member
        refused = [line for line in events if line["event"] == "refuse"]
        assert not [line for line in refused if line.get("reason") == "CountsDiffer"]


def test_the_step_never_falls_behind_the_last_snapshot(disturbed):
    events = disturbed.lines("events.jsonl")
    start = next(i for i, x in enumerate(events) if x["event"] == "start" and x["epoch"] == 2)
    durable = [x["step"] for x in events[:start] if x["event"] == "snapshot" and x["ok"]]
    assert events[start]["step"] == max(durable)


def test_survivors_never_wait(undisturbed, disturbed):
    """learner.step() never takes longer than a median step, even when the syncer is killed."""
    for run in (undisturbed, disturbed):
        for learner in ("eu-0", "us-1"):
            longest, median = longest_wait(run, learner)
            assert longest < median, f"{learner}: {longest:.4f} s against {median:.4f} s"


def test_a_restarted_learner_continues_at_its_data_position(disturbed):
    lines = disturbed.lines("learners/eu-1/steps.jsonl")
    first, second = sorted({x["incarnation"] for x in lines})
    killed_at = max(x["localStep"] for x in lines if x["incarnation"] == first)
    resumed_at = min(x["localStep"] for x in lines if x["incarnation"] == second)
    assert killed_at - 3 <= resumed_at <= killed_at + 1
    # The LR schedule follows the global step, which a restarted learner gets from the syncer.
    back = [x["globalStep"] for x in lines if x["incarnation"] == second]
    assert back[0] >= max(x["globalStep"] for x in lines if x["incarnation"] == first)
