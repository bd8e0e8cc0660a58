"""
Real Kubernetes clusters for tests: given ones (kind in CI), or local ones started on this machine.

Given: DILOCO_E2E_KUBECONFIGS=path1:path2, with images in DILOCO_E2E_{OPERATOR,SYNCER,WORKER}_IMAGE.
Local: `tests/e2e/clusters/cluster.sh`, which needs root, Go and Debian's apt.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco_testing.clusters.audit import AuditLog
from diloco_testing.clusters.kubectl import Kubectl

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests/e2e/clusters/cluster.sh"
BUILD_SECONDS = 3600.0
UP_SECONDS = 400.0
DOWN_SECONDS = 400.0
"""A machine that is paused for minutes is no failure of a test."""
MAX_CLUSTERS = 40
NUMBERS = Path("/run/lock/diloco-e2e")
"""Of clusters; they are addresses of this machine, whatever the cache folder is."""


def cache() -> Path:
    """Where programs, images and running clusters are kept between sessions."""
    return Path(os.environ.get("DILOCO_E2E_CACHE") or Path.home() / ".cache/diloco-e2e")


def required() -> bool:
    """Whether a test that cannot have its cluster has failed (scripts/run_tests.py)."""
    return os.environ.get("DILOCO_E2E") == "required"


def given() -> list[Path]:
    """Kubeconfigs of clusters that exist already."""
    text = os.environ.get("DILOCO_E2E_KUBECONFIGS", "")
    return [Path(path).resolve() for path in text.split(":") if path]


@functools.cache
def why_not_local() -> str:
    """Why this machine cannot start clusters, as `cluster.sh check` reports it; "": it can."""
    done = subprocess.run([str(SCRIPT), "check"], capture_output=True, text=True, timeout=280)
    return "" if done.returncode == 0 else f"local clusters: {done.stdout.strip()}"


def kueue_archive() -> Path:
    """An image of Kueue's controller (an oci-archive), built with Go the first time."""
    return Path(_script("kueue", seconds=BUILD_SECONDS))


def build() -> None:
    """Debian's packages and the programs of local clusters; minutes the first time, nothing later."""
    _script("build", seconds=BUILD_SECONDS)


def unpack(archives: Sequence[Path]) -> None:
    """Let local clusters that start from now on begin with these images (oci-archives)."""
    _script("unpack", *map(str, archives), seconds=600)


class Cluster:
    """One cluster with its kubectl; `wan` is there for local ones only."""

    def __init__(self, name: str, kubeconfig: Path, identity: str = "") -> None:
        """
        Args:
            name: how the tests call it.
            kubeconfig: an administrator's.
            identity: of a local cluster, as cluster.sh knows it.
        """
        self.name = name
        self.kubeconfig = kubeconfig
        self.identity = identity
        # Through the node's own namespace: it is reached even while the node is cut off the WAN.
        self._enter = ("nsenter", f"--net=/run/netns/dl-{identity}", "--") if identity else ()
        self.kubectl = Kubectl((*self._enter, self.program("kubectl")), kubeconfig)

    @property
    def local(self) -> bool:
        """Started by these tests: it can be cut off, and its audit log can be read."""
        return bool(self.identity)

    @property
    def folder(self) -> Path:
        """A local cluster's logs and state."""
        return cache() / "clusters" / self.identity

    @property
    def address(self) -> str:
        """A node's address on the WAN; NodePorts are reached there. A lost node may have none."""
        found = [
            address
            for node in self.kubectl.list("nodes")
            for address in node["status"].get("addresses") or ()
            if address["type"] == "InternalIP"
        ]
        return str(found[0]["address"])

    @property
    def server(self) -> str:
        """URL of the API server."""
        return self.kubectl(
            "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"
        )

    @property
    def audit(self) -> AuditLog:
        """Who asked this cluster's API server for what."""
        return AuditLog(self.folder / "log/audit.log")

    def program(self, name: str) -> str:
        """Path of kubectl or helm: our own for local clusters, else the user's."""
        own = cache() / "bin" / name
        return str(own) if self.identity or own.exists() else name

    def helm(self, *args: str, seconds: float = 300.0) -> str:
        """Run helm on this cluster; AssertionError with its output when it fails."""
        done = subprocess.run(
            [*self._enter, self.program("helm"), "--kubeconfig", str(self.kubeconfig), *args],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds,
        )  # fmt: skip
        assert done.returncode == 0, f"helm {' '.join(args)}: {done.stderr}"
        return done.stdout

    def load(self, archive: Path) -> None:
        """Give the node an image (an oci-archive)."""
        _script("load", self.identity, str(archive), seconds=600)

    def cut(self) -> None:
        """Take the node off the WAN, until `heal`."""
        _script("cut", self.identity)

    def heal(self) -> None:
        """Put it back."""
        _script("heal", self.identity)

    @contextlib.contextmanager
    def shaped(self, rate: str) -> Iterator[None]:
        """The node receives no more than `rate` (such as "20mbit") from the WAN."""
        _script("shape", self.identity, rate)
        try:
            yield
        finally:
            _script("shape", self.identity, "none")

    @contextlib.contextmanager
    def without_api_server(self) -> Iterator[None]:
        """The API server is stopped, pods keep running."""
        _script("api-stop", self.identity)
        try:
            yield
        finally:
            _script("api-start", self.identity)

    def entered(self, *command: str) -> list[str]:
        """A command that runs in the node's network: pods and Services can be reached from it."""
        return [*self._enter, *command]


class LocalClusters:
    """Starts clusters on this machine; `stop` ends all of them and keeps their audit logs."""

    def __init__(self, keep: Path) -> None:
        """
        Args:
            keep: folder for the audit logs of ended clusters; sessions may share it.
        """
        self._keep = keep
        self._locks: dict[str, int] = {}
        self.running: dict[str, Cluster] = {}

    def start(self, name: str, kind: str = "up") -> Cluster:
        """
        A new cluster, ready.

        Args:
            name: how the tests call it.
            kind: "up": one with a node, in ten seconds; "up-ipv6": the same with IPv6 addresses only;
                "up-dual": the same with addresses of both families; "up-api": etcd and API server
                alone, in four seconds; "up-groups": etcd, and API server and scheduler of a Kubernetes
                with PodGroups, built the first time.
        """
        build()
        number = self._claim(name)
        identity = f"{name}-{number}"
        _clear_left_behind(number)
        self.running[name] = Cluster(name, cache() / "clusters" / identity / "admin.conf", identity)
        _script(kind, identity, seconds=BUILD_SECONDS if kind == "up-groups" else UP_SECONDS)
        return self.running[name]

    def end(self, name: str) -> None:
        """Stop one cluster; nothing of it is left but its audit log."""
        cluster = self.running.pop(name)
        cluster.kubectl.close()
        with contextlib.suppress(FileNotFoundError):
            # A later session may get the same number.
            kept = self._keep / f"{cluster.identity}.{os.getpid()}.audit.log"
            shutil.copyfile(cluster.audit.path, kept)
        try:
            _script("down", cluster.identity, seconds=DOWN_SECONDS)
        finally:
            os.close(self._locks.pop(name))

    def stop(self) -> None:
        """End all."""
        for name in list(self.running):
            self.end(name)

    def audits(self) -> list[AuditLog]:
        """Audit logs of all clusters of this session, ended ones included."""
        ended = [AuditLog(path) for path in sorted(self._keep.glob("*.audit.log"))]
        return ended + [cluster.audit for cluster in self.running.values()]

    def _claim(self, name: str) -> int:
        """A number that no other session on this machine uses, held until `end`."""
        folder = NUMBERS
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, MAX_CLUSTERS + 1):
            lock = os.open(folder / str(number), os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._locks[name] = lock
            return number
        raise AssertionError(f"{MAX_CLUSTERS} clusters run already; see {folder}")


def _clear_left_behind(number: int) -> None:
    """What a session that was killed left under a number that is ours now."""
    for folder in (cache() / "clusters").glob(f"*-{number}"):
        _script("down", folder.name, seconds=DOWN_SECONDS)


def _script(*arguments: str, seconds: float = 60.0) -> str:
    environment = {**os.environ, "DILOCO_E2E_CACHE": str(cache())}
    done = subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"cluster.sh {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    return done.stdout.strip()
