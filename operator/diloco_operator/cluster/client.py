"""
The Kubernetes API as the operator uses it: plain dicts in and out, a deadline on every request.

The client library provides only the connections (a urllib3 pool) and the credentials: kubeconfig, TLS, proxies and
token renewal. These are the same in versions 36 and 37 and return responses as the server sent them, while the
typed methods raise on what their models do not accept (`items: null`). Every request may be repeated: applies are
idempotent, deletes have a uid, Events a unique name.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from diloco.errors import ConfigError, DilocoError
from diloco_operator.cluster.kinds import KINDS, NEEDED_KINDS, OTHER_KINDS
from diloco_operator.resources.queue_labels import asks_for_pod_groups
from diloco_operator.state.previous_status import removal
from diloco_operator.state.queues import JOB_UID
from diloco_operator.workqueue import Key

log = logging.getLogger(__name__)

Json = dict[str, Any]

CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
RETRY_PAUSES = (0.2, 1.0)
"""Before the second and third attempt; the work queue retries longer failures."""
PAGE = 50
"""Objects of a list in one reply: each can have 1.5 MB, which takes about three times as much once it is parsed."""
AT_MOST = 500
"""Events about an object, or Workloads of a job, that are read."""
JOB_LABEL = "diloco.dev/job"
TOO_LARGE_VERSION = 504
"""HTTP status of a list that should be newer than the API server's cache became within 3 s."""
TOO_LARGE = "oo large resource version"  # in its message
ANY_VERSION = 1
"""Every cache is this new."""
LAGGING_SECONDS = 60.0
"""How long the lists of a kind are read from the store after that."""
MESSAGE_CHARACTERS = 2000
"""Of the server's message: twice what a condition has."""
METADATA = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
"""Media type of a list of objects with nothing but their metadata."""
MERGED = "application/apply-patch+yaml"  # JSON is YAML; +cbor and +yaml are all the server takes


class ApiError(DilocoError):
    """The API server refused a request, or did not answer."""

    reason = "KubernetesApi"

    def __init__(
        self, request: str, status: int, message: str, *, namespace_terminating: bool = False
    ) -> None:
        super().__init__(f"{request}: {message}" if status else f"{request}: no answer: {message}")
        self.status = status
        """HTTP status; 0: no answer."""
        self.message = message
        """The server's message."""
        self.namespace_terminating = namespace_terminating
        """Refused because the namespace is terminating, so that nothing can be created in it."""

    @property
    def refused(self) -> bool:
        """Whether the server rejected the request, so that an immediate retry cannot help."""
        return 400 <= self.status < 500 and self.status not in (401, 408, 409, 429)


class NotLeaderError(ApiError):
    """A write was not sent: another process may write now."""


class Cluster:
    """One API server; safe for use by many threads."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        manager: str,
        connections: int = 10,
        may_write: Callable[[], bool] = lambda: True,
        only_try_seconds: float | None = None,
        progressed: Callable[[Key], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Nothing is dialled yet.

        Args:
            configuration: address and credentials of the API server.
            manager: field manager of children; the status has `<manager>-status`.
            connections: kept open for the next request.
            may_write: asked before each attempt to write; if it returns False, the request fails.
            only_try_seconds: a request is not repeated, and fails after this time; None: requests
                are repeated, and take as long as READ_SECONDS and RETRY_PAUSES allow.
            progressed: called after each page of a list of a job's objects: there may be hundreds.
            clock: monotonic.
        """
        configuration.connection_pool_maxsize = connections
        self._configuration = configuration
        client: Any = ApiClient(configuration)  # without types
        self._pool: urllib3.PoolManager = client.rest_client.pool_manager
        self._manager = manager
        self._may_write = may_write
        self._only_try_seconds = only_try_seconds
        self._progressed = progressed
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}
        """Kind → the newest version of any of its objects that `saw` was called with."""
        self._listed: dict[tuple[str, str], bool] = {}
        """
        Kind and namespace → whether all objects of jobs were listed from the store since this process
        leads; False: a thread does that now.
        """
        self._lagging: dict[str, float] = {}
        """Kind → until when its lists are read from the store, because the cache was not new enough."""

    def saw(self, item: Mapping[str, Any], kind: str) -> None:
        """The watch delivered this version of an object: lists of a job's objects are no older."""
        try:
            version = int(item["metadata"]["resourceVersion"])
        except (KeyError, TypeError, ValueError):
            return  # such as most answers to a delete
        with self._lock:
            self._newest[kind] = max(version, self._newest.get(kind, 0))

    def begin(self) -> None:
        """This process begins to lead: another one may have written what no watch has delivered yet."""
        with self._lock:
            self._listed = {}  # lists that are under way belong to the former one

    def forget(self, namespace: str) -> None:
        """No job is left in this namespace."""
        with self._lock:
            for place in [place for place in list(self._listed) if place[1] == namespace]:
                del self._listed[place]  # in place: lists that are under way record their end here

    def job(self, namespace: str, name: str) -> Json | None:
        """A DiLoCoJob; None: there is none."""
        return self.get("DiLoCoJob", namespace, name)

    def jobs(self, namespaces: Sequence[str] = ()) -> Iterator[Json]:
        """The metadata of all DiLoCoJobs of these namespaces; (): of all namespaces."""
        for namespace in namespaces or ("",):
            yield from self._list("DiLoCoJob", namespace, accept=METADATA)

    def published_schema(self) -> Json:
        """The fields of a DiLoCoJob that the server stores: OpenAPI v3 of its group, readable for everyone."""
        return self._request("GET", f"/openapi/v3/apis/{KINDS['DiLoCoJob'].api_version}")

    def children(
        self,
        namespace: str,
        job: str,
        *,
        certificates: bool,
        policies: bool = False,
        pod_groups: bool = False,
        newest: bool = False,
    ) -> tuple[Json, ...]:
        """
        All objects except pods with the job's label, whatever their owner; see `_of_job`.

        Raises:
            ApiError: the API server did not answer, or denied access to one of NEEDED_KINDS.
        """
        found: list[Json] = []
        for kind in NEEDED_KINDS:
            found += self._of_job(kind, namespace, job, newest=newest)
        groups = any(map(asks_for_pod_groups, found)) or pod_groups
        for kind in (
            *OTHER_KINDS,
            *(("NetworkPolicy",) if policies else ()),
            *(("Certificate",) if certificates else ()),
            *(("PodGroup",) if groups else ()),
        ):
            try:
                found += self._of_job(kind, namespace, job, newest=newest)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                # The server does not have it, or gives no access: everything of it is applied again, a
                # condition reports it where that is refused, and whatever of it is obsolete stays.
        return tuple(found)

    def pods(self, namespace: str, job: str, *, newest: bool = False) -> tuple[Json, ...]:
        """The job's pods; see `_of_job`."""
        return tuple(self._of_job("Pod", namespace, job, newest=newest))

    def events_about(self, item: Mapping[str, Any]) -> tuple[Json, ...]:
        """Events about this object, at most AT_MOST of them."""
        metadata = item["metadata"]
        selected = {"fieldSelector": f"involvedObject.uid={metadata['uid']}"}
        return self._page_if_allowed("Event", metadata["namespace"], selected)

    def workloads(self, namespace: str, uids: Sequence[str]) -> tuple[Json, ...]:
        """Kueue's Workloads of the objects with these uids; none without Kueue."""
        selected = {"labelSelector": f"{JOB_UID} in ({','.join(uids)})"}
        return self._page_if_allowed("Workload", namespace, selected)

    def _page_if_allowed(
        self, kind: str, namespace: str, selected: Mapping[str, str]
    ) -> tuple[Json, ...]:
        query = {**selected, "limit": str(AT_MOST)}
        try:
            page = self._request("GET", KINDS[kind].path(namespace), query=query)
        except ApiError as error:
            if not error.refused:
                raise
            # The operator's rights may be older than this request: the status shows less then.
            return ()
        return tuple(page.get("items") or ())

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """One object; None: there is none."""
        try:
            return self._request("GET", KINDS[kind].path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def apply(self, body: Json) -> Json:
        """Server-side apply that takes over conflicting fields; the resulting object."""
        metadata = body["metadata"]
        path = KINDS[body["kind"]].path(metadata["namespace"], metadata["name"])
        after = self._apply(path, body, self._manager)
        self.saw(after, body["kind"])
        return after

    def put(self, body: Json) -> Json:
        """
        Replace an object that still has the resourceVersion of `body`, or create it if there is none.

        Create by PUT, unlike by POST, needs a right on this name only; few kinds allow it.
        """
        metadata = body["metadata"]
        path = KINDS[body["kind"]].path(metadata["namespace"], metadata["name"])
        return self._request("PUT", path, body=body)

    def put_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """
        Write the status of the job that was read; a newer job of the same name is left alone.

        An apply removes what its own field manager alone had applied. The rest, such as a time that an operator
        with another region.name, a person or a restored backup has written, is removed by a patch.
        """
        own = f"{self._manager}-status"
        after = self._apply_status(job, ("uid",), status, own)
        removed = removal(after.get("status") or {}, status)
        if not removed:
            return
        metadata = {"resourceVersion": after["metadata"]["resourceVersion"]}
        try:
            self._request(
                "PATCH",
                _status_path(job),
                query={"fieldManager": own},
                body={"metadata": metadata, "status": removed},
                content="application/merge-patch+json",
                final=409,
            )
        except ApiError as error:
            if isinstance(error, NotLeaderError) or error.status == 401:
                raise  # no later request of this process can succeed
            # The status was written, so that its Events are due. The next write tries it again.
            log.warning("cannot remove obsolete fields of the status: %s", error)

    def claim(self, job: Mapping[str, Any], installation: str) -> None:
        """
        Record which installation runs the job, in status.operator.

        Raises:
            ApiError: with status 409 if the job changed since it was read: another may have claimed it.
        """
        status = {"operator": installation}
        self._apply_status(job, ("uid", "resourceVersion"), status, f"{self._manager}-claim")

    def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        uid: str,
        resource_version: str = "",
        force: bool = False,
    ) -> bool:
        """
        Delete exactly the object that was read, and its dependents in the background.

        Args:
            kind: of the object.
            namespace: of the object.
            name: of the object.
            uid: another object of this name is left alone.
            resource_version: and so is a later version; "": whatever the version.
            force: of a pod: do not wait until its kubelet confirms that it ended.

        Returns:
            Whether it was deleted: False if it did not exist or changed since `resource_version`.
        """
        version = {"resourceVersion": resource_version} if resource_version else {}
        body: Json = {"propagationPolicy": "Background", "preconditions": {"uid": uid} | version}
        if force:
            body["gracePeriodSeconds"] = 0
        try:
            after = self._request("DELETE", KINDS[kind].path(namespace, name), body=body)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        self.saw(after, kind)
        return True

    def event(self, body: Json) -> None:
        """Post an Event; an existing Event of this name does not change."""
        try:
            path = KINDS["Event"].path(body["metadata"]["namespace"])
            self._request("POST", path, body=body)
        except ApiError as error:
            if error.status != 409:
                raise

    def _of_job(self, kind: str, namespace: str, job: str, *, newest: bool) -> list[Json]:
        """
        The objects of a kind with the job's label: from the API server's cache, but no older than what
        this process has written or seen. With `newest`, from the store.

        No label has an index. Without a version, and on many servers with a limit, the server reads
        and decodes all objects of the kind and namespace to find those of one job: with five times
        the jobs, it would take 25 times as long to read all of them once.
        """
        place = (kind, namespace)
        with self._lock:
            listed = self._listed
            first = not newest and place not in listed
            if first:
                listed[place] = False
            lags = self._clock() < self._lagging.get(kind, -math.inf)
            cached = listed.get(place, False) and not lags and not newest
            oldest = self._newest.get(kind, ANY_VERSION)
        if first:
            return self._first_list(kind, namespace, job, listed)
        selected = {"labelSelector": f"{JOB_LABEL}={job}"}
        if cached:
            versions = {"resourceVersion": str(oldest), "resourceVersionMatch": "NotOlderThan"}
            try:
                path = KINDS[kind].path(namespace)
                query = selected | versions
                page = self._request("GET", path, query=query, final=TOO_LARGE_VERSION)
                self._progressed(Key(namespace, job))
                return list(_items(page, kind))
            except ApiError as error:
                # Proxies answer 504 as well.
                if error.status != TOO_LARGE_VERSION or TOO_LARGE not in error.message:
                    raise
            # Its cache lags far behind, or etcd was restored and counts from an older version on.
            with self._lock:
                self._lagging[kind] = self._clock() + LAGGING_SECONDS
        found = list(self._list(kind, namespace, selected, of=Key(namespace, job)))
        for item in found:
            self.saw(item, kind)
        return found

    def _first_list(
        self, kind: str, namespace: str, job: str, listed: dict[tuple[str, str], bool]
    ) -> list[Json]:
        """
        The objects of the job, found among those of all jobs, which are read from the store.

        A process that begins to lead must not see less than the one before it did, whatever its
        watches have delivered. The version of the list itself would be of no use: it counts changes of
        all kinds, and the cache of a kind learns it only from changes of that kind.
        """
        found: list[Json] = []
        try:
            selected = {"labelSelector": JOB_LABEL}
            for item in self._list(kind, namespace, selected, of=Key(namespace, job)):
                self.saw(item, kind)
                if item["metadata"]["labels"][JOB_LABEL] == job:
                    found.append(item)
        except BaseException:
            listed.pop((kind, namespace), None)
            raise
        listed[kind, namespace] = True
        return found

    def _list(
        self,
        kind: str,
        namespace: str,
        selected: Mapping[str, str] | None = None,
        *,
        of: Key | None = None,
        accept: str = "application/json",
    ) -> Iterator[Json]:
        """The objects, page by page; `of`: the job whose reconcile reads them."""
        query = {"limit": str(PAGE), **(selected or {})}
        with self._lock:
            known = self._newest.get(kind, ANY_VERSION)
        while True:
            page = self._request("GET", KINDS[kind].path(namespace), query=query, accept=accept)
            if of is not None:
                self._progressed(of)
            self._check_restored(page, kind, known)
            yield from _items(page, kind)
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token

    def _check_restored(self, page: Json, kind: str, known: int) -> None:
        """Forget the newest version if the store is older than what was known before it was asked."""
        try:
            version = int(page["metadata"]["resourceVersion"])
        except (KeyError, TypeError, ValueError):
            return
        with self._lock:
            if version < known <= self._newest.get(kind, ANY_VERSION):
                self._newest.pop(kind)

    def _apply_status(
        self,
        job: Mapping[str, Any],
        preconditions: Sequence[str],
        status: Mapping[str, Any],
        manager: str,
    ) -> Json:
        metadata = job["metadata"]
        body = {
            "apiVersion": KINDS["DiLoCoJob"].api_version,
            "kind": "DiLoCoJob",
            "metadata": {key: metadata[key] for key in ("namespace", "name", *preconditions)},
            "status": status,
        }
        return self._apply(_status_path(job), body, manager)

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
        accept: str = "application/json",
        final: int | None = None,
    ) -> Json:
        request = f"{method} {path}"
        url = (
            self._configuration.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        )
        payload = None if body is None else json.dumps(body).encode()
        pauses = RETRY_PAUSES if self._only_try_seconds is None else ()
        for pause in (*pauses, None):
            if method != "GET" and not self._may_write():
                raise NotLeaderError(request, 0, "not sent: this operator is not the leader")
            status, data, wait = self._send(method, url, payload, content, accept)
            if 200 <= status < 300:
                return _parsed(data, request)
            error = _error(request, status, data)
            # For an apply, 409 is a race inside the server and 500 a field of the wrong type; for a
            # create or delete, 409 is final.
            transient = 409 if method == "PATCH" else 500
            retry = status in (0, 429, transient, 502, 503, 504)
            if pause is None or not retry or wait is None or status == final:
                raise error
            log.info("%s; retrying", error)
            time.sleep(max(pause, wait))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _timeout(self) -> urllib3.Timeout:
        if self._only_try_seconds is not None:
            return urllib3.Timeout(total=self._only_try_seconds)
        return urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)

    def _send(
        self, method: str, url: str, body: bytes | None, content: str, accept: str
    ) -> tuple[int, bytes, float | None]:
        """Status, body, and seconds to wait before a retry (None: do not retry)."""
        headers = {"Accept": accept, "User-Agent": self._manager}
        settings: Mapping[str, Any] = self._configuration.auth_settings()
        for auth in settings.values():
            if auth["value"]:
                headers[auth["key"]] = auth["value"]
        if body is not None:
            headers["Content-Type"] = content
        try:
            response = self._pool.request(
                method,
                url,
                headers=headers,
                body=body,
                timeout=self._timeout(),
                retries=False,
            )
        except urllib3.exceptions.ReadTimeoutError as error:
            # The server hangs: a retry would block a thread as long.
            return 0, str(error).encode(), None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return 0, str(error).encode(), 0.0
        return response.status, response.data, _seconds(response.headers)


def connect(*, kubeconfig: Path | None = None) -> Configuration:
    """
    Address and credentials of the API server: from the pod, else from kubeconfig.

    `auth_settings` rereads tokens from their file once a minute.

    Args:
        kubeconfig: replaces the client library's default file.

    Raises:
        ConfigError: neither exists.
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
                f"no API server: not in a pod with a service account, and kubeconfig: {error}"
            ) from None
    return configuration


def _status_path(job: Mapping[str, Any]) -> str:
    metadata = job["metadata"]
    return KINDS["DiLoCoJob"].path(metadata["namespace"], metadata["name"], "status")


def _items(page: Json, kind: str) -> Iterator[Json]:
    for item in page.get("items") or ():
        yield {**item, "apiVersion": KINDS[kind].api_version, "kind": kind}


def _parsed(data: bytes, request: str) -> Json:
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        text = f"{len(data)} bytes that are not a JSON object; is this the API server?"
        raise ApiError(request, 502, text)
    return parsed


def _error(request: str, status: int, data: bytes) -> ApiError:
    try:
        details = json.loads(data)
        causes = (details.get("details") or {}).get("causes") or ()
        terminating = any(cause.get("reason") == "NamespaceTerminating" for cause in causes)
        message = details["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        message, terminating = data.decode(errors="replace").strip()[:500], False
        if status == 404:
            # Plain text is its answer to a group that it does not know, as without the CRD of a Certificate.
            message = f"{message}: this API server does not serve {_group(request)}"
    text = str(message)[:MESSAGE_CHARACTERS] or f"HTTP status {status}"
    return ApiError(request, status, text, namespace_terminating=terminating)


def _group(request: str) -> str:
    """API group and version of a request, such as "PATCH /apis/apps/v1/namespaces/…"."""
    _, _, path = request.partition("/apis/")
    return "/".join(path.split("/")[:2]) if path else "v1"


def _seconds(headers: Mapping[str, str]) -> float:
    """Retry-After, at most 5 s, because it blocks a thread."""
    try:
        return min(5.0, float(headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
