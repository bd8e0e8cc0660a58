"""
A Kubernetes API server in memory, over real HTTP: as much as the operator's tests need.

GET, LIST (chunked, label selectors), WATCH (bookmarks, 410), server-side apply with field ownership by leaf, PUT, the
status subresource (and its merge patches), DELETE with preconditions and garbage collection by owner, Events,
discovery. No schemas, no defaults, no validation, no controllers: tests play those. Faults: any request can fail
with a status or hang, and the whole server can be unavailable.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
GROUPS = {
    "v1": {
        "namespaces": "Namespace", "pods": "Pod", "services": "Service", "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim", "serviceaccounts": "ServiceAccount",
        "secrets": "Secret", "events": "Event",
    },
    "apps/v1": {"statefulsets": "StatefulSet", "deployments": "Deployment"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "diloco.dev/v1alpha1": {"dilocojobs": "DiLoCoJob"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "cert-manager.io/v1": {"certificates": "Certificate"},
    "coordination.k8s.io/v1": {"leases": "Lease"},
}  # fmt: skip
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<ns>[^/]+)(?=/))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>status))?"
)


@dataclass
class Request:
    """A received request."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    agent: str
    token: str
    kind: str = ""
    """Content-Type."""
    status: int = 0
    at: float = field(default_factory=time.monotonic)


@dataclass
class Fault:
    """Answers the next `times` requests that match."""

    method: str
    path: str
    """A regular expression, searched in path?query."""
    status: int = 500
    message: str = "a fault of the test"
    cause: str = ""
    """Reason of the Status's only cause, such as NamespaceTerminating."""
    hang_seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1


class RefuseError(Exception):
    """Ends a request with a Status, or with plain text."""

    def __init__(self, status: int, message: str, *, plain: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.plain = status, message, plain


class FakeApi:
    """Use as a context manager; `url` to dial, `kubeconfig(path)` for clients."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.unavailable = False
        """Close every connection without a response."""
        self.bookmark_seconds = 0.5
        self.null_lists = False
        """Send empty lists as `items: null`, as some aggregated API servers do."""
        self.num_decoded = 0
        """Objects that lists without a version have read: no label has an index, and the cache is not asked."""
        self.cache: Callable[[int, int], int] = lambda oldest, newest: newest
        """Which version a list shows that may be as old as the first argument; the second is the newest."""
        self.openapi: Json | None = None
        """OpenAPI v3 of the jobs' group; None: not published."""
        self.deaf = False
        """Watches deliver nothing."""
        self.on_write: Callable[[Json], None] | None = None
        """Called with each object that was created or changed: a test's controllers."""
        self._objects: dict[tuple[str, str, str], Json] = {}
        self._owned: dict[tuple[str, str, str, str], set[tuple[str, ...]]] = {}
        self._log: list[tuple[int, str, str, Json]] = []
        self._oldest = 0
        self._version = 1000
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeApi:
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = self.unavailable = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # For tests

    def kubeconfig(self, path: Path, token: str = "") -> Path:
        """Write a kubeconfig for this server."""
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }))  # fmt: skip
        return path

    def create(self, body: Json) -> Json:
        """Create an object, as a user does."""
        plural = next(p for p, k in GROUPS[body["apiVersion"]].items() if k == body["kind"])
        with self._changed:
            return self._create(plural, copy.deepcopy(body))

    def get(self, plural: str, name: str, namespace: str = "ns") -> Json | None:
        with self._changed:
            return copy.deepcopy(self._objects.get((plural, namespace, name)))

    def all(self, plural: str) -> list[Json]:
        with self._changed:
            return [
                copy.deepcopy(o) for (p, _, _), o in sorted(self._objects.items()) if p == plural
            ]

    def edit(
        self, plural: str, name: str, change: Callable[[Json], None], namespace: str = "ns"
    ) -> Json:
        """Change an object, as a user (or a controller, for status) does."""
        with self._changed:
            found = copy.deepcopy(self._objects[(plural, namespace, name)])
            change(found)
            return self._store(plural, found)

    def delete(self, plural: str, name: str, namespace: str = "ns") -> None:
        with self._changed:
            self._remove(plural, namespace, name)

    def forget_history(self) -> None:
        """Answer watches from older versions with 410 Gone, running ones as well."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._changed.notify_all()

    def writes(self, agent: str = "") -> list[Request]:
        """Write requests, including failed ones."""
        return [r for r in list(self.requests) if r.method != "GET" and agent in r.agent]

    # The server

    def handle(self, request: Request) -> Json:
        """The answer to any request but a watch."""
        path = urlsplit(request.path).path
        if (found := self._discovery(path)) is not None:
            return found
        at = _PATH.fullmatch(path)
        if at is None or (at["core"] or at["group"]) not in GROUPS:
            raise RefuseError(404, "404 page not found\n", plain=True)  # as a real server
        if at["plural"] not in GROUPS[at["core"] or at["group"]]:
            raise RefuseError(404, f"the server could not find the requested resource: {path}")
        plural, namespace, name, sub = (
            at["plural"],
            at["ns"] or "",
            at["name"] or "",
            at["sub"] or "",
        )
        with self._changed:
            match request.method:
                case "GET" if name:
                    return copy.deepcopy(self._found(plural, namespace, name))
                case "GET":
                    return self._page(at["core"] or at["group"], plural, namespace, request.query)
                case "POST":
                    return self._create(
                        plural, {**request.body, "kind": GROUPS["v1"][plural], "apiVersion": "v1"}
                    )
                case "PATCH" if request.kind == "application/merge-patch+json":
                    return self._merge_patch(plural, namespace, name, request)
                case "PATCH":
                    return self._apply(plural, namespace, name, sub, request)
                case "PUT":
                    return self._replace(plural, namespace, name, request.body)
                case "DELETE":
                    return self._precondition(plural, namespace, name, request.body or {})
                case _:
                    raise RefuseError(405, request.method)

    def watch(self, request: Request) -> Iterator[Json | None]:
        """Events from a version on; None: nothing yet."""
        at = _PATH.fullmatch(urlsplit(request.path).path)
        assert at is not None
        plural, namespace = at["plural"], at["ns"] or ""
        since = int(request.query.get("resourceVersion") or 0)
        selector = request.query.get("labelSelector", "")
        end = time.monotonic() + float(request.query.get("timeoutSeconds") or 3600)
        place = 0
        while time.monotonic() < end and not self.unavailable:
            with self._changed:
                if place >= len(self._log) and since >= self._oldest:
                    self._changed.wait(self.bookmark_seconds)
                news, place = self._log[place:], len(self._log)
                version, gone = self._version, since < self._oldest
            if gone:
                yield {
                    "type": "ERROR",
                    "object": {
                        "kind": "Status",
                        "code": 410,
                        "message": "too old resource version",
                    },
                }
                return
            for number, event, of, body in news:
                here = of == plural and namespace in ("", body["metadata"].get("namespace"))
                if number > since and here and _selected(body, selector) and not self.deaf:
                    yield {"type": event, "object": body}
            since = max(since, version)
            yield {"type": "BOOKMARK", "object": {"kind": GROUPS[at["core"] or at["group"]][plural],
                                                  "apiVersion": at["core"] or at["group"],
                                                  "metadata": {"resourceVersion": str(version)}}}  # fmt: skip

    def fault(self, request: Request) -> Fault | None:
        with self._changed:
            for fault in self.faults:
                here = fault.method in (request.method, "*") and re.search(fault.path, request.path)
                if fault.times > 0 and here:
                    fault.times -= 1
                    return fault
        return None

    def _discovery(self, path: str) -> Json | None:
        if path == "/openapi/v3/apis/diloco.dev/v1alpha1":
            return self.openapi
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.4"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = sorted(group for group in GROUPS if "/" in group)
            return {"kind": "APIGroupList", "groups": [
                {"name": group.split("/")[0], "versions": [{"groupVersion": group, "version": group.split("/")[1]}],
                 "preferredVersion": {"groupVersion": group, "version": group.split("/")[1]}}
                for group in groups
            ]}  # fmt: skip
        group = (
            path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        )
        if group not in GROUPS:
            return None
        verbs = ["get", "list", "watch", "create", "patch", "delete"]
        return {"kind": "APIResourceList", "groupVersion": group, "resources": [
            {"name": plural, "singularName": kind.lower(), "kind": kind, "verbs": verbs,
             "namespaced": kind not in ("Namespace", "CustomResourceDefinition")}
            for plural, kind in GROUPS[group].items()
        ]}  # fmt: skip

    def _page(self, group: str, plural: str, namespace: str, query: dict[str, str]) -> Json:
        kind = GROUPS[group][plural]
        oldest, shown = query.get("resourceVersion"), self._version
        objects = self._objects
        if oldest is not None:
            # As a real server: the cache of a kind learns versions from changes of that kind only.
            if int(oldest) > max((n for n, _, of, _ in self._log if of == plural), default=1):
                raise RefuseError(504, f"Too large resource version: {oldest}")
            shown = self.cache(int(oldest), self._version)
            objects = objects if shown == self._version else self._objects_at(shown)
        stored = [
            body
            for (of, ns, _), body in sorted(objects.items())
            if of == plural and namespace in ("", ns)
        ]
        if oldest is None:
            self.num_decoded += len(stored)
        found = [
            copy.deepcopy(body)
            for body in stored
            if _selected(body, query.get("labelSelector", ""))
        ]
        first, limit = (
            int(query.get("continue") or 0),
            int(query.get("limit") or 0) or len(found) + 1,
        )
        items = found[first : first + limit]
        for item in items:  # as a real server: items of a list have no kind
            item.pop("apiVersion", None), item.pop("kind", None)
        after = str(first + limit) if first + limit < len(found) else ""
        return {"apiVersion": group, "kind": f"{kind}List", "items": items or (None if self.null_lists else []),
                "metadata": {"resourceVersion": str(shown), "continue": after}}  # fmt: skip

    def _objects_at(self, version: int) -> dict[tuple[str, str, str], Json]:
        """The objects of a former version."""
        objects: dict[tuple[str, str, str], Json] = {}
        for number, event, plural, body in self._log:
            if number > version:
                break
            key = (plural, body["metadata"].get("namespace", ""), body["metadata"]["name"])
            if event == "DELETED":
                objects.pop(key, None)
            else:
                objects[key] = body
        return objects

    def _found(self, plural: str, namespace: str, name: str) -> Json:
        try:
            return self._objects[(plural, namespace, name)]
        except KeyError:
            raise RefuseError(404, f'{plural} "{name}" not found') from None

    def _create(self, plural: str, body: Json) -> Json:
        metadata = body["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        if key in self._objects:
            raise RefuseError(409, f'{plural} "{metadata["name"]}" already exists')
        metadata |= {
            "uid": metadata.get("uid") or str(uuid.uuid4()),
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        return self._store(plural, body)

    def _apply(self, plural: str, namespace: str, name: str, sub: str, request: Request) -> Json:
        body, manager = request.body, request.query["fieldManager"]
        previous = self._objects.get((plural, namespace, name))
        if sub and previous is None:
            raise RefuseError(404, f'{plural} "{name}" not found')
        version = body["metadata"].get("resourceVersion")
        if version and (previous is None or previous["metadata"]["resourceVersion"] != version):
            raise RefuseError(409, f'{plural} "{name}": the object has been modified')
        uid = body["metadata"].get("uid")
        if uid and (previous is None or previous["metadata"]["uid"] != uid):
            raise RefuseError(409, f"Precondition failed: UID in precondition: {uid}")
        wanted = (
            {k: v for k, v in body.items() if k == "status"}
            if sub
            else {k: v for k, v in body.items() if k != "status"}
        )
        wanted.get("metadata", {}).pop("uid", None)
        key = (plural, namespace, name, manager)
        leaves = set(_leaves(wanted)) - {()}
        others = {
            leaf
            for k, owned in self._owned.items()
            if k[:3] == key[:3] and k != key
            for leaf in owned
        }
        after = copy.deepcopy(previous) if previous else {"metadata": {}}
        for leaf in self._owned.get(key, set()) - leaves - others:
            _drop(after, leaf)
        _merge(after, wanted)
        self._owned[key] = leaves
        return self._store(plural, after) if previous is not None else self._create(plural, after)

    def _merge_patch(self, plural: str, namespace: str, name: str, request: Request) -> Json:
        """Of a status, of this version; a removed field no longer has an owner."""
        after = copy.deepcopy(self._found(plural, namespace, name))
        if after["metadata"]["resourceVersion"] != request.body["metadata"]["resourceVersion"]:
            raise RefuseError(409, f'{plural} "{name}": the object has been modified')
        for leaf in _leaves({"status": request.body["status"]}):
            _drop(after, leaf)
            for key, owned in self._owned.items():
                if key[:3] == (plural, namespace, name):
                    owned -= {of for of in owned if of[: len(leaf)] == leaf}
        _merge(after, _without_nulls({"status": request.body["status"]}))
        return self._store(plural, after)

    def _store(self, plural: str, body: Json) -> Json:
        metadata = body["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        previous = self._objects.get(key)
        if previous == body:
            return copy.deepcopy(body)
        if previous is not None and previous.get("spec") != body.get("spec"):
            metadata["generation"] = previous["metadata"]["generation"] + 1
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self._objects[key] = copy.deepcopy(body)
        self._notify("ADDED" if previous is None else "MODIFIED", plural, body)
        if self.on_write is not None:
            self.on_write(copy.deepcopy(body))
        return copy.deepcopy(body)

    def _replace(self, plural: str, namespace: str, name: str, body: Json) -> Json:
        """Of a Lease: creates it, or replaces the version that is named."""
        previous = self._objects.get((plural, namespace, name))
        version = body["metadata"].get("resourceVersion")
        if previous is None and version is None:
            return self._create(plural, copy.deepcopy(body))
        if previous is None:
            raise RefuseError(404, f'{plural} "{name}" not found')
        if version is None:
            raise RefuseError(422, "metadata.resourceVersion: must be specified for an update")
        if previous["metadata"]["resourceVersion"] != version:
            raise RefuseError(409, f'{plural} "{name}": the object has been modified')
        kept = {key: previous["metadata"][key] for key in ("uid", "generation")}
        return self._store(plural, {**body, "metadata": {**body["metadata"], **kept}})

    def _precondition(self, plural: str, namespace: str, name: str, body: Json) -> Json:
        metadata = self._found(plural, namespace, name)["metadata"]
        for field_name, wanted in (body.get("preconditions") or {}).items():
            if metadata[field_name] != wanted:
                raise RefuseError(409, f"Precondition failed: {field_name}")
        self._remove(plural, namespace, name)
        return {"kind": "Status", "status": "Success"}

    def _remove(self, plural: str, namespace: str, name: str) -> None:
        body = self._objects.pop((plural, namespace, name))
        self._owned = {k: v for k, v in self._owned.items() if k[:3] != (plural, namespace, name)}
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._notify("DELETED", plural, body)
        uid = body["metadata"]["uid"]
        for key, child in list(self._objects.items()):
            owners = child["metadata"].get("ownerReferences", ())
            if key in self._objects and any(owner["uid"] == uid for owner in owners):
                self._remove(*key)

    def _notify(self, event: str, plural: str, body: Json) -> None:
        self._log.append((self._version, event, plural, copy.deepcopy(body)))
        self._changed.notify_all()


def _selected(body: Json, selector: str) -> bool:
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True


def _leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """A list counts as one leaf, which is enough for the tests."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*at, key))
    else:
        yield at


def _merge(into: Json, wanted: Json) -> None:
    for key, value in wanted.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


def _drop(body: Json, leaf: tuple[str, ...]) -> None:
    *path, last = leaf
    for key in path:
        body = body.get(key, {})
        if not isinstance(body, dict):
            return
    body.pop(last, None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections: tests kill clients."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # an answer is one write, and its end flushes it

        def _do(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(size) if size else b""
            query = {k: v[-1] for k, v in parse_qs(urlsplit(self.path).query).items()}
            request = Request(
                self.command, self.path, query, json.loads(raw) if raw else None,
                self.headers.get("User-Agent", ""), self.headers.get("Authorization", ""),
                self.headers.get("Content-Type", ""),
            )  # fmt: skip
            api.requests.append(request)
            fault = None if api.unavailable else api.fault(request)
            if fault is not None and fault.hang_seconds:
                end = time.monotonic() + fault.hang_seconds
                while time.monotonic() < end and not api._closed:
                    time.sleep(0.02)
            if api.unavailable:
                self.close_connection = True
                return
            try:
                if fault is not None and not fault.hang_seconds:
                    self._answer(
                        request,
                        fault.status,
                        _status(fault.status, fault.message, fault.cause),
                        fault.headers,
                    )
                elif query.get("watch") == "true":
                    self._stream(request)
                else:
                    self._answer(request, 200, api.handle(request))
            except RefuseError as refusal:
                status = _status(refusal.status, refusal.message)
                self._answer(request, refusal.status, refusal.message if refusal.plain else status)
            except OSError:
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do

        def _answer(
            self, request: Request, status: int, body: Json | str, headers: dict[str, str] | None = None,
        ) -> None:  # fmt: skip
            request.status = status
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response_only(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            kind = "text/plain" if isinstance(body, str) else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, request: Request) -> None:
            request.status = 200
            self.send_response_only(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            for event in api.watch(request):
                if event is not None:
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                    self.wfile.flush()
            if not api.unavailable:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    return Handler


def _status(code: int, message: str, cause: str = "") -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
        "details": {"causes": [{"reason": cause}]} if cause else {},
    }
