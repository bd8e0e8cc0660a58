"""The largest jobs that a tenant can apply: what a decision about one costs the operator in memory."""

import tracemalloc

import pytest

from diloco_job.names import MAX_LEARNERS, MAX_QUEUED, MAX_TEMPLATE_BYTES
from diloco_operator.decide.objections import largest_template
from diloco_operator.resources import template_bytes
from diloco_operator.state.job_state import JobState
from diloco_testing.kubernetes.operated_job import OperatedJob, manifest

pytestmark = pytest.mark.slow  # jobs of thousands of learners

MIB = 2**20
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def job(config_bytes: int, regions: dict[str, int], labels: dict[str, str]):
    config = {f"key{number}": "x" * (config_bytes // 256) for number in range(256)}
    body = manifest(
        learner={"recipe": {"name": "gpt", "config": config}},
        regions=[{"name": name, "learners": learners} for name, learners in regions.items()],
        sync={"quorum": 1},
    )
    body["metadata"]["labels"] = labels
    return body


ALL = {f"r{number}": 1000 for number in range(MAX_LEARNERS // 1000)}


@pytest.mark.parametrize(
    ("body", "applied", "mib"),
    [
        (job(100_000, ALL, {}), len(ALL), 16),
        # Each StatefulSet records its pod template once more, as text.
        (job(500, {"eu": MAX_QUEUED}, QUEUE), MAX_QUEUED, 32),
    ],
    ids=["in ten regions", "in a queue"],
)
def test_a_decision_about_the_largest_job_takes_little_memory(body, applied, mib):
    decisions, peak = measured(OperatedJob(job=body))
    assert sum(want["kind"] == "StatefulSet" for want in decisions.apply) == applied
    assert peak < mib * MIB


@pytest.mark.parametrize("suspend", [False, True])
def test_raising_a_queued_job_to_the_most_learners_takes_little_memory(suspend):
    world = OperatedJob(job=job(20_000, {"r0": 1}, QUEUE))
    world.settle()
    regions = [{"name": name, "learners": learners} for name, learners in ALL.items()]
    world.change(regions=regions, runPolicy={"suspend": suspend})
    check_refused(world)


@pytest.mark.parametrize("suspend", [False, True])
def test_a_label_on_the_largest_suspended_job_takes_little_memory(suspend):
    world = OperatedJob(job=job(20_000, ALL, {}))
    world.change(runPolicy={"suspend": True})
    world.settle()
    world.job["metadata"]["labels"] = QUEUE
    world.change(runPolicy={"suspend": suspend})
    check_refused(world)


@pytest.mark.parametrize("index", ["999", "1" + "0" * 60])
def test_statefulsets_with_high_numbers_make_no_room_for_those_between(index):
    world = OperatedJob(job=job(20_000, {"r0": 1}, QUEUE))
    world.settle()
    [(_, live)] = [item for item in world.children.items() if item[0][0] == "StatefulSet"]
    for name in ALL:
        own = {"diloco.dev/region": name, "diloco.dev/learner": index}
        fake = {"name": f"x-{name}", "labels": {**live["metadata"]["labels"], **own}}
        world.children["StatefulSet", fake["name"]] = {
            **live,
            "metadata": {**live["metadata"], **fake},
        }
    regions = [{"name": name, "learners": learners} for name, learners in ALL.items()]
    world.change(regions=regions, runPolicy={"suspend": False})
    check_refused(world)


@pytest.mark.parametrize(
    ("learners", "config_bytes"),
    [(MAX_QUEUED, MAX_TEMPLATE_BYTES // MAX_QUEUED), (5, MAX_TEMPLATE_BYTES // 5)],
)
def test_large_pod_templates_of_learners_in_a_queue_are_refused_with_their_size(
    learners, config_bytes
):
    world = OperatedJob(job=job(config_bytes, {"eu": learners}, QUEUE))
    check_refused(world, "TemplatesTooLarge")
    world.reconcile()
    message = world.condition("Accepted")["message"]
    assert f"{learners} pod templates of learners have " in message
    assert f"the maximum is {MAX_TEMPLATE_BYTES}" in message
    assert not world.children
    world.change(regions=[{"name": "eu", "learners": 1}])
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")


def test_large_pod_templates_of_many_regions_are_refused_with_their_size():
    world = OperatedJob(job=job(1_000_000, {f"r{number}": 1 for number in range(64)}, {}))
    check_refused(world, "TemplatesTooLarge")
    world.reconcile()
    assert world.condition("Accepted")["message"].startswith("64 pod templates of learners have 6")
    assert not world.children
    world.change(learner=job(30_000, {}, {})["spec"]["learner"])
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")


@pytest.mark.parametrize("text", ["", "a", '"', "\\", "$", "é", "€", "😀", "\n", "\x01", "\x7f"])
def test_the_bound_of_a_pod_template_holds_for_all_characters(text):
    body = job(0, {"eu": 1}, {})
    many = text * 10_000
    body["spec"]["learner"]["recipe"]["config"] = {"key": many, "a": {many: [many]}}
    body["spec"]["learner"]["env"] = [{"name": "E", "value": many}]
    body["spec"]["regions"][0]["podTemplate"] = {"metadata": {"annotations": {"a": many}}}
    world = OperatedJob(job=body)
    observation = world.observation()
    state = JobState.of(observation, observation.stored.job, world.scope, world.now)
    sizes = template_bytes(state.job, state.owner, state.scope, state.plan, state.sets)
    assert sizes["eu"] <= largest_template(state)


@pytest.mark.parametrize("learners", [4, 1], ids=["running", "of which three were removed"])
def test_pod_templates_of_a_queued_job_do_not_grow_beyond_what_fits_into_memory(learners):
    """Those of learners that were removed stay, with 0 replicas."""
    world = OperatedJob(job=job(1000, {"eu": 4}, QUEUE))
    world.settle()
    world.answers()
    world.settle()
    before = templates(world)
    world.change(regions=[{"name": "eu", "learners": learners}])
    world.settle()
    learner = job(MAX_TEMPLATE_BYTES // 4, {"eu": 4}, QUEUE)["spec"]["learner"]
    world.change(learner=learner)
    world.settle()
    assert world.reason("Accepted") == ("False", "TemplatesTooLarge")
    assert templates(world) == before
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.reason("Suspended") == ("True", "Suspended")
    assert not any(world.replicas().values())
    assert templates(world) == before


@pytest.mark.parametrize("suspend", [False, True])
def test_a_running_job_that_is_refused_for_its_size_takes_little_memory(suspend):
    world = OperatedJob(job=job(500, {"eu": 300}, QUEUE))
    world.reconcile()
    learner = job(110_000, {}, QUEUE)["spec"]["learner"]
    world.change(learner=learner, runPolicy={"suspend": suspend})
    check_refused(world, "TemplatesTooLarge")
    stopped = [(want["kind"], want["spec"]["replicas"]) for want in world.decide().apply]
    every_set = [("Deployment", 0), *[("StatefulSet", 0)] * 300]
    assert stopped == (every_set if suspend else [])


def test_a_queued_job_that_an_earlier_version_made_larger_is_repaired_and_does_not_grow(
    monkeypatch,
):
    world = OperatedJob(job=job(6000, {"eu": 4}, QUEUE))
    world.settle()
    monkeypatch.setattr("diloco_operator.decide.objections.MAX_TEMPLATE_BYTES", 20_000)
    world.answers()
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    del world.children["StatefulSet", "a-eu-2"]
    world.reconcile()
    assert ("StatefulSet", "a-eu-2") in world.children
    world.change(learner=job(12_000, {}, QUEUE)["spec"]["learner"])
    world.settle()
    assert world.reason("Accepted") == ("False", "TemplatesTooLarge")


def test_a_job_that_an_earlier_version_made_larger_is_repaired_and_does_not_grow(monkeypatch):
    world = OperatedJob(job=job(6000, {"eu": 1, "us": 1, "asia": 1}, {}))
    world.settle()
    monkeypatch.setattr("diloco_operator.decide.objections.MAX_TEMPLATE_BYTES", 20_000)
    world.answers()
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    del world.children["StatefulSet", "a-us"]
    world.reconcile()
    assert ("StatefulSet", "a-us") in world.children
    world.change(learner=job(12_000, {}, {})["spec"]["learner"])
    world.settle()
    assert world.reason("Accepted") == ("False", "TemplatesTooLarge")


def test_a_queued_job_of_an_earlier_version_may_have_fewer_learners_and_no_more(monkeypatch):
    world = OperatedJob(job=job(6000, {"eu": 4}, QUEUE))
    world.settle()
    monkeypatch.setattr("diloco_operator.decide.objections.MAX_TEMPLATE_BYTES", 20_000)
    for learners, accepted in [(1, True), (4, True), (5, False)]:
        world.change(regions=[{"name": "eu", "learners": learners}], sync={"quorum": 1})
        world.settle()
        assert world.reason("Accepted")[0] == str(accepted), learners


def test_the_pod_templates_of_each_region_count_as_often_as_it_has_learners():
    body = job(500, {"eu": 300, "us": 1}, QUEUE)
    large = {"metadata": {"annotations": {"note": "x" * 16_000}}}
    body["spec"]["regions"][1]["podTemplate"] = large
    world = OperatedJob(job=body)
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")
    body["spec"]["regions"][0]["podTemplate"] = large
    world = OperatedJob(job=body)
    world.reconcile()
    assert world.reason("Accepted") == ("False", "TemplatesTooLarge")


def templates(world):
    """Name → pod template of the StatefulSets."""
    return {
        name: child["spec"]["template"]
        for (kind, name), child in world.children.items()
        if kind == "StatefulSet"
    }


def check_refused(world, reason="TooManyForQueue"):
    decisions, peak = measured(world)
    accepted = next(
        entry for entry in decisions.status["conditions"] if entry["type"] == "Accepted"
    )
    assert accepted["reason"] == reason
    assert not any(
        want["kind"] == "StatefulSet" and want["spec"]["replicas"] for want in decisions.apply
    )
    assert peak < 32 * MIB


def measured(world):
    """What is decided, and the most bytes of memory that it took."""
    tracemalloc.start()
    try:
        return world.decide(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
