"""The chart as helm renders it. Without helm, only the tests run that do not need it."""

import base64
import json
import re
from itertools import pairwise
from typing import Any

import pytest
import yaml

from diloco.runtime.metric_table import METRICS
from diloco_job.reasons import REASONS
from diloco_testing.charts import (
    CHART,
    EVERYTHING,
    OLDEST,
    ROOT,
    helm,
    installed,
    is_test,
    only,
    render,
    sets,
)

pytestmark = pytest.mark.slow  # each starts helm

VALUES_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


def granted(rules: list[Any]) -> dict[str, set[str]]:
    """ "group/resource" → verbs."""
    return {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def operator_container(*arguments: str) -> Any:
    return only(render(*arguments), "Deployment")["spec"]["template"]["spec"]["containers"][0]


def operator_env(*arguments: str) -> dict[str, str]:
    return {
        variable["name"]: variable.get("value")
        for variable in operator_container(*arguments)["env"]
    }


# Values and schema


def closed_keys(schema: Any, path: str = "") -> set[str]:
    keys = set()
    for name, below in schema["properties"].items():
        keys.add(path + name)
        if "properties" in below:
            keys |= closed_keys(below, f"{path}{name}.")
    return keys


def value_keys(values: Any, schema: Any, path: str = "") -> set[str]:
    keys = set()
    for name, value in values.items():
        keys.add(path + name)
        below = schema["properties"].get(name, {})
        if isinstance(value, dict) and "properties" in below:
            keys |= value_keys(value, below, f"{path}{name}.")
    return keys


def test_the_schema_has_exactly_the_values():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    optional = {
        f"{probe}.{field}"
        for probe in ("livenessProbe", "startupProbe")
        for field in ("initialDelaySeconds", "successThreshold")
    }
    assert value_keys(values, schema) == closed_keys(schema) - optional


def test_every_object_of_the_schema_refuses_unknown_keys_but_global_and_pass_through():
    schema = json.loads((CHART / "values.schema.json").read_text())
    open_ones = {
        name
        for name, below in schema["properties"].items()
        if below["type"] == "object" and "additionalProperties" not in below
    }
    assert not schema["additionalProperties"]
    passed_through = {"resources", "podSecurityContext", "securityContext", "affinity"}
    assert open_ones == passed_through | {"global"}


def test_every_value_is_described():
    lines = (CHART / "values.yaml").read_text().splitlines()
    silent = [
        line
        for before, line in pairwise(lines)
        # a key with a value on its line, or the first of a passed-through block
        if re.match(r" *[a-zA-Z]+: \S", line)
        and not re.match(r" *# -- ", before)
        and not re.match(r"  (requests|limits|runAs|fsGroup|seccomp|allow|readOnly|capa)", line)
    ]
    assert silent == []


@pytest.mark.parametrize("values", VALUES_FILES, ids=lambda path: path.stem)
def test_lints(values):
    done = helm("lint", "--strict", "--kube-version", OLDEST, str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"regoin": {"name": "eu"}},
        {"region": {"name": "Europe"}},
        {"region": {"name": "syncer"}},
        {"images": {"worker": {"digest": "sha256:12"}}},
        {"images": {"pullPolicy": "Sometimes"}},
        {"watchNamespaces": "default"},
        {"resyncSeconds": 0},
        {"replicas": "2"},
        {"forbiddenPodFields": ["host network"]},
        {"jobs": {"labels": {"diloco.dev/job": "another"}}},
        {"jobs": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
        {"jobs": {"labels": {"team": "a team"}}},
        {"jobs": {"inheritLabels": ["*"]}},
        {"jobs": {"inheritAnnotations": ["diloco.dev/"]}},
        {"networkPolicy": {"syncerPorts": [0]}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(wrong):
    done = helm("template", "x", str(CHART), "--kube-version", OLDEST, *sets(**wrong))
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


# What is written about it


def test_the_operations_guide_covers_every_warning():
    guide = (ROOT / "docs" / "operations.md").read_text()
    section = guide.partition("## What the conditions mean")[2].partition("\n## ")[0]
    warned = {(row.condition, row.reason) for row in REASONS if row.event == "Warning"}
    assert {reason for _, reason in warned if not re.search(rf"\b{reason}\b", section)} == set()


def test_the_operations_guide_names_every_alert():
    guide = (ROOT / "docs" / "operations.md").read_text()
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    described = set(re.findall(r"^\| (Diloco\w+) \|", guide, re.M))
    assert described == {alert["alert"] for alert in alerts}


def test_the_alerts_name_a_section_of_the_operations_guide():
    guide = (ROOT / "docs" / "operations.md").read_text()
    named = re.findall(
        r'docs/operations.md, "(.+?)"', (CHART / "files" / "alerts.yaml").read_text()
    )
    assert named
    assert all(f"## {section}\n" in guide for section in named)


def test_no_alert_waits_for_a_change_of_a_gauge():
    """A series of jobs by state first appears with its value: its delta is 0."""
    text = (CHART / "files" / "alerts.yaml").read_text()
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert not re.search(r"\bi?delta\(", text)
    for name in re.findall(r"\b(?:increase|rate)\((diloco_[a-z_]+)", text):
        assert kinds.get(name) != "gauge", name


# What is installed


def test_the_defaults_need_nothing_but_kubernetes():
    kinds = sorted(item["kind"] for item in installed(render()))
    assert kinds == [
        "ClusterRole", "ClusterRole", "ClusterRole", "ClusterRole", "ClusterRoleBinding",
        "CustomResourceDefinition", "Deployment", "Role", "RoleBinding", "Service", "ServiceAccount",
    ]  # fmt: skip


def test_everything_can_be_switched_on():
    kinds = {item["kind"] for item in render("--values", str(EVERYTHING))}
    assert {"ServiceMonitor", "PodMonitor", "PrometheusRule", "NetworkPolicy", "ConfigMap"} <= kinds


def test_the_crd_is_the_generated_one_and_stays_after_an_uninstall():
    generated = yaml.load((CHART / "files" / "crd.yaml").read_text(), yaml.CSafeLoader)
    crd = only(render(), "CustomResourceDefinition")
    assert crd["spec"] == generated["spec"]
    assert crd["metadata"]["name"] == generated["metadata"]["name"]
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_crd_can_be_removed_with_the_release_or_left_out():
    crd = only(render(*sets(crds__keep=False)), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in crd["metadata"].get("annotations", {})
    kinds = {item["kind"] for item in render(*sets(crds__install=False))}
    assert "CustomResourceDefinition" not in kinds


def test_two_regions_in_one_cluster_share_no_object():
    def names(region: str, namespace: str, **more: object) -> set[tuple[str, str, str]]:
        flags = sets(region__name=region, **more)
        return {
            (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])
            for item in render(*flags, release=f"diloco-{region}", namespace=namespace)
        }

    first = names("eu", "system")
    for namespace in ("system", "other"):
        assert not first & names("us", namespace, crds__install=False)
    assert not first & names("eu", "other", crds__install=False), "same release, other namespace"


def test_every_object_has_the_standard_labels():
    for item in render("--values", str(EVERYTHING)):
        assert {
            "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/version",
            "app.kubernetes.io/component", "app.kubernetes.io/part-of",
            "app.kubernetes.io/managed-by", "helm.sh/chart",
        } <= item["metadata"]["labels"].keys(), item["kind"]  # fmt: skip


# Rights

CHILD = {"get", "list", "watch", "create", "patch", "delete"}
RIGHTS = {
    "diloco.dev/dilocojobs": {"get", "list", "watch", "delete"},
    "diloco.dev/dilocojobs/status": {"patch"},
    "diloco.dev/dilocojobs/finalizers": {"update"},
    "apps/statefulsets": CHILD,
    "apps/deployments": CHILD,
    "/services": CHILD,
    "/configmaps": CHILD,
    "/persistentvolumeclaims": CHILD,
    "/serviceaccounts": CHILD,
    "policy/poddisruptionbudgets": CHILD,
    "/pods": {"list", "watch", "patch", "delete"},
    "/events": {"list", "create"},
    "kueue.x-k8s.io/workloads": {"list"},
}


def operator_role(*arguments: str) -> Any:
    return next(
        item
        for item in installed(render(*arguments))
        if item["kind"] in ("ClusterRole", "Role")
        and not any("aggregate-to" in label for label in item["metadata"]["labels"])
        and not item["metadata"]["name"].endswith(LEASE)
    )


LEASE = "-leader-election"
"""End of the name of the Role for the operator's own Lease."""


def test_the_operator_may_do_what_it_does_and_nothing_else():
    assert granted(operator_role()["rules"]) == RIGHTS


def test_secrets_and_certificates_are_only_opened_on_request():
    more = granted(operator_role(*sets(rbac__tlsSecrets=True))["rules"])
    assert more == RIGHTS | {"/secrets": {"get"}}
    more = granted(operator_role(*sets(rbac__certManager=True))["rules"])
    assert more.keys() - RIGHTS.keys() == {"cert-manager.io/certificates"}
    both = sets(rbac__certManager=True, rbac__tlsSecrets=True)
    assert granted(operator_role(*both)["rules"])["/secrets"] == {"get", "patch", "delete"}
    objects = installed(render(*sets(rbac__certManager=True, rbac__tlsSecretNamespaces=["b"])))
    opened = [rights["/secrets"] for item in objects
              if "/secrets" in (rights := granted(item.get("rules") or []))]  # fmt: skip
    assert opened == [{"get", "patch", "delete"}]


@pytest.mark.parametrize("watched", [[], ["a", "b"]], ids=["everywhere", "in named namespaces"])
def test_secrets_are_readable_in_the_namespaces_of_jobs_with_tls_and_nowhere_else(watched):
    objects = installed(
        render(*sets(rbac__tlsSecretNamespaces=["b", "b"], watchNamespaces=watched))
    )
    readable = [
        item["metadata"] for item in objects if "/secrets" in granted(item.get("rules") or [])
    ]
    assert [(item["namespace"], item["name"]) for item in readable] == [("b", "diloco:system:tls")]
    role = next(item for item in objects if item["metadata"] == readable[0])
    assert granted(role["rules"]) == {"/secrets": {"get"}}
    (binding,) = [
        item
        for item in objects
        if item["kind"] == "RoleBinding" and item["roleRef"]["name"] == readable[0]["name"]
    ]
    assert binding["metadata"]["namespace"] == "b"
    assert binding["subjects"][0]["name"] == only(objects, "ServiceAccount")["metadata"]["name"]


def test_every_right_is_explained_in_the_security_guide():
    """One row of docs/security.md for each right that some values grant, and no other rows."""
    guide = (ROOT / "docs" / "security.md").read_text()
    section = guide.partition("## What the operator may do")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(.+?)` \| ([a-z, ]+) \|", section, re.M))
    every = {"rbac__tlsSecrets": True, "rbac__certManager": True, "rbac__podGroups": True}
    role = operator_role(*sets(jobs__networkPolicy__enabled=True, **every))
    rights = {key.removeprefix("/"): verbs for key, verbs in granted(role["rules"]).items()}
    assert {key: set(verbs.split(", ")) for key, verbs in rows.items()} == rights


def test_network_policies_of_jobs_are_only_a_right_where_they_are_wanted():
    more = granted(operator_role(*sets(jobs__networkPolicy__enabled=True))["rules"])
    assert more.pop("networking.k8s.io/networkpolicies") == CHILD - {"watch"}
    assert more == RIGHTS
    assert operator_env()["DILOCO_NETWORK_POLICIES"] in ("", None)


def test_with_named_namespaces_nothing_is_granted_elsewhere():
    flags = sets(
        watchNamespaces=["a", "b"], crds__install=False, rbac__aggregate=False, region__name="eu"
    )
    objects = render(*flags)
    assert {item["metadata"].get("namespace") for item in objects} == {"system", "a", "b"}
    roles = [item for item in objects if item["kind"] == "Role" and not is_test(item)]
    (election,) = (role for role in roles if role["metadata"]["name"].endswith(LEASE))
    roles.remove(election)
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    assert all(granted(role["rules"]) == RIGHTS for role in roles)
    account = only(objects, "ServiceAccount")["metadata"]
    for binding in (x for x in objects if x["kind"] == "RoleBinding" and not is_test(x)):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": "system"}
        ]


def test_the_clusters_own_roles_learn_about_jobs():
    added = {
        label.rpartition("-")[2]: granted(item["rules"])
        for item in render()
        if item["kind"] == "ClusterRole"
        for label in item["metadata"]["labels"]
        if "aggregate-to" in label
    }
    assert added.keys() == {"view", "edit", "admin"}
    assert added["view"]["diloco.dev/dilocojobs"] == {"get", "list", "watch"}
    for role in ("edit", "admin"):
        assert {"create", "patch", "delete"} <= added[role]["diloco.dev/dilocojobs"]
    assert all(rights["diloco.dev/dilocojobs/status"] == {"get"} for rights in added.values())


# The operator's pod


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_are_restricted(kind):
    for values in ((), ("--values", str(EVERYTHING))):
        item = next(x for x in render(*values) if x["kind"] == kind)
        pod = item["spec"] if kind == "Pod" else item["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_the_operator_has_rights_on_no_lease_but_its_own():
    objects = render(*sets(watchNamespaces=["a"], fullnameOverride="own"))
    role = next(x for x in objects if x["metadata"]["name"] == "own" + LEASE)
    assert role["metadata"]["namespace"] == "system"
    assert role["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["own"],
            "verbs": ["get", "create", "update"],
        }
    ]
    flags = sets(watchNamespaces=["a"], fullnameOverride="own")
    assert operator_env(*flags)["DILOCO_INSTALLATION"] == "system/own"
    everywhere = json.dumps([x["rules"] for x in objects if x is not role and "rules" in x])
    assert "leases" not in everywhere


def test_operators_are_rolled_because_a_lease_decides_which_one_writes():
    for replicas in (1, 2):
        spec = only(render(*sets(replicas=replicas)), "Deployment")["spec"]
        assert (spec["replicas"], spec["strategy"]) == (replicas, {"type": "RollingUpdate"})


def test_what_selects_the_operator_never_changes():
    plain = only(render(), "Deployment")["spec"]["selector"]
    changed = sets(commonLabels={"a": "b"}, podLabels={"c": "d"}, images__operator__tag="9")
    assert plain == only(render(*changed), "Deployment")["spec"]["selector"]
    assert plain["matchLabels"].keys() == {
        f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
    }
    pod = only(render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert plain["matchLabels"].items() <= pod.items()
    assert only(render(), "Service")["spec"]["selector"] == plain["matchLabels"]


def test_every_switch_reaches_the_operator():
    env = operator_env("--values", str(EVERYTHING))
    assert {key: value for key, value in env.items() if key.startswith("DILOCO_")} == {
        "DILOCO_INSTALLATION": "system/diloco",
        "DILOCO_REGION": "eu",
        "DILOCO_WATCH_NAMESPACES": "research,production",
        "DILOCO_WORKER_IMAGE": "registry.example.com/team/own-worker:7",
        "DILOCO_SYNCER_IMAGE": "registry.example.com/team/diloco-syncer:1.2.3",
        "DILOCO_IMAGE_PULL_POLICY": "Always",
        "DILOCO_IMAGE_PULL_SECRETS": "registry",
        "DILOCO_SYNCER_PROXY": "http://proxy.example.com:3128",
        "DILOCO_CLUSTER_DOMAIN": "example.internal",
        "DILOCO_FORBIDDEN_POD_FIELDS": "hostNetwork,hostPath",
        "DILOCO_JOB_LABELS": '{"cost.example.com/center":"42"}',
        "DILOCO_JOB_ANNOTATIONS": '{"example.com/contact":"ml@example.com, #ml"}',
        "DILOCO_INHERITED_LABELS": "team,cost.example.com/",
        "DILOCO_INHERITED_ANNOTATIONS": "example.com/note",
        "DILOCO_NETWORK_POLICIES": (
            '{"metricsFrom":[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":'
            '"monitoring"}}}],"operatorNamespace":"system","operatorOnHostNetwork":true}'
        ),
        "DILOCO_HEALTH_PORT": "18080",
        "DILOCO_METRICS_PORT": "19090",
        "DILOCO_LOG_FORMAT": "text",
        "DILOCO_RESYNC_SECONDS": "60",
        "DILOCO_RECONCILE_THREADS": "8",
        "DILOCO_POD": None,
    }


def operator_pod(*arguments: str) -> Any:
    return only(render(*arguments), "Deployment")["spec"]["template"]["spec"]


def test_on_the_network_of_its_node_the_operator_has_ports_of_its_own_behind_the_same_service():
    pod = operator_pod("--values", str(EVERYTHING))
    assert pod["hostNetwork"] is True
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet", "else it cannot resolve syncers"
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {"health": 18080, "metrics": 19090}
    service = only(render("--values", str(EVERYTHING)), "Service")["spec"]["ports"]
    assert {port["port"]: port["targetPort"] for port in service} == {
        8080: "health",
        9090: "metrics",
    }
    assert not {"hostNetwork", "dnsPolicy"} & operator_pod().keys()


def test_topology_spread_counts_the_operators_pods_unless_configured_otherwise():
    (constraint,) = operator_pod("--values", str(EVERYTHING))["topologySpreadConstraints"]
    selector = only(render("--values", str(EVERYTHING)), "Deployment")["spec"]["selector"]
    assert constraint["labelSelector"] == selector
    other = {"matchLabels": {"a": "b"}}
    given = {
        "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": other, "minDomains": 2,
    }  # fmt: skip
    flags = sets(topologySpreadConstraints=[given, {**given, "topologyKey": "node"}])
    first, second = operator_pod(*flags)["topologySpreadConstraints"]
    assert first["minDomains"] == 2
    assert first["labelSelector"] == other
    assert second["topologyKey"] == "node"


def test_the_operator_reads_every_variable_that_the_chart_sets():
    settings = ROOT / "operator" / "diloco_operator" / "settings.py"
    given = {name for name in operator_env() if name.startswith("DILOCO_")}
    read = set(re.findall(r'"(DILOCO_[A-Z_]+)"', settings.read_text())) - {"DILOCO_FAULTS"}
    assert given == read


def test_a_digest_wins_over_a_tag_and_the_version_is_the_default():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert operator_container()["image"] == f"diloco-operator:{version}"
    digest = f"sha256:{'0' * 64}"
    flags = sets(images__operator={"tag": "1", "digest": digest}, images__registry="r.example/x/")
    assert operator_container(*flags)["image"] == f"r.example/x/diloco-operator@{digest}"


def test_chart_and_program_have_one_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert project
    assert chart["appVersion"] == chart["version"] == project[1]


def test_the_icon_is_the_one_beside_the_chart():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    kind, _, data = chart["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (CHART / "icon.svg").read_bytes()


def test_chart_and_program_have_one_license():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^license = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert project
    assert chart["annotations"]["artifacthub.io/license"] == project[1] == "Apache-2.0"


# Metrics


def used_metrics(text: str) -> set[str]:
    return set(re.findall(r"\bdiloco_(?!dev_)[a-z_]+", text))


@pytest.mark.parametrize("file", ["files/alerts.yaml", "dashboards/diloco.json"])
def test_alerts_and_dashboard_name_metrics_that_exist(file):
    known = {metric.name for metric in METRICS}
    known |= {
        metric.name + end
        for metric in METRICS
        if metric.kind == "histogram"
        for end in ("_bucket", "_sum", "_count")
    }
    used = used_metrics((CHART / file).read_text())
    assert used
    assert used <= known


def test_the_dashboard_shows_every_metric():
    shown = used_metrics((CHART / "dashboards" / "diloco.json").read_text())
    silent = {
        metric.name for metric in METRICS if not any(name.startswith(metric.name) for name in shown)
    }
    # Per process: the sums of the syncer and of the steps show the same.
    assert silent == {
        "diloco_snapshot_seconds", "diloco_learner_tokens_total", "diloco_learner_step_seconds",
    }  # fmt: skip


def test_alerts_name_the_service_of_the_release():
    rule = only(render("--values", str(EVERYTHING)), "PrometheusRule")
    text = json.dumps(rule)
    assert "OPERATOR_SERVICE" not in text
    assert 'service=\\"diloco\\"' in text
