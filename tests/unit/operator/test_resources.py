"""
The children of a job.

`DILOCO_UPDATE_GOLDEN=1 pytest tests/unit/operator/test_resources.py` rewrites the golden files;
read their diff.
"""

import os
from pathlib import Path

import pytest

from diloco.spec import RunSpec
from diloco_agent import settings as pod_settings
from diloco_cli.render import NO_UID, to_yaml
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_syncer import settings as syncer_settings
from diloco_testing.manifests.files import load_job
from diloco_worker import settings as worker_settings

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/manifests"
EVERYTHING = ROOT / "tests/golden/everything.yaml"
TWO_REGIONS, OWN_LOOP = GOLDEN / "two-regions.job.yaml", GOLDEN / "own-loop.job.yaml"
SCOPE = OperatorScope(worker_image="diloco-worker:1", syncer_image="diloco-syncer:1")
OWNER = Owner(namespace="default", uid=NO_UID)
SECRET = "spec.tls={mode: Secret, secretName: certs}"


def children(source=EVERYTHING, sets=(), *, region="", **wanted):
    scope = OperatorScope(
        region=region, worker_image="diloco-worker:1", syncer_image="diloco-syncer:1"
    )
    return desired(load_job(source, sets), OWNER, scope, Wanted(**wanted))


def find(made, kind, name):
    (item,) = [item for item in made if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return item


def names(made):
    return [f"{item['kind']} {item['metadata']['name']}" for item in made]


def pod(workload):
    return workload["spec"]["template"]["spec"]


def main(workload):
    return next(item for item in pod(workload)["containers"] if item["name"] == "main")


def env(workload):
    return {item["name"]: item.get("value", "") for item in main(workload)["env"]}


def given(text):
    """A value of a pod's environment or command after Kubernetes expanded it."""
    return text.replace("$$", "$")


# ------------------------------------------------------------------------------ golden files


@pytest.mark.parametrize(
    ("golden", "source", "region"),
    [
        ("text", ROOT / "examples/01-text/job.yaml", ""),
        ("two-regions-eu", TWO_REGIONS, "eu"),
        ("two-regions-us", TWO_REGIONS, "us"),
        ("own-loop", OWN_LOOP, ""),
        ("shared-state", GOLDEN / "shared-state.job.yaml", ""),
        ("learner-storage", GOLDEN / "learner-storage.job.yaml", ""),
    ],
)
def test_the_children_are_these(golden, source, region):
    path = GOLDEN / f"{golden}.yaml"
    text = to_yaml(children(source, region=region))
    if os.environ.get("DILOCO_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


# ------------------------------------------------------------------------------ which there are


def test_one_operator_for_all_regions_keeps_everything():
    specs = [item for item in names(children()) if "-spec-" in item]
    assert len(specs) == 2
    assert [item for item in names(children()) if item not in specs] == [
        "ServiceAccount stdlib-gpt",
        "PersistentVolumeClaim stdlib-gpt-syncer",
        "Service stdlib-gpt-syncer",
        "Service stdlib-gpt-eu",
        "Service stdlib-gpt-us",
        "PodDisruptionBudget stdlib-gpt-eu",
        "PodDisruptionBudget stdlib-gpt-us",
        "Deployment stdlib-gpt-syncer",
        "Deployment stdlib-gpt-evaluator",
        "StatefulSet stdlib-gpt-eu",
        "StatefulSet stdlib-gpt-us",
    ]


def test_an_operator_without_the_syncer_keeps_its_learners_and_their_spec():
    made = children(TWO_REGIONS, region="us")
    assert [item for item in names(made) if "-spec-" not in item] == [
        "ServiceAccount wan",
        "Service wan-us",
        "PodDisruptionBudget wan-us",
        "StatefulSet wan-us",
    ]
    assert len(made) == 5


def test_a_region_that_is_not_in_the_job_gets_nothing():
    assert children(TWO_REGIONS, region="asia") == ()


def test_a_job_without_evaluation_has_no_evaluator():
    made = names(children(sets=["spec.evaluation.everySteps=5"]))
    assert "Deployment stdlib-gpt-evaluator" in made
    text = EVERYTHING.read_text().replace("evaluation: {everySteps: 50}", "")
    assert "Deployment stdlib-gpt-evaluator" not in names(children(text))


def test_the_certificate_of_cert_manager_covers_every_own_region():
    made = find(children(OWN_LOOP), "Certificate", "own-loop-tls")
    assert made["spec"]["uris"] == ["diloco://own-loop/region/eu"]
    assert made["spec"]["dnsNames"][0] == "own-loop-syncer"
    assert "server auth" in made["spec"]["usages"]
    assert made["spec"]["secretName"] == "own-loop-tls"
    assert made["spec"]["secretTemplate"] == {"labels": {"diloco.dev/job": "own-loop"}}


def test_a_certificate_far_from_the_syncer_has_no_host_names():
    tls = "spec.tls={mode: CertManager, issuerRef: {name: ca}}"
    off = "spec.learner.recovery=Checkpoint"
    made = find(children(TWO_REGIONS, [tls, off], region="us"), "Certificate", "wan-tls")
    assert made["spec"]["uris"] == ["diloco://wan/region/us"]
    assert "dnsNames" not in made["spec"]


def test_a_certificate_of_learners_that_answer_others_has_their_name_of_each_own_region():
    tls = "spec.tls={mode: CertManager, issuerRef: {name: ca}}"
    made = find(children(TWO_REGIONS, [tls], region="us"), "Certificate", "wan-tls")
    assert made["spec"]["dnsNames"] == ["us.wan-learners"]


# ------------------------------------------------------------------------------ what should run


def replicas(made):
    found = [item for item in made if item["kind"] in ("Deployment", "StatefulSet")]
    return {
        f"{item['kind']} {item['metadata']['name']}": item["spec"]["replicas"] for item in found
    }


def test_replicas_are_learners_times_pods_per_learner():
    assert replicas(children())["StatefulSet stdlib-gpt-eu"] == 2
    assert replicas(children(OWN_LOOP))["StatefulSet own-loop-eu"] == 16


@pytest.mark.parametrize(
    ("unwanted", "stopped"),
    [
        ("learners", {"StatefulSet stdlib-gpt-eu", "StatefulSet stdlib-gpt-us"}),
        ("syncer", {"Deployment stdlib-gpt-syncer"}),
        ("evaluator", {"Deployment stdlib-gpt-evaluator"}),
    ],
)
def test_a_stopped_component_keeps_its_workload_without_replicas(unwanted, stopped):
    running, now = replicas(children()), replicas(children(**{unwanted: False}))
    assert {name for name in running if now[name] == 0} == stopped
    assert all(now[name] == running[name] for name in running if name not in stopped)


def test_stopping_changes_replicas_and_nothing_else():
    running, now = children(), children(learners=False, syncer=False, evaluator=False)
    for item, other in zip(running, now, strict=True):
        for each in (item, other):
            each["metadata"]["annotations"].pop("diloco.dev/applied")
            each.get("spec", {}).pop("replicas", None)
        assert item == other


def test_without_the_volume_there_are_no_children():
    assert children(volume=False) == ()


def test_learners_without_a_syncer_address_do_not_run():
    assert replicas(children(region="us")) == {"StatefulSet stdlib-gpt-us": 0}


THREE_PODS = "spec.learner={command: [python, train.py], podsPerLearner: 3}"


@pytest.mark.parametrize(
    ("sets", "eu", "us"),
    [
        ([], 1, 1),
        (["spec.sync.quorum=4"], 1, 1),
        (["spec.regions[eu].learners=9", "spec.sync.quorum=4"], 5, 1),
        (["spec.regions[eu].learners=0"], 1, 1),
        (["spec.regions[us].learners=8", "spec.evaluation=null", THREE_PODS], 1, 7),
    ],
)
def test_drains_may_take_the_pods_beyond_the_quorum_shared_out_by_size(sets, eu, us):
    made = children(sets=sets)
    spare = [
        find(made, "PodDisruptionBudget", f"stdlib-gpt-{region}")["spec"]["maxUnavailable"]
        for region in ("eu", "us")
    ]
    assert spare == [eu, us]


# ------------------------------------------------------------------------------ the contract


def documents(made):
    return {
        item["metadata"]["name"]: item["data"]["spec.json"]
        for item in made
        if item["kind"] == "ConfigMap"
    }


def mounted_spec(made, workload):
    (volume,) = [item for item in pod(workload)["volumes"] if item["name"] == "spec"]
    return RunSpec.from_json(documents(made)[volume["configMap"]["name"]])


def test_syncer_and_evaluator_read_the_whole_spec_and_learners_one_with_the_same_hash():
    made = children()
    for kind, name in (("Deployment", "stdlib-gpt-syncer"), ("Deployment", "stdlib-gpt-evaluator")):
        whole = mounted_spec(made, find(made, kind, name))
        assert (whole.steps, whole.learners) == (2000, {"eu": 2, "us": 2})
    learner = mounted_spec(made, find(made, "StatefulSet", "stdlib-gpt-us"))
    assert learner != whole
    assert learner.hash == whole.hash


def test_learners_of_an_own_loop_know_the_regions_that_their_index_counts_by():
    made = children(OWN_LOOP)
    assert mounted_spec(made, find(made, "StatefulSet", "own-loop-eu")).learners == {"eu": 0}


def test_a_learner_reads_its_settings_from_the_pod():
    sets = [SECRET, "spec.regions[us].config={batch: 3, note: 'a $(HOME) $$ b'}"]
    workload = find(children(sets=sets), "StatefulSet", "stdlib-gpt-us")
    variables = {name: given(value) for name, value in env(workload).items()}
    read = worker_settings.from_env({**variables, "DILOCO_LEARNER": "us/1"})
    assert read is not None
    assert (read.job, read.syncer) == ("stdlib-gpt", "stdlib-gpt-syncer.default.svc:7070")
    assert (read.config["batch"], read.config["note"]) == (3, "a $(HOME) $$ b")
    assert read.config["layers"] == 4
    mounts = [item["mountPath"] for item in main(workload)["volumeMounts"]]
    assert {str(read.spec.parent), str(read.state), str(read.tls)} <= set(mounts)
    assert read.metrics_port == 9090


def test_dollars_of_the_manifest_reach_the_process_as_they_are():
    workload = find(children(OWN_LOOP), "StatefulSet", "own-loop-eu")
    assert "--price=$$(echo 5$$)" in main(workload)["args"]


def test_the_evaluator_reads_its_settings_from_the_pod():
    workload = find(children(), "Deployment", "stdlib-gpt-evaluator")
    variables = {name: given(value) for name, value in env(workload).items()}
    read = worker_settings.from_env(variables, observer=True)
    assert read is not None
    assert (read.learner, read.config["layers"]) == ("", 4)


def test_the_syncer_reads_its_settings_from_the_pod(monkeypatch):
    workload = find(children(sets=[SECRET]), "Deployment", "stdlib-gpt-syncer")
    for name, value in env(workload).items():
        monkeypatch.setenv(name, given(value))
    read = syncer_settings.read([])
    assert (read.listen, read.metrics_port) == ("0.0.0.0:7070", 9090)
    mounts = [item["mountPath"] for item in main(workload)["volumeMounts"]]
    assert {str(read.spec.parent), str(read.directory), str(read.tls)} <= set(mounts)


def test_the_first_process_gets_its_role_and_the_command():
    for name, kind, role, last in (
        ("stdlib-gpt-eu", "StatefulSet", "learner", "diloco_worker.recipes.gpt"),
        ("stdlib-gpt-syncer", "Deployment", "syncer", "diloco_syncer"),
        ("stdlib-gpt-evaluator", "Deployment", "evaluator", "diloco_worker.evaluator"),
    ):
        container = main(find(children(), kind, name))
        assert container["command"] == ["python3", "-m", "diloco_agent", role]
        assert container["args"] == ["--", "python", "-m", last]


def test_the_first_process_of_a_learner_gets_its_settings():
    variables = env(find(children(TWO_REGIONS, region="us"), "StatefulSet", "wan-us"))
    assert variables["DILOCO_SYNCER"] == "syncer.example.org:7070"
    assert variables["DILOCO_RESTART_LIMIT"] == "10"
    assert variables["DILOCO_REGION"] == "us"
    assert variables["DILOCO_PODS_PER_LEARNER"] == "1"
    assert {"DILOCO_POD", "DILOCO_POD_UID", "DILOCO_HEALTH_PORT"} <= variables.keys()
    assert "DILOCO_LEARNER" not in variables


@pytest.mark.parametrize("name", ["eu", "syncer", "evaluator"])
def test_the_first_process_reads_its_settings_from_the_pod(name):
    kind = "StatefulSet" if name == "eu" else "Deployment"
    longer = "{spec: {terminationGracePeriodSeconds: 300}}"
    sets = [f"spec.learner.podTemplate={longer}", f"spec.syncer.podTemplate={longer}"]
    for grace, made in (
        (30 if name == "evaluator" else 60, children()),
        (300, children(sets=sets)),
    ):
        workload = find(made, kind, f"stdlib-gpt-{name}")
        assert pod(workload)["terminationGracePeriodSeconds"] == grace
        container = main(workload)
        variables = {**env(workload), "DILOCO_POD": f"stdlib-gpt-{name}-1"}
        read = pod_settings.read([*container["command"][3:], *container["args"]], variables)
        assert read.name == ("eu/1" if name == "eu" else name)
        assert read.limits.leave_seconds == grace - 5
        assert read.json_logs
        probes = [container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness")]
        ports = {item["name"]: item["containerPort"] for item in container["ports"]}
        assert {ports[probe] for probe in probes} == {read.health_port}


def test_variables_of_the_user_do_not_take_the_place_of_ours():
    mine = "spec.learner.env=[{name: DILOCO_JOB, value: x}, {name: HOME, value: /mine}]"
    variables = env(find(children(sets=[mine]), "StatefulSet", "stdlib-gpt-eu"))
    assert (variables["DILOCO_JOB"], variables["HOME"]) == ("stdlib-gpt", "/mine")


def test_a_container_that_wrote_no_message_leaves_the_end_of_its_log():
    for workload in (
        child for child in children() if child["kind"] in ("StatefulSet", "Deployment")
    ):
        assert main(workload)["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_an_evaluator_takes_no_accelerator():
    made = children(TWO_REGIONS, region="eu")
    learner, evaluator = (
        main(find(made, "StatefulSet", "wan-eu"))["resources"]["limits"],
        main(find(made, "Deployment", "wan-evaluator"))["resources"]["limits"],
    )
    assert learner == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert evaluator == {"cpu": "4", "memory": "16Gi"}


def test_a_region_has_its_own_resources_instead_of_those_of_all_learners():
    made = find(children(TWO_REGIONS, region="us"), "StatefulSet", "wan-us")
    assert main(made)["resources"] == {"limits": {"cpu": "2", "memory": "8Gi"}}


def test_pods_are_laid_over_by_the_learners_template_then_by_the_regions():
    spec = pod(find(children(TWO_REGIONS, region="us"), "StatefulSet", "wan-us"))
    assert [item["key"] for item in spec["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert spec["nodeSelector"] == {"pool": "spot"}
    volumes = {item["name"]: item for item in spec["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "texts"}
    assert [item["mountPath"] for item in spec["containers"][0]["volumeMounts"]].count("/data") == 1


def test_the_contract_wins_over_the_users_template():
    mine = """spec.learner.podTemplate={
      metadata: {labels: {diloco.dev/job: x, mine: y}},
      spec: {
        volumes: [{name: spec, emptyDir: {}}, {name: tls, emptyDir: {}}],
        containers: [{
          name: main, command: [sh], args: [-c], env: [{name: DILOCO_SPEC, value: /x}],
          ports: [{name: mine, containerPort: 9090}, {name: other, containerPort: 80}],
          volumeMounts: [{name: x, mountPath: /etc/diloco/spec}],
          livenessProbe: {httpGet: {path: /mine, port: 1}, failureThreshold: 9}}]}}"""
    untouched = find(children(sets=[SECRET]), "StatefulSet", "stdlib-gpt-eu")
    made = find(children(sets=[SECRET, mine]), "StatefulSet", "stdlib-gpt-eu")
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert labels == {**untouched["spec"]["template"]["metadata"]["labels"], "mine": "y"}
    for field in ("command", "args", "volumeMounts"):
        assert {str(item) for item in main(made)[field]} == {
            str(item) for item in main(untouched)[field]
        }
    assert env(made) == env(untouched)
    volumes = {item["name"]: item for item in pod(made)["volumes"]}
    assert volumes == {item["name"]: item for item in pod(untouched)["volumes"]}
    ports = {item["name"]: item["containerPort"] for item in main(made)["ports"]}
    assert ports == {"peer": 7071, "metrics": 9090, "health": 8080, "other": 80}
    probe = main(made)["livenessProbe"]
    assert probe["httpGet"] == {"path": "/livez", "port": "health"}
    assert probe["failureThreshold"] == 9


def test_the_syncers_state_is_its_volume_despite_its_template():
    mine = "spec.syncer.podTemplate={spec: {volumes: [{name: state, emptyDir: {}}]}}"
    made = find(children(sets=[mine]), "Deployment", "stdlib-gpt-syncer")
    (state,) = [item for item in pod(made)["volumes"] if item["name"] == "state"]
    assert state == {
        "name": "state", "persistentVolumeClaim": {"claimName": "stdlib-gpt-syncer"},
    }  # fmt: skip


def test_the_pods_service_name_is_the_name_that_ranks_dial():
    made = children(OWN_LOOP)
    workload = find(made, "StatefulSet", "own-loop-eu")
    service = find(made, "Service", workload["spec"]["serviceName"])
    assert service["metadata"]["name"] == "own-loop-eu"
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        "None",
        True,
    )


@pytest.mark.parametrize(
    ("type_", "node_port", "want"),
    [("NodePort", 30070, 30070), ("NodePort", 0, None), ("ClusterIP", 30070, None)],
)
def test_a_node_port_is_set_for_type_node_port(type_, node_port, want):
    sets = [f"spec.syncer.service={{type: {type_}, nodePort: {node_port}}}"]
    (port,) = find(children(sets=sets), "Service", "stdlib-gpt-syncer")["spec"]["ports"]
    assert port.get("nodePort") == want
    assert (port["port"], port["targetPort"]) == (7070, "sync")


def test_the_service_of_the_syncer_has_the_families_of_the_manifest():
    sets = ["spec.syncer.service.ipFamilyPolicy=PreferDualStack"]
    spec = find(children(sets=sets), "Service", "stdlib-gpt-syncer")["spec"]
    assert spec["ipFamilyPolicy"] == "PreferDualStack"


def test_a_load_balancer_has_the_class_and_the_source_ranges_of_the_manifest():
    sets = [
        "spec.syncer.service={type: LoadBalancer, loadBalancerClass: example.com/inner, "
        "loadBalancerSourceRanges: [10.0.0.0/8]}"
    ]
    spec = find(children(sets=sets), "Service", "stdlib-gpt-syncer")["spec"]
    assert spec["loadBalancerClass"] == "example.com/inner"
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    plain = find(
        children(sets=["spec.syncer.service.type=LoadBalancer"]), "Service", "stdlib-gpt-syncer"
    )
    assert not {"loadBalancerClass", "loadBalancerSourceRanges"} & plain["spec"].keys()
    assert "ipFamilyPolicy" not in plain["spec"], "the cluster's default"


def test_pods_satisfy_the_restricted_pod_security_standard():
    for made in (children(), children(TWO_REGIONS, region="eu"), children(OWN_LOOP)):
        for workload in made:
            if workload["kind"] not in ("Deployment", "StatefulSet"):
                continue
            security = pod(workload)["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert main(workload)["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert pod(workload)["automountServiceAccountToken"] is False
