"""
Adds jobs to the work queue: from kopf's watches and, in case they miss events, from periodic lists.

There are only `on.event` handlers, so that kopf stores no state in the cluster, adds no finalizer
and writes nothing. A handler adds a key to the queue and returns; it never blocks a watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import kopf
from kubernetes.client import Configuration

from diloco_operator.cluster.client import JOB_LABEL, PAGE, ApiError, Cluster, Json
from diloco_operator.cluster.kinds import CHILD_KINDS, KINDS
from diloco_operator.resources.queue_labels import KUEUE_QUEUE, POD_GROUPS, VOLCANO_QUEUE
from diloco_operator.state.job_state import LOST_VOLUME
from diloco_operator.watch.health import Health
from diloco_operator.workqueue import Key, WorkQueue

log = logging.getLogger(__name__)

CHILD_PAUSE_SECONDS = 0.3
"""Children change in bursts, for which one reconcile is enough."""
LOGIN_SECONDS = 600.0
"""kopf logs in again after this time; a projected token is valid for an hour or more."""
HEARTBEAT_SECONDS = 5.0
URGENT = frozenset({KUEUE_QUEUE, POD_GROUPS, VOLCANO_QUEUE, LOST_VOLUME})
"""Labels and annotations by which a person corrects a job that fails: a change resets its back-off."""
_BACKOFFS = (1, 2, 3, 5, 8, 13)


class EndlessBackoffs:
    """Pauses between retries, without end: the operator waits for the API server."""

    def __iter__(self) -> Iterator[float]:
        yield from _BACKOFFS
        while True:
            yield _BACKOFFS[-1]


class NoDiffs(kopf.DiffBaseStorage):
    """Disables kopf's diffs, which copy every object and fail on deeply nested ones."""

    def build(self, **_: Any) -> Any:
        """Use nothing of the object."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Nothing was stored."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


def registry(
    queue: WorkQueue,
    health: Health,
    configuration: Configuration,
    *,
    saw: Callable[[Json, str], object],
) -> Any:
    """All handlers of the operator; they call `saw` with each version of a child or pod and its kind."""
    handlers = kopf.OperatorRegistry()
    on: Any = kopf.on
    on.login(id="login", registry=handlers)(_login(configuration))
    on.startup(id="startup", registry=handlers)(_startup(health))
    on.event("diloco.dev", "v1alpha1", "dilocojobs", registry=handlers)(_job(queue, health))
    for kind in (*CHILD_KINDS, "Pod"):
        group, _, version = KINDS[kind].api_version.rpartition("/")
        on.event(group, version, KINDS[kind].plural, id=kind, registry=handlers)(
            _child(queue, kind, saw)
        )
    return handlers


def configure(settings: kopf.OperatorSettings) -> None:
    """Configure kopf; settings without a comment are its defaults, pinned here."""
    # Endless: after its last retry kopf ends the process, and a restart does not help.
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.enforce_retry_after = True
    settings.watching.server_timeout = 300  # an int, because it goes into the query unchanged
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 70
    settings.watching.chunk_size = PAGE
    # Without selectors, kopf reads every pod of the cluster.
    for kind in (*CHILD_KINDS, "Pod"):
        group, _, version = KINDS[kind].api_version.rpartition("/")
        settings.watching.label_selectors[group, version, KINDS[kind].plural] = JOB_LABEL
    settings.peering.standalone = True  # a peering object of another operator would pause this one
    settings.scanning.disabled = True  # no access to namespaces and CRDs; __main__ awaits the CRD
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False  # the reconciler posts Events
    settings.execution.default_backoff = 5
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = None  # __main__ ends the process


def _login(configuration: Configuration) -> Any:
    last = datetime.min.replace(tzinfo=UTC)

    async def login(**_: Any) -> kopf.ConnectionInfo:
        nonlocal last
        # Otherwise kopf retries a rejected token at once, in an endless loop.
        if datetime.now(UTC) - last < timedelta(seconds=5):
            await asyncio.sleep(5)
        last = datetime.now(UTC)
        return connection_info(configuration, last)

    return login


def connection_info(configuration: Configuration, now: datetime) -> kopf.ConnectionInfo:
    """kopf's connection to the same API server, with the current token from its file."""
    auth: Mapping[str, Any] = configuration.auth_settings()
    header = next((str(entry["value"]) for entry in auth.values() if entry["value"]), "")
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        # Also makes the same token a new login: kopf does not reuse a rejected one.
        expiration=now + timedelta(seconds=LOGIN_SECONDS),
    )


def _startup(health: Health) -> Any:
    running: set[asyncio.Task[None]] = set()

    async def heartbeat() -> None:
        while True:
            health.heartbeat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def startup(**_: Any) -> None:
        running.add(asyncio.create_task(heartbeat(), name="heartbeat"))

    return startup


def _job(queue: WorkQueue, health: Health) -> Any:
    seen: dict[str, tuple[tuple[int, int], int]] = {}

    async def job(event: Any, namespace: str, name: str, **_: Any) -> None:
        metadata = event["object"]["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        health.delivered(uid, generation, namespace)
        # Neither a label nor an annotation changes the generation. Those that a person sets to correct a
        # job are urgent; others may be rewritten every few seconds by a controller.
        urgent, other = _digests(metadata)
        version = (generation, urgent), other
        before = seen.get(uid)
        if event["type"] == "DELETED":
            seen.pop(uid, None)
            before = None
        else:
            seen[uid] = version
        # Other changes are those of the status, which the operator itself writes.
        if before is None or before[0] != version[0]:
            queue.add(Key(namespace, name), urgent=True)
        elif before != version:
            queue.add(Key(namespace, name), CHILD_PAUSE_SECONDS)

    return job


def _digests(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """
    Of the labels and annotations by which a person corrects a job, and of the others.

    For comparison in this process: with thousands of jobs, their annotations are too large to keep.
    """
    urgent: set[tuple[str, str, str]] = set()
    other: set[tuple[str, str, str]] = set()
    for kind in ("labels", "annotations"):
        for name, value in (metadata.get(kind) or {}).items():
            (urgent if name in URGENT else other).add((kind, name, value))
    return hash(frozenset(urgent)), hash(frozenset(other))


def _child(queue: WorkQueue, kind: str, saw: Callable[[Json, str], object]) -> Any:
    async def child(event: Any, namespace: str, labels: Any, **_: Any) -> None:
        saw(event["object"], kind)  # first: the reconcile must not read an older version
        if job := labels.get(JOB_LABEL):
            queue.add(Key(namespace, job), CHILD_PAUSE_SECONDS)

    return child


class Watches:
    """Runs kopf on a thread of its own."""

    def __init__(
        self,
        registry: kopf.OperatorRegistry,
        *,
        namespaces: Sequence[str],
        ended: Callable[[], None],
    ) -> None:
        """Call `ended` when the watches end, whether by `stop` or by an error."""
        self._registry = registry
        self._namespaces = namespaces
        self._ended = ended
        self._failure: BaseException | None = None
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Stop, and wait at most this long for the thread to end."""
        # The event loop is already closed if the watches ended by an error.
        with contextlib.suppress(RuntimeError):
            self._stop()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            asyncio.run(self._operate())
        except Exception as error:
            self._failed(error)
        finally:
            self._ended()

    def _failed(self, error: BaseException) -> None:
        if error is not self._failure:
            self._failure = error
            log.error("the watches failed", exc_info=error)

    async def _operate(self) -> None:
        settings = kopf.OperatorSettings()
        configure(settings)
        # Not a threading.Event: kopf waits for it on a thread that it cannot end, and would then
        # keep running without watches when a watch fails.
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=self._registry,
            settings=settings,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )
        for task in tasks:
            task.add_done_callback(self._task_ended)
        await kopf.run_tasks(tasks, ignored=others)

    def _task_ended(self, task: asyncio.Future[Any]) -> None:
        """
        End the process as soon as one of kopf's tasks has ended, since none of them should.

        kopf cancels the others and waits for them without a limit, and a watch that logs in again at
        that moment never ends (1.45): the process would keep running without watches.
        """
        if not task.cancelled() and (error := task.exception()):
            self._failed(error)
        self._ended()


class _Listed(NamedTuple):
    """What the comparison needs of a job."""

    uid: str
    generation: int
    key: Key
    deleted: bool
    """Being deleted."""

    @classmethod
    def of(cls, job: Json) -> _Listed:
        metadata = job["metadata"]
        return cls(
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            key=Key(metadata["namespace"], metadata["name"]),
            deleted=bool(metadata.get("deletionTimestamp")),
        )


class Resync:
    """Lists all jobs periodically and compares the list with what the watch delivered."""

    def __init__(
        self,
        cluster: Cluster,
        queue: WorkQueue,
        health: Health,
        *,
        namespaces: Sequence[str],
        every_seconds: float,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Call `then` after each list."""
        self._then = then
        self._cluster = cluster
        self._queue = queue
        self._health = health
        self._namespaces = namespaces
        self._every_seconds = every_seconds
        self._unread: frozenset[str] = frozenset()
        """Namespaces that the last list lacks, as logged."""
        self._stopped = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resync", daemon=True)

    def start(self) -> None:
        """Start, with the first list at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current request."""
        self._stopped.set()
        self._due.set()

    def now(self) -> None:
        """List as soon as possible: the queue, which was paused, accepts keys again."""
        self._due.set()

    def once(self) -> None:
        """
        List all jobs, and queue what the watch missed: jobs that are only in the list or only in the
        queue, and generations that it has not delivered. The jobs of a namespace that cannot be read
        stay as they are known: the other namespaces do not wait for one that was deleted.

        Raises:
            ApiError: no namespace could be read, or the API server did not answer.
        """
        known = self._queue.keys()
        jobs: list[_Listed] = []
        errors: dict[str, ApiError] = {}
        for namespace in self._namespaces or ("",):
            try:
                jobs += [_Listed.of(job) for job in self._cluster.jobs((namespace,))]
            except ApiError as error:
                if not error.status:
                    raise  # it would not answer about the others either, and each costs the deadline
                errors[namespace] = error
        if self._namespaces:
            self._report(errors)
        if len(errors) == len(self._namespaces or ("",)):
            raise next(iter(errors.values()))
        missing = self._health.listed(
            ((job.uid, job.generation, f"{job.key} (generation {job.generation})") for job in jobs),
            unread=errors.keys(),
        )
        found = {job.key for job in jobs if not job.deleted}
        known = frozenset(key for key in known if key.namespace not in errors)
        for key in (found ^ known) | (found & {job.key for job in jobs if job.uid in missing}):
            self._queue.add(key)

    def _report(self, errors: Mapping[str, ApiError]) -> None:
        """Log which namespaces cannot be read, once per change."""
        for namespace in sorted(errors.keys() - self._unread):
            log.warning(
                "cannot list jobs in namespace %s; the others do not wait for it: %s",
                namespace,
                errors[namespace],
            )
        for namespace in sorted(self._unread - errors.keys()):
            log.info("jobs in namespace %s can be listed again", namespace)
        self._unread = frozenset(errors)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._due.clear()
            try:
                self.once()
                self._then()
            except ApiError as error:
                self._health.unlisted()
                log.warning("cannot list jobs: %s", error)
            except Exception:
                log.exception("unexpected error in the comparison of jobs")
            self._due.wait(self._every_seconds)
