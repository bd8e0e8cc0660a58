"""Learners that fail alone, the job that continues without them, and a failed job that resumes."""

from datetime import timedelta

import pytest

from diloco_testing.kubernetes.operated_job import (
    REFUSED,
    OperatedJob,
    is_idle,
    main_of,
    manifest,
    refuse,
    restarted,
    set_ready,
    training,
)

# ------------------------------------------------------------------------------ failed learners


def test_a_learner_fails_alone_while_a_quorum_is_left():
    world = training()
    refuse(world.pod("a-us-1"))
    world.answers(gone=("us/1",))
    decisions = world.reconcile(1)
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.status["state"] == "Degraded"
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    assert world.condition("LearnersReady")["message"] == (
        "3 of 4 are training; failed: us/1 (LearnerRefused: hidden size 4, expected 8)"
    )
    assert ("Warning", "LearnersFailed") in world.events
    assert is_idle(world.reconcile(1))


def test_a_learner_over_its_limit_fails_alone():
    world = training(manifest(runPolicy={"learnerRestartLimit": 3}))
    restarted(world.pod("a-us-1"), 4, 1)
    world.answers(gone=("us/1",))
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    assert "us/1 (LearnerRestartLimit" in world.condition("LearnersReady")["message"]


def test_the_job_fails_when_fewer_learners_are_left_than_the_quorum():
    world = training(manifest(sync={"quorum": 3}))
    refuse(world.pod("a-us-1"))
    world.reconcile(1)
    assert world.reason("Failed") == ("False", "NotFailed")
    refuse(world.pod("a-eu-0"))
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "LearnerRefused")
    message = world.condition("Failed")["message"]
    assert message.startswith("2 learners are left (quorum: 3): learner eu/0 was permanently")


def test_a_reverted_image_heals_without_a_new_job():
    learner = {"recipe": {"name": "gpt", "config": {}}, "image": "good"}
    world = training(manifest(learner=learner))
    world.change(learner={**learner, "image": "bad"})
    world.settle()
    for name in ("a-us-0", "a-us-1"):
        refuse(world.pod(name))
    world.count_pods()
    world.answers(gone=("us/0", "us/1"))
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    world.change(learner=learner)
    world.settle()
    world.answers()
    world.settle()
    assert world.reason("LearnersReady") == ("True", "AllTraining")
    assert world.status["state"] == "Training"
    images = {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert "bad" not in images


@pytest.mark.parametrize(("step", "reason"), [(0, "Starting"), (1, "SomeNotTraining")])
def test_a_learner_that_is_corrected_before_the_first_step_starts_and_is_not_lost(step, reason):
    world = OperatedJob(job=manifest())
    world.reconcile()
    world.run_controllers(ready=lambda pod: pod["metadata"]["name"] == "a-syncer-0")
    refuse(world.pod("a-eu-1"))
    world.answers("Initialising", step=step, gone=("eu/0", "eu/1", "us/0", "us/1"))
    world.reconcile(5)
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    set_ready(world.pod("a-eu-1"), False)
    world.reconcile(5)
    assert world.reason("LearnersReady") == ("False", reason)
    assert (("Warning", "SomeNotTraining") in world.events) is (step > 0)


# ------------------------------------------------------------------------------ healed since

WEEK = 7 * 86_400
LIMITED = {"learnerRestartLimit": 3}
TWO_PODS = {"command": ["python", "train.py"], "podsPerLearner": 2}
ENDS = [(1, 78, REFUSED), (1, 1, '{"reason": "RestartLimit", "message": "x"}'), (9, 1, "Traceback")]
"""Restarts, exit code and message of learners that failed."""


def timed(world, name, *, ready, changed, started=WEEK):
    """The pod was so ready `changed` seconds ago; its container started `started` seconds ago."""
    pod, back = world.pod(name), world.now - timedelta(seconds=started)
    main_of(pod)["state"] = {"running": {"startedAt": f"{back:%Y-%m-%dT%H:%M:%SZ}"}}
    since = world.now - timedelta(seconds=changed)
    pod["status"]["conditions"] = [
        {"type": "Ready", "status": str(ready), "lastTransitionTime": f"{since:%Y-%m-%dT%H:%M:%SZ}"}
    ]
    world.count_pods()


@pytest.mark.parametrize("end", ENDS, ids=["refused", "limit", "crashes"])
def test_an_exit_that_a_learner_recovered_from_does_not_count_while_the_syncer_is_unavailable(end):
    world = training(manifest(sync={"quorum": 4}, runPolicy=LIMITED))
    count, code, message = end
    for name in ("a-eu-1", "a-us-0"):
        restarted(world.pod(name), count, code, message=message)
        timed(world, name, ready=False, changed=20)
    world.becomes_unreachable()
    world.reconcile(25)
    assert world.reason("Failed") == ("False", "NotFailed")
    assert ("Warning", "LearnersFailed") not in world.events


@pytest.mark.parametrize("changed", [WEEK, WEEK + 1], ids=["at its end", "before its end"])
@pytest.mark.parametrize("end", ENDS, ids=["refused", "limit", "crashes"])
def test_a_learner_that_was_not_ready_since_its_exit_has_failed(end, changed):
    world = training(manifest(sync={"quorum": 4}, runPolicy=LIMITED))
    count, code, message = end
    restarted(world.pod("a-us-0"), count, code, message=message)
    timed(world, "a-us-0", ready=False, changed=changed)
    world.reconcile(1)
    assert world.condition("Failed")["status"] == "True"


def test_a_learner_that_recovered_and_is_refused_again_has_failed():
    world = training(manifest(sync={"quorum": 4}))
    restarted(world.pod("a-us-0"), 1, 78, message=REFUSED)
    timed(world, "a-us-0", ready=False, changed=1)
    main_of(world.pod("a-us-0"))["state"] = {
        "terminated": {"exitCode": 78, "reason": "Error", "message": REFUSED}
    }
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "LearnerRefused")


def test_another_end_after_its_recovery_does_not_bring_an_old_refusal_back():
    world = training(manifest(sync={"quorum": 4}))
    restarted(world.pod("a-us-0"), 2, 78, message=REFUSED)
    timed(world, "a-us-0", ready=False, changed=1)
    running = main_of(world.pod("a-us-0"))["state"].pop("running")
    main_of(world.pod("a-us-0"))["state"]["terminated"] = {**running, "exitCode": 137}
    world.reconcile(1)
    assert world.reason("Failed") == ("False", "NotFailed")


def two_pods(*, rank_0_unready, restarted_at=WEEK):
    """A learner of two pods without a syncer, so long after rank 1 was refused and started again."""
    world = training(manifest(sync={"quorum": 4}, learner=TWO_PODS))
    restarted(world.pod("a-us-1"), 1, 78, message=REFUSED)
    timed(world, "a-us-1", ready=True, changed=restarted_at - 5, started=restarted_at)
    set_ready(world.pod("a-us-0"), False)
    timed(world, "a-us-0", ready=False, changed=rank_0_unready, started=2 * WEEK)
    world.becomes_unreachable()
    world.reconcile(1)
    return world


def test_a_learner_of_several_pods_recovers_when_its_rank_0_was_ready_again():
    assert two_pods(rank_0_unready=20).reason("Failed") == ("False", "NotFailed")


@pytest.mark.parametrize("later", [0, 40])
def test_a_rank_that_runs_does_not_show_that_its_learner_recovered(later):
    """Rank 0 becomes unready a while after the exit of the other rank."""
    world = two_pods(rank_0_unready=WEEK - later)
    assert world.reason("Failed") == ("True", "LearnerRefused")


def test_a_rank_whose_program_ended_without_its_container_was_not_refused_again():
    world = training(manifest(sync={"quorum": 4}, learner=TWO_PODS))
    restarted(world.pod("a-us-1"), 1, 78, message=REFUSED)
    timed(world, "a-us-1", ready=False, changed=20)
    # The pod of rank 0 was replaced, and with it what it showed.
    set_ready(world.pod("a-us-0"), False)
    timed(world, "a-us-0", ready=False, changed=11, started=10)
    world.reconcile(1)
    assert world.reason("Failed") == ("False", "NotFailed")


def test_a_new_pod_of_rank_0_does_not_show_that_its_learner_recovered():
    """Each pod begins unready, which is no change from ready."""
    world = training(manifest(sync={"quorum": 4}, learner=TWO_PODS))
    restarted(world.pod("a-us-1"), 1, 78, message=REFUSED)
    timed(world, "a-us-1", ready=False, changed=WEEK)
    set_ready(world.pod("a-us-0"), False)
    timed(world, "a-us-0", ready=False, changed=11, started=10)
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "LearnerRefused")


# ------------------------------------------------------------------------------ resumed


def failed_job(step=700, **policy):
    world = training(manifest(sync={"quorum": 4}, runPolicy=policy))
    world.job["status"]["step"] = 0
    world.answers(step=step)
    world.reconcile(31)
    refuse(world.pod("a-us-1"))
    world.reconcile(1)
    world.syncer = None
    world.settle()
    assert world.status["state"] == "Failed"
    return world


@pytest.mark.parametrize("policy", ["Running", "None"])
def test_a_failed_job_resumes_after_it_was_suspended(policy):
    world = failed_job(cleanupPolicy=policy)
    volume = world.children["PersistentVolumeClaim", "a-syncer"]["metadata"]["uid"]
    world.change(runPolicy={"cleanupPolicy": policy, "suspend": True})
    world.settle()
    assert world.status["state"] == "Suspended"
    assert world.reason("Failed") == ("False", "NotFailed")
    assert "completionTime" not in world.status
    assert world.status["step"] == 700
    assert not any(world.replicas().values())
    world.change(runPolicy={"cleanupPolicy": policy})
    world.settle()
    world.answers(step=690)
    world.settle()
    assert world.status["state"] == "Training"
    assert world.children["PersistentVolumeClaim", "a-syncer"]["metadata"]["uid"] == volume


def test_a_failed_job_whose_volume_was_deleted_stays_failed():
    world = failed_job(cleanupPolicy="All")
    assert not world.children
    world.change(runPolicy={"cleanupPolicy": "All", "suspend": True})
    world.settle()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    assert world.reason("Suspended") == ("False", "VolumeGone")
    assert "PersistentVolumeClaim a-syncer" in world.condition("Suspended")["message"]
    assert ("Warning", "VolumeGone") in world.events
    world.change(runPolicy={})
    world.settle()
    assert world.status["state"] == "Failed"
    assert not world.children


def test_a_job_that_failed_before_its_first_step_has_nothing_to_lose():
    world = failed_job(cleanupPolicy="All", step=0)
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.status["state"] == "Suspended"


def test_a_job_that_resumes_has_its_whole_time_again():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    world.change(runPolicy={"activeDeadlineSeconds": 100, "suspend": True})
    world.settle()
    world.change(runPolicy={"activeDeadlineSeconds": 100})
    world.settle()
    assert world.status["state"] != "Failed"
    world.reconcile(100)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
