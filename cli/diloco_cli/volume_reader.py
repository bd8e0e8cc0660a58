"""
Where the files of a job's syncer can be read: in its pod, or in a fetch pod that is made for it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from diloco.errors import UnavailableError
from diloco_cli import fetch_pod
from diloco_cli.kubectl import Kubectl
from diloco_cli.pod_files import is_permanent
from diloco_job import names

RESOURCE = "dilocojobs.diloco.dev"

LIFE_SECONDS = 2 * 3600
"""The kubelet ends a fetch pod that was not deleted after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a fetch pod may take to start."""

    start_seconds: float = 300.0
    poll_seconds: float = 2.0


@contextlib.contextmanager
def reader(
    kubectl: Kubectl, job: str, patience: Patience, announce: Callable[[str], None]
) -> Iterator[str]:
    """
    What `kubectl exec` reaches the files of the syncer through, for as long as they are needed.

    Args:
        kubectl: of the job's cluster.
        job: its name.
        patience: with a fetch pod.
        announce: shows a person what happens and why it takes so long.

    Raises:
        ConfigError: kubectl is not installed.
        UnavailableError: the syncer does not run, and no fetch pod can.
    """
    syncer = f"deployment/{names.syncer_name(job)}"
    try:
        runs = _runs(kubectl, job)
    except UnavailableError:
        runs = True  # kubectl exec reports a missing right to list pods
    if runs:
        yield syncer
        return
    start = _Start(kubectl=kubectl, job=job, patience=patience, announce=announce)
    node = start.node()
    if node is None:
        yield syncer
        return
    name = f"{job}-fetch-{secrets.token_hex(4)}"
    try:
        start.create(name, node)
        start.wait(name)
        yield f"pod/{name}"
    finally:
        start.delete(name)


def _runs(kubectl: Kubectl, job: str) -> bool:
    selector = f"diloco.dev/job={job},diloco.dev/role=syncer"
    return fetch_pod.syncer_runs(_list(kubectl, "pods", "--selector", selector))


@dataclass(slots=True, kw_only=True)
class _Start:
    """The way of one fetch pod from its place to its end."""

    kubectl: Kubectl
    job: str
    patience: Patience
    announce: Callable[[str], None]
    _announced: str = ""
    _may_exist: bool = False
    """Whether the pod was created, or may have been: Ctrl-C, or no answer."""

    def node(self) -> str | None:
        """The node that it must run on, "" if any will do; None: the syncer runs by now."""
        deadline = time.monotonic() + self.patience.start_seconds
        self._owner()
        while True:
            deployment = self._deployment()
            found = fetch_pod.place(self.job, deployment, _list(self.kubectl, "pods"))
            if not found.wait:
                return found.node
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{found.wait}; run the command again when it runs, or suspend the job"
                )
            self._announce_once(f"waiting: {found.wait}")
            time.sleep(self.patience.poll_seconds)
            if _runs(self.kubectl, self.job):
                return None

    def create(self, name: str, node: str) -> None:
        """Create the pod."""
        manifest = fetch_pod.fetch_pod(
            self._owner(), self._deployment(), name=name, node=node, seconds=LIFE_SECONDS
        )
        where = f" on node {node}" if node else ""
        self.announce(f"the syncer does not run: starting pod {name}{where} to read its volume")
        self._may_exist = True
        try:
            self.kubectl.run("create", "-f", "-", stdin=json.dumps(manifest).encode())
        except UnavailableError as error:
            # The first attempt may have succeeded without an answer; the name is ours alone.
            if "(AlreadyExists)" not in str(error):
                self._may_exist = not is_permanent(str(error))
                raise UnavailableError(
                    f"cannot create pod {name}, which reads the volume: {error}"
                ) from None

    def wait(self, name: str) -> None:
        """Wait until commands can be run in the pod."""
        deadline, why = time.monotonic() + self.patience.start_seconds, ""
        while True:
            pod = _get(self.kubectl, f"pod/{name}")
            if pod is None:
                raise UnavailableError(f"pod {name} was deleted before it started")
            if fetch_pod.is_running(pod):
                return
            if problem := fetch_pod.failure(pod):
                raise UnavailableError(f"pod {name} cannot run: {problem}")
            why = fetch_pod.delay(pod, self._events(name)) or why
            if time.monotonic() > deadline:
                seconds = self.patience.start_seconds
                raise UnavailableError(
                    f"pod {name} did not start within {seconds:g} s: {why or 'no reason is known'}"
                )
            if why:
                self._announce_once(f"pod {name} waits: {why}")
            time.sleep(self.patience.poll_seconds)

    def delete(self, name: str) -> None:
        """Delete the pod, if it was created; after a failure it ends by its own deadline."""
        if not self._may_exist:
            return
        try:
            self.kubectl.run("delete", f"pod/{name}", "--ignore-not-found", "--wait=false")
        except UnavailableError as error:
            self.announce(f"cannot delete pod {name}, which exits in {LIFE_SECONDS} s: {error}")

    def _owner(self) -> fetch_pod.Object:
        found = _get(self.kubectl, f"{RESOURCE}/{self.job}")
        if found is None:
            raise UnavailableError(f"there is no DiLoCoJob {self.job} in this namespace")
        return found

    def _deployment(self) -> fetch_pod.Object:
        syncer = names.syncer_name(self.job)
        if _get(self.kubectl, f"persistentvolumeclaim/{syncer}") is None:
            raise UnavailableError(fetch_pod.why_no_volume(self._owner()))
        deployment = _get(self.kubectl, f"deployment/{syncer}")
        if deployment is None:
            raise UnavailableError(
                f"Deployment {syncer} is not in this cluster, so the image that reads the volume is "
                "unknown; while the operator runs, it creates the Deployment again"
            )
        return deployment

    def _events(self, name: str) -> list[fetch_pod.Object]:
        with contextlib.suppress(UnavailableError):
            return _list(self.kubectl, "events", f"--field-selector=involvedObject.name={name}")
        return []

    def _announce_once(self, text: str) -> None:
        if text != self._announced:
            self.announce(text)
        self._announced = text


def _list(kubectl: Kubectl, *arguments: str) -> list[fetch_pod.Object]:
    items: list[fetch_pod.Object] = json.loads(kubectl.run("get", *arguments, "-o", "json"))[
        "items"
    ]
    return items


def _get(kubectl: Kubectl, name: str) -> fetch_pod.Object | None:
    """The object; None: there is none."""
    text = kubectl.run("get", name, "-o", "json", "--ignore-not-found").strip()
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found
