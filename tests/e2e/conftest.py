"""Clusters, images, the operator, a namespace for each test, and diagnosis after a failure."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from diloco_testing.clusters import diagnosis, history, images, images_mounted, provision
from diloco_testing.clusters.install import Images, install, load
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import Kubectl, KubectlError, Object, until
from diloco_testing.clusters.provision import Cluster, LocalClusters
from diloco_testing.clusters.volumes import Provisioner
from diloco_testing.kubernetes import api_server

ORDER = (
    "test_api_rules", "test_api_versions", "test_applied_metadata", "test_applied_status",
    "test_applied_templates", "test_cert_manager", "test_fuzzed_jobs", "test_scale", "test_kueue",
    "test_kueue_controller", "test_one_cluster", "test_failures", "test_learners_of_pods",
    "test_lifecycle", "test_failed_jobs", "test_steady_state", "test_volumes",
    "test_operator_failures", "test_operator_replicas", "test_walkthrough", "test_two_clusters",
    "test_pools", "test_older_version", "test_drills", "test_rbac",
)  # fmt: skip
"""Tests that disturb others run after them; tests that read every audit log run last."""
TIMEOUT_SECONDS = 3600
"""The first test of a session on a bare machine builds Kubernetes and the images."""

OPERATOR = "system:serviceaccount:diloco-system:"

_fleet = pytest.StashKey["Fleet"]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
    names = list(ORDER)
    mine.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else -1)
    items[:] = [item for item in items if here not in item.path.parents] + mine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed and call.when in ("setup", "call"):
        fleet = item.config.stash.get(_fleet, None)
        for cluster, namespace in fleet.namespaces[-2:] if fleet else ():
            text = diagnosis.of(cluster, namespace)
            report.sections.append((f"cluster {cluster.name}, namespace {namespace}", text))
    return report


def unable(why: str) -> None:
    """Skip where a user runs the tests; fail where they are required."""
    if provision.required():
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def only_local(why: str) -> None:
    """Skip on given clusters, which cannot serve this; elsewhere as `unable`."""
    if provision.given():
        pytest.skip(why)
    unable(why)


@pytest.fixture(scope="session")
def programs() -> Path:
    """Folder of etcd and an API server (DILOCO_E2E_BIN), for tests that need nothing else."""
    folder = Path(os.environ.get("DILOCO_E2E_BIN") or provision.cache() / "bin")
    if api_server.programs(folder) is None:
        only_local(f"{folder}: neither etcd nor an API server; tests/e2e/clusters/cluster.sh build")
    return folder


@pytest.fixture(scope="session")
def local(request, tmp_path_factory) -> Iterator[LocalClusters]:
    """Starts clusters on this machine."""
    if why := provision.why_not_local():
        only_local(why)
    shared = os.environ.get("DILOCO_E2E_AUDITS")
    keep = Path(shared) if shared else tmp_path_factory.mktemp("audit")
    started = LocalClusters(keep)
    try:
        yield started
    finally:
        started.stop()
        files = {item.path.stem for item in request.session.items}
        (keep / f"{os.getpid()}.ran").write_text("\n".join(sorted(files)))


class Fleet:
    """Clusters with everything in them that pods need, but for the operator."""

    def __init__(self, local: LocalClusters | None) -> None:
        self.local = local
        self.namespaces: list[tuple[Cluster, str]] = []
        """Of the tests that run, the newest last."""
        self._provisioners: dict[str, Provisioner] = {}
        self._images: Images | None = None
        self._true_worker: images.Image | None = None

    def cluster(self, name: str, index: int = 0, kind: str = "up") -> Cluster:
        """A new local cluster of this kind, or the given one of that index."""
        if self.local is None:
            return Cluster(name, provision.given()[index])
        provision.build()  # images need some of its packages
        images.unpack(self.images.operator, self.images.syncer, self.images.worker)
        cluster = self.local.start(name, kind)
        self._provisioners[name] = Provisioner(cluster)
        load(cluster, self.images.operator, self.images.syncer, self.images.worker)
        self.compile_kernels(cluster)
        return cluster

    def compile_kernels(self, cluster: Cluster, tree: Path = provision.ROOT) -> None:
        """Compile the kernels that pods of the small image with a tree's code use, once."""
        with images.one_session("kernels"):
            if not any(images_mounted.numba(images_mounted.code(tree)).rglob("*.nbc")):
                _compile_kernels(
                    cluster, images_mounted.compiling_pod(self.images.worker.name, tree)
                )

    def end(self, name: str) -> None:
        """Stop a local cluster."""
        if self.local is not None:
            self._provisioners.pop(name).stop()
            self.local.end(name)

    def stop(self) -> None:
        """End what is left."""
        for name in list(self._provisioners):
            self.end(name)

    @contextlib.contextmanager
    def namespace(self, name: str, *in_clusters: Cluster, **labels: str) -> Iterator[str]:
        """A namespace for as long as it is needed; a failure meanwhile shows what is in it."""
        metadata = {"name": name, "labels": labels}
        for cluster in in_clusters:
            cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
            self.namespaces.append((cluster, name))
        try:
            yield name
        finally:
            for cluster in in_clusters:
                self.namespaces.remove((cluster, name))
                # Another test covers the deletion of everything; here nothing waits for it.
                with contextlib.suppress(KubectlError):
                    cluster.kubectl.delete("namespace", name, "", "--wait=false")

    @property
    def images(self) -> Images:
        """Of this session; built the first time."""
        if self._images is None:
            self._images = _images(local=self.local is not None)
        return self._images

    def true_worker(self, *loaded_into: Cluster) -> images.Image:
        """The worker image from the Dockerfile, loaded."""
        if self._true_worker is None:
            self._true_worker = images.given("worker") or images.build("worker")
        for cluster in loaded_into:
            if cluster.local:
                load(cluster, self._true_worker)
        return self._true_worker


def _images(*, local: bool) -> Images:
    if local:
        return Images(
            operator=images.given("operator") or images.build("operator"),
            syncer=images.given("syncer") or images.build("syncer"),
            worker=images.small(),
            pod_fields=images_mounted.pod_fields(),
        )
    named = {target: images.given(target) for target in images.TARGETS}
    missing = [
        f"DILOCO_E2E_{target.upper()}_IMAGE" for target, image in named.items() if image is None
    ]
    if missing:
        unable(f"DILOCO_E2E_KUBECONFIGS is set, but not {', '.join(missing)}")
    return Images(**named)  # type: ignore[arg-type]


def _compile_kernels(cluster: Cluster, pod: Object) -> None:
    name = pod["metadata"]["name"]
    cluster.kubectl.apply(pod)

    def ended() -> str:
        return str((cluster.kubectl.get("pod", name) or {}).get("status", {}).get("phase", ""))

    until(lambda: ended() in ("Succeeded", "Failed"), 300, expected="kernels are compiled")
    assert ended() == "Succeeded", cluster.kubectl("logs", name)
    cluster.kubectl.delete("pod", name)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Where clusters come from."""
    known = provision.given()
    made = Fleet(None if known else request.getfixturevalue("local"))
    request.config.stash[_fleet] = made
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def files_of(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the files of an older commit into a folder, for local clusters."""

    def written(commit: str) -> Path:
        if fleet.local is None:
            only_local("images of an older version are built for local clusters alone")
        if why := history.why_not(commit):
            unable(why)
        return history.tree(commit, tmp_path_factory.mktemp(commit[:7]))

    return written


@pytest.fixture(scope="session")
def eu(fleet: Fleet) -> Cluster:
    """A cluster whose operator runs all regions of every job (region.name is empty)."""
    cluster = fleet.cluster("eu")
    install(cluster, fleet.images)
    return cluster


@pytest.fixture(scope="session")
def pair(fleet: Fleet) -> Iterator[dict[str, Cluster]]:
    """Two clusters by region; the operator of each runs that region alone."""
    made = {"eu": fleet.cluster("east", 0), "us": fleet.cluster("west", 1)}
    for region, cluster in made.items():
        install(cluster, fleet.images, region={"name": region})
    yield made
    for name in ("east", "west"):
        fleet.end(name)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, eu: Cluster, fleet: Fleet) -> Iterator[str]:
    """A namespace of this test in the first cluster."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).removeprefix("test-")
    with fleet.namespace(name[:40].strip("-"), eu) as made:
        yield made


@pytest.fixture
def kubectl(eu: Cluster) -> Kubectl:
    """kubectl of the first cluster."""
    return eu.kubectl


@dataclass(slots=True)
class Quiet:
    """Jobs to which nothing happens."""

    cluster: Cluster
    namespace: str
    jobs: list[Job]
    states: dict[str, str]
    instances: dict[str, dict[str, tuple[str, int]]]
    since: datetime
    """From then on nothing was left to do."""


@pytest.fixture(scope="session")
def quiet(eu: Cluster, fleet: Fleet) -> Iterator[Quiet]:
    """
    A complete job, a suspended one, one without a node for its learners, one whose name is taken.

    Modules that run before request it by `resting`, so that its ten minutes pass while they run.
    """
    if not eu.local:
        only_local("a given cluster's audit log cannot be read")
    with fleet.namespace("quiet", eu) as namespace:
        yield _at_rest(eu, fleet, namespace)


@pytest.fixture(scope="session")
def resting(request: pytest.FixtureRequest, eu: Cluster) -> None:
    """The jobs of `quiet` exist, if tests of this session need them: their ten minutes pass meanwhile."""
    if eu.local and any(item.path.stem == "test_steady_state" for item in request.session.items):
        request.getfixturevalue("quiet")


def _at_rest(eu: Cluster, fleet: Fleet, namespace: str) -> Quiet:
    fields = fleet.images.pod_fields
    nowhere = {**fields, "nodeSelector": {"there-is": "none"}}
    # An image of its own: with the chart's, learners that never ran follow the chart's upgrades.
    every = {"regions": {"eu": 1}, "learner": {"image": fleet.images.worker.name}}
    jobs = {
        "Complete": manifest("complete", steps=3, pod_fields=fields, **every),
        "Suspended": manifest(
            "suspended", steps=9, pod_fields=fields, runPolicy={"suspend": True}, **every
        ),
        "Starting": manifest("waiting", steps=9, pod_fields=nowhere, **every),
        "Pending": manifest("taken", steps=9, pod_fields=nowhere, **every),
    }
    taken = {"ports": [{"port": 1}], "clusterIP": "None"}
    eu.kubectl.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken-eu"}, "spec": taken},
        namespace=namespace,
    )
    made = [Job(eu, namespace, body).apply() for body in jobs.values()]
    complete, suspended, waiting, taken = made
    complete.until_condition("Complete", 240)
    suspended.until_condition("Suspended", 120)
    waiting.until_condition("SyncerReachable", 120)
    taken.until_condition("Accepted", 120, status="False", reason="NameTaken")
    until(
        lambda: not complete.pods("learner"), 120, expected="the complete job's learners are gone"
    )
    since = _rest(eu, namespace)
    return Quiet(
        cluster=eu, namespace=namespace, jobs=made, since=since,
        states={job.name: job.status()["state"] for job in made},
        instances={job.name: job.instances() for job in made},
    )  # fmt: skip


def _rest(cluster: Cluster, namespace: str, seconds: float = 45.0) -> datetime:
    """When the operator had written nothing in a namespace for so long."""

    def rested() -> datetime | None:
        writes = [
            request.at
            for request in cluster.audit.requests(user=OPERATOR, namespace=namespace)
            if request.writes
        ]
        last = max(writes, default=datetime.now(UTC))
        return last if datetime.now(UTC) - last > timedelta(seconds=seconds) else None

    last: datetime = until(rested, 300, every=5.0, expected=f"the operator rests in {namespace}")
    return last + timedelta(milliseconds=1)


@pytest.fixture(scope="module")
def training(eu: Cluster, fleet: Fleet) -> Iterator[Job]:
    """A job that trains in peace."""
    body = manifest("steady", steps=10**6, regions={"eu": 1}, pod_fields=fleet.images.pod_fields)
    with fleet.namespace("training", eu) as namespace:
        job = Job(eu, namespace, body).apply()
        job.until_condition("LearnersReady", 180)
        job.until_step(20, 120)
        yield job
