"""An upgrade of the operator restarts no pod: running workloads keep their pod template."""

import copy
import dataclasses
import json

import pytest

from diloco_operator.resources import pod_templates
from diloco_operator.resources.common import JobContext
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.resources.template_record import FORMAT, INPUTS, MAX_TEMPLATE, TEMPLATE
from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    is_idle,
    main_of,
    manifest,
    set_ready,
    training,
)

NEXT = OperatorScope(worker_image="diloco/worker:2", syncer_image="diloco/syncer:2")
WORKLOADS = [("StatefulSet", "a-eu"), ("StatefulSet", "a-us"), ("Deployment", "a-syncer"),
             ("Deployment", "a-evaluator")]  # fmt: skip
LEARNER = {"recipe": {"name": "gpt", "config": {}}}


@pytest.fixture
def upgrade(monkeypatch):
    """Upgrades to an operator that sets one more variable in every pod, with another chart."""
    env = pod_templates._env

    def upgrade(world):
        extra = {"name": "DILOCO_NEW", "value": "1"}
        monkeypatch.setattr(pod_templates, "_env", lambda *given: [*env(*given), extra])
        world.scope = NEXT

    return upgrade


def job(**spec):
    return manifest(evaluation={"everySteps": 5}, **spec)


def specs(world):
    return {name: copy.deepcopy(pod["spec"]) for name, pod in world.pods.items()}


def is_new(pod):
    """Whether the pod is of the next version; its template and its default image go together."""
    main = pod["spec"]["containers"][0]
    new = "DILOCO_NEW" in [entry["name"] for entry in main["env"]]
    if main["image"].startswith("diloco/"):
        assert new == main["image"].endswith(":2"), main
    return new


def new_pods(world):
    return {name for name, pod in world.pods.items() if is_new(pod)}


def applied(decisions):
    return [(child["kind"], child["metadata"]["name"]) for child in decisions.apply]


def annotations(world, key):
    found: dict[str, str] = world.children[key]["metadata"]["annotations"]
    return found


def forget_records(world, inputs=None):
    """As if the version before had made the workloads: it recorded nothing, or in another format."""
    for key in WORKLOADS:
        marks = annotations(world, key)
        marks["diloco.dev/applied"] = "0" * 16
        del marks[INPUTS]
        if inputs:
            marks[INPUTS] = inputs
        else:
            del marks[TEMPLATE]


# ------------------------------------------------------------------------------ an upgrade


def test_a_version_with_another_template_applies_nothing_to_a_running_job(upgrade):
    world = training(job())
    upgrade(world)
    assert is_idle(world.reconcile(30))


def test_a_workload_with_another_template_is_not_kept_where_no_pod_of_it_has_run(upgrade):
    world = OperatedJob(job=job())
    world.reconcile()
    upgrade(world)
    world.settle()
    assert new_pods(world) == set(world.pods)


def test_a_drain_of_all_pods_at_once_after_the_upgrade_brings_no_new_template(upgrade):
    world = training(job())
    upgrade(world)
    for pod in world.pods.values():
        pod["status"] = {"phase": "Pending"}
    world.settle()
    assert not new_pods(world)


def test_a_job_that_is_created_after_the_upgrade_gets_the_new_template(upgrade):
    world = OperatedJob(job=job())
    upgrade(world)
    world.settle()
    assert new_pods(world) == set(world.pods)


def test_a_job_that_resumes_after_the_upgrade_gets_the_new_template(upgrade):
    world = training(job())
    upgrade(world)
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    assert not world.pods
    world.change(runPolicy={})
    world.settle()
    assert new_pods(world) == set(world.pods)


def test_a_region_that_is_scaled_from_zero_gets_the_new_template(upgrade):
    world = training(job(regions=[{"name": "eu", "learners": 2}, {"name": "us", "learners": 0}]))
    upgrade(world)
    world.change(regions=[{"name": "eu", "learners": 2}, {"name": "us", "learners": 2}])
    world.settle()
    assert {name for name in new_pods(world) if "-eu-" in name or "-us-" in name} == {
        "a-us-0",
        "a-us-1",
    }


def test_scaling_after_the_upgrade_restarts_no_learner_and_new_ones_equal_them(upgrade):
    world = training(job())
    before = specs(world)
    upgrade(world)
    world.change(regions=[{"name": "eu", "learners": 3}, {"name": "us", "learners": 2}])
    world.settle()
    after = specs(world)
    for name in ("a-eu-0", "a-eu-1", "a-us-0", "a-us-1"):
        assert after[name] == before[name]
    assert after["a-eu-2"] == before["a-eu-1"]


def test_a_kept_template_whose_document_was_deleted_is_replaced_when_a_pod_cannot_start(
    monkeypatch,
):
    """Without it no pod of it would ever start again; those that run need it no more."""
    from diloco_operator import resources

    world = training(job())
    before, shorten = specs(world), resources.learner_spec
    monkeypatch.setattr(
        resources, "learner_spec", lambda spec: dataclasses.replace(shorten(spec), seed=77)
    )
    volumes = world.pods["a-eu-0"]["spec"]["volumes"]
    (mounted,) = [v["configMap"]["name"] for v in volumes if v["name"] == "spec"]
    world.settle()
    del world.children["ConfigMap", mounted]
    world.settle()
    assert specs(world) == before
    scheduled = {"type": "PodScheduled", "status": "True"}
    world.pods["a-eu-0"]["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.settle()
    assert world.pods["a-eu-0"]["spec"] != before["a-eu-0"]
    assert world.pods["a-us-0"]["spec"] == before["a-us-0"], "a region that lacks no pod"


def test_a_kept_template_that_mounts_no_document_is_kept_when_a_pod_waits_for_its_kubelet(upgrade):
    world, key = training(job()), ("StatefulSet", "a-eu")
    template = copy.deepcopy(world.children[key]["spec"]["template"])
    template["spec"]["volumes"] = [v for v in template["spec"]["volumes"] if v["name"] != "spec"]
    world.children[key]["spec"]["template"] = template
    forget_records(world, "1-0123456789abcdef")
    annotations(world, key)[TEMPLATE] = json.dumps(template)
    world.run_controllers()
    upgrade(world)
    world.settle()
    before = specs(world)
    assert not is_new(world.pods["a-eu-0"])
    scheduled = {"type": "PodScheduled", "status": "True"}
    world.pods["a-eu-0"]["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.settle()
    assert specs(world) == before


def test_a_document_that_the_new_version_writes_differently_restarts_nothing_and_stays(monkeypatch):
    from diloco_operator import resources

    world = training(job())
    before, old = specs(world), {name for kind, name in world.children if kind == "ConfigMap"}
    shorten = resources.learner_spec
    monkeypatch.setattr(
        resources, "learner_spec", lambda spec: dataclasses.replace(shorten(spec), seed=77)
    )
    world.settle()
    assert specs(world) == before
    assert old <= {name for kind, name in world.children if kind == "ConfigMap"}


# ------------------------------------------------------------------------------ the manifest


@pytest.mark.parametrize(
    ("change", "who"),
    [
        ({"learner": {**LEARNER, "image": "mine:2"}}, {"eu", "us", "evaluator"}),
        ({"learner": {**LEARNER, "env": [{"name": "A", "value": "1"}]}}, {"eu", "us", "evaluator"}),
        ({"learner": {**LEARNER, "resources": {"limits": {"cpu": 2}}}}, {"eu", "us", "evaluator"}),
        ({"syncer": {"image": "mine:2"}}, {"syncer"}),
        ({"steps": 9000}, {"syncer", "evaluator"}),
        ({"runPolicy": {"learnerRestartLimit": 7}}, {"eu", "us"}),
        (
            {"regions": [{"name": "eu", "learners": 2},
                         {"name": "us", "learners": 2, "config": {"batch": 8}}]},
            {"us"},
        ),
    ],
)  # fmt: skip
def test_a_change_of_the_manifest_brings_the_new_template_to_those_that_read_it(
    upgrade, change, who
):
    world = training(job())
    upgrade(world)
    world.change(**change)
    world.settle()
    assert {name.split("-")[1] for name in new_pods(world)} == who
    world.settle()
    assert is_idle(world.reconcile(30))


def test_a_removed_value_of_the_manifest_rolls_too(upgrade):
    world = training(job(learner={**LEARNER, "env": [{"name": "A", "value": "1"}]}))
    upgrade(world)
    world.change(learner=LEARNER)
    world.settle()
    assert {name.split("-")[1] for name in new_pods(world)} == {"eu", "us", "evaluator"}


def test_a_change_that_replaces_learners_proceeds_region_by_region_after_an_upgrade_too(upgrade):
    world = training(job())
    upgrade(world)
    world.change(learner={**LEARNER, "env": [{"name": "A", "value": "1"}]})
    sets = [name for kind, name in applied(world.reconcile(30)) if kind == "StatefulSet"]
    assert sets == ["a-eu"]


def test_a_new_default_image_that_cannot_be_pulled_is_replaced_by_the_next_one(upgrade):
    """The change brought the image of a chart with a mistake; pods of the old one still run."""
    world = training(job())
    world.scope = OperatorScope(worker_image="typo", syncer_image="diloco/syncer:1")
    world.change(learner={**LEARNER, "env": [{"name": "A", "value": "1"}]})
    world.reconcile(30)
    live, stuck = world.children["StatefulSet", "a-eu"], world.pod("a-eu-1")
    stuck["spec"] = live["spec"]["template"]["spec"]
    set_ready(stuck, False)
    main_of(stuck).update(imageID="", state={"waiting": {"reason": "ImagePullBackOff"}})
    world.count_pods()
    upgrade(world)
    world.settle()
    assert {"a-eu-0", "a-eu-1", "a-us-0", "a-us-1"} <= new_pods(world)


def test_images_that_an_admission_webhook_changed_count_as_those_of_the_template(upgrade):
    world = training(job())
    for pod in world.pods.values():
        pod["spec"] = copy.deepcopy(pod["spec"])
        pod["spec"]["containers"][0]["image"] = "mirror/" + pod["spec"]["containers"][0]["image"]
    upgrade(world)
    assert is_idle(world.reconcile(30))


# ------------------------------------------------------------------------------ other writers


@pytest.mark.parametrize("key", WORKLOADS)
def test_a_manual_edit_after_the_upgrade_is_reverted_to_the_former_template(upgrade, key):
    world = training(job())
    before = copy.deepcopy(world.children[key]["spec"]["template"])
    upgrade(world)
    world.children[key]["spec"]["template"]["spec"]["containers"][0]["image"] = "other:1"
    assert applied(world.reconcile(30)) == [key]
    assert world.children[key]["spec"]["template"] == before


@pytest.mark.parametrize("damage", ["", "{", "[]", '"x"', "{}", '{"spec": 1}'])
def test_a_damaged_record_costs_a_rollout_and_no_more(upgrade, damage):
    world = training(job())
    annotations(world, ("StatefulSet", "a-eu"))[TEMPLATE] = damage
    upgrade(world)
    world.settle()
    assert new_pods(world) == {"a-eu-0", "a-eu-1"}
    assert is_idle(world.reconcile(30))


def test_a_removed_record_is_written_again_and_restarts_nothing(upgrade):
    world = training(job())
    before = specs(world)
    recorded = dict(annotations(world, ("StatefulSet", "a-eu")))
    for name in (INPUTS, TEMPLATE):
        del annotations(world, ("StatefulSet", "a-eu"))[name]
    upgrade(world)
    world.settle()
    assert specs(world) == before
    assert annotations(world, ("StatefulSet", "a-eu"))[INPUTS] == recorded[INPUTS]


def test_a_template_that_is_too_large_for_an_annotation_is_not_recorded():
    env = [{"name": f"A{number}", "value": "x" * 30000} for number in range(8)]
    world = training(job(learner={**LEARNER, "env": env}))
    sizes = [
        sum(map(len, annotations(world, key).values()))
        for key in WORKLOADS
    ]  # fmt: skip
    assert max(sizes) < MAX_TEMPLATE
    assert TEMPLATE not in annotations(world, ("StatefulSet", "a-eu"))
    assert TEMPLATE in annotations(world, ("Deployment", "a-syncer"))
    assert is_idle(world.reconcile(30))


# ------------------------------------------------------------------------------ other versions


@pytest.mark.parametrize("inputs", [None, f"{FORMAT + 1}-0123456789abcdef", "what?"])
def test_workloads_of_a_version_with_no_record_or_another_one_keep_their_template(upgrade, inputs):
    world = training(job())
    before = specs(world)
    forget_records(world, inputs)
    upgrade(world)
    assert set(applied(world.reconcile(30))) == set(WORKLOADS), "all at once: no rollout"
    world.settle()
    assert specs(world) == before
    assert is_idle(world.reconcile(30))
    for key in WORKLOADS:
        assert annotations(world, key)[INPUTS].startswith(f"{FORMAT}-")
        kept = json.loads(annotations(world, key)[TEMPLATE])
        assert kept["spec"]["containers"][0]["image"].endswith(":1")


def test_the_former_default_interval_of_checkpoints_that_is_stored_in_a_job_restarts_nothing(
    upgrade,
):
    """The API server stored 100; the version before left its default out of the hash."""
    without, stored = training(job()), {**LEARNER, "checkpoint": {"everySteps": 100, "keep": 2}}
    world = training(job(learner=stored))
    former = {key: annotations(without, key)[INPUTS] for key in WORKLOADS}
    assert all(annotations(world, key)[INPUTS] != text for key, text in former.items())
    for key, text in former.items():
        annotations(world, key)[INPUTS] = "2-" + text.partition("-")[2]
    before = specs(world)
    upgrade(world)
    world.settle()
    assert specs(world) == before
    assert is_idle(world.reconcile(30))


def test_their_records_do_not_wait_for_a_region_while_only_a_quorum_trains(upgrade):
    world = training(job(sync={"quorum": 3}))
    world.answers(gone=("us/1",))
    forget_records(world)
    upgrade(world)
    assert set(applied(world.reconcile(30))) == set(WORKLOADS)


def test_their_next_change_of_the_manifest_brings_the_new_template(upgrade):
    world = training(job())
    forget_records(world)
    upgrade(world)
    world.settle()
    world.change(syncer={"image": "mine:2"})
    world.settle()
    assert new_pods(world) == {"a-syncer-0"}


def test_a_manifest_that_changed_while_no_operator_ran_is_carried_out(upgrade):
    world = training(job())
    forget_records(world)
    upgrade(world)
    world.change(learner={**LEARNER, "env": [{"name": "A", "value": "1"}]})
    world.settle()
    for pod in world.pods.values():
        names = [entry["name"] for entry in pod["spec"]["containers"][0]["env"]]
        assert ("A" in names) == ("syncer" not in pod["metadata"]["name"])


@pytest.mark.parametrize(
    "learner",
    [
        {**LEARNER, "env": [{"name": "A", "value": "1"}]},
        {**LEARNER, "image": "mine:2"},
        {**LEARNER, "resources": {"limits": {"cpu": "2"}}},
        {**LEARNER, "podTemplate": {"spec": {"nodeSelector": {"pool": "spot"}}}},
        {**LEARNER, "podTemplate": {"spec": {"tolerations": [{"key": "gpu"}]}}},
    ],
)
def test_a_rollout_that_the_former_version_held_back_continues(upgrade, learner):
    world = training(job())
    world.change(learner=learner)
    world.reconcile(30)
    world.run_controllers()
    former = copy.deepcopy(world.children["StatefulSet", "a-eu"]["spec"]["template"])
    forget_records(world)
    upgrade(world)
    world.settle()
    assert world.children["StatefulSet", "a-eu"]["spec"]["template"] == former
    assert {name.split("-")[1] for name in new_pods(world)} == {"us"}, "the region that waited"


def test_a_rollback_to_the_version_with_the_same_records_restarts_nothing(upgrade, monkeypatch):
    world = training(job())
    upgrade(world)
    world.change(syncer={"image": "mine:2"})
    world.settle()
    before = specs(world)
    monkeypatch.undo()
    world.settle()
    assert specs(world) == before


# ------------------------------------------------------------------------------ the numbers of learners


def with_immutable_document(world):
    """As a version of format 1 made them: the syncer has mounted a document that never changes."""
    live = world.children["Deployment", "a-syncer"]
    template = copy.deepcopy(live["spec"]["template"])
    [volume] = [v for v in template["spec"]["volumes"] if v["name"] == "spec"]
    former = copy.deepcopy(world.children["ConfigMap", volume["configMap"]["name"]])
    volume["configMap"]["name"] = former["metadata"]["name"] = "a-spec-0123456789"
    former["metadata"]["uid"] = "uid-of-former"
    former["immutable"] = True
    world.children["ConfigMap", "a-spec-0123456789"] = former
    live["spec"]["template"] = template
    forget_records(world, "1-0123456789abcdef")
    annotations(world, ("Deployment", "a-syncer"))[TEMPLATE] = json.dumps(template)
    world.run_controllers()
    return world


def scaled(world, **learners):
    world.change(regions=[{"name": name, "learners": count} for name, count in learners.items()])
    world.settle()


def test_another_number_of_learners_restarts_neither_syncer_nor_evaluator_nor_learner():
    world = training(job())
    before = specs(world)
    for learners in ({"eu": 3, "us": 2}, {"eu": 1, "us": 1}, {"eu": 2, "us": 0}, {"eu": 2}):
        scaled(world, **learners)
        after = specs(world)
        assert all(after[name] == before[name] for name in after.keys() & before.keys())
        assert {"a-syncer-0", "a-evaluator-0"} <= after.keys()
        [stated] = [
            json.loads(child["data"]["spec.json"])["learners"]
            for (kind, _), child in world.children.items()
            if kind == "ConfigMap" and not child.get("immutable")
        ]
        assert stated == learners
        assert is_idle(world.reconcile(30))


def test_a_syncer_of_the_version_before_keeps_its_template_until_the_numbers_change(upgrade):
    world = with_immutable_document(training(job()))
    before = specs(world)
    upgrade(world)
    world.settle()
    assert specs(world) == before, "the upgrade restarts nothing"
    assert annotations(world, ("Deployment", "a-syncer"))[INPUTS].startswith("3-")
    world.settle()
    scaled(world, eu=3, us=2)
    assert {name for name in new_pods(world) if name in before} == {"a-syncer-0"}
    assert ("ConfigMap", "a-spec-0123456789") not in world.children, "nothing mounts it any longer"
    after = specs(world)
    scaled(world, eu=4, us=1)
    assert specs(world)["a-syncer-0"] == after["a-syncer-0"], "from now on it reads them"


def test_a_syncer_with_the_document_of_an_earlier_version_restarts_once_to_read_new_numbers(
    monkeypatch,
):
    world = training(job())
    before = specs(world)
    former = JobContext.spec_map.fget
    another = property(lambda context: former(context)[:-10] + "9876543210")
    monkeypatch.setattr(JobContext, "spec_map", another)
    world.settle()
    assert specs(world) == before, "the upgrade restarts nothing"
    scaled(world, eu=3, us=2)
    after = specs(world)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"a-syncer-0"}
    [mounted] = [
        v["configMap"]["name"] for v in after["a-syncer-0"]["volumes"] if v["name"] == "spec"
    ]
    document = world.children["ConfigMap", mounted]["data"]["spec.json"]
    assert json.loads(document)["learners"] == {"eu": 3, "us": 2}
    scaled(world, eu=2, us=2)
    assert specs(world)["a-syncer-0"] == after["a-syncer-0"], "from now on it reads them"


@pytest.mark.parametrize("document", [None, "{", "[]", '{"learners": 1}'])
def test_a_former_document_that_is_missing_or_damaged_restarts_a_syncer_at_most_once(document):
    world = with_immutable_document(training(job()))
    if document is None:
        del world.children["ConfigMap", "a-spec-0123456789"]
    else:
        world.children["ConfigMap", "a-spec-0123456789"]["data"]["spec.json"] = document
    world.settle()
    before = specs(world)
    world.settle()
    assert specs(world) == before
    assert is_idle(world.reconcile(30))
