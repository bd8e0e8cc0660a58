"""The supervisor's decisions in virtual time."""

import pytest

from diloco_local.events import (
    Abandon,
    Completed,
    Exited,
    Exported,
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
from diloco_local.supervisor import exit_code
from diloco_testing.local.policy_run import LEARNERS, SIGKILL, SIGSEGV, fresh, names, training

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


def test_a_complete_job_whose_parameters_changed_and_whose_model_is_on_disk_exits_with_0():
    run = training()
    run.handle(Completed())
    assert exit_code(run.policy) == 1
    run.handle(Exported())
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


@pytest.mark.parametrize(
    ("code", "joined", "pause"),
    [(-SIGKILL, True, 0.5), (-SIGKILL, False, 2.0), (-SIGSEGV, True, 2.0), (1, True, 2.0)],
)  # fmt: skip
def test_a_kill_of_a_learner_that_had_joined_resets_the_back_off(code, joined, pause):
    run = training()
    for at in (0.5, 1.5):
        run.exits("eu/0", 1)
        run.wait(until=at)
    event = Exited(name="eu/0", code=code, joined=joined)
    assert run.handle(event, at=4.0)[0].delay_seconds == pause


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
