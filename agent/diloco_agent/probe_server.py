"""
Answers probes, and reports of the other pods of a learner, over HTTP.

Not `http.server`, which would double the memory of this process.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable

from diloco.errors import ConfigError
from diloco.runtime.listening import AllAddresses
from diloco_agent.probes import Reply

REQUEST_SECONDS = 5.0
_MAX_LINES = 100
_MAX_BYTES = 8192
_PHRASES = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


class Server:
    """
    Serves on all addresses until the process ends.

    Args:
        port: 0: any free port, see `port`.
        answer: maps a path and its query to the answer; None: no such path. Called from other
            threads.

    Raises:
        ConfigError: the port is not available.
    """

    def __init__(self, port: int, answer: Callable[[str, str], Reply | None]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = REQUEST_SECONDS

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    self.wfile.write(_reply(answer(*self._path_and_query())))

            def _path_and_query(self) -> tuple[str, str]:
                first = self.rfile.readline(_MAX_BYTES).split()
                # Closing before all of the request is read would reset the connection.
                for _ in range(_MAX_LINES if first else 0):
                    if not self.rfile.readline(_MAX_BYTES).strip():
                        break
                target = first[1].decode("latin-1") if len(first) > 1 else ""
                path, _, query = target.partition("?")
                return path, query

        class Threads(AllAddresses, socketserver.ThreadingTCPServer):
            daemon_threads = True

        try:
            self._server = Threads(port, Handler)
        except OSError as error:
            raise ConfigError(
                f"DILOCO_HEALTH_PORT: port {port}: {error.strerror}; choose a free port"
            ) from None
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()


def _reply(answer: Reply | None) -> bytes:
    code = 404 if answer is None else 200 if answer.ok else 503
    body = f"{answer.message if answer else 'the paths are /startz, /readyz and /livez'}\n".encode()
    head = (
        f"HTTP/1.0 {code} {_PHRASES[code]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
