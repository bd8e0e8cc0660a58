"""
Whether this operator still does its work, answered over HTTP; found out without any write.

Unhealthy is what only a new process cures: a reconcile that does not end, a thread that died, an
event loop that does not turn, a watch that went deaf. An API server that is away is none of these:
a restart would not bring it back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from diloco.errors import ConfigError
from diloco_operator.workqueue import WorkQueue

STUCK_SECONDS = 300.0
"""A reconcile of so long will not end: each of its requests has a deadline of seconds."""
DEAF_SECONDS = 120.0
"""kopf reopens a silent watch after 70 s."""
LOOP_SECONDS = 60.0
"""The event loop of the watches turns every few seconds."""

Clock = Callable[[], float]


class _Missing(NamedTuple):
    name: str
    generation: int
    since: float


class Health:
    """Facts that come in from all threads, and the verdict on them."""

    def __init__(self, queue: WorkQueue, *, clock: Clock = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._lock = threading.Lock()
        self._delivered: dict[str, int] = {}
        self._missing: dict[str, _Missing] = {}
        self._listed_once = False
        self._turned: float | None = None

    def delivered(self, uid: str, generation: int) -> None:
        """The watch brought this generation of a job."""
        with self._lock:
            self._delivered[uid] = max(generation, self._delivered.get(uid, 0))

    def listed(self, jobs: Iterable[tuple[str, int, str]]) -> None:
        """A list of all jobs was read: uid, generation, and what to call them."""
        now = self._clock()
        with self._lock:
            found = {uid: (generation, name) for uid, generation, name in jobs}
            self._delivered = {u: g for u, g in self._delivered.items() if u in found}
            self._missing = {
                uid: self._still(uid) or _Missing(name, generation, now)
                for uid, (generation, name) in found.items()
                if self._delivered.get(uid, 0) < generation
            }
            self._listed_once = True

    def turned(self) -> None:
        """The event loop of the watches turns."""
        with self._lock:
            self._turned = self._clock()

    def ready(self) -> bool:
        """Whether the operator reads jobs and watches them."""
        with self._lock:
            return self._listed_once and self._turned is not None

    def problem(self) -> str:
        """What is wrong with this process, in one sentence; "": nothing."""
        if not self._queue.alive():
            return "a reconcile thread has ended"
        if (seconds := self._queue.longest_seconds()) > STUCK_SECONDS:
            return f"a reconcile has been running for {seconds:.0f} s"
        now = self._clock()
        with self._lock:
            if self._turned is not None and now - self._turned > LOOP_SECONDS:
                return f"the event loop of the watches stands since {now - self._turned:.0f} s"
            for uid in self._missing:
                one = self._still(uid)
                if one is not None and now - one.since > DEAF_SECONDS:
                    return f"the watch has not delivered {one.name} for {now - one.since:.0f} s"
        return ""

    def _still(self, uid: str) -> _Missing | None:
        """What was missing of this job before and has not been delivered since."""
        one = self._missing.get(uid)
        return one if one and self._delivered.get(uid, 0) < one.generation else None


class HealthServer:
    """/healthz and /readyz on a thread of its own: 200 or, with the reason, 503."""

    def __init__(self, health: Health, port: int, host: str = "") -> None:
        """
        Listen; port 0: any free one.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(health))
        except OSError as error:
            raise ConfigError(
                f"DILOCO_HEALTH_PORT: {port}: {error.strerror}; give a free port"
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            match self.path:
                case "/healthz":
                    problem = health.problem()
                case "/readyz":
                    problem = "" if health.ready() else "no list of jobs was read yet"
                case _:
                    return self.send_error(404)
            body = ((problem or "ok") + "\n").encode()
            self.send_response(503 if problem else 200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *args: object) -> None:
            """A probe every few seconds is not worth a line."""

    return Handler
