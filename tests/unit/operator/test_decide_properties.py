"""Properties of `decide` for every job: it never raises, and its decisions leave nothing to do."""

import copy
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_job.reasons import CONDITIONS
from diloco_job.status_types import Status
from diloco_operator.state.observation import Answer, LearnerAnswer, Refusal, Unreachable
from diloco_operator.state.stored_job import StoredJob, managed_by
from diloco_testing.kubernetes.operated_job import (
    SCOPE,
    OperatedJob,
    certificate,
    is_idle,
    main_of,
    manifest,
    set_ready,
)
from diloco_testing.properties import examples

SLOWLY = settings(suppress_health_check=[HealthCheck.too_slow])

# ------------------------------------------------------------------------------ jobs

REGIONS = ("eu", "us", "asia")

regions = st.lists(st.sampled_from(REGIONS), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.tuples(
        *(
            st.fixed_dictionaries(
                {"name": st.just(name), "learners": st.sampled_from([2, 0, 1, 3])}
            )
            for name in names
        )
    ).map(list)
)
policies = st.fixed_dictionaries(
    {},
    optional={
        "suspend": st.booleans(),
        "ttlSecondsAfterFinished": st.sampled_from([0, 50, 10**6]),
        "activeDeadlineSeconds": st.sampled_from([0, 50, 10**6]),
        "learnerRestartLimit": st.integers(0, 3),
        "cleanupPolicy": st.sampled_from(["None", "Running", "All"]),
    },
)
pod_templates = st.sampled_from(
    [
        {},
        {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {"gpu": "yes"}}},
        {
            "spec": {
                "tolerations": [{"key": "spot"}],
                "containers": [{"name": "side", "image": "x"}],
            }
        },
        {"spec": {"containers": [{"name": "main", "env": [{"name": "X", "value": ""}]}]}},
    ]
)
programs = st.sampled_from([
    {"recipe": {"name": "gpt", "config": {}}},
    {"command": ["python", "train.py"], "podsPerLearner": 2},
])  # fmt: skip
learner_fields = st.fixed_dictionaries(
    {},
    optional={
        "env": st.just([{"name": "A", "value": "1"}, {"name": "EMPTY", "value": ""}]),
        "resources": st.just({"requests": {"cpu": 1, "memory": "1024Mi"}, "limits": {"x/gpu": 2}}),
        "podTemplate": pod_templates,
    },
)
learner = st.builds(lambda program, fields: {**program, **fields}, programs, learner_fields)
syncers = st.fixed_dictionaries(
    {},
    optional={
        "endpoint": st.sampled_from(["", "sync.example.org:7070"]),
        "service": st.fixed_dictionaries({"type": st.sampled_from(["ClusterIP", "LoadBalancer"])}),
    },
)
specs = st.fixed_dictionaries(
    {
        "regions": regions,
        "runPolicy": policies,
        "learner": learner,
        "syncer": syncers,
        "steps": st.sampled_from([1, 100, 2000]),
        "tls": st.just({"mode": "Secret", "secretName": "s"}),
        "evaluation": st.sampled_from([None, {"everySteps": 5, "command": ["python", "eval.py"]}]),
    }
)
scopes = st.sampled_from([SCOPE, *(replace(SCOPE, region=name) for name in REGIONS)])

answers = st.builds(
    dict,
    state=st.sampled_from(["Initialising", "Waiting", "Training", "Complete"]),
    step=st.sampled_from([0, 1, 99, 100, 2000]),
    seconds_since_merge=st.sampled_from([-1.0, 0.0, 3.7]),
    gone=st.sampled_from([(), ("eu/0",), ("us/0", "us/1")]),
    epoch=st.integers(0, 3),
    eval_step=st.sampled_from([0, 2000]),
)
asked = st.one_of(st.none(), answers, st.sampled_from(["DialTimeout", "HandshakeRefused", "Odd"]))
histories = st.lists(
    st.tuples(asked, st.sampled_from([0.0, 1.0, 29.0, 60.0, 400.0]), st.booleans()), max_size=5
)


def observe(world: OperatedJob, what) -> None:
    world.syncer = None
    if isinstance(what, dict):
        world.answers(**what)
    elif what:
        world.syncer = Unreachable(reason=what, message="odd")


# ------------------------------------------------------------------------------ steady


@SLOWLY
@given(spec=specs, scope=scopes, events=histories)
def test_after_the_decisions_are_carried_out_nothing_is_left_to_decide(spec, scope, events):
    spec["sync"] = {"quorum": 1}
    world = OperatedJob(job=manifest(**spec), scope=scope, certificate=certificate("a", "eu"))
    for what, seconds, ready in events:
        if StoredJob.parse(world.job).job is not None:
            observe(world, what)
        world.reconcile(seconds)
        world.run_controllers(ready=lambda pod, ready=ready: ready)
    world.settle()
    again = world.decide()
    assert is_idle(again)
    assert 1 <= again.requeue_seconds <= 300


@SLOWLY
@given(spec=specs, scope=scopes, events=histories)
def test_the_status_always_matches_the_crd(spec, scope, events):
    spec["sync"] = {"quorum": 1}
    world = OperatedJob(job=manifest(**spec), scope=scope)
    for what, seconds, ready in [(None, 0.0, False), *events]:
        if StoredJob.parse(world.job).job is not None:
            observe(world, what)
        world.reconcile(seconds)
        world.run_controllers(ready=lambda pod, ready=ready: ready)
        Status.model_validate(world.status)
        assert [condition["type"] for condition in world.status["conditions"]] == list(CONDITIONS)
        ends = [
            kind for kind in ("Suspended", "Complete", "Failed") if world.reason(kind)[0] == "True"
        ]
        assert len(ends) <= 1
        assert world.status["state"] in (ends or ("Pending", "Starting", "Training", "Degraded"))


@SLOWLY
@given(spec=specs, cut=st.integers(0, 30))
def test_an_operator_that_is_killed_between_any_two_writes_reaches_the_same_state(spec, cut):
    spec["sync"] = {"quorum": 1}
    spec["runPolicy"].pop("activeDeadlineSeconds", None)
    calm = OperatedJob(job=manifest(**copy.deepcopy(spec)))
    killed = OperatedJob(job=manifest(**copy.deepcopy(spec)))
    if StoredJob.parse(calm.job).job is None:
        return
    for world in (calm, killed):
        world.settle()
        world.change(steps=spec["steps"] + 1)
    # Some writes of the reconcile succeed, but not the status.
    decisions = killed.decide()
    for wanted in decisions.apply[:cut]:
        killed.apply(wanted)
    killed.run_controllers()
    for world in (calm, killed):
        world.settle()
    assert killed.replicas() == calm.replicas()
    assert set(killed.children) == set(calm.children)
    assert [
        (condition["type"], condition["status"]) for condition in killed.status["conditions"]
    ] == [(condition["type"], condition["status"]) for condition in calm.status["conditions"]]


# ------------------------------------------------------------------------------ any job

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(["name", "value", "containers"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*path, index))


EVERYTHING = manifest(
    seed=7,
    sync={"quorum": 2, "fragments": 4, "interval": 8, "overlap": 2, "averageParameters": ["x"],
          "outer": {"learningRate": "0.7"}, "grace": {"safety": "0.5"}, "wire": {"up": "Int8"}},
    learner={"recipe": {"name": "gpt", "config": {"layers": 2}}, "image": "", "podsPerLearner": 1,
             "env": [{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"fieldRef": {}}}],
             "resources": {"requests": {"cpu": "500m"}, "limits": {"gpu": 1}},
             "podTemplate": {"metadata": {"labels": {"a": "b"}},
                             "spec": {"containers": [{"name": "main", "env": [{"name": "C"}]}],
                                      "volumes": [{"name": "state", "emptyDir": {}}],
                                      "tolerations": [{"key": "x"}]}}},
    syncer={"region": "eu", "endpoint": "a.b:1", "service": {"type": "NodePort", "port": 1},
            "storage": {"size": "1Gi"}, "podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
    evaluation={"everySteps": 5},
    tls={"mode": "CertManager", "issuerRef": {"name": "ca"}},
    runPolicy={"suspend": False, "ttlSecondsAfterFinished": 5, "activeDeadlineSeconds": 5,
               "learnerRestartLimit": 1, "cleanupPolicy": "All", "managedBy": ""},
)  # fmt: skip
PLACES = sorted((path for path in paths(EVERYTHING["spec"])), key=repr)


@settings(max_examples=examples(300))
@given(changed=st.lists(st.tuples(st.sampled_from(PLACES), json_values), max_size=3), scope=scopes)
def test_any_spec_gives_children_or_a_clear_condition(changed, scope):
    job = copy.deepcopy(EVERYTHING)
    for path, value in changed:
        place = job["spec"]
        try:
            for key in path[:-1]:
                place = place[key]
            if path:
                place[path[-1]] = copy.deepcopy(value)
            else:
                job["spec"] = value
        except (KeyError, IndexError, TypeError):
            pass  # an earlier change removed the place
    world = OperatedJob(job=job, scope=scope)
    decisions = world.reconcile()
    if managed_by(job):
        assert is_idle(decisions)
        return
    assert world.condition("Accepted")["status"] in ("True", "False")
    if world.refusals:
        assert world.condition("Accepted")["status"] == "False"
    world.run_controllers()
    world.reconcile()
    if not decisions.apply:
        assert world.condition("Accepted")["status"] == "False" or world.status["state"] == "Failed"
        assert world.condition("Accepted")["message"]


@settings(max_examples=examples(200))
@given(status=json_values, syncer=st.sampled_from(["answer", "unreachable", "none"]))
def test_any_status_may_stand_there(status, syncer):
    world = OperatedJob()
    world.reconcile()
    world.run_controllers()
    world.job["status"] = {
        "conditions": [status],
        "regions": [status],
        "step": status,
        "syncer": status,
    }
    world.job["status"] |= {"lastSyncTime": status, "startTime": status, "model": status}
    if syncer == "answer":
        world.answers()
    elif syncer == "unreachable":
        world.becomes_unreachable()
    world.reconcile()
    assert len(world.status["conditions"]) == len(CONDITIONS)


@pytest.mark.parametrize(
    "scope", [SCOPE, replace(SCOPE, region="us"), replace(SCOPE, region="mars")]
)
def test_pods_of_every_shape_are_accepted(scope):
    world = OperatedJob(scope=scope)
    world.settle()
    shapes = [
        {}, {"phase": "Pending"}, {"phase": "Failed", "reason": "Evicted"}, {"conditions": []},
        {"containerStatuses": [{"name": "main"}]}, {"containerStatuses": [{"name": "main", "state": {}}]},
        {"containerStatuses": [{"name": "main", "state": {"terminated": {}}, "lastState": {}}]},
        {"containerStatuses": [{"name": "main", "lastState": {"terminated": {"exitCode": 1, "message": "[]"}}}]},
        {"initContainerStatuses": [{"name": "init", "state": {"waiting": {"reason": "Odd"}}}]},
    ]  # fmt: skip
    for shape in shapes:
        for pod in world.pods.values():
            pod["status"] = copy.deepcopy(shape)
        world.reconcile()
        assert len(world.status["conditions"]) == len(CONDITIONS)


def test_an_answer_with_unknown_learners_is_accepted():
    world = OperatedJob()
    world.settle()
    unknown = tuple(
        LearnerAnswer(name=name, state="Training") for name in ("", "x", "eu/9", "mars/0")
    )
    world.syncer = Answer(at=world.now, learners=unknown)
    world.reconcile()
    assert world.status["learners"]["training"] == 0


def test_two_refusals_are_both_reported():
    world = OperatedJob(
        refusals=(Refusal(child="A a", message="x"), Refusal(child="B b", message="y"))
    )
    world.reconcile()
    assert world.condition("Accepted")["message"] == "the API server did not accept A a: x; B b: y"


def test_the_message_of_a_pod_does_not_flap_with_its_back_off():
    world = OperatedJob()
    world.settle()
    pod = world.pod("a-eu-0")
    set_ready(pod, False)
    writes = 0
    for seconds in (10, 20, 40, 80):
        main_of(pod)["state"] = {
            "waiting": {"reason": "CrashLoopBackOff", "message": f"back-off {seconds}s"}
        }
        writes += world.reconcile().status is not None
    assert writes == 1
