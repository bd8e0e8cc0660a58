"""Real runs of two learners of unequal speed, of which one is killed or the syncer, and their replay."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from diloco.journal import reader
from diloco.journal.records import decode
from diloco.journal.replay_difference import first_difference
from diloco.journal.replay_files import plan_from, tapes_in
from diloco_local import run_control
from diloco_local.replay import ReplayError, replay
from diloco_testing.local.fake_run import until
from diloco_testing.local.run_process import LocalRun

pytestmark = [pytest.mark.slow, pytest.mark.slow_tier, pytest.mark.timeout(1800)]

PROGRAM = """
import time
import numpy, torch
from torch import nn
from diloco_worker import Learner, identity

torch.set_num_threads(1)
identity().seed_everything()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
learner = Learner.connect(model, optimizer)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, learner.total_steps)
learner.scheduler(schedule)
while not learner.done:
    x = torch.randn(8, 16) + numpy.random.random()
    loss = (model(x) - x[:, :4].cumsum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(learner.config["seconds"])
    learner.step(tokens=8, loss=loss.detach())
"""

STEPS = 90


def job(*, steps=STEPS, feedback=False):
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "replayed"},
        "spec": {
            "steps": steps,
            "sync": {
                "fragments": 3,
                "interval": 6,
                "quorum": 2,
                "wire": {"up": "Int4", "errorFeedback": feedback},
            },
            "learner": {"command": ["python", "train.py"], "checkpoint": {"everySteps": 4}},
            "syncer": {"checkpoint": {"everySteps": 20, "keep": 2}},
            "regions": [
                {"name": "eu", "learners": 1, "config": {"seconds": 0.02}},
                {"name": "us", "learners": 1, "config": {"seconds": 0.05}},
            ],
        },
    }


def merges(run):
    lines = reader.read(run / "events.jsonl")
    return [decode(line) for line in lines if line.get("event") == "merge"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A complete run, one learner of which was killed once."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(PROGRAM)
    run = LocalRun(folder, job())
    try:
        until(lambda: len(merges(run.dir)) >= 8, "some merges", seconds=600)
        run_control.kill(run.dir, "us/0")
        assert run.process.wait(900) == 0, run.output.read_text()
    finally:
        run.stop()
    return run.dir


@pytest.fixture(scope="module")
def replayed(recorded, tmp_path_factory):
    """Its replay: directory, first difference, what was shown."""
    directory = tmp_path_factory.mktemp("replayed") / "run"
    shown = []
    difference = replay(recorded, to=None, directory=directory, show=shown.append)
    return directory, difference, shown


def copied(recorded, tmp_path):
    """The files of a tape, to be changed."""
    run = tmp_path / "changed"
    shutil.copytree(
        recorded, run, ignore=shutil.ignore_patterns("snapshots", "model", "*.safetensors")
    )
    return run


def snapshot(run):
    """Θ, momentum and constants of the newest snapshot."""
    [*_, newest] = sorted((run / "snapshots").glob("*.safetensors"))
    return load_file(newest)


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]


def undone(run):
    """Newest snapshot, and how many steps a restart would undo now."""
    lines = run.lines("events.jsonl")
    snapshots = [line["step"] for line in lines if line["event"] == "snapshot" and line["ok"]]
    newest = max(snapshots, default=0)
    return newest, max(0, run.step() - newest)


def count(run, event):
    return sum(line["event"] == event for line in run.lines("events.jsonl"))


def kill_both(run, *, least):
    """
    Kill a learner, then the syncer, once its newest snapshot is of this step or a later one.

    Nothing can be merged without the learner: the line of a merge is written some milliseconds after its result is
    sent, and a replay ends where such a line is missing.
    """

    def due():
        newest, steps = undone(run)
        return newest >= least and 4 <= steps <= 10

    until(due, "merges that a restart undoes", seconds=600)
    left, starts = count(run, "leave"), count(run, "start")
    run_control.kill(run.dir, "us/0")
    until(lambda: count(run, "leave") > left, "the end of its session", seconds=600)
    run.kill_syncer()
    until(lambda: count(run, "start") > starts, "the next syncer", seconds=600)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """A complete run with error feedback, whose syncer was killed before and after its second snapshot."""
    folder = tmp_path_factory.mktemp("restarted")
    (folder / "train.py").write_text(PROGRAM)
    run = LocalRun(folder, job(steps=60, feedback=True))
    try:
        kill_both(run, least=0)
        kill_both(run, least=20)
        assert run.process.wait(900) == 0, run.output.read_text()
    finally:
        run.stop()
    return run.dir


def same_state(recorded, directory):
    """Names of the tensors that differ: of Θ and momentum, the model, and each learner's last state."""
    model = "model/model.safetensors"
    found = same(snapshot(recorded), snapshot(directory))
    found += same(load_file(recorded / model), load_file(directory / model))
    for learner in ("eu-0", "us-0"):
        [*_, ours] = sorted((recorded / "learners" / learner).glob("checkpoint-*.safetensors"))
        found += same(load_file(ours), load_file(directory / "learners" / learner / ours.name))
    return found


def test_the_tape_has_a_learner_that_was_killed_and_came_back(recorded):
    plan = plan_from(recorded)
    first, second = plan.lives_of("us/0")
    assert first.killed
    assert not second.killed
    assert second.copies
    assert plan.complete
    eu = plan.lives["eu/0", 0]
    assert eu.last > 1.2 * second.last  # of unequal speed


def test_a_replay_ends_with_the_same_bits(recorded, replayed):
    directory, difference, shown = replayed
    assert difference is None
    assert shown[-1].startswith(f"identical: {len(merges(recorded))} merges up to step {STEPS}")
    assert len(merges(directory)) == len(merges(recorded))
    assert same_state(recorded, directory) == []  # what was compared by digests, in full


def test_a_changed_digest_is_found_at_its_step_tensor_and_worker(recorded, tmp_path):
    run = copied(recorded, tmp_path)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    line = [line for line in lines if line["event"] == "merge"][2]
    member = line["members"][1]
    member["digests"] = f"{int(member['digests'], 16) ^ 1:0{len(member['digests'])}x}"
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    names = plan_from(run).lives["us/0", 0].process.begin.fragments
    tensor = next(f.names for f in names if f.fragment == line["fragment"]).split("\n")[-1]
    found = replay(run, to=line["step"], directory=tmp_path / "replay", show=lambda _: None)
    assert (found.step, found.worker, found.tensor) == (line["step"], "us/0", tensor)
    assert found.fragment == line["fragment"]


def test_a_changed_decision_is_found_where_its_values_first_count(recorded, tmp_path):
    run = copied(recorded, tmp_path)
    plan = plan_from(recorded)
    path = run / "learners" / "us-0" / "tape.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # The learning rate of one step was that of another global step.
    first = min(plan.lives["us/0", 0].copies)
    line = next(line for line in lines if line["event"] == "step" and line["localStep"] == first)
    line["seen"] += 40
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    [copy] = plan.lives["us/0", 0].copies[first]
    found = replay(run, to=copy.round, directory=tmp_path / "replay", show=lambda _: None)
    assert (found.step, found.worker, found.fragment) == (copy.round, "us/0", copy.fragment)
    assert found.tensor


def test_a_replay_that_cannot_continue_names_what_it_waits_for(recorded, tmp_path):
    run = copied(recorded, tmp_path)
    manifest = (run / "job.yaml").read_text()
    place = json.loads((run / "state" / "origin.json").read_text())["manifest"]
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / Path(place).name).write_text(manifest)
    (run / "state" / "origin.json").write_text(json.dumps({"manifest": str(tmp_path / "job.yaml")}))
    with pytest.raises(ReplayError, match=r"nothing has happened for 5 s: step 2 .*waits for eu/0"):
        replay(run, to=2, directory=tmp_path / "replay", show=lambda _: None, stall_seconds=5)


def test_the_digests_show_no_difference_that_the_values_do_not(recorded, replayed):
    directory, _, _ = replayed
    assert first_difference(plan_from(recorded), merges(directory), tapes_in(directory)) is None


def test_a_replay_continues_through_restarts_of_the_syncer_and_ends_with_the_same_bits(
    restarted, tmp_path
):
    plan, shown = plan_from(restarted), []
    first, second, third = plan.epochs
    assert (plan.ends, plan.complete) == ("", True)
    for before, after in ((first, second), (second, third)):
        assert before.rounds[-1].step > after.step  # each restart has undone merges
    assert third.step > second.step == 0
    eu = plan.lives["eu/0", 0]
    assert {epoch for epoch, _ in (r.version for r in eu.results)} == {1, 2, 3}  # it lived on
    assert [life.killed for life in plan.lives_of("us/0")] == [True, True, False]
    difference = replay(restarted, to=None, directory=tmp_path / "replay", show=shown.append)
    assert difference is None, difference
    assert "in 3 epochs of the syncer" in shown[-1]
    assert same_state(restarted, tmp_path / "replay") == []
