"""Rules between fields, everything at once, and what may not change."""

import copy
from typing import Any

import pytest
import yaml

from diloco.errors import ConfigError
from diloco_operator.api import DiLoCoJob
from diloco_operator.manifest import apply_set, examine, load_job
from diloco_operator.validate import FIXED, RULES, transition_problems

JOB = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: job}
spec:
  steps: 100
  learner: {recipe: {name: gpt, config: {width: 8}}}
  regions: [{name: eu, learners: 2}, {name: us, learners: 2}]
"""


def problems_with(*sets: str) -> list[str]:
    return examine(JOB, sets)[1]


def job_with(*sets: str) -> DiLoCoJob:
    return load_job(JOB, sets)


BROKEN_RULES = [
    (
        ["metadata.name=" + "j" * 50],
        f'metadata.name: "{"j" * 50}", "-" and the longest region "eu" are 53 characters; at most '
        "52 are allowed",
    ),
    (
        ["spec.sync.fragments=30"],
        "spec.sync.interval: 24 is less than the 30 fragments",
    ),
    (
        ["spec.sync.overlap=24"],
        "spec.sync.overlap: 24 is more than 23, the most with an interval of 24",
    ),
    (
        ["spec.sync.fragments=1", "spec.sync.interval=1"],
        "spec.sync.overlap: 2 is more than 1, the most with an interval of 1",
    ),
    (
        ["spec.sync.fragments=2", "spec.sync.interval=2"],
        "spec.sync.overlap: 2 is more than 1, the most with an interval of 2",
    ),
    (
        ["spec.sync.quorum=5"],
        "spec.sync.quorum: 5 is more than the 4 learners of all regions together",
    ),
    (
        ["spec.regions[eu].learners=0", "spec.regions[us].learners=0"],
        "spec.sync.quorum: 1 is more than the 0 learners of all regions together",
    ),
    (
        ["spec.learner.command=[python, train.py]"],
        "spec.learner: has both recipe and command; exactly one of the two is allowed",
    ),
    (
        ["spec.learner.recipe=null"],
        "spec.learner: has neither recipe nor command; exactly one of the two is allowed",
    ),
    (["spec.learner={}"], "spec.learner: has neither recipe nor command"),
    (["spec.syncer.region=asia"], 'spec.syncer.region: "asia" is none of the regions: eu, us'),
    (
        ["spec.learner={command: [python, train.py]}", "spec.evaluation.everySteps=5"],
        "spec.evaluation.command: missing; with spec.learner.command only a program of yours",
    ),
    (
        ["spec.syncer.endpoint=eu.example:7070"],
        'spec.tls.mode: Disabled, but spec.syncer.endpoint is "eu.example:7070"; use Secret or '
        "CertManager",
    ),
    (["spec.syncer.endpoint=eu.example"], 'spec.syncer.endpoint: "eu.example" is no endpoint'),
    (["spec.tls.mode=Secret"], "spec.tls.secretName: missing; spec.tls.mode Secret needs it"),
    (
        ["spec.tls.mode=CertManager"],
        "spec.tls.issuerRef: missing; spec.tls.mode CertManager needs it",
    ),
]


@pytest.mark.parametrize(("sets", "words"), BROKEN_RULES, ids=lambda v: str(v)[:40])
def test_a_broken_rule_is_said_alone_and_in_words(sets, words):
    [said] = problems_with(*sets)
    assert said.startswith(words)


def test_every_rule_of_the_table_has_a_case_here():
    said = {words.partition(":")[0] for _, words in BROKEN_RULES}
    assert {rule.path for rule in RULES} <= said


@pytest.mark.parametrize(
    "sets",
    [
        ["metadata.name=" + "j" * 49],
        ["spec.sync.overlap=23"],
        ["spec.sync.fragments=1", "spec.sync.interval=1", "spec.sync.overlap=1"],
        ["spec.sync.quorum=4"],
        ["spec.regions[eu].learners=0", "spec.syncer.region=eu"],
        ["spec.learner={command: [x]}", "spec.evaluation={everySteps: 5, command: [y]}"],
        ["spec.syncer.endpoint=a:1", "spec.tls.mode=Secret", "spec.tls.secretName=s"],
        ["spec.tls.mode=CertManager", "spec.tls.issuerRef.name=ca"],
    ],
    ids=str,
)
def test_a_rule_is_kept_at_its_edge(sets):
    assert problems_with(*sets) == []


def test_everything_wrong_is_said_in_one_message():
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
        "spec.seed",  # comes twice
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


def test_a_rule_is_silent_while_a_field_it_reads_has_no_value():
    said = problems_with("spec.sync.quorum=5", "spec.regions[eu].learners=many")
    assert said == ['spec.regions[0].learners: "many" is not an integer']


# ------------------------------------------------------------------------------ changes

REFUSED_CHANGES = [
    ("metadata.name=other", 'metadata.name: cannot change from "job" to "other"'),
    ("spec.seed=8", "spec.seed: cannot change from 0 to 8"),
    ("spec.sync.fragments=12", "spec.sync.fragments: cannot change from 24 to 12"),
    ("spec.sync.interval=48", "spec.sync.interval: cannot change from 24 to 48"),
    ("spec.sync.overlap=3", "spec.sync.overlap: cannot change from 2 to 3"),
    ('spec.sync.grace.maxSteps="0"', 'spec.sync.grace.maxSteps: cannot change from "1" to "0"'),
    ('spec.sync.grace.safety="0.80"', "spec.sync.grace.safety: cannot change from "),
    ("spec.sync.merge=Average", "spec.sync.merge: cannot change from "),
    ("spec.sync.averageParameters=[x]", 'spec.sync.averageParameters: cannot change from [] to ["'),
    ('spec.sync.outer.learningRate="0.70"', "spec.sync.outer.learningRate: cannot change from "),
    ('spec.sync.outer.momentum="0.9"', "spec.sync.outer.momentum: cannot change from "),
    ("spec.sync.outer.nesterov=false", "spec.sync.outer.nesterov: cannot change from true to fal"),
    ("spec.sync.wire.up=Int4", "spec.sync.wire.up: cannot change from "),
    ("spec.sync.wire.down=FP32", "spec.sync.wire.down: cannot change from "),
    ("spec.sync.wire.errorFeedback=true", "spec.sync.wire.errorFeedback: cannot change from "),
    ("spec.learner.recipe.config.width=16", "spec.learner.recipe: cannot change from "),
    ("spec.learner.recipe.config.width=8.0", "spec.learner.recipe: cannot change from "),
    ("spec.learner.recipe.config={depth: 8}", "spec.learner.recipe: cannot change from "),
    ("spec.learner.podsPerLearner=2", "spec.learner.podsPerLearner: cannot change from 1 to 2"),
    ("spec.syncer.storage.size=1Gi", "spec.syncer.storage.size: cannot change from "),
    ("spec.syncer.storage.storageClassName=x", "spec.syncer.storage.storageClassName: cannot"),
    ("spec.steps=99", "spec.steps: cannot go down from 100 to 99; only up"),
    ("spec.syncer.region=us", "spec.syncer.region: cannot change from eu to us"),
    (
        "spec.regions=[{name: us, learners: 2}, {name: eu, learners: 2}]",
        "spec.syncer.region: cannot change from eu to us (empty: the first region)",
    ),
    ("spec.regions=[{name: us, learners: 2}]", "spec.syncer.region: cannot change from eu to us"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED_CHANGES, ids=lambda v: str(v)[:40])
def test_what_may_not_change_is_refused_in_words(change, words):
    [said] = transition_problems(job_with(), job_with(change))
    assert said.startswith(words)


def test_tls_mode_and_the_kind_of_program_may_not_change():
    secret = job_with("spec.tls.mode=Secret", "spec.tls.secretName=a")
    assert transition_problems(job_with(), secret) == [
        'spec.tls.mode: cannot change from "Disabled" to "Secret"'
    ]
    own = job_with("spec.learner={command: [python, train.py]}")
    other = job_with("spec.learner={command: [python, other.py]}")
    assert [one.partition(":")[0] for one in transition_problems(job_with(), own)] == [
        "spec.learner.recipe",
        "spec.learner.command",
    ]
    assert [one.partition(":")[0] for one in transition_problems(own, other)] == [
        "spec.learner.command"
    ]


def test_every_fixed_field_has_a_case_here():
    cases = {words.partition(":")[0] for _, words in REFUSED_CHANGES}
    assert set(FIXED) - cases == {"spec.tls.mode", "spec.learner.command"}


@pytest.mark.parametrize(
    "change",
    [
        "spec.steps=101",
        "spec.sync.quorum=4",
        "spec.learner.image=x",
        "spec.learner.env=[{name: a, value: b}]",
        "spec.learner.resources.limits.cpu=2",
        "spec.learner.podTemplate.spec.nodeSelector.a=b",
        "spec.learner.checkpoint={everySteps: 5, keep: 1}",
        "spec.syncer.checkpoint={everySteps: 5, keep: 1}",
        "spec.syncer.service.port=7071",
        "spec.syncer.region=eu",
        "spec.regions[us].learners=9",
        "spec.regions[us].config.batch=4",
        "spec.regions=[{name: eu, learners: 1}]",
        "spec.regions=[{name: eu, learners: 1}, {name: asia, learners: 1}]",
        "spec.evaluation.everySteps=7",
        "spec.runPolicy.suspend=true",
        "spec.sync.fragments=24",
        "spec.learner.recipe={config: {width: 8}, name: gpt}",
    ],
)
def test_everything_else_may_change(change):
    assert transition_problems(job_with(), job_with(change)) == []


def test_a_default_left_out_again_is_no_change():
    written = yaml.safe_load(JOB)
    written = apply_set(written, "spec.sync.interval=24")
    assert transition_problems(load_job(yaml.safe_dump(written)), job_with()) == []


def test_looking_for_problems_changes_nothing():
    data: Any = yaml.safe_load(JOB)
    before = copy.deepcopy(data)
    apply_set(data, "spec.regions[eu].learners=9")
    assert data == before
