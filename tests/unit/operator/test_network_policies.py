"""The NetworkPolicies of a job: who may connect to which of its pods."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import NetworkPolicies
from diloco_operator.settings import from_env
from diloco_testing.kubernetes.operated_job import SCOPE, is_idle, training
from diloco_testing.manifests.files import load_job

EVERYTHING = Path(__file__).parents[3] / "tests/golden/everything.yaml"
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
WANTED = NetworkPolicies(operator_namespace="system", metrics_from=(MONITORING,))
ENDPOINT = ("spec.syncer.endpoint=a.b:7070", "spec.tls={mode: Secret, secretName: s}")
ENV = {"DILOCO_WORKER_IMAGE": "w", "DILOCO_SYNCER_IMAGE": "s"}


def made(sets=(), *, region="", wanted=WANTED):
    scope = replace(SCOPE, region=region, network_policies=wanted)
    owner = Owner(namespace="work", uid="7f")
    return desired(load_job(EVERYTHING, sets), owner, scope, Wanted())


def policies(sets=(), **options):
    return {
        item["metadata"]["name"]: item["spec"]
        for item in made(sets, **options)
        if item["kind"] == "NetworkPolicy"
    }


def pods(sets=()):
    """(labels, names of ports) of each kind of pod."""
    templates = [
        item["spec"]["template"]
        for item in made(sets)
        if item["kind"] in ("Deployment", "StatefulSet")
    ]
    return [
        (
            template["metadata"]["labels"],
            {port["name"] for port in template["spec"]["containers"][0]["ports"]},
        )
        for template in templates
    ]


def selects(selector, labels):
    """Whether a label selector selects these labels."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "NotIn"
        if labels.get(expression["key"]) in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def allows(sets, labels, port, peer_labels, namespace="work", wanted=WANTED):
    """Whether a pod with these labels accepts a connection, as a network would decide."""
    found = policies(sets, wanted=wanted).values()
    chosen = [spec for spec in found if selects(spec["podSelector"], labels)]
    assert chosen, "a pod that no policy selects accepts everything"
    for rule in (rule for spec in chosen for rule in spec["ingress"]):
        if "ports" in rule and port not in {entry["port"] for entry in rule["ports"]}:
            continue
        if "from" not in rule:
            return True
        for peer in rule["from"]:
            named = peer.get("namespaceSelector", {}).get("matchLabels", {})
            there = named.get("kubernetes.io/metadata.name", "work") == namespace
            if there and selects(peer.get("podSelector", {}), peer_labels):
                return True
    return False


OPERATOR = {"app.kubernetes.io/part-of": "diloco", "app.kubernetes.io/component": "operator"}
SYNCER, LEARNER, EVALUATOR = (
    {"diloco.dev/job": "stdlib-gpt", "diloco.dev/region": "eu", "diloco.dev/role": role}
    for role in ("syncer", "learner", "evaluator")
)
OUTSIDER = {"app": "other"}
OTHER_JOB = {"diloco.dev/job": "another", "diloco.dev/role": "learner"}


def test_there_are_none_unless_they_are_wanted():
    assert policies(wanted=None) == {}


def test_every_pod_of_a_job_is_selected_by_exactly_one():
    found = policies()
    assert found.keys() == {"stdlib-gpt-syncer", "stdlib-gpt-eu", "stdlib-gpt-us"}
    assert len(pods()) == 4
    for labels, _ in pods():
        assert sum(selects(spec["podSelector"], labels) for spec in found.values()) == 1


def test_every_port_that_a_policy_names_is_one_of_the_pod():
    for labels, ports in pods():
        for spec in policies().values():
            if selects(spec["podSelector"], labels):
                named = {p["port"] for rule in spec["ingress"] for p in rule.get("ports", ())}
                # The evaluator has the policy of the learners of its region, and answers none.
                answers = labels["diloco.dev/role"] == "learner"
                assert named <= ports | (set() if answers else {"peer"})


@pytest.mark.parametrize(
    ("peer", "namespace", "expected"),
    [
        (LEARNER, "work", True),
        (EVALUATOR, "work", True),
        (OPERATOR, "system", True),
        (OPERATOR, "elsewhere", False),
        (OUTSIDER, "work", False),
        (OTHER_JOB, "work", False),
        (LEARNER, "elsewhere", False),
    ],
)
def test_the_syncer_is_reached_by_its_job_and_by_the_operator_alone(peer, namespace, expected):
    assert allows((), SYNCER, "sync", peer, namespace) is expected


def test_a_syncer_with_an_endpoint_is_reached_by_other_clusters():
    assert allows(ENDPOINT, SYNCER, "sync", OUTSIDER, "elsewhere")


def test_a_syncer_is_reached_by_an_operator_that_has_the_address_of_its_node():
    """No selector of pods matches a pod in the network of its node."""
    on_node = replace(WANTED, operator_on_host_network=True)
    assert allows((), SYNCER, "sync", {}, "of a node", on_node)
    assert not allows((), LEARNER, "metrics", {}, "of a node", on_node)


@pytest.mark.parametrize("template", ["spec.learner", "spec.regions[us]"])
def test_a_syncer_is_reached_by_learners_that_have_the_addresses_of_their_nodes(template):
    sets = (f"{template}.podTemplate.spec.hostNetwork=true",)
    assert allows(sets, SYNCER, "sync", {}, "of a node")
    assert not allows((f"{template}.podTemplate.spec.hostNetwork=false",), SYNCER, "sync", {}, "x")


@pytest.mark.parametrize(
    "pod", [SYNCER, LEARNER, EVALUATOR], ids=["syncer", "learner", "evaluator"]
)
def test_metrics_are_read_by_those_who_may_and_probes_by_the_kubelet(pod):
    assert allows((), pod, "metrics", OUTSIDER, "monitoring")
    assert not allows((), pod, "metrics", OUTSIDER, "work")
    assert allows((), pod, "health", {}, "anywhere")


def test_without_named_peers_every_pod_reads_metrics():
    found = policies(wanted=NetworkPolicies(operator_namespace="system"))
    for spec in found.values():
        (rule,) = [r for r in spec["ingress"] if r.get("ports", [{}])[0].get("port") == "metrics"]
        assert "from" not in rule


def test_only_pods_of_one_region_reach_each_other_and_only_if_a_learner_has_several():
    several = (
        "spec.learner={command: [python, train.py], podsPerLearner: 2}",
        "spec.evaluation={everySteps: 5, command: [y]}",
    )
    other_region = {**LEARNER, "diloco.dev/region": "us"}
    assert not allows((), LEARNER, "rendezvous", LEARNER)
    assert allows(several, LEARNER, "rendezvous", LEARNER)
    assert not allows(several, LEARNER, "rendezvous", other_region)
    assert not allows(several, LEARNER, "rendezvous", OUTSIDER)


@pytest.mark.parametrize(
    ("peer", "namespace", "expected"),
    [
        (LEARNER, "work", True),
        ({**LEARNER, "diloco.dev/region": "us"}, "work", True),
        (EVALUATOR, "work", False),
        (SYNCER, "work", False),
        (OPERATOR, "system", False),
        (OUTSIDER, "work", False),
        (OTHER_JOB, "work", False),
        (LEARNER, "elsewhere", False),
    ],
)
def test_learners_are_asked_for_their_state_by_the_learners_of_their_job_alone(
    peer, namespace, expected
):
    assert allows((), LEARNER, "peer", peer, namespace) is expected
    off = ("spec.learner.recovery=Checkpoint",)
    assert not allows(off, LEARNER, "peer", peer, namespace)


def test_learners_with_the_addresses_of_their_nodes_may_ask_others():
    sets = ("spec.regions[us].podTemplate.spec.hostNetwork=true",)
    assert allows(sets, LEARNER, "peer", {}, "of a node")


def test_each_operator_keeps_the_policies_of_its_own_regions():
    assert policies(ENDPOINT, region="us").keys() == {"stdlib-gpt-us"}
    assert policies(ENDPOINT, region="eu").keys() == {"stdlib-gpt-syncer", "stdlib-gpt-eu"}


def test_they_come_to_a_running_job_and_go_with_a_region_without_a_restart():
    world = training()
    before = {name: pod["spec"] for name, pod in world.pods.items()}
    world.scope = replace(world.scope, network_policies=WANTED)
    world.settle()
    names = {name for kind, name in world.children if kind == "NetworkPolicy"}
    assert names == {"a-syncer", "a-eu", "a-us"}
    assert {name: pod["spec"] for name, pod in world.pods.items()} == before
    assert is_idle(world.reconcile(30))
    world.change(regions=[{"name": "eu", "learners": 2}])
    world.settle()
    names = {name for kind, name in world.children if kind == "NetworkPolicy"}
    assert names == {"a-syncer", "a-eu"}


def test_the_setting_is_read():
    assert from_env(ENV).scope.network_policies is None
    text = '{"operatorNamespace": "system", "metricsFrom": [{"podSelector": {}}]}'
    found = from_env(ENV | {"DILOCO_NETWORK_POLICIES": text}).scope.network_policies
    expected = NetworkPolicies(operator_namespace="system", metrics_from=({"podSelector": {}},))
    assert found == expected
    text = '{"operatorNamespace": "system", "operatorOnHostNetwork": true}'
    found = from_env(ENV | {"DILOCO_NETWORK_POLICIES": text}).scope.network_policies
    assert found == NetworkPolicies(operator_namespace="system", operator_on_host_network=True)


@pytest.mark.parametrize(
    "text", ["[]", '{"metricsFrom": []}', '{"operatorNamespace": "a", "metricsFrom": 1}']
)
def test_a_setting_that_cannot_be_carried_out_is_reported(text):
    with pytest.raises(ConfigError, match="DILOCO_NETWORK_POLICIES"):
        from_env(ENV | {"DILOCO_NETWORK_POLICIES": text})
