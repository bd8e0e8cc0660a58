"""Ports of the pods: two jobs in the network of one node do not share one."""

from pathlib import Path

from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_testing.manifests.files import load_job

GOLDEN = Path(__file__).parents[3] / "tests/golden"
EVERYTHING = GOLDEN / "everything.yaml"
OWN_LOOP = GOLDEN / "manifests/own-loop.job.yaml"
OWN_PORTS = (
    "spec.learner.ports={health: 18080, metrics: 19090, rendezvous: 29510, peer: 17071}",
    "spec.syncer.ports={health: 18081, metrics: 19091, sync: 17070}",
)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
EVALUATION = "spec.evaluation={everySteps: 5, ports: {health: 18082, metrics: 19092}}"


def made(source, *sets):
    scope = OperatorScope(worker_image="w:1", syncer_image="s:1")
    children = desired(load_job(source, sets), Owner(namespace="ml", uid="1"), scope, Wanted())
    return {(child["kind"], child["metadata"]["name"]): child for child in children}


def mains(children):
    """Name of a workload → its container."""
    return {
        name: child["spec"]["template"]["spec"]["containers"][0]
        for (kind, name), child in children.items()
        if kind in ("Deployment", "StatefulSet")
    }


def ports(main):
    return {port["name"]: port["containerPort"] for port in main["ports"]}


def variables(main):
    return {entry["name"]: entry.get("value") for entry in main["env"]}


def test_pods_without_ports_of_their_own_have_the_defaults():
    found = {name: ports(main) for name, main in mains(made(EVERYTHING)).items()}
    usual = {"metrics": 9090, "health": 8080}
    assert found == {
        "stdlib-gpt-eu": {"peer": 7071, **usual},
        "stdlib-gpt-us": {"peer": 7071, **usual},
        "stdlib-gpt-evaluator": usual,
        "stdlib-gpt-syncer": {"sync": 7070, **usual},
    }


def test_two_jobs_with_other_ports_share_no_port_of_a_node():
    usual, own = (mains(made(EVERYTHING, *sets)) for sets in ((), (*OWN_PORTS, EVALUATION)))
    taken, wanted = (
        {number for main in job.values() for number in ports(main).values()} for job in (usual, own)
    )
    assert not taken & wanted
    assert len(wanted) == 8, "nor do learners, syncer and evaluator of the job"


def test_the_programs_get_the_ports_that_the_containers_declare():
    found = mains(made(EVERYTHING, *OWN_PORTS, EVALUATION))
    for main in found.values():
        given = variables(main)
        assert given["DILOCO_METRICS_PORT"] == str(ports(main)["metrics"])
        assert given["DILOCO_HEALTH_PORT"] == str(ports(main)["health"])
        assert {main[probe]["httpGet"]["port"] for probe in PROBES} == {"health"}
    assert variables(found["stdlib-gpt-syncer"])["DILOCO_LISTEN"] == "0.0.0.0:17070"
    assert "DILOCO_RENDEZVOUS_PORT" not in variables(found["stdlib-gpt-eu"])
    assert variables(found["stdlib-gpt-eu"])["DILOCO_PEER"] == "0.0.0.0:17071"
    assert "DILOCO_PEER" not in variables(found["stdlib-gpt-evaluator"])


def test_the_services_lead_to_the_ports():
    children = made(EVERYTHING, *OWN_PORTS)
    metrics, peer = children["Service", "stdlib-gpt-eu"]["spec"]["ports"]
    assert (metrics["port"], metrics["targetPort"]) == (19090, "metrics")
    assert (peer["port"], peer["targetPort"]) == (17071, "peer")
    [sync] = children["Service", "stdlib-gpt-syncer"]["spec"]["ports"]
    assert (sync["port"], sync["targetPort"]) == (7070, "sync"), "what learners dial stays"


def test_the_rendezvous_of_several_pods_moves_with_the_other_ports():
    main = mains(made(OWN_LOOP, *OWN_PORTS))["own-loop-eu"]
    assert variables(main)["DILOCO_RENDEZVOUS_PORT"] == "29510"
    assert ports(main) == {"rendezvous": 29510, "metrics": 19090, "health": 18080}
    usual = mains(made(OWN_LOOP))["own-loop-eu"]
    assert ports(usual) == {"metrics": 9090, "health": 8080}


def port_names(children, name):
    return [port["name"] for port in children["Service", name]["spec"]["ports"]]


def test_learners_answer_each_other_only_if_the_job_wants_it_and_each_has_one_pod():
    off = made(EVERYTHING, "spec.learner.recovery=Checkpoint")
    assert "peer" not in ports(mains(off)["stdlib-gpt-eu"])
    assert "DILOCO_PEER" not in variables(mains(off)["stdlib-gpt-eu"])
    assert port_names(off, "stdlib-gpt-eu") == ["metrics"]
    several = made(OWN_LOOP)
    assert "DILOCO_PEER" not in variables(mains(several)["own-loop-eu"])
    assert port_names(several, "own-loop-eu") == ["metrics"]


def test_a_learner_in_the_network_of_its_node_shares_the_node_with_that_of_another_job():
    """A declared port would keep the second one Pending; so, it does not answer others if the port is taken."""
    children = made(EVERYTHING, "spec.regions[us].podTemplate.spec.hostNetwork=true")
    found = mains(children)
    assert "peer" not in ports(found["stdlib-gpt-us"])
    assert variables(found["stdlib-gpt-us"])["DILOCO_PEER"] == "0.0.0.0:7071"
    assert "peer" in ports(found["stdlib-gpt-eu"])


def test_the_cluster_of_a_learner_is_that_of_its_operator():
    assert "DILOCO_CLUSTER" not in variables(mains(made(EVERYTHING))["stdlib-gpt-eu"])
    scope = OperatorScope(worker_image="w:1", syncer_image="s:1", region="east")
    sets = (
        "spec.regions[eu].cluster=east",
        "spec.regions[us].cluster=east",
        "spec.evaluation=null",
    )
    job = load_job(EVERYTHING, sets)
    children = desired(job, Owner(namespace="ml", uid="1"), scope, Wanted())
    found = {c["metadata"]["name"]: c for c in children if c["kind"] == "StatefulSet"}
    for name in ("stdlib-gpt-eu", "stdlib-gpt-us"):
        main = found[name]["spec"]["template"]["spec"]["containers"][0]
        assert variables(main)["DILOCO_CLUSTER"] == "east"
