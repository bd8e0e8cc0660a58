"""What a person would look at after a failure, as text."""

from __future__ import annotations

from diloco_testing.clusters import Cluster
from diloco_testing.clusters_install import NAMESPACE
from diloco_testing.kubectl import KubectlError

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
    said = [f"$ kubectl {' '.join(words)}\n{_said(kubectl, *words)}" for words in parts]
    try:
        pods = kubectl.list("pods", namespace)
    except KubectlError as error:
        return "\n\n".join([*said, str(error)])
    for pod in pods:
        name = pod["metadata"]["name"]
        for more in ((), ("--previous",)):
            text = _said(kubectl, "logs", "-n", namespace, name, "--tail", TAIL, *more)
            if not more or "previous terminated container" not in text:
                said.append(f"$ kubectl logs {name} {' '.join(more)}\n{text}")
    return "\n\n".join(said)


def _said(kubectl, *words: str) -> str:  # type: ignore[no-untyped-def]
    try:
        return str(kubectl(*words, seconds=30))
    except KubectlError as error:
        return str(error)
