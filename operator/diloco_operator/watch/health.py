"""
Health of the operator process, served over HTTP and determined without any write.

The process is unhealthy if only a restart helps: a reconcile that does not end, a thread that
ended, a blocked event loop, a watch that misses events. An unavailable API server is none of these,
because a restart does not help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from diloco.errors import ConfigError
from diloco.runtime.listening import AllAddresses
from diloco_operator.workqueue import WorkQueue

STALLED_SECONDS = 300.0
"""A reconcile without progress for longer hangs: each of its requests has a deadline of seconds."""
WATCH_SECONDS = 120.0
"""Longest delay of a watch event; kopf reopens an idle watch after 70 s."""
LOOP_SECONDS = 60.0
"""Longest time between two heartbeats of the watches' event loop."""

Clock = Callable[[], float]


class _Missing(NamedTuple):
    name: str
    generation: int
    since: float
    """When a list showed it first."""
    seen: float
    """When a list showed it last: while the API server does not answer, nothing is overdue."""


class _Delivered(NamedTuple):
    generation: int
    namespace: str


class Health:
    """Collects reports from all threads and derives the health of the process."""

    def __init__(self, queue: WorkQueue, *, clock: Clock = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._lock = threading.Lock()
        self._delivered: dict[str, _Delivered] = {}
        self._missing: dict[str, _Missing] = {}
        self._absent: set[str] = set()
        """Delivered, but not in the last list."""
        self._unread: tuple[str, ...] = ()
        """Namespaces that the last list lacks."""
        self._listed_once = False
        self._crd_problem = ""
        self._heartbeat: float | None = None

    def delivered(self, uid: str, generation: int, namespace: str = "") -> None:
        """The watch delivered this generation of a job."""
        with self._lock:
            newest = max(generation, self._generation(uid))
            self._delivered[uid] = _Delivered(newest, namespace)

    def listed(
        self, jobs: Iterable[tuple[str, int, str]], *, unread: Collection[str] = ()
    ) -> frozenset[str]:
        """
        A list of all jobs was read.

        Args:
            jobs: uid, generation and display name of each.
            unread: namespaces that could not be read: the watch may be interrupted there as well.

        Returns:
            The uids of those that the watch has not delivered in this generation.
        """
        now = self._clock()
        with self._lock:
            found = {uid: (generation, name) for uid, generation, name in jobs}
            # A job that was created while the list was read is missing in this one list only.
            absent = {
                uid
                for uid in self._delivered.keys() - found.keys()
                if self._delivered[uid].namespace not in unread
            }
            for uid in absent & self._absent:
                del self._delivered[uid]
            self._absent = absent - self._absent
            self._missing = {
                uid: (self._still_missing(uid) or _Missing(name, generation, now, now))._replace(
                    seen=now
                )
                for uid, (generation, name) in found.items()
                if self._generation(uid) < generation
            }
            self._unread = tuple(sorted(unread))
            self._listed_once = True
            return frozenset(self._missing)

    def unlisted(self) -> None:
        """No list could be read: the watch may be interrupted as well, and gets its time again."""
        with self._lock:
            self._missing.clear()

    def heartbeat(self) -> None:
        """The event loop of the watches is running."""
        with self._lock:
            self._heartbeat = self._clock()

    def ready(self) -> bool:
        """Whether the operator has listed jobs and watches them."""
        with self._lock:
            return self._listed_once and self._heartbeat is not None

    def unread(self) -> tuple[str, ...]:
        """Namespaces whose jobs the last list could not read."""
        with self._lock:
            return self._unread

    def crd_is(self, problem: str) -> bool:
        """The CRD has this problem, "": none; whether that is new."""
        with self._lock:
            changed = problem != self._crd_problem
            self._crd_problem = problem
            return changed

    def remarks(self) -> tuple[str, ...]:
        """What a person should know although the process is ready."""
        unread = self.unread()
        with self._lock:
            crd = self._crd_problem
        return (
            *((f"cannot list jobs in {', '.join(unread)}",) if unread else ()),
            *((crd,) if crd else ()),
        )

    def problem(self) -> str:
        """Why this process is unhealthy, in one sentence; "": it is healthy."""
        if not self._queue.alive():
            return "a reconcile thread ended"
        if (seconds := self._queue.stalled_seconds()) > STALLED_SECONDS:
            return f"a reconcile has made no progress for {seconds:.0f} s"
        now = self._clock()
        with self._lock:
            if self._heartbeat is not None and (stall := now - self._heartbeat) > LOOP_SECONDS:
                return f"the event loop of the watches has been stalled for {stall:.0f} s"
            for uid in self._missing:
                job = self._still_missing(uid)
                if job is not None and (late := job.seen - job.since) > WATCH_SECONDS:
                    return f"the watch has not delivered {job.name} for {late:.0f} s"
        return ""

    def _still_missing(self, uid: str) -> _Missing | None:
        """The job, if it was missing before and has not been delivered since."""
        job = self._missing.get(uid)
        return job if job and self._generation(uid) < job.generation else None

    def _generation(self, uid: str) -> int:
        """The newest generation of a job that the watch delivered; 0: none."""
        delivered = self._delivered.get(uid)
        return delivered.generation if delivered else 0


class _Server(AllAddresses, ThreadingHTTPServer):
    daemon_threads = True


class HealthServer:
    """
    Serves /healthz and /readyz on a thread of its own: 200, or 503 with the reason.

    /readyz also names the namespaces that cannot be read, for which the others do not wait, and the fields
    that the CRD lacks.
    """

    def __init__(self, health: Health, port: int) -> None:
        """
        Listen on all addresses; port 0: any free port.

        Raises:
            ConfigError: the port is in use.
        """
        try:
            self._server = _Server(port, _handler(health))
        except OSError as error:
            raise ConfigError(
                f"DILOCO_HEALTH_PORT: {port}: {error.strerror}; set a free port"
            ) from None
        self.port = self._server.port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = "ok"
            match self.path:
                case "/healthz":
                    problem = health.problem()
                case "/readyz":
                    problem = "" if health.ready() else "jobs have not been listed yet"
                    if remarks := health.remarks():
                        text = f"ok, but {'; '.join(remarks)}"
                case _:
                    return self.send_error(404)
            body = ((problem or text) + "\n").encode()
            self.send_response(503 if problem else 200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *args: object) -> None:
            """Do not log probes."""

    return Handler
