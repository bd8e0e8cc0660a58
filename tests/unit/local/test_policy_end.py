"""The supervisor's decisions at the end of a run, in virtual time."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from diloco.spec import EVALUATION_SECONDS, FINAL_EVALUATION_SECONDS
from diloco_local.events import (
    Acknowledge,
    Close,
    Completed,
    Decision,
    Event,
    Exited,
    Exported,
    Interrupted,
    Kill,
    Outcome,
    Phase,
    Restart,
    Served,
    Start,
    State,
    Terminate,
    Tick,
)
from diloco_local.policy import Policy
from diloco_local.supervisor import exit_code
from diloco_testing.local.policy_run import LEARNERS, SIGKILL, SIGSEGV, Run, fresh, names, training


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
    run.handle(Exported())
    message = "eu/0 failed after the job was complete (exit code 1: no such folder)"
    assert run.exits("eu/0", 1, last_line="no such folder") == [Acknowledge(message=message)]
    [stopped] = [d for d in run.wait(until=21.0) if isinstance(d, Acknowledge)]
    assert stopped.message.startswith("eu/1 is stopped")
    assert not names(run.exits("eu/1", -15), Restart), "this one did not fail by itself"
    assert [d for _, d in run.decisions if isinstance(d, Acknowledge)] == [
        Acknowledge(message=message),
        stopped,
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


# ---------------------------------------------------------------------------------- the last score


def completed(**limits: Any) -> Run:
    """A complete run whose learners have ended and whose model is exported."""
    run = training(**limits)
    run.handle(Completed())
    run.handle(Exported())
    for name in LEARNERS:
        run.exits(name, 0)
    return run


def notes(decisions: list[Decision]) -> list[str]:
    return [decision.message for decision in decisions if isinstance(decision, Acknowledge)]


def test_the_last_score_is_waited_for_as_long_as_an_evaluation_may_take_after_one_that_had_begun():
    run = completed()
    assert names(run.wait(until=2 * EVALUATION_SECONDS), Terminate) == []
    assert names(run.exits("evaluator", 0), Terminate) == ["syncer"]


def test_an_evaluator_that_does_not_end_is_ended_after_all():
    run = completed()
    assert names(run.wait(until=FINAL_EVALUATION_SECONDS - 0.25), Terminate) == []
    assert names(run.wait(until=FINAL_EVALUATION_SECONDS), Terminate) == ["evaluator"]


def test_an_evaluator_that_exits_again_and_again_is_waited_for_two_minutes_only():
    run = completed()
    while run.now < 600.0 and run.state("evaluator") in (State.RUNNING, State.BACK_OFF):
        run.wait(until=run.now + 5.0)
        if run.state("evaluator") is State.RUNNING:
            run.exits("evaluator", 1)
    assert run.state("evaluator") is State.STOPPED
    assert 120.0 <= run.now < 160.0
    assert run.policy.processes["syncer"].terminated_at is not None, "nothing else is waited for"


def test_an_evaluator_that_was_killed_once_after_long_may_score_the_model_after_all():
    run = completed()
    run.wait(until=1000.0)
    assert names(run.exits("evaluator", -SIGKILL), Terminate) == []
    assert names(run.wait(until=1001.0), Start) == ["evaluator"]
    assert names(run.wait(until=3000.0), Terminate) == []
    assert names(run.exits("evaluator", -SIGKILL), Terminate) == ["syncer"], "not twice"


def test_an_evaluator_is_not_waited_for_when_no_syncer_can_take_its_score():
    run = training()
    run.handle(Completed())
    for name in LEARNERS:
        run.exits(name, 0)
    run.exits("syncer", -SIGKILL)
    while run.state("syncer") is not State.STOPPED:
        run.wait(until=run.now + 0.25)
        if run.state("syncer") is State.RUNNING:
            run.exits("syncer", 1)
    assert run.now < 60.0
    assert run.policy.processes["evaluator"].terminated_at == run.now
    run.exits("evaluator", 0)
    assert run.policy.phase is Phase.CLOSED
    assert exit_code(run.policy) == 1, "the model was not exported"


def test_a_syncer_that_serves_and_crashes_again_and_again_is_no_reason_to_wait_for_hours():
    run = completed()
    while run.now < 600.0 and run.policy.processes["evaluator"].terminated_at is None:
        run.wait(until=run.now + 1.0)
        if run.state("syncer") is State.RUNNING:
            run.handle(Served(complete=True))
            run.exits("syncer", -SIGSEGV)
    assert 120.0 <= run.now < 160.0


def test_an_interrupt_ends_the_wait_for_the_last_score():
    run = completed()
    run.wait(until=1000.0)
    assert names(run.handle(Interrupted()), Terminate) == ["evaluator"]
    assert run.policy.skips_waiting
    run.exits("evaluator", 0)
    run.exits("syncer", 0)
    assert (run.policy.outcome, exit_code(run.policy)) == (Outcome.COMPLETE, 0)


def test_what_a_complete_run_waits_for_is_reported_with_the_way_to_end_it():
    run = completed()
    assert run.policy.waiting_for == "the last evaluation"
    assert notes(run.wait(until=59.75)) == []
    message = "still waiting for the last evaluation; press Ctrl-C to end without waiting"
    assert notes(run.wait(until=60.0)) == [message]
    assert notes(run.wait(until=119.75)) == []
    assert notes(run.wait(until=1919.75)) == 4 * [message]
    run.exits("evaluator", 0)
    assert run.policy.waiting_for == ""


def test_a_run_that_waits_for_its_model_is_not_reported_as_one_that_an_interrupt_ends():
    run = training()
    run.handle(Completed())
    for name in (*LEARNERS, "evaluator"):
        run.exits(name, 0)
    assert run.policy.waiting_for == "the model"
    assert notes(run.wait(until=100.0)) == [
        "still waiting for the model; press Ctrl-C twice to stop without it"
    ]
    run.handle(Interrupted())
    assert notes(run.wait(until=200.0)) == [
        "still waiting for the model; press Ctrl-C to stop without it"
    ]
    assert names(run.wait(until=3599.0), Terminate) == [], "a slow disk takes minutes"
    assert names(run.wait(until=3600.0), Terminate) == ["syncer"]


def test_the_evaluators_reason_for_a_missing_score_is_kept_if_it_is_about_the_last_model():
    run = completed()
    run.handle(Exited(name="evaluator", code=1, no_score="the model of step 12 has no score: x"))
    assert run.policy.no_score == ""
    run.wait(until=5.0)
    run.handle(Exited(name="evaluator", code=0, no_score="the model of step 24 has no score: x"))
    assert run.policy.no_score == "the model of step 24 has no score: x"


def test_a_learner_whose_program_is_ended_after_its_loop_is_reported():
    run = training()
    run.handle(Completed())
    run.handle(Exported())
    run.exits("eu/0", 0)
    [noted] = notes(run.wait(until=60.0))
    assert noted.startswith("eu/1 is stopped, because its program did not end within 60 s after")


def test_learners_and_evaluator_have_their_time_after_an_export_that_takes_long():
    """They do not know that the job is complete before."""
    run = training()
    run.handle(Completed())
    assert names(run.wait(until=1000.0), Terminate) == []
    assert run.policy.waiting_for == "the model"
    run.handle(Exported())
    run.handle(Exported(), at=1010.0)
    assert run.policy.waiting_for == "the learners"
    assert names(run.wait(until=1059.75), Terminate) == []
    assert names(run.wait(until=1060.0), Terminate) == ["eu/0", "eu/1"]
    for name in LEARNERS:
        run.exits(name, 0)
    assert names(run.wait(until=1000.0 + 2 * EVALUATION_SECONDS), Terminate) == []


def test_a_syncer_that_crashes_at_each_export_ends_the_run_after_two_minutes():
    run = training()
    run.handle(Completed())
    while run.now < 600.0 and run.policy.processes["eu/0"].terminated_at is None:
        run.wait(until=run.now + 1.0)
        if run.state("syncer") is State.RUNNING:
            run.handle(Served(complete=True))
            run.exits("syncer", -SIGKILL)
    assert 120.0 <= run.now < 160.0
    for name in (*LEARNERS, "evaluator"):
        run.exits(name, 0)
    while run.now < 600.0 and run.policy.phase is not Phase.CLOSED:
        run.wait(until=run.now + 1.0)
        if run.state("syncer") is State.RUNNING:
            run.exits("syncer", -SIGKILL)
    assert run.now < 200.0
    assert exit_code(run.policy) == 1


def test_a_learner_that_a_person_does_not_wait_for_is_not_reported():
    run = training()
    run.handle(Completed())
    assert not any("is stopped" in note for note in notes(run.handle(Interrupted())))
