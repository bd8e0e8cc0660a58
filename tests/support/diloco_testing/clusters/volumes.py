"""Volumes for clusters that have no storage provisioner: a directory for each pending claim."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_testing.clusters.provision import Cluster

NONROOT = 65532
"""User and group of all containers of ours; a hostPath is not handed to fsGroup by the kubelet."""


class Provisioner:
    """Makes a hostPath PersistentVolume for every pending claim of a local cluster, until `stop`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._folder = cluster.folder / "volumes"
        self._stopped = threading.Event()
        self._watch: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="provisioner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch and the thread."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.kill()
        self._thread.join(30)

    def _run(self) -> None:
        # The watch ends with the API server, which tests stop on purpose.
        while not self._stopped.wait(0.5):
            self._watch = self._cluster.kubectl.popen(
                "get",
                "persistentvolumeclaims",
                "-A",
                "--watch",
                "--output-watch-events",
                "-o",
                "json",
            )
            with self._watch as watch:
                for event in _objects(watch):
                    if self._stopped.is_set():
                        break
                    self._handle(event["type"], event["object"])
                watch.kill()

    def _handle(self, kind: str, claim: dict[str, Any]) -> None:
        uid = claim["metadata"]["uid"]
        name = f"e2e-{uid}"
        if kind == "DELETED":
            self._cluster.kubectl.delete("persistentvolume", name, "", "--wait=false")
            shutil.rmtree(self._folder / uid, ignore_errors=True)
        elif (
            claim.get("status", {}).get("phase") == "Pending" and not (self._folder / uid).exists()
        ):
            (self._folder / uid).mkdir(parents=True)
            os.chown(self._folder / uid, NONROOT, NONROOT)
            self._cluster.kubectl.apply(_volume(name, self._folder / uid, claim))


def on_this_machine(cluster: Cluster, pod: dict[str, Any], path: str) -> Path | None:
    """
    Where a file of a pod is on the machine of a local cluster, whose containers need not be entered to read it.

    Args:
        cluster: of the pod.
        pod: it runs.
        path: in its container `main`.

    Returns:
        None: the cluster is a given one, or the file is not on a volume that is a folder.
    """
    if not cluster.local:
        return None
    spec = pod["spec"]
    main = next(container for container in spec["containers"] if container["name"] == "main")
    around = [m for m in main["volumeMounts"] if path.startswith(f"{m['mountPath']}/")]
    mount = max(around, key=lambda mount: len(mount["mountPath"]), default={"name": ""})
    volume = next((v for v in spec["volumes"] if v["name"] == mount["name"]), {})
    if "subPath" in mount:
        return None
    if "emptyDir" in volume:
        pods = cluster.folder / "kubelet/pods"
        folder = pods / pod["metadata"]["uid"] / "volumes/kubernetes.io~empty-dir" / mount["name"]
    elif "persistentVolumeClaim" in volume:
        kubectl, name = cluster.kubectl, volume["persistentVolumeClaim"]["claimName"]
        claim = kubectl.get("pvc", name, pod["metadata"]["namespace"]) or {"spec": {}}
        found = kubectl.get("pv", claim["spec"].get("volumeName", "none"), "")
        if found is None:
            return None
        folder = Path(found["spec"]["hostPath"]["path"])
    else:
        return None
    return folder / path.removeprefix(f"{mount['mountPath']}/")


def _volume(name: str, path: Path, claim: dict[str, Any]) -> dict[str, Any]:
    meta, spec = claim["metadata"], claim["spec"]
    storage_class = spec.get("storageClassName")
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path)},
            "claimRef": {
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            **({"storageClassName": storage_class} if storage_class else {}),
        },
    }


def _objects(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """JSON objects one after the other, as `kubectl get --watch -o json` prints them."""
    assert process.stdout is not None
    decoder, text = json.JSONDecoder(), ""
    while piece := os.read(process.stdout.fileno(), 65536):
        text += piece.decode()
        while text := text.lstrip():
            try:
                found, end = decoder.raw_decode(text)
            except ValueError:
                break
            yield found
            text = text[end:]
