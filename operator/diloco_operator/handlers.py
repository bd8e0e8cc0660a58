"""
What puts jobs into the queue: kopf's watches and, should they miss something, a list now and then.

Only `on.event` handlers: kopf then keeps no state in the cluster, adds no finalizer and writes
nothing. A handler puts a key into the queue and returns; the watch is never held up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from kubernetes.client import Configuration

from diloco_operator.cluster import CHILD_KINDS, JOB_LABEL, KINDS, ApiError, Cluster
from diloco_operator.health import Health
from diloco_operator.workqueue import Key, WorkQueue

log = logging.getLogger(__name__)

CHILD_PAUSE_SECONDS = 0.3
"""Children change in bursts: one look is enough for all of it."""
LOGIN_SECONDS = 600.0
"""kopf logs in anew so often; a projected token lives an hour or more."""
TURN_SECONDS = 5.0
_BACKOFFS = (1, 2, 3, 5, 8, 13)


class EndlessBackoffs:
    """Pauses between tries that never end: without an API server there is nothing else to do."""

    def __iter__(self) -> Iterator[float]:
        yield from _BACKOFFS
        while True:
            yield _BACKOFFS[-1]


class NoDiffs(kopf.DiffBaseStorage):
    """What kopf compares objects by: nothing. It would copy every object, deep ones until it falls."""

    def build(self, **_: Any) -> Any:
        """Nothing of the object."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


def registry(queue: WorkQueue, health: Health, configuration: Configuration) -> Any:
    """All handlers of the operator."""
    made = kopf.OperatorRegistry()
    on: Any = kopf.on
    on.login(id="login", registry=made)(_login(configuration))
    on.startup(id="startup", registry=made)(_startup(health))
    on.event("diloco.dev", "v1alpha1", "dilocojobs", registry=made)(_job(queue, health))
    for kind in (*CHILD_KINDS, "Pod"):
        group, _, version = KINDS[kind].api_version.rpartition("/")
        on.event(group, version, KINDS[kind].plural, id=kind, registry=made)(_child(queue))
    return made


def configure(settings: kopf.OperatorSettings) -> None:
    """
    kopf's settings. Those without a word of explanation are its defaults, said here to keep them.
    """
    # Endless: after its last try kopf ends the process, and a pod that restarts helps no API server.
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.enforce_retry_after = True
    settings.watching.server_timeout = 300  # an int: it is put into the query as it is
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 70
    settings.watching.chunk_size = 500
    # By default every pod of the cluster is read, and dropped here.
    for kind in (*CHILD_KINDS, "Pod"):
        group, _, version = KINDS[kind].api_version.rpartition("/")
        settings.watching.label_selectors[group, version, KINDS[kind].plural] = JOB_LABEL
    settings.peering.standalone = True  # a peering object of somebody else would pause us
    settings.scanning.disabled = True  # no right to namespaces and CRDs; __main__ awaits our CRD
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False  # our Events have names of their own
    settings.execution.default_backoff = 5
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = None  # __main__ ends the process


def _login(configuration: Configuration) -> Any:
    last = datetime.min.replace(tzinfo=UTC)

    async def login(**_: Any) -> kopf.ConnectionInfo:
        nonlocal last
        # A token that the server refuses would be tried again at once, without end.
        if datetime.now(UTC) - last < timedelta(seconds=5):
            await asyncio.sleep(5)
        last = datetime.now(UTC)
        return connection_info(configuration, last)

    return login


def connection_info(configuration: Configuration, now: datetime) -> kopf.ConnectionInfo:
    """What kopf needs to dial the same API server, with the token as it is in its file now."""
    auth: Mapping[str, Any] = configuration.auth_settings()
    header = next((str(one["value"]) for one in auth.values() if one["value"]), "")
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        # Also makes the same token a new login: kopf refuses one that was refused before.
        expiration=now + timedelta(seconds=LOGIN_SECONDS),
    )


def _startup(health: Health) -> Any:
    running: set[asyncio.Task[None]] = set()

    async def turn() -> None:
        while True:
            health.turned()
            await asyncio.sleep(TURN_SECONDS)

    async def startup(**_: Any) -> None:
        running.add(asyncio.create_task(turn(), name="turning"))

    return startup


def _job(queue: WorkQueue, health: Health) -> Any:
    seen: dict[str, int] = {}

    async def job(event: Any, namespace: str, name: str, **_: Any) -> None:
        metadata = event["object"]["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        health.delivered(uid, generation)
        news = event["type"] == "DELETED" or seen.get(uid) != generation
        if event["type"] == "DELETED":
            seen.pop(uid, None)
        else:
            seen[uid] = generation
        # What else changes is the status, and that is our own doing.
        if news:
            queue.add(Key(namespace, name), urgent=True)

    return job


def _child(queue: WorkQueue) -> Any:
    async def child(namespace: str, labels: Any, **_: Any) -> None:
        if job := labels.get(JOB_LABEL):
            queue.add(Key(namespace, job), CHILD_PAUSE_SECONDS)

    return child


class Watches:
    """kopf on a thread of its own."""

    def __init__(
        self,
        registry: kopf.OperatorRegistry,
        *,
        namespaces: Sequence[str],
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called when the watches end, whether by `stop` or by an error."""
        self._registry = registry
        self._namespaces = namespaces
        self._ended = ended
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """End, and wait for it so long."""
        # Its loop is closed where the watches ended by themselves.
        with contextlib.suppress(RuntimeError):
            self._stop()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            asyncio.run(self._operate())
        except Exception:
            log.exception("the watches ended by an error")
        finally:
            self._ended()

    async def _operate(self) -> None:
        settings = kopf.OperatorSettings()
        configure(settings)
        # Not a threading.Event: kopf would wait for it on a thread that it cannot end, and then
        # stay, deaf, when a watch fails.
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        await kopf.operator(
            registry=self._registry,
            settings=settings,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )


class Resync:
    """Reads the list of all jobs now and then, and compares it with what the watch delivered."""

    def __init__(
        self,
        cluster: Cluster,
        queue: WorkQueue,
        health: Health,
        *,
        namespaces: Sequence[str],
        every_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._queue = queue
        self._health = health
        self._namespaces = namespaces
        self._every_seconds = every_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resync", daemon=True)

    def start(self) -> None:
        """Begin, with the first list at once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the request that runs now."""
        self._stopped.set()

    def once(self) -> None:
        """
        Read the list; jobs that the queue does not know are put into it, and those that it alone
        knows are looked at.

        Raises:
            ApiError: there is no list to be had.
        """
        known = self._queue.keys()
        listed: list[tuple[str, int, str]] = []
        found: set[Key] = set()
        for job in self._cluster.jobs(self._namespaces):
            metadata = job["metadata"]
            key = Key(metadata["namespace"], metadata["name"])
            if not metadata.get("deletionTimestamp"):
                found.add(key)
            generation = metadata.get("generation", 0)
            listed.append((metadata["uid"], generation, f"{key} (generation {generation})"))
        self._health.listed(listed)
        for key in found ^ known:
            self._queue.add(key)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.once()
            except ApiError as error:
                log.warning("no list of jobs: %s", error)
            except Exception:
                log.exception("the list of jobs could not be compared")
            self._stopped.wait(self._every_seconds)
