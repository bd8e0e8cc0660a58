"""The supervisor's decisions in virtual time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local.events import (
    Abandon,
    Acknowledge,
    Close,
    Completed,
    Decision,
    Event,
    Exited,
    Exported,
    Interrupted,
    Kill,
    Limits,
    Outcome,
    Phase,
    Restart,
    Served,
    StandsStill,
    Start,
    State,
    Terminate,
    Tick,
)
from diloco_local.policy import Policy
from diloco_local.supervisor import exit_code

SIGKILL, SIGSEGV = 9, 11
LEARNERS = ("eu/0", "eu/1")


@dataclass
class Run:
    """A policy and a clock; `decisions` are all decisions with their time."""

    policy: Policy
    now: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def handle(self, event: Event, *, at: float | None = None) -> list[Decision]:
        self.now = self.now if at is None else at
        decisions = self.policy.handle(event, self.now)
        self.decisions += [(self.now, decision) for decision in decisions]
        return decisions

    def exits(
        self, name: str, code: int, *, at: float | None = None, last_line: str = ""
    ) -> list[Decision]:
        return self.handle(Exited(name=name, code=code, last_line=last_line), at=at)

    def wait(self, *, until: float) -> list[Decision]:
        decisions: list[Decision] = []
        while self.now < until:
            decisions += self.handle(Tick(), at=min(until, self.now + 0.25))
        return decisions

    def state(self, name: str) -> State:
        return self.policy.processes[name].state

    def starts(self, name: str) -> list[float]:
        return [at for at, decision in self.decisions if decision == Start(name=name)]


def fresh(**limits: float) -> Run:
    run = Run(Policy(learners=LEARNERS, evaluator=True, limits=Limits(**limits)))
    run.handle(Tick())
    return run


def training(**limits: float) -> Run:
    run = fresh(**limits)
    run.exits("kernels", 0)
    run.handle(Served())
    return run


def names(decisions: list[Decision], kind: type) -> list[str]:
    return [decision.name for decision in decisions if isinstance(decision, kind)]


# ---------------------------------------------------------------------------------- starting


def test_the_kernels_start_first_then_the_syncer_then_the_rest():
    run = fresh()
    assert names(run.handle(Tick()), Start) == []
    assert run.starts("kernels") == [0.0]
    assert names(run.exits("kernels", 0, at=3.0), Start) == ["syncer"]
    assert names(run.handle(Tick(), at=9.0), Start) == []
    assert names(run.handle(Served(), at=10.0), Start) == ["eu/0", "eu/1", "evaluator"]
    assert run.policy.phase is Phase.RUNNING


def test_kernels_that_do_not_compile_do_not_stop_the_run():
    assert names(fresh().exits("kernels", 1), Start) == ["syncer"]


def test_a_complete_job_started_again_runs_no_learner():
    run = fresh()
    run.exits("kernels", 0)
    assert names(run.handle(Served(complete=True)), Start) == []
    assert run.policy.outcome is Outcome.COMPLETE


def test_a_complete_job_started_again_still_evaluates_its_final_model():
    run = fresh()
    run.exits("kernels", 0)
    assert names(run.handle(Served(complete=True, evaluated=False)), Start) == ["evaluator"]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Completed(unchanged=True), "the final step is complete, but no learner changed"),
        (Served(complete=True, unchanged=True), "the job was already complete, but no learner"),
    ],
)
def test_a_complete_job_whose_parameters_never_changed_exits_with_1(event, message):
    run = fresh()
    run.exits("kernels", 0)
    if isinstance(event, Completed):
        run.handle(Served())
    run.handle(event)
    assert run.policy.outcome is Outcome.COMPLETE, "it does not start again"
    assert run.policy.message.startswith(message)
    assert exit_code(run.policy) == 1


def test_a_complete_job_whose_parameters_changed_exits_with_0():
    run = training()
    run.handle(Completed())
    assert (run.policy.message, exit_code(run.policy)) == ("the final step is complete", 0)


# ---------------------------------------------------------------------------------- restarts


def test_the_back_off_of_a_learner_doubles_up_to_its_maximum():
    run = training()
    pauses = []
    for _ in range(9):
        restart = run.exits("eu/0", -SIGKILL)[0]
        pauses.append(restart.delay_seconds)
        assert names(run.wait(until=run.now + restart.delay_seconds - 0.01), Start) == []
        assert names(run.wait(until=run.now + 0.25), Start) == ["eu/0"]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert run.policy.processes["eu/0"].restarts == 9


@pytest.mark.parametrize(("lived_seconds", "pause"), [(59.0, 2.0), (60.0, 0.5)])
def test_a_healthy_minute_resets_the_back_off(lived_seconds, pause):
    run = training()
    run.exits("eu/0", 1)
    run.wait(until=0.5)
    run.exits("eu/0", 1)
    run.wait(until=1.5)
    assert run.exits("eu/0", 1, at=1.5 + lived_seconds)[0].delay_seconds == pause


def test_the_exit_of_a_learner_does_not_affect_the_others():
    run = training()
    decisions = run.exits("eu/0", 1, last_line="RuntimeError: boom")
    assert decisions == [
        Restart(name="eu/0", code=1, last_line="RuntimeError: boom", restarts=1, delay_seconds=0.5)
    ]


def test_the_syncer_restarts_immediately_and_learners_keep_running():
    run = training()
    decisions = run.exits("syncer", -SIGKILL, at=100.0)
    assert names(decisions, Start) == ["syncer"]
    assert names(decisions, Terminate) == []


def test_a_syncer_that_serves_and_crashes_repeatedly_backs_off():
    run = training()
    run.exits("syncer", 1)
    run.handle(Served())
    assert run.exits("syncer", 1)[0].delay_seconds == 0.5


def test_a_syncer_that_never_serves_again_fails_the_job():
    run = training(syncer_starts=3)
    for _ in range(4):
        run.exits("syncer", 2, last_line="port 7 is in use")
        run.wait(until=run.now + 30)
    assert run.policy.outcome is Outcome.FAILED
    assert run.policy.message == (
        "the syncer was started 3 times in a row and did not serve (exit code 2: port 7 is in use)"
    )


@pytest.mark.parametrize("code", [2, 78])
def test_a_syncer_that_rejects_its_spec_is_not_restarted(code):
    run = fresh()
    run.exits("kernels", 0)
    run.exits("syncer", code, last_line="no such spec")
    assert run.policy.outcome is Outcome.FAILED
    assert run.starts("syncer") == [0.0]


def test_a_learner_that_exits_early_restarts():
    run = training()
    assert run.exits("eu/0", 0) == []
    assert names(run.wait(until=1.9), Start) == []
    decisions = run.wait(until=2.25)
    assert names(decisions, Start) == ["eu/0"]
    [restart] = [decision for decision in decisions if isinstance(decision, Restart)]
    assert restart.last_line == (
        "the job is not complete: its loop must be `while not learner.done`"
    )


def test_a_learner_that_a_person_stopped_restarts_without_a_remark_about_its_loop():
    run = training()
    run.handle(Exited(name="eu/0", code=0, joined=True, left="SIGTERM"))
    [restart] = [found for found in run.wait(until=2.25) if isinstance(found, Restart)]
    assert restart.last_line == ""


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, "exit code 0: the job is not complete: its loop must be `while not learner.done`"),
        (127, "exit code 127: no such file"),
    ],
)
def test_a_learner_that_never_joins_fails_the_job_after_five_ends_with_the_cause(code, cause):
    run = training(never_joined_seconds=0)
    for ends in range(5):
        assert (run.policy.outcome, ends) == (None, ends)
        run.exits("eu/0", code, last_line="no such file")
        run.wait(until=run.now + 40)
    assert run.policy.outcome is Outcome.FAILED
    assert run.policy.message == f"learner eu/0 ended 5 times and never joined the job ({cause})"


def test_a_learner_that_never_joined_outlives_an_outage_of_minutes():
    run = training()
    first = run.now
    while run.policy.outcome is None:
        assert run.now < first + 400
        run.exits("eu/0", 1, last_line="no such disk")
        failed_at = run.now
        run.wait(until=run.now + 40)
    assert failed_at >= first + 300


def test_neither_kills_nor_a_slow_syncer_nor_the_other_learner_fail_one_that_never_joined():
    run = training()
    for code in [-SIGKILL, 75, -15] * 5:
        run.exits("eu/0", code)
        run.wait(until=run.now + 40)
    for name in LEARNERS * 4:
        run.exits(name, 1)
        run.wait(until=run.now + 40)
    assert run.policy.outcome is None


def test_a_learner_that_joined_once_is_restarted_without_end():
    run = training()
    run.handle(Exited(name="eu/0", code=1, joined=True))
    for _ in range(20):
        run.wait(until=run.now + 40)
        run.exits("eu/0", 1)
    assert run.policy.outcome is None


def test_a_run_in_which_no_learner_can_train_fails_with_the_reason():
    run = training()
    run.handle(StandsStill(message="no learner can train: eu/0 (NotFinite)"))
    assert run.policy.outcome is Outcome.FAILED
    assert run.policy.message == "no learner can train: eu/0 (NotFinite)"
    done = training()
    done.handle(Completed())
    done.handle(StandsStill(message="too late"))
    assert done.policy.outcome is Outcome.COMPLETE


def test_a_learner_that_exits_just_before_completion_is_reported_is_done():
    run = training()
    run.exits("eu/0", 0)
    run.handle(Completed(), at=1.0)
    run.wait(until=10.0)
    assert run.state("eu/0") is State.DONE
    assert run.policy.processes["eu/0"].restarts == 0


def test_a_temporary_failure_is_a_restart():
    assert names(training().exits("eu/0", 75), Restart) == ["eu/0"]


def test_a_refused_learner_fails_the_job_with_its_last_line_and_never_restarts():
    run = training()
    run.exits("eu/0", 78, last_line="parameter head.weight has shape [4] instead of [8]")
    run.wait(until=200.0)
    assert run.policy.message == (
        "learner eu/0 was refused: parameter head.weight has shape [4] instead of [8]"
    )
    assert run.state("eu/0") is State.REFUSED
    assert run.starts("eu/0") == [0.0]


def test_the_names_before_the_reason_of_a_refusal_are_not_repeated():
    run = training()
    run.exits("eu/0", 78, last_line="diloco: eu/0: refused by the syncer (Mismatch): another shape")
    assert run.policy.message == (
        "learner eu/0 was refused: refused by the syncer (Mismatch): another shape"
    )


def test_a_refused_evaluator_does_not_restart_and_the_run_continues():
    run = training()
    assert run.exits("evaluator", 78, last_line="no data") == [
        Abandon(name="evaluator", last_line="no data")
    ]
    run.wait(until=100.0)
    assert run.policy.outcome is None
    assert run.starts("evaluator") == [0.0]


@pytest.mark.parametrize(
    ("code", "counts"), [(1, True), (75, False), (-SIGSEGV, True), (-SIGKILL, False), (0, False)]
)
def test_only_crashes_count_against_the_restart_limit(code, counts):
    run = training(learner_restarts=2)
    for _ in range(3):
        run.exits("eu/0", code)
        run.wait(until=run.now + 40)
    assert (run.policy.outcome is Outcome.FAILED) is counts


def test_crashes_of_two_learners_are_not_added_up():
    run = training(learner_restarts=1)
    run.exits("eu/0", 1)
    run.exits("eu/1", 1)
    assert run.policy.outcome is None


def test_the_active_deadline_fails_the_job():
    run = training(active_seconds=100)
    run.wait(until=99.9)
    assert run.policy.outcome is None
    run.wait(until=100.0)
    assert run.policy.outcome is Outcome.FAILED
    assert "activeDeadlineSeconds" in run.policy.message


# ---------------------------------------------------------------------------------- the end


def test_after_completion_no_process_is_terminated_before_its_time():
    run = training()
    run.handle(Completed())
    run.handle(Exported())
    assert names(run.wait(until=59.75), Terminate) == []
    assert names(run.wait(until=60.0), Terminate) == ["eu/0", "eu/1"]


def test_the_syncer_is_terminated_last_and_then_the_run_is_closed():
    run = training()
    run.handle(Completed())
    run.handle(Exported())
    run.exits("eu/0", 0)
    run.exits("eu/1", 0)
    assert names(run.wait(until=5.0), Terminate) == []
    assert names(run.exits("evaluator", 0), Terminate) == ["syncer"]
    run.exits("syncer", 0)
    assert run.policy.phase is Phase.CLOSED
    assert all(process.state is State.DONE for process in run.policy.processes.values())


def test_the_syncer_is_not_terminated_before_the_model_is_exported():
    run = training()
    run.handle(Completed())
    for name in (*LEARNERS, "evaluator"):
        run.exits(name, 0)
    assert names(run.wait(until=100.0), Terminate) == []
    assert names(run.handle(Exported()), Terminate) == ["syncer"]


def test_a_syncer_that_is_killed_before_the_export_restarts():
    run = training()
    run.handle(Completed())
    assert names(run.exits("syncer", -SIGKILL), Start) == ["syncer"]


def test_an_evaluator_that_crashes_before_the_final_evaluation_restarts():
    run = training()
    run.handle(Completed())
    run.exits("evaluator", 1)
    assert names(run.wait(until=1.0), Start) == ["evaluator"]


def test_a_learner_that_fails_after_the_job_is_complete_is_reported_and_does_not_restart():
    run = training(complete_learner_seconds=20)
    run.handle(Completed())
    message = "eu/0 failed after the job was complete (exit code 1: no such folder)"
    assert run.exits("eu/0", 1, last_line="no such folder") == [Acknowledge(message=message)]
    run.wait(until=21.0)
    assert not names(run.exits("eu/1", -15), Restart), "this one did not fail by itself"
    assert [d for _, d in run.decisions if isinstance(d, Acknowledge)] == [
        Acknowledge(message=message)
    ]
    run.wait(until=50.0)
    assert run.starts("eu/0") == [0.0]


def test_a_learner_that_is_to_restart_when_the_job_is_complete_is_named():
    """As one that was killed shortly before: it saves no file."""
    run = training()
    run.exits("eu/0", -SIGKILL)
    run.exits("eu/1", 0)
    [_, noted] = [d for d in run.handle(Completed()) if isinstance(d, Close | Acknowledge)]
    assert noted.message.startswith("eu/0 does not restart, because the job is complete; what its")
    run.wait(until=30.0)
    assert run.starts("eu/0") == [0.0]
    assert run.policy.processes["eu/0"].restarts == 0


def test_an_interrupt_terminates_learners_then_evaluator_then_syncer():
    run = training()
    assert names(run.handle(Interrupted()), Terminate) == ["eu/0", "eu/1"]
    run.exits("eu/0", 0)
    assert names(run.exits("eu/1", 0), Terminate) == ["evaluator"]
    assert names(run.exits("evaluator", 0), Terminate) == ["syncer"]
    run.exits("syncer", 0)
    assert (run.policy.phase, run.policy.outcome) == (Phase.CLOSED, Outcome.SUSPENDED)
    assert not run.policy.forced


def test_a_process_that_does_not_exit_is_killed_once():
    run = training()
    run.handle(Interrupted())
    assert names(run.wait(until=29.75), Kill) == []
    assert names(run.wait(until=60.0), Kill) == ["eu/0", "eu/1"]


def test_a_second_interrupt_kills_all_processes_immediately():
    run = training()
    run.handle(Interrupted())
    assert names(run.handle(Interrupted()), Kill) == ["syncer", "eu/0", "eu/1", "evaluator"]
    for name in ("syncer", *LEARNERS, "evaluator"):
        run.exits(name, -SIGKILL)
    assert run.policy.phase is Phase.CLOSED
    assert run.policy.forced


def test_an_interrupt_after_completion_skips_the_wait_but_stays_complete():
    run = training()
    run.handle(Completed())
    decisions = run.handle(Interrupted())
    assert names(decisions, Terminate) == ["eu/0", "eu/1"]
    assert run.policy.outcome is Outcome.COMPLETE
    [noted] = [found.message for found in decisions if isinstance(found, Acknowledge)]
    assert noted.startswith("no longer waiting for the learners and the last evaluation")
    decisions = run.handle(Interrupted())
    assert Acknowledge(message="stopping immediately") in decisions
    assert names(decisions, Kill) != []


def test_an_interrupt_while_the_kernels_compile_ends_the_run():
    run = fresh()
    assert names(run.handle(Interrupted()), Terminate) == ["kernels"]
    run.exits("kernels", -15)
    assert run.policy.phase is Phase.CLOSED
    assert run.starts("syncer") == []


def test_a_learner_in_back_off_does_not_restart_after_an_interrupt():
    run = training()
    run.exits("eu/0", 1)
    run.handle(Interrupted())
    run.wait(until=20.0)
    assert run.starts("eu/0") == [0.0]


def test_the_first_reason_to_close_is_kept():
    run = training()
    run.exits("eu/0", 78, last_line="first")
    run.handle(Completed())
    run.exits("eu/1", 78, last_line="second")
    assert run.policy.message == "learner eu/0 was refused: first"
    assert sum(isinstance(decision, Close) for _, decision in run.decisions) == 1


EVENTS = st.one_of(
    st.just(Tick()),
    st.just(Served()),
    st.just(Completed()),
    st.just(Exported()),
    st.just(Interrupted()),
    st.builds(
        Exited,
        name=st.sampled_from(["kernels", "syncer", *LEARNERS, "evaluator"]),
        code=st.sampled_from([0, 1, 2, 75, 78, -9, -15]),
    ),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=40))
def test_any_history_never_starts_a_running_process_and_closes_after_two_interrupts(history):
    run = Run(Policy(learners=LEARNERS, evaluator=True))
    running: set[str] = set()

    def handle(event: Event) -> None:
        if isinstance(event, Exited):
            if event.name not in running:
                return
            running.remove(event.name)
        for name in names(run.handle(event), Start):
            assert name not in running
            running.add(name)

    for event, seconds in history:
        run.now += seconds
        handle(event)
    while run.policy.phase is not Phase.CLOSED:
        run.now += 50.0
        handle(Interrupted())
        for name in sorted(running):
            handle(Exited(name=name, code=-SIGKILL))
    assert running == set()
    assert names(run.wait(until=run.now + 300.0), Start) == []
