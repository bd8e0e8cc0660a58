"""Rules between fields, everything at once, and what may not change."""

import copy
from typing import Any

import pytest
import yaml

from diloco.errors import ConfigError
from diloco_job.manifest_file import apply_set, examine
from diloco_job.rules import FIXED, RULES, transition_problems
from diloco_job.types import DiLoCoJob
from diloco_testing.manifests.cases import (
    ALLOWED_CHANGES,
    BROKEN_RULES,
    JOB,
    KEPT_RULES,
    REFUSED_CHANGES,
)
from diloco_testing.manifests.files import load_job


def problems_with(*sets: str) -> list[str]:
    return examine(JOB, sets)[1]


def job_with(*sets: str) -> DiLoCoJob:
    return load_job(JOB, sets)


@pytest.mark.parametrize(("sets", "expected"), BROKEN_RULES, ids=lambda v: str(v)[:40])
def test_a_broken_rule_is_the_only_problem_reported(sets, expected):
    [problem] = problems_with(*sets)
    assert problem.startswith(expected)


def test_every_rule_of_the_table_has_a_case_here():
    covered = {expected.partition(":")[0] for _, expected in BROKEN_RULES}
    assert {rule.path for rule in RULES} <= covered


@pytest.mark.parametrize("sets", KEPT_RULES, ids=str)
def test_a_rule_holds_at_its_limit(sets):
    assert problems_with(*sets) == []


def test_all_problems_are_reported_in_one_message():
    text = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: Bad}
spec:
  step: 3
  seed: "5"
  seed: "6"
  sync: {fragments: 30, quorum: 5, grace: {safety: 0.7}}
  learner: {env: [{name: a, value: 1}, {name: a}]}
  regions:
  - {name: spec, learners: 2}
  - {name: eu}
  - 5
  - {name: eu, learners: 1}
  syncer: {endpoint: nowhere}
  tls: {mode: Secret}
"""
    with pytest.raises(ConfigError) as refused:
        load_job(text, ["spec.regions[asia].learners=3"])
    lines = str(refused.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "manifest",
        "spec.seed",  # duplicate key
        "--set spec.regions[asia].learners=3",
        "metadata.name",
        "spec.steps",
        "spec.seed",
        "spec.sync.grace.safety",
        "spec.learner.env[0].value",
        "spec.regions[0].name",
        "spec.regions[1].learners",
        "spec.regions[2]",
        "spec.syncer.endpoint",
        "spec.step",
        "spec.learner.env",  # two entries
        "spec.regions",  # two entries
        "spec.sync.interval",
        "spec.learner",
        "spec.tls.secretName",
    ]
    assert lines[0] == "manifest: 17 problems"


def test_a_rule_is_skipped_if_a_field_it_reads_is_invalid():
    problems = problems_with("spec.sync.quorum=5", "spec.regions[eu].learners=many")
    assert problems == ['spec.regions[0].learners: "many" is not an integer']


# ------------------------------------------------------------------------------ changes


@pytest.mark.parametrize(("change", "expected"), REFUSED_CHANGES, ids=lambda v: str(v)[:40])
def test_a_forbidden_change_is_refused_with_the_reason(change, expected):
    [problem] = transition_problems(job_with(), job_with(change))
    assert problem.startswith(expected)


def test_tls_mode_the_kind_of_program_and_its_pods_cannot_change():
    secret = job_with("spec.tls.mode=Secret", "spec.tls.secretName=a")
    assert transition_problems(job_with(), secret) == [
        'spec.tls.mode: cannot change from "Disabled" to "Secret"'
    ]
    own = job_with("spec.learner={command: [python, train.py]}")
    other = job_with("spec.learner={command: [python, other.py]}")
    assert [problem.partition(":")[0] for problem in transition_problems(job_with(), own)] == [
        "spec.learner.recipe",
        "spec.learner.command",
    ]
    assert [problem.partition(":")[0] for problem in transition_problems(own, other)] == [
        "spec.learner.command"
    ]
    several = job_with("spec.learner={command: [python, train.py], podsPerLearner: 2}")
    assert transition_problems(own, several) == [
        "spec.learner.podsPerLearner: cannot change from 1 to 2"
    ]


STORAGE = {
    "spec.learner.storage.size": "20Gi",
    "spec.learner.storage.storageClassName": "fast",
    "spec.learner.storage.accessMode": "ReadWriteMany",
}


@pytest.mark.parametrize(("path", "value"), STORAGE.items())
def test_the_volumes_of_learners_cannot_change(path, value):
    before = job_with("spec.learner.storage={}")
    [problem] = transition_problems(before, job_with("spec.learner.storage={}", f"{path}={value}"))
    assert problem.startswith(f"{path}: cannot change from ")
    [removed] = transition_problems(before, job_with())
    assert removed == "spec.learner.storage: cannot be removed after the job is created"


def test_the_retention_of_the_volumes_of_learners_can_change():
    before = job_with("spec.learner.storage={}")
    after = job_with("spec.learner.storage={whenDeleted: Retain, whenScaled: Delete}")
    assert transition_problems(before, after) == []


def test_every_fixed_field_has_a_case_here():
    cases = {expected.partition(":")[0] for _, expected in REFUSED_CHANGES} | STORAGE.keys()
    assert set(FIXED) - cases == {
        "spec.tls.mode",
        "spec.learner.command",
        "spec.learner.podsPerLearner",
    }


@pytest.mark.parametrize("change", ALLOWED_CHANGES)
def test_other_fields_can_change(change):
    assert transition_problems(job_with(), job_with(change)) == []


def test_removing_a_default_value_is_not_a_change():
    written = yaml.safe_load(JOB)
    written = apply_set(written, "spec.sync.interval=24")
    assert transition_problems(load_job(yaml.safe_dump(written)), job_with()) == []


def test_a_set_does_not_modify_its_input():
    data: Any = yaml.safe_load(JOB)
    before = copy.deepcopy(data)
    apply_set(data, "spec.regions[eu].learners=9")
    assert data == before
