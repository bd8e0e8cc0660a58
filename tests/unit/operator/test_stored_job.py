"""A job as the API server stores it, whose CRD may be newer than the operator."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_job.manifest_file import examine
from diloco_job.types import DiLoCoJob
from diloco_operator.state.stored_job import StoredJob
from diloco_testing.kubernetes.operated_job import OperatedJob, is_idle, manifest, training
from diloco_testing.manifests.fuzz import NODES
from diloco_testing.manifests.generated import manifests
from diloco_testing.properties import examples

VALUES = st.sampled_from([None, True, 1, "x", [], [{"a": 1}], {}, {"deep": {"er": [1]}}])


def at(data, place):
    """What is at a place of the manifest; None: nothing."""
    for part in place:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def objects(data):
    """Objects of a manifest that have a type of their own, below spec."""
    found = []
    for place, node in NODES.items():
        places = [place, (*place, 0), (*place, 1)] if node.get("type") == "array" else [place]
        found += [here for here in places if isinstance(at(data, here), dict)]
    passed = {"config", "labels", "annotations", "requests", "limits", "valueFrom"}
    return [
        here
        for here in dict.fromkeys(found)
        if not passed & set(here) and not (here[-2:] == ("podTemplate", "spec") or "claims" in here)
    ]


# ------------------------------------------------------------------------------ parsing


@settings(max_examples=examples(100))
@given(data=st.data(), written=manifests())
def test_unknown_fields_anywhere_are_removed_and_named_and_nothing_else_changes(data, written):
    stored = json.loads(json.dumps(written))  # an API server's objects share no parts
    stored["metadata"] |= {"namespace": "work", "uid": "1"}
    places = [("spec",), *objects(written)]
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=5, unique=True))
    for place in chosen:
        at(stored, place)["newThing"] = data.draw(VALUES)
    before = copy.deepcopy(stored)
    parsed = StoredJob.parse(stored)
    expected = {**written, "metadata": {**written["metadata"], "namespace": "work"}}
    assert parsed.problems == ()
    assert parsed.job == DiLoCoJob.model_validate(expected)
    assert len(parsed.unknown_fields) == len(chosen)
    assert all(path.endswith(".newThing") for path in parsed.unknown_fields)
    assert stored == before


def test_unknown_fields_are_named_as_the_api_server_names_them():
    job = manifest()
    job["spec"]["newThing"] = {"a": 1}
    job["spec"]["regions"][1]["spot"] = True
    job["status"] = {"newThing": 1}
    parsed = StoredJob.parse(job)
    assert set(parsed.unknown_fields) == {"spec.newThing", "spec.regions[1].spot"}


def test_what_is_wrong_besides_unknown_fields_makes_the_spec_invalid():
    job = manifest(steps="many")
    job["spec"]["newThing"] = 1
    parsed = StoredJob.parse(job)
    assert parsed.job is None
    (problem,) = parsed.problems
    assert problem.startswith("spec.steps: ")


def test_rules_between_fields_hold_for_what_is_known():
    job = manifest(sync={"quorum": 99, "newThing": 1})
    (problem,) = StoredJob.parse(job).problems
    assert problem.startswith("spec.sync.quorum: ")


def test_an_unknown_value_of_a_known_field_is_still_refused():
    """It would change what the job computes."""
    (problem,) = StoredJob.parse(manifest(sync={"merge": "Median"})).problems
    assert problem.startswith("spec.sync.merge: ")


def test_a_manifest_file_with_an_unknown_field_is_still_refused():
    text = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: a}
spec:
  steps: 1
  learner: {recipe: {name: gpt}}
  regions: [{name: eu, learners: 1}]
  sync: {quorums: 1}
"""
    _, problems = examine(text)
    assert problems == ["spec.sync.quorums: unknown field; did you mean quorum?"]


# ------------------------------------------------------------------------------ the operator


def newer(world, **sync):
    world.job["spec"]["sync"] = {**world.job["spec"]["sync"], **sync}


def test_an_older_operator_keeps_a_job_of_a_newer_crd_running_and_names_what_it_ignores():
    world = training()
    newer(world, newThing=1)
    assert world.reconcile(30).apply == ()
    assert world.reason("Accepted") == ("True", "FieldsIgnored")
    assert "spec.sync.newThing" in world.condition("Accepted")["message"]
    assert ("Warning", "FieldsIgnored") in world.events
    assert world.status["state"] == "Training"
    assert is_idle(world.reconcile(30))


@pytest.mark.parametrize("key", [("Deployment", "a-syncer"), ("StatefulSet", "a-eu")])
def test_it_still_repairs_children(key):
    world = training()
    newer(world, newThing=1)
    del world.children[key]
    world.settle()
    assert key in world.children


def test_it_still_completes_and_creates_jobs():
    job = manifest()
    job["spec"]["newThing"] = {"a": 1}
    world = OperatedJob(job=job)
    world.settle()
    assert len(world.pods) == 5
    del job["spec"]["newThing"]  # the scripted syncer reads the strict types
    world.answers(state="Complete", step=2000, model_path="/m")
    job["spec"]["newThing"] = {"a": 1}
    world.settle()
    assert world.condition("Complete")["status"] == "True"
    assert world.reason("Accepted") == ("True", "FieldsIgnored")


def test_the_remark_goes_with_the_fields():
    world = training()
    newer(world, newThing=1)
    world.reconcile(30)
    del world.job["spec"]["sync"]["newThing"]
    world.reconcile(30)
    assert world.reason("Accepted") == ("True", "Valid")


def test_the_remark_is_bounded():
    world = training()
    newer(world, **{f"field{number:03}": 1 for number in range(500)})
    world.reconcile(30)
    message = world.condition("Accepted")["message"]
    assert message.endswith("spec.sync.field003 and 496 more")


def test_the_message_is_bounded_whatever_the_names_are():
    world = training()
    newer(world, **{letter * 5000: 1 for letter in "abcdef"})
    world.reconcile(30)
    assert len(world.condition("Accepted")["message"]) <= 1000
