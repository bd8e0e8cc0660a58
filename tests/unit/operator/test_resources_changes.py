"""Which pods a change of the manifest replaces."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from diloco.spec import RunSpec
from diloco_job.manifest_file import apply_set
from diloco_job.rules import rule_problems
from diloco_job.types import DiLoCoJob
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.resources.template_record import INPUTS
from diloco_testing.manifests.files import load_job
from diloco_testing.manifests.fuzz import NODES, edges, put

GOLDEN = Path(__file__).parents[3] / "tests/golden"
EVERYTHING = GOLDEN / "everything.yaml"
OWN_LOOP = GOLDEN / "manifests/own-loop.job.yaml"
SCOPE = OperatorScope(worker_image="w:1", syncer_image="s:1")
OWNER = Owner(namespace="ml", uid="1")

SYNCER, EVALUATOR = "stdlib-gpt-syncer", "stdlib-gpt-evaluator"
EU, US = "stdlib-gpt-eu", "stdlib-gpt-us"


def templates(source, sets, scope=SCOPE):
    """Pod templates by the name of their workload."""
    made = desired(load_job(source, sets), OWNER, scope, Wanted())
    return {
        child["metadata"]["name"]: child["spec"]["template"]
        for child in made
        if child["kind"] in ("Deployment", "StatefulSet")
    }


def rolled(*sets, source=EVERYTHING):
    """Workloads whose pods a change replaces."""
    previous, after = templates(source, []), templates(source, sets)
    return {name for name in previous if name in after and previous[name] != after[name]}


@pytest.mark.parametrize(
    "change",
    [
        "spec.steps=3000",
        "spec.sync.quorum=3",
        "spec.evaluation.everySteps=7",
        "spec.syncer.checkpoint={everySteps: 1, keep: 9}",
        "spec.syncer.checkpoint.url=s3://bucket/runs",
        "spec.output=s3://bucket/models",
    ],
)
def test_values_that_learners_get_from_the_syncer_replace_no_learner(change):
    assert rolled(change) == {SYNCER, EVALUATOR}


def test_urls_of_objects_reach_the_syncer_and_no_learner_and_its_template_adds_the_credentials():
    sets = [
        "spec.syncer.checkpoint.url=s3://bucket/runs", "spec.output=s3://bucket/models",
        "spec.syncer.podTemplate.spec={serviceAccountName: trainer, "
        "containers: [{name: main, envFrom: [{secretRef: {name: s3}}]}]}",
    ]  # fmt: skip
    made = desired(load_job(EVERYTHING, sets), OWNER, SCOPE, Wanted())
    documents = {
        child["metadata"]["name"]: RunSpec.from_json(child["data"]["spec.json"])
        for child in made
        if child["kind"] == "ConfigMap"
    }
    urls = {
        name: {
            (documents[volume["configMap"]["name"]].snapshot_url, documents[volume["configMap"]["name"]].output_url)
            for volume in template["spec"]["volumes"]
            if "configMap" in volume
        }
        for name, template in templates(EVERYTHING, sets).items()
    }  # fmt: skip
    assert urls[SYNCER] == {("s3://bucket/runs", "s3://bucket/models")}
    assert urls[EU] == urls[US] == {("", "")}
    pod = templates(EVERYTHING, sets)[SYNCER]["spec"]
    assert pod["serviceAccountName"] == "trainer"
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "DILOCO_SPEC" in {variable["name"] for variable in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    "change",
    [
        "spec.regions[eu].learners=9",
        "spec.regions[us].learners=0",
        "spec.regions=[{name: eu, learners: 2}, {name: us, learners: 2}, {name: asia, learners: 1}]",
        "spec.regions=[{name: eu, learners: 2}]",
    ],
)
def test_another_number_of_learners_replaces_no_pod_and_reaches_the_document_of_the_syncer(change):
    assert rolled(change) == set()
    before, after = documents(load_job(EVERYTHING)), documents(load_job(EVERYTHING, [change]))
    assert before.keys() == after.keys()
    [changed] = [name for name in before if before[name] != after[name]]
    job = load_job(EVERYTHING, [change])
    spec = RunSpec.from_json(after[changed]["data"]["spec.json"])
    assert spec.learners == {region.name: region.learners for region in job.spec.regions}
    assert "immutable" not in after[changed]
    assert all(after[name]["immutable"] for name in after if name != changed)


def documents(job):
    """ConfigMaps by their name."""
    made = desired(job, OWNER, SCOPE, Wanted())
    return {child["metadata"]["name"]: child for child in made if child["kind"] == "ConfigMap"}


def test_documents_of_equal_text_for_syncer_and_learners_are_two_objects():
    """The one changes, the other is immutable."""
    sets = (
        "spec.steps=1000000000", "spec.sync.quorum=1", 'spec.sync.guard="0"',
        "spec.syncer.checkpoint={everySteps: 1, keep: 1}",
    )  # fmt: skip
    data = yaml.safe_load(EVERYTHING.read_text())
    del data["spec"]["evaluation"]
    for change in sets:
        data = apply_set(data, change)
    assert len(documents(DiLoCoJob.model_validate(data))) == 2


@pytest.mark.parametrize("change", ["spec.steps=3000", "spec.regions[eu].learners=9"])
def test_it_replaces_no_learner_of_an_own_loop_either(change):
    assert rolled(change, source=OWN_LOOP) <= {"own-loop-syncer", "own-loop-evaluator"}


def test_another_set_of_regions_replaces_learners_of_an_own_loop_for_their_index_counts_by_it():
    more = "spec.regions=[{name: eu, learners: 4, config: {batch: 2}}, {name: us, learners: 1}]"
    assert "own-loop-eu" in rolled(more, source=OWN_LOOP)


@pytest.mark.parametrize(
    "change",
    [
        "spec.regions[us].config={batch: 8}",
        "spec.regions[us].resources={limits: {cpu: 2}}",
        "spec.regions[us].podTemplate={spec: {nodeSelector: {pool: spot}}}",
    ],
)
def test_a_change_of_a_region_replaces_only_its_learners(change):
    assert rolled(change) == {US}


@pytest.mark.parametrize(
    ("change", "who"),
    [
        ("spec.syncer.image=mine:2", {SYNCER}),
        ("spec.syncer.resources={limits: {cpu: 2}}", {SYNCER}),
        ("spec.learner.image=mine:2", {EU, US, EVALUATOR}),
        ("spec.learner.env=[{name: A, value: b}]", {EU, US, EVALUATOR}),
        ("spec.learner.checkpoint={everySteps: 7}", {EU, US, SYNCER, EVALUATOR}),
        ("spec.runPolicy.learnerRestartLimit=3", {EU, US}),
        ("spec.syncer.ports={sync: 7171}", {SYNCER}),
        ("spec.learner.ports={health: 8181, metrics: 9191}", {EU, US}),
        ("spec.evaluation={everySteps: 50, ports: {health: 8181}}", {EVALUATOR}),
        ("spec.regions[us].cluster=eu", set()),
        ("spec.syncer.service.annotations={a: b}", set()),
        ("spec.runPolicy.suspend=true", set()),
        ("spec.runPolicy.activeDeadlineSeconds=9", set()),
        ("spec.runPolicy.cleanupPolicy=All", set()),
    ],
)
def test_a_change_replaces_those_that_read_it(change, who):
    assert rolled(change) == who


def test_another_worker_image_of_the_chart_does_not_reach_learners_that_name_theirs():
    named = ["spec.learner.image=mine:1", "spec.syncer.image=mine:2"]
    upgraded = replace(SCOPE, worker_image="w:2", syncer_image="s:2")
    assert templates(EVERYTHING, named, upgraded) == templates(EVERYTHING, named)


def test_the_annotation_changes_exactly_with_the_content():
    def marks(sets):
        made = desired(load_job(EVERYTHING, sets), OWNER, SCOPE, Wanted())
        return {
            f"{child['kind']} {child['metadata']['name']}": child["metadata"]["annotations"][
                "diloco.dev/applied"
            ]
            for child in made
        }

    previous, after = marks([]), marks(["spec.regions[us].learners=3"])
    assert marks([]) == previous
    changed = {name for name in previous if previous[name] != after.get(name)}
    assert f"StatefulSet {US}" in changed
    assert f"StatefulSet {EU}" not in changed


# ------------------------------------------------------------------------------ inputs


def workloads(job, scope=SCOPE):
    return {
        child["metadata"]["name"]: child
        for child in desired(job, OWNER, scope, Wanted())
        if child["kind"] in ("Deployment", "StatefulSet")
    }


def inputs(made):
    return {name: child["metadata"]["annotations"][INPUTS] for name, child in made.items()}


def changed_jobs(data):
    """Every job that differs from the manifest in one field, with the field's place."""
    for place, node in NODES.items():
        samples = [
            {"a": "b"},
            {"a": "c"},
            "1Gi",
            "gpt",
            1,
            7,
            ["a"],
            [{"name": "x", "request": "y"}],
        ]
        for value in [*edges(node), *samples]:
            changed = copy.deepcopy(data)
            put(changed, place, value)
            try:
                job = DiLoCoJob.model_validate(changed)
            except ValidationError:
                continue
            if not rule_problems(job):
                yield place, job


SECURED = (
    "spec.tls={mode: Secret, secretName: certs}",
    "spec.syncer.endpoint=eu.example.org:443",
)


@pytest.mark.slow  # every field of a job, one at a time
@pytest.mark.parametrize(
    ("source", "sets", "region"),
    [(EVERYTHING, (), ""), (OWN_LOOP, (), ""), (EVERYTHING, SECURED, "us")],
    ids=["recipe", "own-loop", "operator-of-us"],
)
def test_a_field_that_changes_a_template_changes_the_hash_of_its_inputs(source, sets, region):
    """Otherwise a running workload would keep its template, and the change would be lost."""
    data, scope = yaml.safe_load(source.read_text()), replace(SCOPE, region=region)
    for change in sets:
        data = apply_set(data, change)
    before = workloads(DiLoCoJob.model_validate(data), scope)
    seen = set()
    for place, job in changed_jobs(data):
        after = workloads(job, scope)
        for name in before.keys() & after.keys():
            if before[name]["spec"]["template"] != after[name]["spec"]["template"]:
                seen.add(place)
                assert inputs(before)[name] != inputs(after)[name], (place, name)
    assert len(seen) > 20


@pytest.mark.parametrize(
    ("change", "who"),
    [
        ("spec.steps=3000", {SYNCER, EVALUATOR}),
        ("spec.regions[eu].learners=9", set()),
        ("spec.regions[us].podTemplate={spec: {nodeSelector: {pool: spot}}}", {US}),
        ("spec.syncer.image=mine:2", {SYNCER}),
        ("spec.syncer.ports={sync: 7171}", {SYNCER}),
        ("spec.learner.ports={health: 8181, metrics: 9191}", {EU, US}),
        ("spec.evaluation={everySteps: 50, ports: {health: 8181}}", {EVALUATOR}),
        ("spec.regions[us].cluster=eu", set()),
        ("spec.learner.image=mine:2", {EU, US, EVALUATOR}),
        ("spec.runPolicy={suspend: true, cleanupPolicy: All, activeDeadlineSeconds: 9}", set()),
        ("spec.syncer.service.annotations={a: b}", set()),
        ("spec.syncer.storage.size=99Gi", set()),
    ],
)
def test_a_change_changes_the_inputs_of_no_other_workload(change, who):
    before = inputs(workloads(load_job(EVERYTHING)))
    after = inputs(workloads(load_job(EVERYTHING, [change])))
    assert {name for name in before if before[name] != after[name]} == who


@pytest.mark.parametrize("region", ["", "eu"])
def test_no_value_of_the_chart_is_an_input(region):
    scope = replace(SCOPE, region=region)
    other = replace(
        scope,
        worker_image="w:2",
        syncer_image="s:2",
        image_pull_policy="Always",
        image_pull_secrets=("pull",),
        cluster_domain="example.org",
    )
    job = load_job(EVERYTHING)
    assert inputs(workloads(job, scope)) == inputs(workloads(job, other))


def test_the_hash_of_the_inputs_is_that_of_the_versions_before():
    """If it has to change, raise template_record.FORMAT: else the upgrade restarts running jobs."""
    assert inputs(workloads(load_job(EVERYTHING))) == {
        EU: "3-5b2392ec0db24054",
        US: "3-d3511d92ab1f4102",
        SYNCER: "3-f6401ccaba8576ed",
        EVALUATOR: "3-0226f81872f158c8",
    }
