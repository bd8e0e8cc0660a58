"""
The connection of another rank to rank 0 of its learner: one report a second, at once after a change.

A thread, so that a name which does not resolve or a host which does not answer delays nothing else.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from urllib.parse import quote

from diloco.runtime import untrusted_json
from diloco_agent.unit import REPORT_SECONDS, Order, Report

log = logging.getLogger(__name__)

PATH = "/unit"
"""Of rank 0's agent, on the port of the probes; the query is the report as JSON."""

_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 8192


class RankZero:
    """
    Reports to rank 0 until the process ends.

    Args:
        address: host and port of its agent's probes.
        report: the first report.
    """

    def __init__(self, address: tuple[str, int], report: Report) -> None:
        self._address = address
        self._report = report
        self._changed = threading.Event()
        self.reply: tuple[Order, float] | None = None
        """The newest reply, and when it arrived; None: none yet."""
        threading.Thread(target=self._run, name="rank 0", daemon=True).start()

    def update(self, report: Report) -> None:
        """Report this from now on."""
        if report != self._report:
            self._report = report
            self._changed.set()

    def _run(self) -> None:
        problem = ""
        while True:
            self._changed.clear()
            try:
                order = _exchange(self._address, self._report)
                self.reply = (order, time.monotonic())
                problem = ""
            except (OSError, ValueError, TypeError, KeyError) as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("rank 0 at %s:%d: %s", *self._address, problem)
            self._changed.wait(REPORT_SECONDS)


def _exchange(address: tuple[str, int], report: Report) -> Order:
    """
    Send a report; the reply.

    Raises:
        OSError, ValueError, TypeError, KeyError: rank 0 did not answer, or with something else.
    """
    query = quote(json.dumps(report.to_json()))
    request = f"GET {PATH}?{query} HTTP/1.0\r\n\r\n".encode()
    with socket.create_connection(address, timeout=_TIMEOUT_SECONDS) as connection:
        connection.sendall(request)
        answer = bytearray()
        while len(answer) < _MAX_BYTES and (piece := connection.recv(_MAX_BYTES)):
            answer += piece
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if status[1:2] != [b"200"]:
        raise ValueError(f"answered {head[:80]!r}")
    return Order.of(untrusted_json.parse(body))
