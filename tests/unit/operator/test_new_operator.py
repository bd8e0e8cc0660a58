"""An operator that starts knows nothing but what it reads: of a job at rest it computes what is written already."""

import copy
import pickle
from dataclasses import replace
from datetime import timedelta

import pytest

from diloco_operator.state.observation import (
    Answer,
    Failure,
    Refusal,
    RegionFailure,
    Unreachable,
)
from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    certificate,
    is_idle,
    manifest,
    refuse,
    set_ready,
    training,
    trains_in,
)

QUEUE = {"kueue.x-k8s.io/queue-name": "team-a"}
GATE = [{"name": "kueue.x-k8s.io/admission"}]
NO_NODE = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient cpu"}
    ],
}
STEPS = manifest()["spec"]["steps"]

# ------------------------------------------------------------------------------ jobs at rest


ALL_LEARNERS = ("eu/0", "eu/1", "us/0", "us/1")
DONE = {"step": STEPS, "eval_step": STEPS, "model_path": "model", "model_sha256": "ab"}


def completes(world):
    world.answers("Complete", **DONE)
    world.settle()
    world.run_controllers()
    world.answers("Complete", **DONE, gone=ALL_LEARNERS)
    return world


def complete():
    return completes(training(manifest(evaluation={"everySteps": 50})))


def complete_with_its_pods():
    return completes(training(manifest(runPolicy={"cleanupPolicy": "None"})))


def complete_and_deleted():
    world = completes(training(manifest(runPolicy={"cleanupPolicy": "All"})))
    world.reconcile(61)
    world.run_controllers()
    world.syncer = None
    return world


def suspended():
    world = stops(training())
    world.syncer = None
    return world


def stops(world):
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.run_controllers()
    return world


def never_started():
    world = OperatedJob(job=manifest(runPolicy={"suspend": True}))
    world.settle()
    return world


def failed_at_its_deadline():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    world.settle()
    world.syncer = None
    return world


def failed_with_kept_pods():
    world = training(manifest(sync={"quorum": 4}))
    refuse(world.pod("a-eu-1"))
    world.settle()
    world.syncer = None
    return world


def failed_without_its_volume():
    world = failed_with_kept_pods()
    del world.children["PersistentVolumeClaim", "a-syncer"]
    return world


def name_taken():
    world = training()
    world.foreign = ({
        "kind": "Service",
        "metadata": {"name": "a-eu", "ownerReferences": [{"uid": "x", "controller": True}]},
    },)  # fmt: skip
    del world.children["Service", "a-eu"]
    return world


def refused():
    world = training()
    del world.children["PodDisruptionBudget", "a-eu"]
    world.refusals = (Refusal(child="PodDisruptionBudget a-eu", message="no quota"),)
    return world


def waiting_for_a_node(*pods):
    world = training()
    for name in pods:
        world.pod(name)["status"] = copy.deepcopy(NO_NODE)
    world.count_pods()
    return world


def a_learner_waits_for_a_node():
    world = waiting_for_a_node("a-eu-1")
    world.answers(gone=("eu/1",))
    return world


def the_syncer_waits_for_a_node():
    world = waiting_for_a_node("a-syncer-0", "a-eu-0", "a-eu-1", "a-us-0", "a-us-1")
    world.syncer = None
    return world


def mounts(world, *pods):
    for name in pods:
        scheduled = {"type": "PodScheduled", "status": "True"}
        scheduled["lastTransitionTime"] = world.now.isoformat(timespec="seconds")
        waits = {"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}
        world.pod(name)["status"] = {
            "phase": "Pending", "conditions": [scheduled], "containerStatuses": [waits],
        }  # fmt: skip
        world.report_event(world.pod(name), "FailedMount", f"no secret for {name}")
    world.count_pods()
    return world


def a_learner_waits_for_a_volume():
    world = mounts(training(), "a-eu-1")
    world.answers(gone=("eu/1",))
    return world


def the_syncer_waits_for_a_volume():
    world = mounts(training(), "a-syncer-0")
    world.syncer = None
    return world


def the_evaluator_waits_for_a_volume():
    return mounts(training(manifest(evaluation={"everySteps": 50})), "a-evaluator-0")


def over_quota():
    world = OperatedJob()
    world.reconcile()
    world.run_controllers()
    for name in ("a-eu-0", "a-eu-1"):
        del world.pods[name]
    world.count_pods()
    world.report_event(world.children["StatefulSet", "a-eu"], "FailedCreate", "exceeded quota")
    world.answers(gone=("eu/0", "eu/1"), state="Waiting", step=0, tokens=0)
    return world


def queued(learners=2, waiting=2):
    job = manifest(regions=[{"name": "eu", "learners": learners}], sync={"quorum": 1})
    job["metadata"]["labels"] = dict(QUEUE)
    world = OperatedJob(job=job)
    world.reconcile()
    world.run_controllers()
    for index in range(waiting):
        pod = world.pod(f"a-eu-{index}-{index}")
        pod["spec"] = {**pod["spec"], "schedulingGates": GATE}
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            ],
        }
        uid = world.children["StatefulSet", f"a-eu-{index}"]["metadata"]["uid"]
        world.workloads.append({
            "metadata": {"labels": {"kueue.x-k8s.io/job-uid": uid}},
            "status": {"conditions": [
                {"type": "QuotaReserved", "status": "False", "message": f"no quota for {index}"}
            ]},
        })  # fmt: skip
    world.count_pods()
    gone = tuple(f"eu/{index}" for index in range(waiting))
    world.answers("Waiting" if waiting == learners else "Training", gone=gone)
    if waiting == learners:
        world.syncer = replace(world.syncer, step=0, tokens=0, seconds_since_merge=-1.0)
    return world


def one_of_three_is_queued():
    return queued(learners=3, waiting=1)


def ejected():
    world = training()
    world.answers(ejected=("eu/1",))
    return world


def gone_with_its_pod():
    world = training(manifest(sync={"quorum": 4}))
    set_ready(world.pod("a-eu-1"), False)
    world.count_pods()
    world.answers("Waiting", gone=("eu/1",), waiting_for="a quorum of 4")
    return world


def stands_still():
    world = training()
    world.answers("Waiting", waiting_for="manual action: x", seconds_since_merge=3600.0)
    return world


def a_learner_failed():
    world = training()
    refuse(world.pod("a-eu-1"))
    world.count_pods()
    world.answers(gone=("eu/1",))
    return world


def restarted_learners():
    world = training()
    learners = tuple(replace(learner, restarts=3) for learner in world.syncer.learners)
    world.answers(learners=learners)
    return world


def lost_volume():
    world = training()
    del world.children["PersistentVolumeClaim", "a-syncer"]
    world.reconcile()
    world.run_controllers()
    world.syncer = None
    return world


def forbidden():
    template = {"spec": {"hostNetwork": True}}
    scope = replace(OperatedJob().scope, forbidden_pod_fields=("hostNetwork",))
    return OperatedJob(job=manifest(learner={"podTemplate": template}), scope=scope)


def follows(region="us", **answer):
    world = trains_in(region)
    world.answers(**answer)
    return world


def follows_a_failed_region():
    world = follows(failure=Failure(reason="DeadlineExceeded", message="100 s"))
    world.settle()
    world.becomes_unreachable()
    return world


def follows_a_complete_region():
    return completes(follows())


def follows_a_region_that_has_gone():
    world = follows_a_complete_region()
    world.settle()
    world.becomes_unreachable()
    return world


def follows_suspended():
    world = stops(follows())
    world.becomes_unreachable("DialTimeout")
    return world


def suspended_alone():
    """The other region trains."""
    world = stops(follows())
    world.answers(gone=("us/0", "us/1"))
    return world


def follows_a_syncer_with_fewer_steps():
    world = follows()
    world.change(steps=2 * STEPS)
    world.answers("Complete", step=STEPS, gone=("us/0", "us/1"))
    return world


def a_region_failed():
    world = trains_in("eu")
    failed = RegionFailure(region="us", reason="LearnerRefused", message="hidden size", learners=2)
    world.answers(gone=("us/0", "us/1"), region_failures=(failed,))
    return world


def a_region_differs():
    world = training()
    world.answers(differing=(("us/1", "0123456789abcdef"),))
    return world


def a_certificate_is_missing():
    world = trains_in("us")
    world.certificate = certificate("a", reason="CertificateMissing", problem="Secret s is missing")
    world.syncer = Unreachable(reason="CertificateMissing", message="Secret s is missing")
    return world


def training_well():
    return training()


AT_REST = [
    complete, complete_with_its_pods, complete_and_deleted, suspended, never_started,
    failed_at_its_deadline, failed_with_kept_pods,
    failed_without_its_volume, name_taken, refused, a_learner_waits_for_a_node,
    the_syncer_waits_for_a_node, a_learner_waits_for_a_volume, the_syncer_waits_for_a_volume,
    the_evaluator_waits_for_a_volume, over_quota, queued, one_of_three_is_queued, ejected,
    gone_with_its_pod, stands_still, a_learner_failed, restarted_learners, lost_volume, forbidden,
    follows, follows_a_failed_region, follows_a_complete_region, follows_a_region_that_has_gone,
    follows_suspended, suspended_alone, follows_a_syncer_with_fewer_steps,
    a_region_failed, a_region_differs, a_certificate_is_missing, training_well,
]  # fmt: skip

# ------------------------------------------------------------------------------ what a new operator observes


def late(world, reason="NoAnswer"):
    """The syncer answers, but its first answer comes late; one that did not answer fails otherwise."""
    if world.syncer is not None and world.syncer != Unreachable(
        reason="CertificateMissing", message="Secret s is missing"
    ):
        world.syncer = Unreachable(reason=reason, message="other words", silent_since=world.now)


def refused_connection(world):
    late(world, "ConnectionRefused")


def no_events(world):
    """API servers keep Events for an hour."""
    world.reported_events.clear()


def no_workloads(world):
    """Kueue's are unreadable for now, or being replaced."""
    world.workloads.clear()


def nothing_but_objects(world):
    for lose in (late, no_events, no_workloads):
        lose(world)


LOST = [
    *(pytest.param(part, marks=pytest.mark.slow) for part in (late, no_events, no_workloads)),
    refused_connection, nothing_but_objects,
]  # fmt: skip
"""Each thing by itself is slow: nothing_but_objects loses all of these."""


def at_rest(make):
    """The job when nothing has happened for hours, and its operator has nothing to write."""
    world = make()
    for seconds in (1, 5, 30, 60, 120, 300, 600, 3600, 3600):
        world.reconcile(seconds)
    world.settle()
    assert is_idle(world.reconcile(300)), "it is not at rest"
    return world


@pytest.fixture(scope="module")
def rested():
    worlds = {}

    def of(make):
        if make not in worlds:
            worlds[make] = pickle.dumps(at_rest(make))
        return pickle.loads(worlds[make])  # in a fraction of the time of copy.deepcopy

    return of


@pytest.mark.parametrize("lose", [None, *LOST])
@pytest.mark.parametrize("make", AT_REST)
def test_a_new_operator_writes_nothing_about_a_job_at_rest(rested, make, lose):
    world = rested(make)
    before = copy.deepcopy(world.status)
    world.now += timedelta(hours=2)
    world.last_answer = None
    if isinstance(world.syncer, Answer):
        world.syncer = replace(world.syncer, at=world.now)
        world.last_answer = world.now if lose is None else None
    if lose is not None:
        lose(world)
    decisions = world.decide()
    after = decisions.status
    changed = {key: after[key] for key in after if after[key] != before.get(key)} if after else {}
    assert is_idle(decisions), (changed, decisions.apply, decisions.delete, decisions.patch)


@pytest.mark.parametrize("make", [complete, follows_a_complete_region, suspended_alone])
def test_one_answer_that_is_late_is_no_write_about_a_job_at_rest(rested, make):
    """Its syncer is asked every five minutes only, so that the answer before is old."""
    world = rested(make)
    world.now += timedelta(seconds=300)
    late(world)
    assert is_idle(world.reconcile())
    assert is_idle(world.reconcile(14))
    world.reconcile(1)
    assert world.reason("SyncerReachable") == ("False", "NoAnswer")


def test_a_syncer_that_still_does_not_answer_a_new_operator_is_reported_with_its_new_reason(rested):
    world = rested(follows_a_region_that_has_gone)
    late(world)
    assert is_idle(world.reconcile(14))
    world.reconcile(1)
    assert world.reason("SyncerReachable") == ("False", "NoAnswer")


def test_an_evaluator_that_has_finished_does_not_start_again_without_an_answer():
    world = completes(training(manifest(evaluation={"everySteps": 50})))
    world.settle()
    assert world.replicas()["a-evaluator"] == 0
    late(world)
    for _ in range(3):
        assert is_idle(world.reconcile(5))


def test_what_events_showed_holds_until_the_pod_starts_or_another_event_comes(rested):
    world = rested(a_learner_waits_for_a_volume)
    no_events(world)
    world.report_event(world.pod("a-eu-1"), "Pulling", "the image", kind="Normal")
    world.reconcile(30)
    message = world.condition("LearnersReady")["message"]
    assert message == "still starting after 300 s: not registered: eu/1"
    world = rested(a_learner_waits_for_a_volume)
    no_events(world)
    set_ready(world.pod("a-eu-1"), False)
    world.reconcile(30)
    message = world.condition("LearnersReady")["message"]
    assert message == "still starting after 300 s: not registered: eu/1"


def test_a_learner_that_left_the_queue_no_longer_shows_why_it_waited(rested):
    world = rested(queued)
    no_workloads(world)
    for pod in list(world.pods.values()):
        pod["spec"] = {key: value for key, value in pod["spec"].items() if key != "schedulingGates"}
        set_ready(pod, False)
    world.reconcile(30)
    assert "Kueue" not in world.condition("LearnersReady")["message"]


def test_learners_that_were_ejected_are_forgotten_with_the_last_answer(rested):
    world = rested(ejected)
    late(world)
    world.last_answer = None
    world.reconcile(30)
    assert "ejected" not in world.condition("LearnersReady")["message"]
    assert world.status["learners"]["training"] == 4
