"""
One job in two clusters over mutual TLS: region eu in one, region us in the other.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from diloco_cli.authority import write_certs
from diloco_job.types import DiLoCoJob
from diloco_testing.clusters.install import Images
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import Object, until
from diloco_testing.clusters.provision import Cluster


class Pair:
    """The same job in both clusters."""

    def __init__(
        self, clusters: Mapping[str, Cluster], images: Images, name: str, node_port: int, folder: Path,
        *, syncer: str = "eu", **spec: Any,
    ) -> None:  # fmt: skip
        """
        Nothing is applied yet.

        Args:
            clusters: by region.
            images: of its pods.
            name: of the job and of its namespace.
            node_port: at which the syncer is reached; no other job of these clusters has it.
            folder: for authorities and certificates.
            syncer: its region.
            spec: more fields of the manifest's spec.
        """
        self.namespace = name
        self.folder = folder
        made = manifest(
            name, regions={"eu": 1, "us": 1}, pod_fields=images.pod_fields,
            tls={"mode": "Secret", "secretName": f"{name}-tls"},
            syncer={"region": syncer, "endpoint": f"{clusters[syncer].address}:{node_port}",
                    "service": {"type": "NodePort", "nodePort": node_port}},
            **spec,
        )  # fmt: skip
        # Each cluster has its own copy of the manifest, and tests change one or both.
        self.jobs = {
            region: Job(cluster, name, copy.deepcopy(made)) for region, cluster in clusters.items()
        }
        self.eu, self.us = self.jobs["eu"], self.jobs["us"]
        self.home = self.jobs[syncer]
        """Where the syncer runs."""

    def certificates(
        self, folder: str = "good", *, now: datetime | None = None, days: int = 30
    ) -> dict[str, Object]:
        """What `diloco certs` writes, as {file: Secret}."""
        directory = self.folder / folder
        job = DiLoCoJob.model_validate(self.eu.manifest)
        write_certs(
            job, directory, now=now or datetime.now(UTC), days=days, namespace=self.namespace
        )
        return {path.stem: yaml.safe_load(path.read_text()) for path in directory.glob("*.yaml")}

    def start(self) -> Pair:
        """Certificates and manifests, as a user applies them."""
        secrets = self.certificates()
        for region, job in self.jobs.items():
            job.cluster.kubectl.apply(secrets[region], namespace=self.namespace)
            job.apply()
        return self

    def bad_secret(self, kind: str) -> Object:
        """What a user may apply in us by mistake."""
        if kind == "a wrong CA":
            return self.certificates("other")["us"]
        if kind == "another region":
            return self.certificates()["eu"]
        return self.certificates(now=datetime.now(UTC) - timedelta(days=3), days=1)["us"]

    def give_us(self, secret: Object) -> None:
        """Another Secret for us, and a learner that knows no other."""
        kubectl, pod = self.us.cluster.kubectl, self.us.pod_of("us/0")
        kubectl.apply(secret, namespace=self.namespace)
        kubectl.delete("pod", pod, self.namespace, "--grace-period=1")

    def replace_authority(self, bundle: bytes, key: bytes) -> None:
        """Certificates by an authority with this ca.crt and ca.key, in all pods when it returns."""
        folder = self.folder / "rotated"
        folder.mkdir(exist_ok=True)
        (folder / "ca.crt").write_bytes(bundle)
        (folder / "ca.key").write_bytes(key)
        secrets = self.certificates("rotated")
        for region, job in self.jobs.items():
            job.cluster.kubectl.apply(secrets[region], namespace=self.namespace)
            expected = base64.b64decode(secrets[region]["data"]["tls.crt"]).decode()
            for pod in (pod["metadata"]["name"] for pod in job.pods()):
                refresh_volumes(job, pod)
                until(
                    lambda j=job, p=pod, e=expected: e == j.cluster.kubectl.exec(
                        p, "cat", "/etc/diloco/tls/tls.crt", namespace=self.namespace
                    ),
                    150, expected="the kubelet has replaced the files", details=self.details,
                )  # fmt: skip

    def details(self) -> str:
        """Both jobs' statuses in short, for a failure's text."""
        return "\n".join(f"{region}: {job.details()}" for region, job in self.jobs.items())

    def members(self, since_step: int = 0) -> set[str]:
        """Learners that were merged after that step."""
        return {
            member["learner"]
            for merge in self.home.merges()
            if merge["step"] > since_step
            for member in merge["members"]
        }


def training(job: Job) -> dict[str, int]:
    """Learners that train, by region, as the job's status has them."""
    return {region["name"]: region.get("training", 0) for region in job.status().get("regions", ())}


def refresh_volumes(job: Job, pod: str) -> None:
    """
    Let the kubelet refresh a pod's ConfigMaps and Secrets now.

    It hands out changes within some 90 s; a changed annotation of the pod triggers it.
    """
    change = {"metadata": {"annotations": {"e2e": datetime.now(UTC).isoformat()}}}
    job.cluster.kubectl.patch("pod", pod, change, job.namespace)
