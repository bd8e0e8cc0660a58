"""
What a job in a cluster left behind, fetched with the caller's own kubectl.

kubectl brings kubeconfig, contexts, credential plugins and proxies; the files come out of the
containers of the syncer and the learners, which need no tools of their own but Python.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from diloco.errors import ConfigError, StorageError, UnavailableError
from diloco_operator import names
from diloco_operator.local.rundir import RunDir

STATE = "/var/lib/diloco"
"""Where the syncer's volume is mounted, and what a learner keeps."""

SPEC = "/etc/diloco/spec"
"""Where the RunSpec is mounted."""

LOGS = ("events.jsonl", "eval.jsonl")
MODEL = ("model",)
STEPS = "steps.jsonl"

_PACK = (
    "import os, sys, tarfile\n"
    # A mounted ConfigMap is made of links.
    "out = tarfile.open(fileobj=sys.stdout.buffer, mode='w|', dereference=True)\n"
    "for name in sys.argv[2:]:\n"
    "    path = os.path.join(sys.argv[1], name)\n"
    "    if os.path.exists(path): out.add(path, arcname=name)\n"
    "out.close()\n"
)
_MOST_WORDS = 400
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job in a cluster, as kubectl finds it."""

    name: str
    namespace: str = ""
    """"": the context's."""
    context: str = ""
    """"": the current one."""
    kubectl: str = "kubectl"

    def manifest(self) -> bytes:
        """
        The DiLoCoJob as YAML.

        Raises:
            ConfigError: there is no kubectl.
            UnavailableError: kubectl got no such job.
        """
        return self._get(f"dilocojobs.diloco.dev/{self.name}", "-o", "yaml")

    def learner_pods(self) -> dict[tuple[str, int], str]:
        """
        (region, ordinal) of every learner's pod that runs in this cluster, with its name.

        Raises:
            ConfigError: there is no kubectl.
            UnavailableError: kubectl got no list.
        """
        labels = f"diloco.dev/job={self.name},diloco.dev/role=learner"
        found = json.loads(self._get("pods", "--selector", labels, "-o", "json"))
        pods = {}
        for pod in found["items"]:
            metadata = pod["metadata"]
            region = (metadata.get("labels") or {}).get("diloco.dev/region", "")
            stem, _, ordinal = metadata["name"].rpartition("-")
            ours = stem == names.child_name(self.name, region) and ordinal.isdecimal()
            if ours and (pod.get("status") or {}).get("phase") == "Running":
                pods[region, int(ordinal)] = metadata["name"]
        return pods

    def fetch(
        self, wanted: tuple[str, ...], to: Path, *, pod: str = "", folder: str = STATE
    ) -> None:
        """
        Copy files and folders out of a pod into `to`; what is not there is left out.

        Args:
            wanted: names in `folder`.
            to: made if need be.
            pod: "": the syncer's.
            folder: where it has them.

        Raises:
            ConfigError: there is no kubectl.
            StorageError: the disk here refused.
            UnavailableError: the pod is not there, or the stream broke.
        """
        pod = f"pod/{pod}" if pod else f"deployment/{names.syncer_name(self.name)}"
        command = self._command("exec", pod, "-c", "main", "--", "python3", "-c", _PACK, folder)
        with tempfile.TemporaryFile() as said:
            with subprocess.Popen(  # noqa: S603
                [*command, *wanted], stdout=subprocess.PIPE, stderr=said
            ) as process:
                whole = _unpack(process.stdout, to)
            said.seek(0)
            if process.returncode or not whole:
                raise self._refused("fetch files of", said.read())

    def _get(self, *words: str) -> bytes:
        done = subprocess.run(  # noqa: S603
            self._command("get", *words), capture_output=True, check=False
        )
        if done.returncode:
            raise self._refused("read", done.stderr)
        return done.stdout

    def _command(self, *words: str) -> list[str]:
        program = shutil.which(self.kubectl)
        if program is None:
            raise ConfigError(f"{self.kubectl}: no such program; install kubectl, it is what asks")
        where = [f"--context={self.context}"] if self.context else []
        where += [f"--namespace={self.namespace}"] if self.namespace else []
        return [program, *where, *words]

    def _refused(self, doing: str, said: bytes) -> UnavailableError:
        words = said.decode(errors="replace").strip()[-_MOST_WORDS:]
        return UnavailableError(
            f"cannot {doing} job {self.name}: {words or 'the stream broke off'}"
        )


def fetch_run(job: RemoteJob, to: Path) -> list[str]:
    """
    Make `to` what a run directory is: all but logs, snapshots and the model.

    Returns:
        What could not be had of single learners, a sentence each.

    Raises:
        ConfigError: there is no kubectl.
        StorageError: the disk here refused.
        UnavailableError: the job or its syncer's pod is not there, or the stream broke.
    """
    text = job.manifest()
    manifest = yaml.safe_load(text)
    run = RunDir(to)
    run.path.mkdir(parents=True, exist_ok=True)
    job.fetch(LOGS, run.path)
    job.fetch((run.spec.name,), run.path, folder=SPEC)
    run.manifest.write_bytes(text)
    run.write_status({"job": job.name, **(manifest.get("status") or {})})
    return _fetch_steps(job, run, manifest.get("spec") or {})


def _fetch_steps(job: RemoteJob, run: RunDir, spec: Mapping[str, Any]) -> list[str]:
    """`STEPS` of every learner that runs in this cluster; what could not be had."""
    try:
        pods = job.learner_pods()
    except UnavailableError as error:
        return [f"no learner's {STEPS}: {error}"]
    size = (spec.get("learner") or {}).get("podsPerLearner", 1)
    # The first pod of a learner trains in the job; the others keep nothing of their own.
    running = {
        (region, ordinal // size): pod
        for (region, ordinal), pod in sorted(pods.items())
        if ordinal % size == 0
    }
    wanted = [
        (region["name"], index)
        for region in spec.get("regions") or ()
        for index in range(region["learners"])
    ]
    said = []
    if gone := [names.learner_name(*one) for one in wanted if one not in running]:
        said.append(f"no running pod in this cluster, so no {STEPS}: {_some(gone)}")
    for (region, index), pod in running.items():
        name = names.learner_name(region, index)
        try:
            job.fetch((STEPS,), run.state_of(name), pod=pod)
        except UnavailableError as error:
            said.append(f"{name}: no {STEPS}: {error}")
    return said


def _some(learners: Iterable[str]) -> str:
    found = list(learners)
    more = len(found) - _MOST_NAMES
    return ", ".join(found[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _unpack(stream: IO[bytes] | None, to: Path) -> bool:
    """Write the archive's files below `to`; False when it broke off."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(to, filter="data")
    except tarfile.ReadError:
        return False
    except OSError as error:
        raise StorageError(f"{error.filename or to}: {error.strerror}") from None
    return True
