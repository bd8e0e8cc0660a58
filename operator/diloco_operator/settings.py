"""The operator's settings, read once from the environment; with fault injection for tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.runtime.env import PROXY, Environment
from diloco_job import names
from diloco_operator.resources.extra_metadata import ExtraMetadata, Metadata, is_own
from diloco_operator.resources.operator_scope import NetworkPolicies, OperatorScope

FAULT_POINTS = ("after-read", "after-apply-N", "after-delete", "before-status", "after-status")
"""Points of a reconcile at which a test can kill the operator; N counts from 1."""


_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults to inject."""

    kill_at: str = ""
    """A point of FAULT_POINTS; "": none."""

    def reached(self, point: str) -> None:
        """Kill this process with SIGKILL if the fault is set for this point."""
        if point == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # a container's first process ignores its own signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one operator process."""

    scope: OperatorScope
    namespaces: tuple[str, ...]
    """Namespaces whose jobs it reconciles; (): all."""
    health_port: int
    """0: any free port."""
    metrics_port: int
    """0: no metrics."""
    json_logs: bool
    resync_seconds: float
    """Between two lists of all jobs."""
    threads: int
    """Jobs that are reconciled concurrently."""
    pod: str
    """Name of this pod, for Events and the leader election."""
    installation: tuple[str, str] | None
    """Namespace and name of this installation, which identify its Lease and mark the jobs that it runs;
    None: no leader election and no mark."""
    faults: Faults

    @classmethod
    def from_environment(cls) -> Settings:
        """
        The settings of this process.

        Raises:
            ConfigError: some are missing or cannot be used; the message names all of them.
        """
        return from_env(os.environ)


def from_env(variables: Mapping[str, str]) -> Settings:
    """
    The settings in these variables; an empty variable counts as not set.

    Raises:
        ConfigError: some are missing or cannot be used; the message names all of them.
    """
    env = Environment(variables)
    image = "the image of pods whose job names none"
    points = "|".join(FAULT_POINTS)
    fault = env.text(
        "DILOCO_FAULTS",
        pattern=rf"\s*reconcile:kill=({points.replace('N', '[1-9][0-9]*')})\s*",
        expected=f"reconcile:kill=<{points}>",
    )
    installation = env.text(
        "DILOCO_INSTALLATION",
        pattern=f"{_NAME}/{_NAME}",
        expected="<namespace>/<name> of the installation",
    )
    settings = Settings(
        scope=OperatorScope(
            region=env.text(
                "DILOCO_REGION",
                pattern=names.REGION_PATTERN,
                expected="the name of a region (a DNS label)",
            ),
            worker_image=env.required("DILOCO_WORKER_IMAGE", image),
            syncer_image=env.required("DILOCO_SYNCER_IMAGE", image),
            image_pull_policy=env.text("DILOCO_IMAGE_PULL_POLICY", "IfNotPresent"),
            image_pull_secrets=env.names("DILOCO_IMAGE_PULL_SECRETS"),
            forbidden_pod_fields=env.names("DILOCO_FORBIDDEN_POD_FIELDS"),
            syncer_proxy=env.text(
                "DILOCO_SYNCER_PROXY", pattern=PROXY, expected="http://<host>:<port>"
            ),
            cluster_domain=env.text("DILOCO_CLUSTER_DOMAIN", "cluster.local"),
            extra_metadata=ExtraMetadata(
                fixed=Metadata(
                    labels=_metadata(env, "DILOCO_JOB_LABELS"),
                    annotations=_metadata(env, "DILOCO_JOB_ANNOTATIONS"),
                ),
                inherited_labels=env.names("DILOCO_INHERITED_LABELS"),
                inherited_annotations=env.names("DILOCO_INHERITED_ANNOTATIONS"),
            ),
            network_policies=_network_policies(env),
        ),
        namespaces=env.names("DILOCO_WATCH_NAMESPACES"),
        health_port=env.port("DILOCO_HEALTH_PORT", 8080),
        metrics_port=env.port("DILOCO_METRICS_PORT", 9090),
        json_logs=env.choice("DILOCO_LOG_FORMAT", "json", "text") == "json",
        resync_seconds=env.number("DILOCO_RESYNC_SECONDS", 30, least=1, most=3600),
        threads=env.integer("DILOCO_RECONCILE_THREADS", 8, least=1, most=64),
        pod=env.text("DILOCO_POD") or env.text("HOSTNAME", "diloco-operator"),
        installation=_pair(installation),
        faults=Faults(kill_at=fault.strip().removeprefix("reconcile:kill=")),
    )
    env.check()
    return settings


def _pair(text: str) -> tuple[str, str] | None:
    namespace, _, name = text.partition("/")
    return (namespace, name) if name else None


def _metadata(env: Environment, name: str) -> dict[str, str]:
    """Labels or annotations, as a JSON object."""
    given = env.json_object(name)
    if own := sorted(filter(is_own, given)):
        env.problem(f"{name}: the operator itself sets {', '.join(own)}")
    if odd := sorted(key for key, text in given.items() if not isinstance(text, str)):
        env.problem(f"{name}: {', '.join(odd)}: expected a string")
    return given


def _network_policies(env: Environment) -> NetworkPolicies | None:
    """{"operatorNamespace": …, "operatorOnHostNetwork": …, "metricsFrom": [peers]}; not set: none."""
    name = "DILOCO_NETWORK_POLICIES"
    given = env.json_object(name)
    if not given:
        return None
    namespace, peers = given.get("operatorNamespace"), given.get("metricsFrom", [])
    if not isinstance(namespace, str) or not namespace:
        env.problem(f"{name}: operatorNamespace is not set")
    if not isinstance(peers, list) or not all(isinstance(peer, dict) for peer in peers):
        env.problem(f"{name}: metricsFrom is not a list of peers")
        return None
    return NetworkPolicies(
        operator_namespace=str(namespace),
        operator_on_host_network=given.get("operatorOnHostNetwork") is True,
        metrics_from=tuple(peers),
    )
