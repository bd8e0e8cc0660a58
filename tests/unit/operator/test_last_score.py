"""How long the evaluator of a complete job is kept for the score of the final model."""

import pytest

from diloco.spec import EVALUATION_SECONDS, FINAL_EVALUATION_SECONDS
from diloco_operator.decide.phase import EVALUATOR_SECONDS
from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    is_idle,
    main_of,
    manifest,
    restarted,
    set_ready,
    training,
)

POD = "a-evaluator-0"


def complete(**run_policy: object) -> OperatedJob:
    """A job that is complete, and whose evaluator scores the final model."""
    world = training(manifest(evaluation={"everySteps": 50}, runPolicy=run_policy))
    world.answers("Complete", step=2000, eval_step=1950)
    world.settle()
    assert POD in world.pods
    return world


def evaluators(world: OperatedJob) -> int:
    return world.replicas()["a-evaluator"]


def unready(world: OperatedJob) -> None:
    set_ready(world.pod(POD), False)
    world.count_pods()


def waits_until_stopped(world: OperatedJob) -> float:
    """Seconds until the evaluator is stopped, by reconciles at no other times than those that were asked for."""
    passed, next_seconds = 0.0, world.reconcile().requeue_seconds
    while world.replicas().get("a-evaluator") and passed < 2 * FINAL_EVALUATION_SECONDS:
        passed += next_seconds
        next_seconds = world.reconcile(next_seconds).requeue_seconds
    return passed


def test_an_evaluator_that_runs_is_kept_as_long_as_an_evaluation_may_take_after_one_that_had_begun():
    world = complete()
    world.reconcile(2 * EVALUATION_SECONDS)
    assert evaluators(world) == 1
    world.answers("Complete", step=2000, eval_step=2000)
    world.settle()
    assert evaluators(world) == 0


def test_an_evaluator_that_runs_is_not_kept_for_ever():
    assert waits_until_stopped(complete()) == FINAL_EVALUATION_SECONDS


def test_with_cleanup_policy_all_a_job_goes_once_its_final_model_has_a_score():
    world = complete(cleanupPolicy="All")
    world.reconcile(EVALUATION_SECONDS)
    assert evaluators(world) == 1
    assert world.replicas()["a-syncer"] == 1, "which serves the model"
    world.answers("Complete", step=2000, eval_step=2000)
    world.settle()
    assert not world.children


def test_with_cleanup_policy_all_a_job_does_not_wait_for_an_evaluator_that_does_not_run():
    world = complete(cleanupPolicy="All")
    unready(world)
    assert waits_until_stopped(world) == EVALUATOR_SECONDS
    world.settle()
    assert not world.children


def test_the_job_is_complete_meanwhile():
    world = complete()
    assert world.reason("Complete") == ("True", "StepsDone")
    assert world.status["completionTime"]
    assert world.replicas() == {"a-eu": 0, "a-evaluator": 1, "a-syncer": 1, "a-us": 0}


def test_an_evaluator_that_never_ran_is_kept_for_two_minutes():
    world = training(manifest(evaluation={"everySteps": 50}))
    unready(world)
    world.reconcile(500)
    world.answers("Complete", step=2000, eval_step=1950)
    assert waits_until_stopped(world) == 120


def test_an_evaluator_whose_deployment_reports_nothing_is_kept_for_two_minutes():
    world = complete()
    world.children["Deployment", "a-evaluator"]["status"] = {}
    assert waits_until_stopped(world) == 120


def test_an_evaluator_that_keeps_exiting_is_kept_for_two_minutes_although_it_is_ready_meanwhile():
    world = complete()
    restarted(world.pod(POD), 3, 1, message="no data")
    main_of(world.pod(POD))["state"] = {"running": {"startedAt": world.now.isoformat()}}
    world.pod(POD)["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    assert waits_until_stopped(world) == 120


def test_a_pod_that_is_replaced_long_after_completion_gets_two_minutes_to_run_again():
    world = complete()
    world.reconcile(1000)
    unready(world)
    assert is_idle(world.reconcile(100))
    set_ready(world.pod(POD), True)
    world.count_pods()
    world.reconcile(1000)
    assert evaluators(world) == 1
    unready(world)
    assert waits_until_stopped(world) == 120


def test_an_evaluator_that_ended_without_a_score_is_stopped_before_its_agent_starts_it_again():
    """Exit 0 makes the pod unready for the 300 s of `Limits.done_seconds`."""
    world = complete()
    world.reconcile(EVALUATION_SECONDS)
    unready(world)
    assert waits_until_stopped(world) == 120
    world.settle()
    assert is_idle(world.reconcile(300))
    assert evaluators(world) == 0


@pytest.mark.parametrize("ready", [True, False])
def test_a_stopped_evaluator_stays_stopped_while_its_pod_ends_and_when_the_syncer_forgets_its_score(
    ready: bool,
):
    world = complete()
    world.answers("Complete", step=2000, eval_step=2000)
    world.reconcile(60)
    assert evaluators(world) == 0
    set_ready(world.pod(POD), ready)
    world.count_pods()
    world.answers("Complete", step=2000, eval_step=0)
    assert is_idle(world.reconcile(1))
    assert evaluators(world) == 0


def test_the_evaluator_of_a_job_that_completes_again_with_more_steps_scores_again():
    world = complete()
    world.answers("Complete", step=2000, eval_step=2000)
    world.settle()
    world.change(steps=3000)
    world.answers("Training", step=2000, eval_step=2000)
    world.settle()
    assert evaluators(world) == 1
    world.answers("Complete", step=3000, eval_step=2000)
    world.settle()
    world.reconcile(1000)
    assert evaluators(world) == 1
