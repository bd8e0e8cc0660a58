"""A learner of `diloco run` without its local checkpoints continues with the moments of a peer, or of the next one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from diloco.journal.audit import audit
from diloco_testing.local.run_process import LocalRun, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 300
CONTINUES = "the optimizers continue with the state of {}"
FROM_FIRST = CONTINUES.format("eu/0")
TRAINED = 16
"""Global steps after which peers are asked, with a margin: H is 8."""


@pytest.fixture
def run(tmp_path):
    job = manifest("peers", steps=STEPS, learners=3)
    del job["spec"]["evaluation"]
    run = LocalRun(tmp_path, job)
    yield run
    run.stop()


def log_of(run, name):
    return (run.dir / "logs" / f"{name.replace('/', '-')}.log").read_text(errors="replace")


def pid_of(run, name):
    return next(p["pid"] for p in run.status()["processes"] if p["name"] == name)


def lose(run, name):
    """Kill a learner and delete its local checkpoints, as a new node would."""
    state = run.dir / "learners" / name.replace("/", "-")
    for _ in range(2):
        for path in state.glob("checkpoint-*"):
            path.unlink(missing_ok=True)
        os.kill(pid_of(run, name), signal.SIGKILL)


def dies_while_it_is_asked(run, first) -> bool:
    """Stop the process `first` of eu/0 when eu/1 asks it, and kill it; False: it had answered, and continues."""
    asked, answered = (log_of(run, "eu/1").count(text) for text in ("asking eu/0", FROM_FIRST))
    lose(run, "eu/1")
    run.until(
        lambda: log_of(run, "eu/1").count("asking eu/0") > asked, 120, expected="eu/1 asks eu/0"
    )
    os.kill(first, signal.SIGSTOP)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if log_of(run, "eu/1").count(FROM_FIRST) > answered:
            os.kill(first, signal.SIGCONT)
            return False
        time.sleep(0.1)
    os.kill(first, signal.SIGKILL)
    return True


def test_it_takes_the_moments_of_a_peer_of_its_region_and_of_another_if_that_one_dies(run):
    names = ("eu/0", "eu/1", "us/0")
    run.until(lambda: run.step() >= TRAINED and all(map(run.stepped, names)), 300, expected="steps")

    lose(run, "eu/1")
    run.until(
        lambda: FROM_FIRST in log_of(run, "eu/1"), 120,
        expected="eu/1 has the moments of eu/0",
    )  # fmt: skip
    run.until(lambda: run.incarnations("eu/1") > 1, 120, expected="eu/1 trains again")
    shown = run.until(
        lambda: [p for p in run.status()["processes"] if p.get("recoveredFrom")], 60, expected="status"
    )  # fmt: skip
    assert [(p["name"], p["recoveredFrom"]) for p in shown] == [("eu/1", "eu/0")]

    first, tries = pid_of(run, "eu/0"), 0
    while not dies_while_it_is_asked(run, first):
        tries += 1
        assert tries < 5, "eu/0 always answers before it is stopped"
    run.until(
        lambda: CONTINUES.format("us/0") in log_of(run, "eu/1"), 120,
        expected="eu/1 has the moments of us/0",
    )  # fmt: skip

    assert run.wait(500) == 0, run.tail()
    verdict = audit((run.dir / "events.jsonl").read_text().splitlines())
    assert verdict.ok, verdict.violations
    assert not list(run.dir.glob("learners/*/peer-state*"))
