"""Real processes and a cell of an experiment train the same job: its merges, its tokens and its loss agree."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml

from diloco.spec import RunSpec
from diloco_experiment import study as studies
from diloco_experiment.results import Result, Status
from diloco_experiment.tasks import Task
from diloco_experiment.world import TrainingWorld
from diloco_testing.local.run_process import LocalRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, LEARNERS, SEEDS = 48, 2, (7, 8, 9, 10)
CONFIG = {
    "layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 4, "data": "stdlib",
    "slowdown": 2,  # of the real learners: so that they rest, which PACED makes a step of one length
}  # fmt: skip
TOKENS = 4 * 32
"""Of a step of a learner."""

STEP_SECONDS = 0.25
PACED = f"""
import os, sys, time
from pathlib import Path

due = []  # when the step ends

def paced(seconds, sleep=time.sleep):
    if sys._getframe(1).f_globals["__name__"] == "__main__":
        if not due:
            deadline = time.monotonic() + 60
            Path(__file__).with_name(str(os.getpid()) + ".begun").touch()
            while len(list(Path(__file__).parent.glob("*.begun"))) < {LEARNERS} and time.monotonic() < deadline:
                sleep(0.01)
            due.append(time.monotonic())
        due[0] = max(due[0] + {STEP_SECONDS}, time.monotonic())
        seconds = due[0] - time.monotonic()
    sleep(max(0.0, seconds))

if "diloco_worker.recipes.gpt" in sys.orig_argv:
    time.sleep = paced
"""
"""
sitecustomize.py of the real processes: steps of one length, which begin together, as those of the cell. On cores
that processes share, steps differ by a factor of two: the faster learner trains on while the other one keeps the job
waiting.
"""

JOB: dict[str, Any] = {
    "apiVersion": "diloco.dev/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"name": "both"},
    "spec": {
        "steps": STEPS,
        "seed": SEEDS[0],
        "sync": {"fragments": 8, "interval": 8, "quorum": LEARNERS, "overlap": 2},
        "learner": {"recipe": {"name": "gpt", "config": CONFIG}},
        "regions": [{"name": "eu", "learners": LEARNERS}],
        "evaluation": {"everySteps": STEPS},
    },
}
STUDY = {
    "name": "both", "job": "job.yaml", "methods": ["Decoupled"], "seeds": list(SEEDS),
    "set": {"spec.learner.recipe.config.slowdown": 1},
}  # fmt: skip

Merges = list[dict[str, Any]]


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Iterator[list[tuple[Task, Result, Merges]]]:
    """The cell of each seed: its task, its result, and its merges."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the program
    folder = tmp_path_factory.mktemp("cells")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    found = []
    for cell in studies.cells(*studies.load(folder / "study.yaml")):
        world = TrainingWorld(cell.task)
        result = world.result()
        assert result.status is Status.OK, result.detail
        lines = [json.loads(text) for _, text in world.journal_lines() or ()]
        found.append((cell.task, result, [line for line in lines if line["event"] == "merge"]))
    yield found
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[LocalRun]:
    """The same job in processes of its own, complete."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "sitecustomize.py").write_text(PACED)
    path = os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run = LocalRun(folder, JOB, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    try:
        assert run.wait(300) == 0, run.tail()
        yield run
    finally:
        run.stop()


def merges_of(run: LocalRun) -> Merges:
    return [line for line in run.lines("events.jsonl") if line["event"] == "merge"]


def rounds(merges: Merges) -> list[tuple[int, int]]:
    return [(merge["step"], merge["fragment"]) for merge in merges]


def test_both_have_one_schedule_and_the_same_rounds(cells, real):
    """The schedule alone decides which fragment is merged at which step; K = M decides the members."""
    task, _, virtual = cells[0]
    spec = RunSpec.from_json((real.dir / "spec.json").read_text())
    for field in ("steps", "interval", "fragments", "overlap", "quorum", "seed", "learners"):
        assert getattr(spec, field) == getattr(task.spec, field), field
    assert rounds(merges_of(real)) == rounds(virtual)
    assert len(virtual) > STEPS - spec.interval
    names = {tuple(sorted(m["learner"] for m in merge["members"])) for merge in merges_of(real)}
    assert names == {tuple(sorted(task.names))}


def test_the_tokens_of_both_are_those_that_the_schedule_allows(cells, real):
    """
    A merge needs a report that no other merge had: at its n-th one, a learner has made n steps at least. How many
    more is a matter of timing, as is when a result arrives; the counters are those of the steps in any case.
    """
    task, result, virtual = cells[0]
    for merges in (virtual, merges_of(real)):
        for number, merge in enumerate(merges, start=1):
            for member in merge["members"]:
                assert member["step"] >= number, merge
                assert 1 <= member["steps"] <= member["step"], merge
                assert member["tokens"] == member["steps"] * TOKENS, merge
    steps = [real.stepped(name) for name in task.names]
    assert all(count >= len(virtual) for count in steps), steps
    assert result.tokens == result.local_steps * TOKENS
    assert result.local_steps >= LEARNERS * len(virtual)


def test_the_loss_of_both_differs_by_no_more_than_seeds_do(cells, real):
    """
    Θ is a function of the members and their steps, which timing changes: so the bound is three standard deviations
    of the loss over the seeds of the cell. (With equal steps in each merge, the losses are equal to the last digit.)
    """
    losses = [result.loss for _, result, _ in cells]
    found = real.lines("eval.jsonl")
    assert [line["step"] for line in found] == [0, STEPS]
    assert losses[0] < found[0]["loss"] - 1, "both have trained"
    assert found[-1]["loss"] == pytest.approx(losses[0], abs=3 * statistics.stdev(losses))
