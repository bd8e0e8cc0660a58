"""
Fetches the files of a job in a cluster with the user's kubectl.

kubectl handles kubeconfig, contexts, credential plugins and proxies. The files are in the containers
of the syncer and the learners.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diloco.errors import ConfigError, StorageError, UnavailableError
from diloco.runtime import files
from diloco_cli.pod_files import DEFAULT_CAPS, Caps, Retries, copy_files, is_permanent
from diloco_job import names
from diloco_local.run_directory import RunDir

RESOURCE = "dilocojobs.diloco.dev"

STATE = "/var/lib/diloco"
"""Mount path of the syncer's volume and of a learner's state."""

SPEC = "/etc/diloco/spec"
"""Mount path of the RunSpec."""

LOGS = ("events.*.jsonl", "events.jsonl", "eval.*.jsonl", "eval.jsonl")
MODEL = ("model/model.json", "model/model.safetensors")
STEPS = ("steps.*.jsonl", "steps.jsonl")

MODEL_CAPS = Caps(file_bytes=16 << 40, total_bytes=16 << 40)
"""In effect the free space of the local disk."""

_MAX_MESSAGE = 400
_NAME = re.compile("[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job in a cluster, addressed through kubectl."""

    name: str
    namespace: str = ""
    """"": that of the context."""
    context: str = ""
    """"": the current one."""
    kubectl: str = "kubectl"
    retries: Retries = field(default_factory=Retries)

    def manifest(self) -> bytes:
        """
        The DiLoCoJob as YAML.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the job cannot be read.
        """
        return self._get(f"{RESOURCE}/{self.name}", "-o", "yaml")

    def read(self) -> dict[str, Any]:
        """
        The DiLoCoJob with its status.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the job cannot be read.
        """
        job: dict[str, Any] = json.loads(self._get(f"{RESOURCE}/{self.name}", "-o", "json"))
        return job

    def learner_pods(self) -> dict[tuple[str, int], str]:
        """
        (region, ordinal) of every running learner pod in this cluster, with its name.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the pods cannot be listed.
        """
        labels = f"diloco.dev/job={self.name},diloco.dev/role=learner"
        found = json.loads(self._get("pods", "--selector", labels, "-o", "json"))
        pods = {}
        for pod in found["items"]:
            metadata = pod["metadata"]
            region = (metadata.get("labels") or {}).get("diloco.dev/region", "")
            stem, _, ordinal = metadata["name"].rpartition("-")
            own = stem == names.child_name(self.name, region) and ordinal.isdecimal()
            if own and (pod.get("status") or {}).get("phase") == "Running":
                pods[region, int(ordinal)] = metadata["name"]
        return pods

    def fetch(
        self, wanted: tuple[str, ...], to: Path, *, pod: str = "", folder: str = STATE,
        caps: Caps = DEFAULT_CAPS,
    ) -> None:  # fmt: skip
        """
        Copy regular files out of a pod into `to`; missing ones are skipped.

        Args:
            wanted: paths in `folder`; the last component may be a pattern.
            to: created if missing.
            pod: "": the syncer's.
            folder: their directory in the pod.
            caps: of what is written.

        Raises:
            ConfigError: kubectl is not installed.
            StorageError: a local file cannot be written, or the pod sends more than `caps`.
            UnavailableError: the pod cannot be reached, or the stream breaks repeatedly.
        """
        pod = f"pod/{pod}" if pod else f"deployment/{names.syncer_name(self.name)}"
        command = self._command("exec", pod, "-c", "main", "--")
        try:
            copy_files(command, folder, wanted, to, self.retries, caps)
        except UnavailableError as error:
            raise UnavailableError(f"cannot fetch files of job {self.name}: {error}") from None
        except StorageError as error:
            raise StorageError(f"files of job {self.name}: {error}") from None

    def _get(self, *arguments: str) -> bytes:
        command, backoff = self._command("get", *arguments), self.retries.backoff()
        for attempt in range(1, self.retries.attempts + 1):
            problem = "no reply from the API server"
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(  # noqa: S603
                    command, capture_output=True, check=False, timeout=self.retries.stall_seconds
                )
                if not done.returncode:
                    return done.stdout
                problem = done.stderr.decode(errors="replace").strip()[-_MAX_MESSAGE:] or problem
            if is_permanent(problem) or attempt == self.retries.attempts:
                break
            time.sleep(backoff.next())
        raise UnavailableError(f"cannot read job {self.name}: {problem}")

    def _command(self, *arguments: str) -> list[str]:
        program = shutil.which(self.kubectl)
        if program is None:
            raise ConfigError(f"{self.kubectl}: program not found; install kubectl")
        options = [f"--context={self.context}"] if self.context else []
        options += [f"--namespace={self.namespace}"] if self.namespace else []
        return [program, *options, *arguments]


def fetch_run(job: RemoteJob, to: Path) -> list[str]:
    """
    Fetch a job into the run directory `to`, without logs, snapshots and the model.

    Returns:
        What is missing of single learners, one message each.

    Raises:
        ConfigError: kubectl is not installed.
        StorageError: a local file cannot be written.
        UnavailableError: the job or its syncer's pod cannot be reached.
    """
    text = job.manifest()
    manifest = yaml.safe_load(text)
    run = RunDir(to)
    run.path.mkdir(parents=True, exist_ok=True)
    job.fetch(LOGS, run.path)
    job.fetch((run.spec.name,), run.path, folder=SPEC)
    files.replace(run.manifest, text)
    run.write_status({"job": job.name, **(manifest.get("status") or {})})
    return _fetch_steps(job, run, manifest.get("spec") or {})


def _fetch_steps(job: RemoteJob, run: RunDir, spec: Mapping[str, Any]) -> list[str]:
    """Fetch `STEPS` of every learner that runs in this cluster; returns what is missing."""
    try:
        pods = job.learner_pods()
    except UnavailableError as error:
        return [f"no steps.jsonl of any learner: {error}"]
    size = (spec.get("learner") or {}).get("podsPerLearner", 1)
    # Only the first pod of a learner writes files.
    running = {
        (region, ordinal // size): pod
        for (region, ordinal), pod in sorted(pods.items())
        if ordinal % size == 0 and _NAME.fullmatch(region)
    }
    wanted = [
        (region["name"], index)
        for region in spec.get("regions") or ()
        if _NAME.fullmatch(str(region["name"]))  # it becomes a directory
        for index in range(region["learners"])
    ]
    missing = []
    if absent := [names.learner_name(*key) for key in wanted if key not in running]:
        missing.append(f"no running pod in this cluster, so no steps.jsonl: {_some(absent)}")
    for (region, index), pod in running.items():
        name = names.learner_name(region, index)
        try:
            job.fetch(STEPS, run.state_of(name), pod=pod)
        except UnavailableError as error:
            missing.append(f"{name}: no steps.jsonl: {error}")
    return missing


def _some(learners: Iterable[str]) -> str:
    listed = list(learners)
    more = len(listed) - _MAX_NAMES
    return ", ".join(listed[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
