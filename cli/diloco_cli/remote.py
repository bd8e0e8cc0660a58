"""
Fetches the files of a job in a cluster, and the health of its learners, with the user's kubectl.

The files are in the containers of the syncer and the learners, or on the volume of a syncer that does
not run.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from diloco.errors import ConfigError, StorageError, UnavailableError
from diloco.runtime import files, untrusted_json
from diloco.runtime.formatting import shorten
from diloco_cli import volume_reader
from diloco_cli.fetch_pod import MAIN, SPEC, STATE
from diloco_cli.kubectl import Kubectl
from diloco_cli.pod_files import DEFAULT_CAPS, Caps, Retries, copy_files
from diloco_cli.volume_reader import RESOURCE, Patience
from diloco_job import names
from diloco_local.run_directory import RunDir

LOGS = ("events.*.jsonl", "events.jsonl", "eval.*.jsonl", "eval.jsonl")
MODEL = ("model/model.json", "model/model.safetensors")
STEPS = ("steps.*.jsonl", "steps.jsonl")

MODEL_CAPS = Caps(file_bytes=16 << 40, total_bytes=16 << 40)
"""In effect the free space of the local disk."""

ASKED_LEARNERS = 64
"""Whose health files are read for a status, at most."""
ASKED_AT_ONCE = 8
ASK_SECONDS, ASK_ALL_SECONDS = 5.0, 10.0
"""A status does not wait for a pod as a fetch does: pods of a node that is lost count as running for minutes."""
HEALTH_BYTES = 1 << 16
"""Read from a container that is asked, at most."""
HEALTH = """\
import glob, os
found = glob.glob(os.path.join(os.environ.get("TMPDIR") or "/tmp", "diloco-learner-*.json"))
print(open(max(found, key=os.path.getmtime)).read(8192) if found else "{}")
"""
"""Prints the health file that the first process of a learner's container has named."""
_MAX_KIND, _MAX_TEXT = 32, 400

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
    patience: Patience = field(default_factory=Patience)
    most_bytes: int | None = None
    """Of a reply of the API server; None: no limit."""
    announce: Callable[[str], None] = print
    """Shows a person what a pod that is started waits for, and why a request is repeated."""

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

    def pods(self, *labels: str) -> list[dict[str, Any]]:
        """
        The pods of the job in this cluster with these labels, as the API server returns them.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the pods cannot be listed.
        """
        selector = ",".join((f"diloco.dev/job={self.name}", *labels))
        found = json.loads(self._get("pods", "--selector", selector, "-o", "json"))
        return list(found["items"])

    def may(self, namespace: str, verb: str, resource: str, subresource: str = "") -> bool:
        """
        Whether the API server permits this to the user.

        Args:
            namespace: of the job.
            verb: such as delete.
            resource: such as pods.
            subresource: such as exec.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: it does not reply.
        """
        attributes = {
            "namespace": namespace, "verb": verb, "resource": resource, "subresource": subresource,
        }  # fmt: skip
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }  # fmt: skip
        text = json.dumps(review).encode()
        found = json.loads(self.program.run("create", "-f", "-", "-o", "json", stdin=text))
        return bool((found.get("status") or {}).get("allowed"))

    def learner_pods(self) -> dict[tuple[str, int], str]:
        """
        (region, ordinal) of every running learner pod in this cluster, with its name.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the pods cannot be listed.
        """
        pods = {}
        for pod in self.pods("diloco.dev/role=learner"):
            metadata = pod["metadata"]
            region = (metadata.get("labels") or {}).get("diloco.dev/region", "")
            ordinal = names.learner_pod_ordinal(metadata["name"], self.name, region)
            if ordinal is not None and (pod.get("status") or {}).get("phase") == "Running":
                pods[region, ordinal] = metadata["name"]
        return pods

    def health(self, pod: str, seconds: float = ASK_SECONDS) -> Mapping[str, Any]:
        """
        The health of the learner of a pod; empty: it has not reported any.

        Args:
            pod: its name.
            seconds: how long to wait for the reply.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the pod cannot be reached, or what it replies is not a health file.
        """
        command = ("exec", f"pod/{pod}", "-c", MAIN, "--", "python3", "-c", HEALTH)
        once = Retries(attempts=1, stall_seconds=seconds)
        kubectl = replace(self.program, retries=once, most_bytes=HEALTH_BYTES)
        try:
            found = untrusted_json.parse(kubectl.run(*command), finite=False)
        except ValueError as error:
            raise UnavailableError(f"its health file is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise UnavailableError("its health file is not a JSON object")
        return found

    @contextlib.contextmanager
    def syncer_files(self) -> Iterator[str]:
        """
        What `fetch` reads the syncer's files through: its pod, else one that is deleted at the end.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: the syncer does not run, and its volume cannot be read without it.
        """
        with contextlib.ExitStack() as stack:
            source = volume_reader.reader(self.program, self.name, self.patience, self.announce)
            try:
                found = stack.enter_context(source)
            except UnavailableError as error:
                raise UnavailableError(f"cannot fetch files of job {self.name}: {error}") from None
            yield found

    def fetch(
        self, wanted: tuple[str, ...], to: Path, *, source: str = "", folder: str = STATE,
        caps: Caps = DEFAULT_CAPS,
    ) -> None:  # fmt: skip
        """
        Copy regular files out of a pod into `to`; missing ones are skipped.

        Args:
            wanted: paths in `folder`; the last component may be a pattern.
            to: created if missing.
            source: what `kubectl exec` takes; "": the syncer's Deployment.
            folder: their directory in the pod.
            caps: of what is written.

        Raises:
            ConfigError: kubectl is not installed.
            StorageError: a local file cannot be written, or the pod sends more than `caps`.
            UnavailableError: the pod cannot be reached, or the stream breaks repeatedly.
        """
        source = source or f"deployment/{names.syncer_name(self.name)}"
        command = self.program.command("exec", source, "-c", MAIN, "--")
        try:
            copy_files(command, folder, wanted, to, self.program.retries, caps)
        except UnavailableError as error:
            raise UnavailableError(f"cannot fetch files of job {self.name}: {error}") from None
        except StorageError as error:
            raise StorageError(f"files of job {self.name}: {error}") from None

    def _get(self, *arguments: str) -> bytes:
        try:
            return self.program.run("get", *arguments)
        except UnavailableError as error:
            raise UnavailableError(f"cannot read job {self.name}: {error}") from None

    @property
    def program(self) -> Kubectl:
        """kubectl for its namespace."""
        return Kubectl(
            namespace=self.namespace,
            context=self.context,
            program=self.kubectl,
            retries=replace(self.retries, announce=self.announce),
            most_bytes=self.most_bytes,
        )


def fetch_model(job: RemoteJob, to: Path) -> None:
    """
    Fetch the exported model of a job, as `model/` in `to`.

    Raises:
        ConfigError: kubectl is not installed.
        StorageError: a local file cannot be written.
        UnavailableError: the job or its syncer's volume cannot be reached.
    """
    with job.syncer_files() as source:
        job.fetch(MODEL, to, source=source, caps=MODEL_CAPS)


def adopt(job: RemoteJob, to: Path, option: str = "--to") -> dict[str, Any]:
    """
    Make `to` the run directory of a job: its manifest is written there.

    Args:
        job: the job.
        to: created if missing.
        option: of the command, which names the directory.

    Returns:
        The DiLoCoJob.

    Raises:
        ConfigError: kubectl is not installed, or `to` is the directory of another run.
        StorageError: a local file cannot be written.
        UnavailableError: the job cannot be reached.
    """
    text = job.manifest()
    manifest: dict[str, Any] = yaml.safe_load(text)
    run = RunDir(to)
    _refuse_another(run, manifest, option)
    try:
        run.path.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        files.replace(run.manifest, text, mode=files.PRIVATE)
    except OSError as error:
        raise StorageError(f"{error.filename or to}: {error.strerror}") from None
    return manifest


def fetch_run(job: RemoteJob, to: Path) -> list[str]:
    """
    Fetch a job into the run directory `to`, without logs, snapshots and the model.

    Returns:
        What is missing of single learners, one message each.

    Raises:
        ConfigError: kubectl is not installed, or `to` is the directory of another run.
        StorageError: a local file cannot be written.
        UnavailableError: the job or its syncer's volume cannot be reached.
    """
    # First: the next fetch recognizes the directory although this one is interrupted.
    manifest, run = adopt(job, to), RunDir(to)
    with job.syncer_files() as source:
        job.fetch(LOGS, run.path, source=source)
        job.fetch((run.spec.name,), run.path, source=source, folder=SPEC)
    run.write_status({"job": job.name, **(manifest.get("status") or {})})
    return _fetch_steps(job, run, manifest.get("spec") or {})


def _refuse_another(run: RunDir, manifest: Mapping[str, Any], option: str) -> None:
    """Refuse a directory whose files are those of another run: journals of two runs prove nothing."""
    if run.is_local():
        raise ConfigError(
            f"{run.path}: holds a run of this machine; give another directory with {option}"
        )
    try:
        there = yaml.safe_load(files.read(run.manifest))
    except FileNotFoundError:
        return
    except yaml.YAMLError:
        there = None
    if _identity(there) != _identity(manifest):
        raise ConfigError(
            f"{run.path}: holds another job, or one that was deleted and created again with the same name; give "
            f"another directory with {option}"
        )


def _identity(manifest: Any) -> tuple[Any, ...]:
    """What no other DiLoCoJob has, also not a later one of the same name."""
    metadata = manifest.get("metadata") if isinstance(manifest, dict) else None
    found = metadata if isinstance(metadata, dict) else {}
    return found.get("name"), found.get("uid")


def learner_problems(
    job: RemoteJob, spec: Mapping[str, Any]
) -> tuple[list[tuple[str, str, str]], str]:
    """
    What is wrong with the work of the learners that run in this cluster, as `diloco status` of a run shows it.

    Returns:
        Learner, kind and message of each problem; and of which learners it is not known, with a reason.

    Raises:
        ConfigError: kubectl is not installed.
    """
    try:
        pods = _first_pods(job, spec)
    except UnavailableError as error:
        return [], f"problems of learners are not known: {error}"
    asked = {names.learner_name(*key): pod for key, pod in [*pods.items()][:ASKED_LEARNERS]}

    deadline = time.monotonic() + ASK_ALL_SECONDS

    def ask(pod: str) -> Mapping[str, Any] | UnavailableError:
        left = deadline - time.monotonic()
        if left <= 0:
            return UnavailableError(
                f"not asked, because others did not reply within {ASK_ALL_SECONDS:g} s"
            )
        try:
            return job.health(pod, min(left, ASK_SECONDS))
        except UnavailableError as error:
            return error

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        replies = dict(zip(asked, pool.map(ask, asked.values()), strict=True))
    failed = {name: reply for name, reply in replies.items() if isinstance(reply, UnavailableError)}
    problems = [
        (
            name,
            shorten(str(reply["problem"]), _MAX_KIND),
            shorten(str(reply.get("why", "")), _MAX_TEXT),
        )
        for name, reply in replies.items()
        if not isinstance(reply, UnavailableError) and reply.get("problem")
    ]
    unknown = [f"{_some(failed)}: {next(iter(failed.values()))}"] if failed else []
    if (more := len(pods) - len(asked)) > 0:
        unknown.append(f"{more} learners beyond the first {ASKED_LEARNERS}, which are not asked")
    return problems, f"problems are not known of {'; '.join(unknown)}" if unknown else ""


def _first_pods(job: RemoteJob, spec: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """The first pod of each learner that runs in this cluster: it alone joins, and writes files."""
    size = (spec.get("learner") or {}).get("podsPerLearner", 1)
    return {
        (region, ordinal // size): pod
        for (region, ordinal), pod in sorted(job.learner_pods().items())
        if ordinal % size == 0 and _NAME.fullmatch(region)
    }


def _fetch_steps(job: RemoteJob, run: RunDir, spec: Mapping[str, Any]) -> list[str]:
    """Fetch `STEPS` of every learner that runs in this cluster; returns what is missing."""
    try:
        running = _first_pods(job, spec)
    except UnavailableError as error:
        return [f"no steps.jsonl of any learner: {error}"]
    wanted = [
        (region["name"], index)
        for region in spec.get("regions") or ()
        if _NAME.fullmatch(str(region["name"]))  # it becomes a directory
        for index in range(region["learners"])
    ]
    missing = []
    if absent := [names.learner_name(*key) for key in wanted if key not in running]:
        missing.append(
            f"no running pod in this cluster, so steps.jsonl is not fetched: {_some(absent)}"
        )
    for (region, index), pod in running.items():
        name = names.learner_name(region, index)
        try:
            fetch_steps(job, run, name, pod)
        except UnavailableError as error:
            missing.append(f"{name}: no steps.jsonl: {error}")
    return missing


def fetch_steps(job: RemoteJob, run: RunDir, learner: str, pod: str) -> None:
    """
    Fetch `STEPS` of a learner out of its first pod; raises as `RemoteJob.fetch`.
    """
    job.fetch(STEPS, run.state_of(learner), source=f"pod/{pod}")


def _some(learners: Iterable[str]) -> str:
    listed = list(learners)
    more = len(listed) - _MAX_NAMES
    return ", ".join(listed[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
