"""
Asks a peer for the state of its optimizers, and writes it to the state directory (docs/adr/0033).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from diloco.errors import DilocoError
from diloco.rpc.channels import channel
from diloco.rpc.connection_reasons import explain
from diloco.rpc.identity import learner_server_name
from diloco.rpc.tls import Tls
from diloco.runtime import files
from diloco.runtime.formatting import shorten
from diloco.v1 import peer_pb2 as pb
from diloco.v1.peer_pb2_grpc import PeerStub
from diloco_worker.core import events as ev
from diloco_worker.core.peer_files import PEER_MANIFEST, PEER_TENSORS
from diloco_worker.link.peer_messages import Arrival

log = logging.getLogger("diloco.link")

REPLY_BYTES = 4 << 20
"""Largest message of a peer."""

MAX_REASON = 300
"""Characters of a peer's reason."""

_TLS_FAULTS = {
    "CertificateNotForSyncer": "the server at its address has no certificate with the DNS name {name}: it is another "
    "program, or a learner whose Secret must be renewed (diloco certs)",
    "CertificateOfOtherAuthority": "its certificate was not issued by the authority in ca.crt of this learner: the "
    "Secrets of all regions must come from the same authority",
    "CertificateExpired": "its certificate or that of its authority has expired: renew the Secret of its region",
    "CertificateNotYetValid": "its certificate is not valid yet: check the clocks",
    "PlainText": "the server at its address did not negotiate TLS: it is another program",
    "HandshakeRefused": "it closed the connection: it requires TLS with a valid certificate of its authority; check "
    "tls.crt of this learner",
}
"""Sentences for reasons of diloco.rpc.connection_reasons, of which those are about the syncer."""

FAILED = (DilocoError, OSError, ValueError, KeyError, TypeError)
"""What a state raises that is not what was asked for, or cannot be written."""


class PeerClient:
    """
    One request at a time, on a thread of its own.

    Args:
        job: of this learner.
        learner: who asks.
        layout: digest of the layout of its model.
        elements: of its trained tensors.
        directory: where to write what arrives.
        tls: directory of the certificates; None: plain text.
        post: takes the ends.
    """

    def __init__(
        self, *, job: str, learner: str, layout: str, elements: int, directory: Path, tls: Path | None,
        post: Callable[[ev.PeerAnswered], object],
    ) -> None:  # fmt: skip
        self._job, self._learner, self._layout = job, learner, layout
        self._elements = elements
        self._directory, self._tls, self._post = directory, tls, post
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="peer")
        self._lock = threading.Lock()
        self._dropped = 0
        """Requests up to this number have ended for the protocol."""
        self._call: tuple[int, grpc.RpcContext] | None = None

    def ask(self, request: ev.AskPeer) -> None:
        """Begin a request; `PeerAnswered` follows."""
        self._executor.submit(self._run, request)

    def drop(self, number: int) -> None:
        """End a request."""
        with self._lock:
            self._dropped = max(self._dropped, number)
            if self._call is not None and self._call[0] <= number:
                self._call[1].cancel()

    def _run(self, request: ev.AskPeer) -> None:
        state, error = None, ""
        log.info("asking %s for the state of its optimizers", request.peer.learner)
        try:
            state = self._fetch(request)
        except grpc.RpcError as failure:
            error = failure.details() if isinstance(failure, grpc.Call) else repr(failure)
            fault = _TLS_FAULTS.get(explain(error or ""), "")
            error = fault.format(name=self._name_of(request.peer)) or error
        except FAILED as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("the state of a peer's optimizers")
            error = repr(failure)
        error = shorten(error or "no reason", MAX_REASON)
        if request.number <= self._dropped:
            state = None  # the protocol has asked the next peer, or trains
        if state is None:
            for name in (PEER_MANIFEST, PEER_TENSORS):
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()
        if state is None and request.number > self._dropped:
            log.warning("%s has not sent its state: %s", request.peer.learner, error)
        self._post(ev.PeerAnswered(number=request.number, state=state, error=error))

    def _name_of(self, peer: ev.PeerAddress) -> str:
        return learner_server_name(self._job, peer.learner.partition("/")[0])

    def _fetch(self, request: ev.AskPeer) -> ev.PeerState:
        wire = channel(
            request.peer.address, tls=Tls.load(self._tls), purpose="bulk",
            server_name=self._name_of(request.peer), reply_bytes=REPLY_BYTES,
        )  # fmt: skip
        message = pb.PeerRequest(
            job=self._job,
            learner=self._learner,
            layout=self._layout,
            run=request.run,
            step=request.step,
        )
        with contextlib.closing(wire):
            call = PeerStub(wire).GetState(message)
            with self._lock:
                self._call = request.number, call
                if request.number <= self._dropped:
                    call.cancel()
            try:
                return self._receive(request, iter(call))
            finally:
                call.cancel()
                with self._lock:
                    self._call = None

    def _receive(self, request: ev.AskPeer, parts: Iterator[pb.PeerPart]) -> ev.PeerState:
        arrival = Arrival(request, layout=self._layout, elements=self._elements)
        arrival.add(next(parts, pb.PeerPart()))
        (self._directory / PEER_MANIFEST).unlink(missing_ok=True)
        tensors = self._directory / PEER_TENSORS
        with files.replacing(tensors, durable=False, mode=files.PRIVATE) as fd:
            for part in parts:
                files.write_all(fd, arrival.add(part))
                if arrival.over:
                    break
            text, state = arrival.end()
        with files.replacing(
            self._directory / PEER_MANIFEST, durable=False, mode=files.PRIVATE
        ) as fd:
            files.write_all(fd, text)
        return state
