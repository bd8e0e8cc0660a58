"""The state of a namespace after a failure, as text."""

from __future__ import annotations

from diloco_testing.clusters.install import NAMESPACE
from diloco_testing.clusters.kubectl import KubectlError
from diloco_testing.clusters.provision import Cluster

TAIL = "60"


def of(cluster: Cluster, namespace: str) -> str:
    """Objects, conditions, Events and the ends of all logs of a namespace and the operator."""
    kubectl = cluster.kubectl
    parts = [
        ("get", "dilocojobs,all,pvc,pdb", "-n", namespace, "-o", "wide"),
        ("get", "dilocojobs", "-n", namespace, "-o", "yaml"),
        ("get", "events", "-n", namespace, "--sort-by=.lastTimestamp"),
        ("describe", "pods", "-n", namespace),
        (
            "logs",
            "-n",
            NAMESPACE,
            "-l",
            "app.kubernetes.io/name=diloco",
            "--tail",
            TAIL,
            "--prefix",
        ),
    ]
    sections = [
        f"$ kubectl {' '.join(command)}\n{_output_of(kubectl, *command)}" for command in parts
    ]
    try:
        pods = kubectl.list("pods", namespace)
    except KubectlError as error:
        return "\n\n".join([*sections, str(error)])
    for pod in pods:
        name = pod["metadata"]["name"]
        for more in ((), ("--previous",)):
            text = _output_of(kubectl, "logs", "-n", namespace, name, "--tail", TAIL, *more)
            if not more or "previous terminated container" not in text:
                sections.append(f"$ kubectl logs {name} {' '.join(more)}\n{text}")
    return "\n\n".join(sections)


def _output_of(kubectl, *command: str) -> str:  # type: ignore[no-untyped-def]
    try:
        return str(kubectl(*command, seconds=30))
    except KubectlError as error:
        return str(error)
