"""
A real Kubernetes API server with its store, and nothing else: no nodes, no controllers, no pods.

Only a real API server shows what a CRD rejects and with which message. It needs two programs, etcd
and kube-apiserver (or hyperkube, which includes it), in one folder or on the PATH; it starts in 5 s.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from diloco_operator.cluster.client import Cluster, connect

Json = dict[str, Any]

JOBS = "/apis/diloco.dev/v1alpha1/namespaces/default/dilocojobs"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

_TOKEN = "local-test-server"
_START_SECONDS = 90.0
_STOP_SECONDS = 20.0

# What the server writes between the path and the message.
_KIND = re.compile(
    r'(Forbidden|Required value|(Invalid|Unsupported|Duplicate) value: ("(\\.|[^"\\])*"|\S+)): '
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rejection by the API server."""

    code: int
    message: str
    causes: tuple[tuple[str, str], ...]
    """Path of the field and message, for each problem."""

    @property
    def problems(self) -> list[str]:
        """Each cause as `path: message`, without the server's prefix of the message."""
        return [f"{field}: {_KIND.sub('', text, count=1)}" for field, text in self.causes]


class ApiServer:
    """Plain objects to and from a running API server, as its administrator."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._port = port
        self._certificate = certificate
        self._tls = ssl.create_default_context(cafile=str(certificate))
        self._tls.check_hostname = False

    def kubeconfig(self, path: Path, token: str = "") -> Path:
        """Write a kubeconfig for this server; without a token, as the administrator."""
        cluster = {
            "server": f"https://127.0.0.1:{self._port}",
            "certificate-authority": str(self._certificate),
        }
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or _TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }  # fmt: skip
        path.write_text(json.dumps(config))
        return path

    def send(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        kind: str = "application/json",
        accept: str = "application/json",
        **query: str,
    ) -> tuple[int, Json]:
        """One request; the status code and the returned object."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, context=self._tls, timeout=30
        )
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": kind, "Accept": accept}
        try:
            target = f"{path}?{urlencode(query)}" if query else path
            text = json.dumps(body) if body is not None else None
            connection.request(method, target, text, headers)
            reply = connection.getresponse()
            content = reply.read()
            try:
                return reply.status, json.loads(content)
            except ValueError:
                return reply.status, {"message": content.decode(errors="replace")}
        finally:
            connection.close()

    def create(self, manifest: Json, *, dry_run: bool = False) -> Json | Refusal:
        """Create a job; the object as it is (or would be) stored."""
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return _answer(*self.send("POST", JOBS, manifest, **query))

    def replace(self, manifest: Json) -> Json | Refusal:
        """Replace the stored job, at any version."""
        path = f"{JOBS}/{manifest['metadata']['name']}"
        version = self.send("GET", path)[1]["metadata"]["resourceVersion"]
        body = manifest | {"metadata": manifest["metadata"] | {"resourceVersion": version}}
        return _answer(*self.send("PUT", path, body, fieldValidation="Strict"))

    def apply(self, manifest: Json, *, manager: str = "test") -> Refusal | None:
        """Server-side apply of a job; None: it was accepted."""
        answer = _answer(
            *self.send(
                "PATCH",
                f"{JOBS}/{manifest['metadata']['name']}",
                manifest,
                kind="application/apply-patch+yaml",
                fieldManager=manager,
                force="true",
                fieldValidation="Strict",
            )
        )
        return answer if isinstance(answer, Refusal) else None

    def delete(self, name: str) -> None:
        """Delete a job, if it exists."""
        self.send("DELETE", f"{JOBS}/{name}")

    def install(self, crd: Json) -> None:
        """
        Create a CustomResourceDefinition and wait until it is served.

        Raises:
            RuntimeError: the server does not take it, or finds fault with its schema.
        """
        name = crd["metadata"]["name"]
        code, body = self.send("POST", CRDS, crd, fieldValidation="Strict")
        if code >= 300:
            raise RuntimeError(body.get("message"))
        until = time.monotonic() + 30
        while time.monotonic() < until:
            status = self.send("GET", f"{CRDS}/{name}")[1].get("status", {})
            held = {c["type"]: c["status"] for c in status.get("conditions") or ()}
            if held.get("NonStructuralSchema") == "True":
                raise RuntimeError(f"{name}: {status}")
            if held.get("Established") == "True" and self.send("GET", JOBS)[0] == 200:
                return
            time.sleep(0.1)
        raise RuntimeError(f"{name} is not established after 30 s")


def _answer(code: int, body: Json) -> Json | Refusal:
    if code < 300:
        return body
    causes = body.get("details", {}).get("causes", ())
    return Refusal(
        code=code,
        message=body.get("message", ""),
        causes=tuple((cause.get("field", ""), cause.get("message", "")) for cause in causes),
    )


# -------------------------------------------------------------------------------- start, stop


def programs(folder: Path | None) -> tuple[list[str], str] | None:
    """The commands that start kube-apiserver and etcd; None: a program is missing."""
    path = os.pathsep.join([*([str(folder)] if folder else []), os.environ.get("PATH", "")])
    etcd = shutil.which("etcd", path=path)
    alone, all_in_one = (shutil.which(name, path=path) for name in ("kube-apiserver", "hyperkube"))
    if etcd is None or not (alone or all_in_one):
        return None
    return ([alone] if alone else [str(all_in_one), "kube-apiserver"]), etcd


@contextmanager
def running(folder: Path, work: Path) -> Iterator[ApiServer]:
    """
    A fresh API server for as long as the block lasts.

    Args:
        folder: searched for the programs before the PATH.
        work: an empty directory for its data and logs.

    Raises:
        RuntimeError: a program is missing, ends, or does not answer in time.
    """
    found = programs(folder)
    if found is None:
        raise RuntimeError(f"{folder}: no etcd and kube-apiserver (or hyperkube) there")
    server, etcd = found
    etcd_port, peer_port, port = _free_ports(3)
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_start("etcd", [etcd, *_etcd_flags(work, etcd_port, peer_port)], work))
        started.append(_start("apiserver", [*server, *_flags(work, port, etcd_port)], work))
        yield _ready(port, work, started)
    finally:
        for process in reversed(started):
            _stop(process)


@contextmanager
def operated(folder: Path, work: Path) -> Iterator[Cluster]:
    """The operator's client of a fresh API server; arguments as for `running`."""
    with running(folder, work) as api:
        config = connect(kubeconfig=api.kubeconfig(work / "kubeconfig"))
        yield Cluster(config, manager="diloco-operator")


def _etcd_flags(work: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={work / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _flags(work: Path, port: int, etcd_port: int) -> list[str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (work / "accounts.key").write_bytes(pem)
    (work / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={work / 'certificates'}",
        f"--token-auth-file={work / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={work / 'accounts.key'}",
        f"--service-account-signing-key-file={work / 'accounts.key'}",
        "--shutdown-delay-duration=0s",
    ]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _start(name: str, argv: list[str], work: Path) -> subprocess.Popen[bytes]:
    with (work / f"{name}.log").open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, cwd=work)


def _ready(port: int, work: Path, started: list[subprocess.Popen[bytes]]) -> ApiServer:
    certificate = work / "certificates" / "apiserver.crt"
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if any(process.poll() is not None for process in started):
            break
        if certificate.is_file() and certificate.stat().st_size:
            try:
                server = ApiServer(port, certificate)
                if server.send("GET", "/readyz")[0] == 200:
                    return server
            except (OSError, http.client.HTTPException):
                pass
        time.sleep(0.1)
    logs = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(work.glob("*.log"))]
    raise RuntimeError("the API server did not come up\n" + "\n".join(logs))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
