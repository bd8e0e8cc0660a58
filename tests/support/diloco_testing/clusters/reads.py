"""
Reads of objects through one `kubectl proxy` that keeps running.

Tests poll thousands of times, and each start of kubectl takes 60 ms of processor time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

START_SECONDS = 30.0
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


class UnansweredError(Exception):
    """No answer, or one that is neither objects nor their absence; kubectl itself reports what is wrong."""


class Reads:
    """Objects of one cluster, by the names that kubectl knows kinds by."""

    def __init__(self, program: Sequence[str]) -> None:
        """
        Args:
            program: the command of kubectl, with its kubeconfig.
        """
        self._program = program
        self._proxy: Proxy | None = None
        self._kinds: Mapping[str, Kind] = {}

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """
        The object; None: there is none of that name.

        Raises:
            UnansweredError: ask kubectl.
        """
        status, answer = self._ask(f"{self._kind(kind).path(namespace)}/{quote(name)}")
        if status == http.client.NOT_FOUND and answer.get("details", {}).get("name") == name:
            return None
        return _as_printed(self._good(status, answer))

    def list(self, kinds: str, namespace: str, selector: str) -> list[dict[str, Any]]:
        """
        Objects of kinds separated by commas.

        Args:
            kinds: their names.
            namespace: "": all of them.
            selector: of labels; "": every object.

        Raises:
            UnansweredError: ask kubectl.
        """
        found: list[dict[str, Any]] = []
        for kind in map(self._kind, kinds.split(",")):
            query = f"?{urlencode({'labelSelector': selector})}" if selector else ""
            answer = self._good(*self._ask(f"{kind.path(namespace)}{query}"))
            # The items of a list lack what they have in common.
            common = {"apiVersion": kind.version, "kind": kind.name}
            found += [_as_printed(common | item) for item in answer["items"]]
        return found

    def close(self) -> None:
        """End the proxy; the next read starts another."""
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            core, groups = (self._good(*self._ask(path, DISCOVERY)) for path in ("/api", "/apis"))
            self._kinds = kinds(core["items"] + groups["items"])
        if name not in self._kinds:
            raise UnansweredError(f"no kind is called {name}")
        return self._kinds[name]

    def _good(self, status: int, answer: dict[str, Any]) -> dict[str, Any]:
        if status != http.client.OK:
            self._kinds = {}  # it may have gone
            raise UnansweredError(f"{status}: {answer.get('message')}")
        return answer

    def _ask(self, path: str, accept: str = "application/json") -> tuple[int, dict[str, Any]]:
        if self._proxy is None:
            self._proxy = Proxy(self._program)
        return self._proxy.ask(path, accept)


class Kind:
    """Where objects of a kind are."""

    def __init__(self, version: str, found: Mapping[str, Any]) -> None:
        """
        Args:
            version: apiVersion, such as "apps/v1".
            found: the resource as discovery describes it.
        """
        self.version = version
        self.name = str(found["responseKind"]["kind"])
        self._plural = found["resource"]
        self._namespaced = found["scope"] == "Namespaced"

    def path(self, namespace: str) -> str:
        """Of all objects, in one namespace or, with "", in all of them."""
        root = f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if self._namespaced and namespace else ""
        return f"{root}{scope}/{self._plural}"


def kinds(groups: Sequence[Mapping[str, Any]]) -> dict[str, Kind]:
    """Kinds by every name that kubectl takes, given the groups of discovery; the first one counts, as there."""
    known: dict[str, Kind] = {}
    for group in groups:
        name = group["metadata"].get("name", "")
        for version in group["versions"]:
            for found in version.get("resources", ()):
                kind = Kind(f"{name}/{version['version']}" if name else version["version"], found)
                plural = found["resource"]
                singular = found.get("singularResource") or kind.name.lower()
                for called in (plural, singular, *found.get("shortNames", ()), f"{plural}.{name}"):
                    known.setdefault(called, kind)
    return known


class Proxy:
    """A `kubectl proxy` on a socket in a folder of its own, until `close` or the end of this program."""

    def __init__(self, program: Sequence[str]) -> None:
        """Start it."""
        folder = tempfile.TemporaryDirectory(prefix="kubectl-proxy-")
        self._socket = Path(folder.name) / "socket"
        process = subprocess.Popen(
            [*program, "proxy", f"--unix-socket={self._socket}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.close = weakref.finalize(self, _end, process, folder)
        """End it."""
        deadline = time.monotonic() + START_SECONDS
        while not self._socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise UnansweredError("kubectl proxy does not start")
            time.sleep(0.02)

    def ask(self, path: str, accept: str) -> tuple[int, dict[str, Any]]:
        """
        Status and answer of a GET.

        Raises:
            UnansweredError: no answer, or none in JSON.
        """
        with contextlib.closing(_Connection(str(self._socket))) as connection:
            try:
                connection.request("GET", path, headers={"Accept": accept})
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise UnansweredError(f"{path}: {error}") from None


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _as_printed(found: dict[str, Any]) -> dict[str, Any]:
    """Without what kubectl does not print."""
    found["metadata"].pop("managedFields", None)
    return found


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    folder.cleanup()
