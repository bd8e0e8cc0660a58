"""What should run for a job."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.spec import Checkpoint, RunSpec
from diloco_job.manifest_file import examine
from diloco_job.names import learner_slug
from diloco_job.plan import environment, plan, run_spec
from diloco_testing.manifests.files import load_job

EVERYTHING = Path(__file__).parents[3] / "tests/golden/everything.yaml"

OWN_LOOP = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: own}
spec:
  steps: 10
  learner:
    command: [python, train.py, --fast]
    env:
    - {name: A, value: b}
    - {name: TOKEN, valueFrom: {secretKeyRef: {}}}
    - {name: DILOCO_JOB, value: mine}
  regions: [{name: eu, learners: 1, config: {batch: 2}}]
  evaluation: {everySteps: 5, command: [python, eval.py]}
"""


def test_the_example_becomes_this_run_spec():
    assert run_spec(load_job(EVERYTHING)) == RunSpec(
        job="stdlib-gpt",
        steps=2000,
        seed=7,
        fragments=24,
        interval=24,
        overlap=2,
        quorum=1,
        grace_max_steps=1.0,
        grace_safety=0.8,
        merge="Radial",
        average_parameters=(),
        guard=10.0,
        outer_learning_rate=0.7,
        outer_momentum=0.5,
        outer_nesterov=True,
        wire_up="BF16",
        wire_down="BF16",
        error_feedback=False,
        learners={"eu": 2, "us": 2},
        learner_checkpoint=Checkpoint(every_steps=96, keep=2),
        syncer_checkpoint=Checkpoint(every_steps=48, keep=3),
        evaluation_every_steps=50,
        evaluation_command=(),
        recipe="gpt",
        recipe_config={
            "layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16, "data": "stdlib",
        },
    )  # fmt: skip


def test_every_field_of_the_run_spec_follows_the_manifest():
    job = load_job(
        EVERYTHING,
        [
            "metadata.name=other", "spec.steps=1", "spec.seed=2", "spec.sync.fragments=3",
            "spec.sync.interval=5", "spec.sync.overlap=3", "spec.sync.quorum=2",
            'spec.sync.grace={maxSteps: "2", safety: "0.1"}', "spec.sync.merge=Average",
            "spec.sync.averageParameters=[a*]", "spec.sync.buffers=Initial",
            "spec.sync.movingBuffers=[b*]", 'spec.sync.guard="6"', "spec.sync.frozen=Ship",
            'spec.sync.outer={learningRate: "0.3", momentum: "0.4", nesterov: false}',
            "spec.sync.wire={up: Int4, down: FP32, errorFeedback: true}",
            "spec.regions[us].learners=3", "spec.learner.checkpoint={everySteps: 8, keep: 9}",
            "spec.syncer.checkpoint={everySteps: 10, keep: 11}", "spec.evaluation.everySteps=12",
            "spec.evaluation.command=[x]", "spec.learner.recipe.config={a: 1}",
            "spec.syncer.checkpoint.url=s3://snapshots", "spec.output=s3://models",
        ],
    )  # fmt: skip
    assert run_spec(job) == RunSpec(
        job="other", steps=1, seed=2, fragments=3, interval=5, overlap=3, quorum=2,
        grace_max_steps=2.0, grace_safety=0.1, merge="Average", average_parameters=("a*",),
        buffers="Initial", moving_buffers=("b*",), guard=6.0, frozen="Ship",
        outer_learning_rate=0.3, outer_momentum=0.4, outer_nesterov=False, wire_up="Int4",
        wire_down="FP32", error_feedback=True, learners={"eu": 2, "us": 3},
        learner_checkpoint=Checkpoint(every_steps=8, keep=9),
        syncer_checkpoint=Checkpoint(every_steps=10, keep=11), evaluation_every_steps=12,
        evaluation_command=("x",), recipe="gpt", recipe_config={"a": 1},
        snapshot_url="s3://snapshots", output_url="s3://models",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "every", "expected"),
    [(24, None, 96), (100, None, 400), (10**9, None, 10**9), (100, 7, 7)],
)
def test_without_a_number_of_steps_local_checkpoints_follow_the_interval(interval, every, expected):
    changes = [] if every is None else [f"spec.learner.checkpoint.everySteps={every}"]
    job = load_job(EVERYTHING, [f"spec.sync.interval={interval}", *changes])
    assert run_spec(job).learner_checkpoint == Checkpoint(every_steps=expected, keep=2)


def test_learners_come_in_the_order_of_the_regions():
    made = plan(load_job(EVERYTHING, ["spec.regions[us].learners=1"]))
    assert [learner.name for learner in made.learners] == ["eu/0", "eu/1", "us/0"]
    assert made.learner("us/0") is made.learners[2]
    assert made.learner("us/1") is None


def test_a_recipe_becomes_its_module_and_a_regions_config_overrides_it():
    made = plan(load_job(EVERYTHING, ["spec.regions[us].config={batch: 4, slowdown: 5}"]))
    eu, us = made.learners[0], made.learners[2]
    assert eu.argv == ("python", "-m", "diloco_worker.recipes.gpt")
    assert eu.config == made.spec.recipe_config
    assert us.config == {**eu.config, "batch": 4, "slowdown": 5}
    assert made.evaluator is not None
    assert made.evaluator.config == eu.config


def test_a_users_command_is_started_as_written_with_only_the_regions_config():
    made = plan(load_job(OWN_LOOP))
    [learner] = made.learners
    assert learner.argv == ("python", "train.py", "--fast")
    assert learner.config == {"batch": 2}
    assert made.spec.recipe is None
    assert made.evaluator is not None
    assert made.evaluator.argv == ("python", "-m", "diloco_worker.evaluator")
    assert made.spec.evaluation_command == ("python", "eval.py")


def test_without_evaluation_there_is_no_evaluator():
    made = plan(load_job(EVERYTHING, ["spec.evaluation=null"]))
    assert made.evaluator is None
    assert made.spec.evaluation_every_steps is None


def test_the_syncer_is_in_its_region_or_else_in_the_first():
    assert plan(load_job(EVERYTHING, ["spec.syncer.region="])).syncer.region == "eu"
    assert plan(load_job(EVERYTHING, ["spec.syncer.region=us"])).syncer.region == "us"


def test_a_learner_gets_the_variables_of_the_contract():
    made = plan(load_job(OWN_LOOP))
    env = environment(
        made,
        made.learners[0],
        syncer="127.0.0.1:7070",
        spec_path="/run/spec.json",
        state_dir="/run/learners/eu-0",
        tls_dir="/tls",
        metrics_port=9,
    )
    assert env == {
        "A": "b",  # only a cluster resolves TOKEN
        "DILOCO_JOB": "own",  # the user's value does not replace ours
        "DILOCO_LEARNER": "eu/0",
        "DILOCO_SYNCER": "127.0.0.1:7070",
        "DILOCO_SPEC": "/run/spec.json",
        "DILOCO_CONFIG": '{"batch":2}',
        "DILOCO_STATE": "/run/learners/eu-0",
        "DILOCO_TLS": "/tls",
        "DILOCO_METRICS_PORT": "9",
    }


def test_without_tls_the_variable_is_unset_and_the_evaluator_has_no_learner_name():
    made = plan(load_job(OWN_LOOP))
    assert made.evaluator is not None
    env = environment(
        made,
        made.evaluator,
        syncer="h:1",
        spec_path="s",
        state_dir="d",
    )
    assert not {"DILOCO_TLS", "DILOCO_LEARNER"} & env.keys()
    assert env["DILOCO_CONFIG"] == "{}"
    assert env["DILOCO_METRICS_PORT"] == "0"


names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?", fullmatch=True)
region_maps = st.dictionaries(names, st.integers(0, 4), min_size=1, max_size=8)


@settings(deadline=None)  # a busy machine is no failure
@given(
    regions=region_maps,
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,26}[a-z0-9])?", fullmatch=True),
    fragments=st.integers(1, 30),
    interval=st.integers(1, 30),
    overlap=st.integers(1, 30),
    quorum=st.integers(1, 8),
    momentum=st.decimals(0, 1, places=3),
    own=st.booleans(),
)
def test_every_valid_manifest_can_be_planned(
    regions, name, fragments, interval, overlap, quorum, momentum, own
):
    program = {"command": ["x"]} if own else {"recipe": {"name": "gpt"}}
    job, problems = examine(
        json.dumps(
            {
                "apiVersion": "diloco.dev/v1alpha1",
                "kind": "DiLoCoJob",
                "metadata": {"name": name},
                "spec": {
                    "steps": 5,
                    "sync": {
                        "fragments": fragments,
                        "interval": interval,
                        "overlap": overlap,
                        "quorum": quorum,
                        "outer": {"momentum": str(momentum)},
                    },
                    "learner": program,
                    "regions": [{"name": key, "learners": n} for key, n in regions.items()],
                },
            }
        )
    )
    allowed = (
        fragments <= interval
        and overlap <= max(1, min(interval - 1, fragments))
        and quorum <= sum(regions.values())
        and momentum < 1
        and len(name) + 1 + max(map(len, regions)) <= 52
        and not {"syncer", "evaluator", "spec"} & regions.keys()
    )
    assert (problems == []) == allowed
    if allowed:
        assert job is not None
        made = plan(job)
        assert made == plan(job)
        learners = [learner.name for learner in made.learners]
        assert len(set(learners)) == len(learners) == sum(regions.values())
        assert len({learner_slug(learner) for learner in learners}) == len(learners)
        assert RunSpec.from_json(made.spec.to_json()) == made.spec
