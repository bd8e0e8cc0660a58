"""What the loop of `diloco run` remembers of its processes. No processes."""

from __future__ import annotations

import errno
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.errors import ConfigError
from diloco.runtime.health import Health, HealthFile
from diloco.v1 import syncer_pb2 as pb
from diloco_agent.processes import ProcessExit
from diloco_local import events as e
from diloco_local import run_directory
from diloco_local import supervisor as supervising
from diloco_local.policy import Policy
from diloco_local.problems import Problems
from diloco_local.run_directory import RunDir
from diloco_local.status_poller import TimedReply
from diloco_local.supervisor import Supervisor, stuck_seconds


def test_that_a_learner_joined_is_not_forgotten_when_its_link_restarts(tmp_path):
    run_dir, policy = RunDir(tmp_path), Policy(learners=("eu/0", "us/0"))
    supervisor = SimpleNamespace(run_dir=run_dir, policy=policy, _problems=Problems(["eu/0"]))
    path = run_dir.health_of("eu/0")
    path.parent.mkdir(parents=True)
    for joined in (False, True, False):
        health = Health(at=1.0, ready=False, why="", progress_at=1.0, joined=joined)
        HealthFile(path).write(health)
        Supervisor._observe_problems(supervisor, ["eu/0", "us/0"], 1.0)
    assert policy.processes["eu/0"].joined
    assert not policy.processes["us/0"].joined


def test_the_time_without_a_step_is_that_of_the_environment_of_learners():
    def plan(**env):
        return SimpleNamespace(learners=[SimpleNamespace(env=tuple(env.items()))])

    assert stuck_seconds(plan()) == 900
    assert stuck_seconds(plan(DILOCO_STUCK_SECONDS="3600")) == 3600
    with pytest.raises(ConfigError, match="DILOCO_STUCK_SECONDS"):
        stuck_seconds(plan(DILOCO_STUCK_SECONDS="soon"))


def test_a_file_system_that_became_read_only_does_not_end_the_run(tmp_path, monkeypatch):
    def refuse(path, *, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    notes = []
    supervisor = SimpleNamespace(_warned=set(), _display=SimpleNamespace(note=notes.append))
    supervisor._warn_once = lambda path: Supervisor._warn_once(supervisor, path)
    for _ in range(2):
        Supervisor._remove(supervisor, tmp_path / "health.json")
    assert len(notes) == 1
    assert "Read-only file system; the run continues" in notes[0]


def test_starts_are_counted_on_when_their_file_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    run_dir = RunDir(tmp_path)
    path = run_dir.starts_of("eu/0")
    path.parent.mkdir(parents=True)
    path.write_text("7\n")  # by an earlier run
    loop = Supervisor.__new__(Supervisor)
    loop.run_dir, loop.policy = run_dir, Policy(learners=("eu/0",))
    loop._warned, loop._starts = set(), {}
    loop._display = SimpleNamespace(note=lambda text: None)
    assert loop._starts_before("eu/0") == 7
    monkeypatch.setattr(run_directory.files, "replace", refuse)
    assert [loop._starts_before("eu/0") for _ in range(2)] == [8, 9]
    monkeypatch.undo()
    assert (loop._starts_before("eu/0"), path.read_text()) == (10, "11\n")


def test_a_closed_terminal_that_is_reported_twice_is_one_interrupt():
    supervisor = SimpleNamespace(interrupts=0)
    for number, interrupts in (
        *((signal.SIGHUP, 1), (signal.SIGHUP, 1)),
        *((signal.SIGINT, 2), (signal.SIGHUP, 2), (signal.SIGTERM, 3)),
    ):
        Supervisor._on_signal(supervisor, number)
        assert supervisor.interrupts == interrupts


class Ending:
    """The loop of a run whose syncer serves, and whose evaluator ends."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self.exits: list[ProcessExit] = []
        self.latest: TimedReply | None = None
        self.loop = Supervisor.__new__(Supervisor)
        policy = self.loop.policy = Policy(learners=("eu/0",), evaluator=True)
        policy.processes["syncer"].state = policy.processes["evaluator"].state = e.State.RUNNING
        policy.processes["syncer"].served = True
        policy.outcome = e.Outcome.COMPLETE
        self.loop.run_dir, self.loop._problems = RunDir(folder), Problems(["eu/0"])
        self.loop.interrupts = self.loop._interrupts_seen = 0
        self.loop._listening_at, self.loop._evaluated = 0.0, -1
        self.loop._evaluator_exit = None
        self.loop._display = SimpleNamespace(note=self.notes.append)
        self.loop._poller = SimpleNamespace(latest=lambda: self.latest, poll_now=lambda: None)
        self.loop._processes = SimpleNamespace(exits=self._exits)

    def _exits(self) -> list[ProcessExit]:
        found, self.exits = self.exits, []
        return found

    def evaluator_ends(self) -> None:
        self.exits = [ProcessExit(name="evaluator", code=0, last_lines=(), cause="")]

    def reply(self, *, asked_at: float, eval_step: int) -> None:
        status = pb.StatusReply(state="Complete", step=9, steps=9, eval_step=eval_step)
        status.eval_loss = 1.5 if eval_step else 0.0
        self.latest = TimedReply(reply=status, asked_at=asked_at, at=asked_at + 0.1)

    def ends(self, now: float) -> bool:
        """Whether the policy learns of the evaluator's end in this turn."""
        return any(isinstance(event, e.Exited) for event in self.loop._events(now))


def test_the_last_score_is_shown_once_before_the_policy_learns_of_the_end_of_the_evaluator(
    tmp_path,
):
    run, now = Ending(tmp_path), time.monotonic()
    run.reply(asked_at=now - 0.01, eval_step=0)  # requested before the score, and arrives after it
    run.evaluator_ends()
    assert not run.ends(now)
    assert not run.ends(now + 0.1)
    assert run.notes == []
    run.reply(asked_at=now + 1.0, eval_step=9)
    assert run.ends(now + 1.1)
    assert not run.ends(now + 1.2)
    assert run.notes == ["step 9: validation loss 1.5000"]


def test_the_end_of_the_evaluator_waits_for_no_syncer_that_does_not_answer(tmp_path):
    run, now = Ending(tmp_path), time.monotonic()
    run.evaluator_ends()
    assert not run.ends(now)
    assert run.ends(now + 1 + supervising.LAST_SCORE_SECONDS)


@pytest.mark.parametrize("change", ["forced", "syncer"])
def test_the_end_of_the_evaluator_waits_for_no_syncer_that_ended(tmp_path, change):
    run = Ending(tmp_path)
    if change == "forced":
        run.loop.policy.forced = True
    else:
        run.loop.policy.processes["syncer"].state = e.State.BACK_OFF
    run.evaluator_ends()
    assert run.ends(time.monotonic())
