"""A learner of `diloco run` without its local checkpoints continues with the moments of a peer, or of the next one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from diloco.journal.audit import audit
from diloco_testing.local.run_process import LocalRun, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 100_000
"""More than a test trains: it ends the run when it has seen enough."""
CONTINUES = "the optimizers continue with the state of {}"
FROM_FIRST = CONTINUES.format("eu/0")
TRAINED = 16
"""Global steps after which peers are asked, with a margin: H is 8."""


@pytest.fixture
def start(tmp_path):
    """Starts a run of so many learners, and returns it when all have trained."""
    runs = []

    def begin(learners):
        job = manifest("peers", steps=STEPS, learners=learners)
        del job["spec"]["evaluation"]
        run = LocalRun(tmp_path, job)
        runs.append(run)
        names = ("eu/0", "us/0", "eu/1")[:learners]
        run.until(lambda: all(map(run.stepped, names)), 240, expected="steps of all")
        peers_from = run.step() + TRAINED
        run.until(lambda: run.step() >= peers_from, 240, expected="moments of value")
        return run

    yield begin
    for run in runs:
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


def check(run):
    run.stop()
    text = (run.dir / "events.jsonl").read_text()
    verdict = audit(text.rpartition("\n")[0].splitlines())  # the last line may be cut
    assert verdict.ok, verdict.violations
    assert not list(run.dir.glob("learners/*/peer-state*"))
    return verdict


def test_a_learner_that_lost_its_checkpoints_takes_the_moments_of_another(start):
    run = start(2)
    lose(run, "us/0")
    run.until(
        lambda: FROM_FIRST in log_of(run, "us/0"), 120, expected="us/0 has the moments of eu/0"
    )
    run.until(lambda: run.incarnations("us/0") > 1, 120, expected="us/0 trains again")
    # A learner that joined after step 0 shows with which state its optimizers began, too: without a peer's.
    shown = run.until(
        lambda: [p for p in run.status()["processes"] if (p.get("recovery") or {}).get("peer")], 60,
        expected="status",
    )  # fmt: skip
    assert [(p["name"], p["recovery"]["peer"]) for p in shown] == [("us/0", "eu/0")]
    verdict = check(run)
    [found] = [r for r in verdict.recoveries if r.source == "Peer"]
    assert (found.learner, found.peer) == ("us/0", "eu/0")
    assert found.bytes > 0
    assert found.seconds > 0
    assert found.problem == ""


@pytest.mark.slow_tier
def test_if_the_peer_of_its_region_dies_it_takes_the_moments_of_another(start):
    run = start(3)
    first, tries = pid_of(run, "eu/0"), 0
    while not dies_while_it_is_asked(run, first):
        tries += 1
        assert tries < 5, "eu/0 always answers before it is stopped"
    run.until(
        lambda: CONTINUES.format("us/0") in log_of(run, "eu/1"), 120,
        expected="eu/1 has the moments of us/0",
    )  # fmt: skip
    check(run)


@pytest.mark.slow_tier
def test_a_learner_whose_only_peer_is_paused_trains_after_a_minute(start):
    run = start(2)
    stopped = pid_of(run, "eu/0")
    os.kill(stopped, signal.SIGSTOP)
    try:
        before = run.incarnations("us/0")
        lose(run, "us/0")
        run.until(
            lambda: "eu/0: no complete answer within" in log_of(run, "us/0"), 240, expected="the reason"
        )  # fmt: skip
        run.until(lambda: run.incarnations("us/0") > before, 60, expected="us/0 trains again")
    finally:
        os.kill(stopped, signal.SIGCONT)
    check(run)
