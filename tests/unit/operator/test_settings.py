"""The operator's environment and its log lines."""

import io
import json
import logging

import kopf
import pytest

from diloco.errors import ConfigError
from diloco_operator import logs
from diloco_operator.settings import FAULT_POINTS, from_env
from diloco_operator.workqueue import Key

ENV = {"DILOCO_WORKER_IMAGE": "w", "DILOCO_SYNCER_IMAGE": "s"}


def test_defaults():
    found = from_env(ENV)
    assert (found.scope.region, found.scope.worker_image, found.scope.syncer_image) == (
        "",
        "w",
        "s",
    )
    assert found.namespaces == ()
    assert (found.health_port, found.metrics_port, found.json_logs) == (8080, 9090, True)
    assert found.faults.kill_at == ""
    assert found.installation is None


def test_every_setting_can_be_set_and_lists_accept_commas_and_spaces():
    found = from_env(
        ENV
        | {
            "DILOCO_REGION": "eu",
            "DILOCO_WATCH_NAMESPACES": "a, b",
            "DILOCO_IMAGE_PULL_POLICY": "Never",
            "DILOCO_IMAGE_PULL_SECRETS": "x y",
            "DILOCO_CLUSTER_DOMAIN": "example.org",
            "DILOCO_HEALTH_PORT": "0",
            "DILOCO_METRICS_PORT": "1",
            "DILOCO_LOG_FORMAT": "text",
            "DILOCO_RESYNC_SECONDS": "2.5",
            "DILOCO_POD": "operator-0",
            "DILOCO_INSTALLATION": "system/diloco",
            "DILOCO_FORBIDDEN_POD_FIELDS": "hostNetwork, hostPath",
        }
    )
    assert found.scope.manager == "diloco-operator-eu"
    assert (found.scope.image_pull_policy, found.scope.image_pull_secrets) == ("Never", ("x", "y"))
    assert found.scope.cluster_domain == "example.org"
    assert found.namespaces == ("a", "b")
    assert (found.health_port, found.metrics_port, found.json_logs) == (0, 1, False)
    assert (found.resync_seconds, found.pod) == (2.5, "operator-0")
    assert found.installation == ("system", "diloco")
    assert found.scope.forbidden_pod_fields == ("hostNetwork", "hostPath")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DILOCO_WORKER_IMAGE", ""),
        ("DILOCO_SYNCER_IMAGE", ""),
        ("DILOCO_REGION", "EU\n"),
        ("DILOCO_INSTALLATION", "diloco"),
        ("DILOCO_INSTALLATION", "a/b/c"),
        ("DILOCO_HEALTH_PORT", "http"),
        ("DILOCO_METRICS_PORT", "70000"),
        ("DILOCO_RESYNC_SECONDS", "0"),
        ("DILOCO_RESYNC_SECONDS", "nan"),
        ("DILOCO_LOG_FORMAT", "xml"),
        ("DILOCO_FAULTS", "reconcile:kill=somewhere"),
        ("DILOCO_FAULTS", "reconcile:kill=after-apply-0"),
    ],
)
def test_an_invalid_setting_is_reported_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        from_env(ENV | {name: value})


@pytest.mark.parametrize("point", [name.replace("N", "12") for name in FAULT_POINTS])
def test_every_named_fault_point_is_understood(point):
    assert from_env(ENV | {"DILOCO_FAULTS": f"reconcile:kill={point}"}).faults.kill_at == point


@pytest.fixture
def lines():
    root, kopf_logger = logging.getLogger(), logging.getLogger("kopf._core.reactor.running")
    handlers, level, filters = root.handlers[:], root.level, kopf_logger.filters[:]
    stream = io.StringIO()
    logs.configure(json=True, stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)
    kopf_logger.filters[:] = filters


def test_lines_of_any_logger_within_a_reconcile_carry_the_jobs_key(lines):
    with logs.job_context(Key("ns", "a")):
        logging.getLogger("urllib3.connectionpool").warning("lost a connection")
    logging.getLogger("other").warning("about nothing")
    assert [line.get("job") for line in lines()] == ["ns/a", None]


def test_kopfs_lines_are_as_ours_and_name_the_object(lines):
    logger = logging.getLogger("kopf.objects")
    for kind in ("DiLoCoJob", "Pod"):
        ref = {"kind": kind, "namespace": "ns", "name": "x"}
        extra = {"k8s_ref": ref, "k8s_skip": False, "settings": kopf.OperatorSettings()}
        logger.warning("trouble", extra=extra)
    job, pod = lines()
    assert job["job"] == "ns/x"
    assert pod["object"] == "ns/x"
    assert not {"settings", "k8s_skip", "k8s_ref"} & (job.keys() | pod.keys())


def test_kopfs_signal_warning_is_not_logged(lines):
    logger = logging.getLogger("kopf._core.reactor.running")
    logger.warning("OS signals are ignored: running not in the main thread.")
    logger.warning("something else")
    assert [line["message"] for line in lines()] == ["something else"]
