"""
Answers other learners that ask for the state of the optimizers of this one (docs/adr/0033).

Reads local checkpoints, which the training process writes anyway or begins when one is asked for; that process does
nothing else for a peer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import grpc

from diloco.errors import StorageError
from diloco.model import tensorfile
from diloco.rpc.identity import region_uri, regions_of
from diloco.rpc.servers import bind, server
from diloco.rpc.tls import Tls
from diloco.runtime import files
from diloco.runtime.formatting import shorten
from diloco.v1 import peer_pb2 as pb
from diloco.v1.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server
from diloco_worker.core.peer_files import select
from diloco_worker.core.peer_pace import YIELD_SECONDS, Pace, bytes_per_second
from diloco_worker.core.sealed import unsealed
from diloco_worker.link.peer_messages import answers, chunks, parts, refusal

log = logging.getLogger("diloco.link")

POLL_SECONDS = 0.1
"""How often the state directory is inspected for a checkpoint that was asked for."""

THREADS = 4
"""One serves, the others refuse."""

MAX_NAME = 128
"""Characters of the learner that asks, in the log."""

LEAST_PRIORITY = 19
"""Of the thread that reads and sends, so that it takes little from the training."""

DAMAGED = (OSError, ValueError, KeyError, TypeError, StorageError)
"""What a checkpoint raises that is not intact, or is being deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a peer's server needs to know of its learner now."""

    run: Callable[[], str]
    step: Callable[[], int]
    """The newest global step that it knows."""
    saves: Callable[[], bool]
    """Whether local checkpoints are written."""
    step_seconds: Callable[[], float]
    uploading: Callable[[], bool]
    """Whether a fragment is being uploaded."""
    wanted: Callable[[int], object]
    """A local checkpoint of this global step or a later one is needed."""


class PeerServer(PeerServicer):
    """
    Serves one learner at a time.

    Args:
        job: of this learner.
        layout: digest of the layout of its model.
        directory: with the local checkpoints.
        interval: H.
        facts: of the learner.
        tls: directory of the certificates; None: plain text.
    """

    def __init__(
        self, *, job: str, layout: str, directory: Path, interval: int, facts: Facts, tls: Path | None,
    ) -> None:  # fmt: skip
        self._job, self._layout, self._directory = job, layout, directory
        self._interval, self._facts, self._tls = interval, facts, tls
        self._turn = threading.Lock()
        self._server: grpc.Server | None = None

    def listen(self, address: str) -> int:
        """
        Begin to serve; returns the port.

        Args:
            address: host:port; port 0: any free one.

        Raises:
            ConfigError: the address or the TLS files cannot be used.
        """
        self._server = server(max_workers=THREADS)
        add_PeerServicer_to_server(self, self._server)
        port = bind(self._server, address, Tls.load(self._tls), tls_dir=self._tls)
        self._server.start()
        return port

    def close(self) -> None:
        """Stop to serve at once."""
        if self._server is not None:
            self._server.stop(None)

    def GetState(  # noqa: N802 - as in peer.proto
        self, request: pb.PeerRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PeerPart]:
        """See peer.proto."""
        self._check(request, context)
        if not self._turn.acquire(blocking=False):
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "it is serving another learner")
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
            yield from self._parts(request, context)
        except DAMAGED as error:
            _abort(context, grpc.StatusCode.UNAVAILABLE, f"its local checkpoint: {error}")
        finally:
            self._turn.release()

    def _check(self, request: pb.PeerRequest, context: grpc.ServicerContext) -> None:
        region = request.learner.partition("/")[0]
        if self._tls is not None:
            names: Any = context.auth_context().get("peer_uri", ())
            if (needed := region_uri(self._job, region)).encode() not in names:
                found = regions_of((name.decode(errors="replace") for name in names), self._job)
                seen = f"region {', '.join(found)}" if found else "no region"
                text = (
                    f"{shorten(request.learner, MAX_NAME)} presented a certificate for {seen} of job {self._job}, "
                    f"expected one with the URI name {shorten(needed, MAX_NAME)}"
                )
                _abort(context, grpc.StatusCode.PERMISSION_DENIED, text)
        text = refusal(
            request, job=self._job, layout=self._layout, run=self._facts.run(), step=self._facts.step(),
            interval=self._interval,
        )  # fmt: skip
        if text:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, text)

    def _parts(
        self, request: pb.PeerRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PeerPart]:
        found = self._checkpoint(request, context)
        if found is None:
            return
        manifest, file = found
        with file:
            size = os.fstat(file.fileno()).st_size
            entries = tensorfile.parse(_header(file), size)
            selection = select(manifest, entries)
            log.info(
                "%s takes the optimizers' state of local step %d: %d bytes",
                shorten(request.learner, MAX_NAME), manifest["local_step"], selection.tensors_bytes,
            )  # fmt: skip
            rate = bytes_per_second(
                selection.tensors_bytes, interval=self._interval, step_seconds=self._facts.step_seconds()
            )  # fmt: skip
            pace = Pace(rate, now=time.monotonic())
            pieces = chunks(selection, lambda at, size: os.pread(file.fileno(), size, at))
            for part in parts(manifest, selection, pieces):
                if part.WhichOneof("kind") == "chunk":
                    self._pause(pace, len(part.chunk))
                if not context.is_active():
                    return
                yield part

    def _pause(self, pace: Pace, size: int) -> None:
        until = time.monotonic() + YIELD_SECONDS
        while self._facts.uploading() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        time.sleep(pace.wait_seconds(size, now=time.monotonic()))

    def _checkpoint(
        self, request: pb.PeerRequest, context: grpc.ServicerContext
    ) -> tuple[dict[str, Any], BinaryIO] | None:
        """The newest checkpoint of the step or a later one, when there is one; None: the client is gone."""
        seen: set[str] = set()
        asked = False
        while context.is_active():
            for path in sorted(self._directory.glob("checkpoint-*.json"), reverse=True):
                if path.name not in seen:
                    seen.add(path.name)
                    with contextlib.suppress(*DAMAGED):
                        if (found := self._usable(path, request)) is not None:
                            return found
            if not self._facts.saves():
                text = "it writes no local checkpoints"
                _abort(context, grpc.StatusCode.FAILED_PRECONDITION, text)
            if not asked:
                self._facts.wanted(request.step)
                asked = True
            time.sleep(POLL_SECONDS)
        return None

    def _usable(
        self, path: Path, request: pb.PeerRequest
    ) -> tuple[dict[str, Any], BinaryIO] | None:
        manifest = unsealed(files.read(path))
        if not answers(manifest, request):
            return None
        tensors = path.with_suffix(".safetensors")
        return manifest, open(files.open_regular(tensors), "rb", buffering=0)


def _header(file: BinaryIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    file.seek(0)
    return file.read(min(8 + length, size))


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort raises")
