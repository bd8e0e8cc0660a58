"""
The Kubernetes API as the operator uses it: plain dicts in and out, a deadline on every request.

Of the client library only the connections (a urllib3 pool) and the credentials are used: they bring
kubeconfig, TLS, proxies and token renewal, are the same in versions 36 and 37, and leave an answer
as the server sent it. The typed methods raise on what their models do not like (`items: null`).
Every request may be repeated: applies are idempotent, deletes name a uid, Events a name of ours.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from diloco.errors import ConfigError, DilocoError

log = logging.getLogger(__name__)

Json = dict[str, Any]

CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
RETRY_PAUSES = (0.2, 1.0)
"""Before the second and third try; what fails longer is the queue's business."""
PAGE = 500
JOB_LABEL = "diloco.dev/job"
MERGED = "application/apply-patch+yaml"  # JSON is YAML; +cbor and +yaml are all the server takes


class Kind(NamedTuple):
    """Where the objects of a kind are found."""

    api_version: str
    plural: str

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The resource's path; namespace "": of all namespaces."""
        root = "/apis" if "/" in self.api_version else "/api"
        parts = [root, self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [one for one in (self.plural, name, subresource) if one]
        return "/".join(parts)


KINDS = {
    "DiLoCoJob": Kind("diloco.dev/v1alpha1", "dilocojobs"),
    "StatefulSet": Kind("apps/v1", "statefulsets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Service": Kind("v1", "services"),
    "ConfigMap": Kind("v1", "configmaps"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "Certificate": Kind("cert-manager.io/v1", "certificates"),
    "Pod": Kind("v1", "pods"),
    "Secret": Kind("v1", "secrets"),
    "Event": Kind("v1", "events"),
}
CHILD_KINDS = (
    *("StatefulSet", "Deployment", "Service", "ConfigMap", "PersistentVolumeClaim"),
    *("ServiceAccount", "PodDisruptionBudget"),
)
"""Kinds of children in every cluster; Certificates are one more where cert-manager is."""


class ApiError(DilocoError):
    """The API server refused a request, or did not answer."""

    reason = "KubernetesApi"

    def __init__(self, what: str, status: int, message: str, *, ending: bool = False) -> None:
        super().__init__(f"{what}: {message}" if status else f"{what}: no answer: {message}")
        self.status = status
        """HTTP status; 0: no answer."""
        self.message = message
        """The server's words."""
        self.ending = ending
        """Refused because the namespace is being deleted, where nothing can be made any more."""

    @property
    def refused(self) -> bool:
        """Whether the server understood and said no: the same request will not help at once."""
        return 400 <= self.status < 500 and self.status not in (401, 408, 409, 429)


class Cluster:
    """One API server; safe for use by many threads."""

    def __init__(
        self, configuration: Configuration, *, manager: str, connections: int = 10
    ) -> None:
        """
        Nothing is dialled yet.

        Args:
            configuration: address and credentials of the API server.
            manager: field manager of children; the status has `<manager>-status`.
            connections: kept open for the next request.
        """
        configuration.connection_pool_maxsize = connections
        self._configuration = configuration
        client: Any = ApiClient(configuration)  # without types
        self._pool: urllib3.PoolManager = client.rest_client.pool_manager
        self._manager = manager

    def job(self, namespace: str, name: str) -> Json | None:
        """A DiLoCoJob; None: there is none."""
        return self.get("DiLoCoJob", namespace, name)

    def jobs(self, namespaces: Sequence[str] = ()) -> Iterator[Json]:
        """All DiLoCoJobs of these namespaces; (): of all."""
        for namespace in namespaces or ("",):
            yield from self._list("DiLoCoJob", namespace)

    def children(self, namespace: str, job: str, *, certificates: bool) -> tuple[Json, ...]:
        """Everything but pods that is labelled as the job's, whoever owns it."""
        found: list[Json] = []
        for kind in CHILD_KINDS:
            found += self._list(kind, namespace, job)
        if certificates:
            try:
                found += self._list("Certificate", namespace, job)
            except ApiError as error:
                if not error.refused:
                    raise
                # No cert-manager, or no right to it: applying the Certificate says so in a condition.
        return tuple(found)

    def pods(self, namespace: str, job: str) -> tuple[Json, ...]:
        """The job's pods."""
        return tuple(self._list("Pod", namespace, job))

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """One object; None: there is none."""
        try:
            return self._request("GET", KINDS[kind].path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def apply(self, body: Json) -> Json:
        """Server-side apply, taking fields from others where need be; the object as it is now."""
        metadata = body["metadata"]
        path = KINDS[body["kind"]].path(metadata["namespace"], metadata["name"])
        return self._apply(path, body, self._manager)

    def put_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Make this the status of the job that was read; a successor of its name is left alone."""
        metadata = job["metadata"]
        body = {
            "apiVersion": KINDS["DiLoCoJob"].api_version,
            "kind": "DiLoCoJob",
            "metadata": {key: metadata[key] for key in ("namespace", "name", "uid")},
            "status": status,
        }
        path = KINDS["DiLoCoJob"].path(metadata["namespace"], metadata["name"], "status")
        self._apply(path, body, f"{self._manager}-status")

    def delete(
        self, kind: str, namespace: str, name: str, *, uid: str, resource_version: str = ""
    ) -> bool:
        """
        Delete exactly the object that was read; its own children follow in the background.

        Returns:
            Whether it was there; False as well when it changed since `resource_version`.
        """
        wanted = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        body = {"propagationPolicy": "Background", "preconditions": wanted}
        try:
            self._request("DELETE", KINDS[kind].path(namespace, name), body=body)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    def event(self, body: Json) -> None:
        """Post an Event; one of this name that exists stays as it is."""
        try:
            path = KINDS["Event"].path(body["metadata"]["namespace"])
            self._request("POST", path, body=body)
        except ApiError as error:
            if error.status != 409:
                raise

    def _list(self, kind: str, namespace: str, job: str = "") -> Iterator[Json]:
        at = KINDS[kind]
        query = {"limit": str(PAGE)} | ({"labelSelector": f"{JOB_LABEL}={job}"} if job else {})
        while True:
            page = self._request("GET", at.path(namespace), query=query)
            for item in page.get("items") or ():
                yield {"apiVersion": at.api_version, "kind": kind, **item}
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return
            query["continue"] = following

    def _apply(self, path: str, body: Mapping[str, Any], manager: str) -> Json:
        query = {"fieldManager": manager, "force": "true"}
        return self._request("PATCH", path, query=query, body=body, content=MERGED)

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> Json:
        what = f"{method} {path}"
        url = (
            self._configuration.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        )
        sent = None if body is None else json.dumps(body).encode()
        for pause in (*RETRY_PAUSES, None):
            status, data, wait = self._once(method, url, sent, content)
            if 200 <= status < 300:
                return _parsed(data, what)
            error = _error(what, status, data)
            # An apply is answered by 409 for a race inside the server, by 500 for a field of the
            # wrong type; a create or delete means its 409.
            passing = 409 if method == "PATCH" else 500
            again = status in (0, 429, passing, 502, 503, 504)
            if pause is None or not again or wait is None:
                raise error
            log.info("%s; trying again", error)
            time.sleep(max(pause, wait))
        raise AssertionError("not reached: the last try returns or raises")

    def _once(
        self, method: str, url: str, body: bytes | None, content: str
    ) -> tuple[int, bytes, float | None]:
        """Status, body, and for how long the server asks to wait (None: do not try again)."""
        headers = {"Accept": "application/json", "User-Agent": self._manager}
        settings: Mapping[str, Any] = self._configuration.auth_settings()
        for auth in settings.values():
            if auth["value"]:
                headers[auth["key"]] = auth["value"]
        if body is not None:
            headers["Content-Type"] = content
        try:
            answer = self._pool.request(
                method,
                url,
                headers=headers,
                body=body,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
                retries=False,
            )
        except urllib3.exceptions.ReadTimeoutError as error:
            # It hangs: the next try would hold a thread as long.
            return 0, str(error).encode(), None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return 0, str(error).encode(), 0.0
        return answer.status, answer.data, _seconds(answer.headers)


def connect(*, kubeconfig: Path | None = None) -> Configuration:
    """
    Address and credentials of the API server: the pod's own, else those of kubeconfig.

    Tokens are read again from their file by `auth_settings`, once a minute.

    Args:
        kubeconfig: instead of the file that the client library takes.

    Raises:
        ConfigError: neither is there.
    """
    configuration = Configuration()
    load: Any = config  # without types
    try:
        load.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            load.load_kube_config(
                str(kubeconfig) if kubeconfig else None, client_configuration=configuration
            )
        except config.ConfigException as error:
            raise ConfigError(
                f"no API server: this is no pod with a service account, and kubeconfig: {error}"
            ) from None
    return configuration


def _parsed(data: bytes, what: str) -> Json:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ApiError(
            what, 502, f"{len(data)} bytes that are no JSON object; is this the API server?"
        )
    return found


def _error(what: str, status: int, data: bytes) -> ApiError:
    try:
        said = json.loads(data)
        causes = (said.get("details") or {}).get("causes") or ()
        ending = any(one.get("reason") == "NamespaceTerminating" for one in causes)
        message = said["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        message, ending = data.decode(errors="replace")[:500], False
    return ApiError(what, status, str(message) or f"HTTP status {status}", ending=ending)


def _seconds(headers: Mapping[str, str]) -> float:
    """Retry-After, at most 5 s: a worker thread waits that long."""
    try:
        return min(5.0, float(headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
