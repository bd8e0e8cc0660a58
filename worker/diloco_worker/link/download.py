"""Downloads over gRPC: one fragment (or the constants), requested until it has arrived."""

from __future__ import annotations

import logging
import threading
from typing import Any

import grpc

from diloco.rpc.status_codes import error_of
from diloco_worker.link.assembly import Assembly, Outcome, Payloads
from diloco_worker.link.buffers import MAX_TRANSFERS
from diloco_worker.link.transfer import RAW_CHUNK, CancelToken

log = logging.getLogger("diloco.link")

METHOD = "/diloco.v1.Bulk/Download"

UNDECIDED_SECONDS = 0.5
"""Pause before a result is requested again whose round the syncer has not decided about, or of which no more came."""

START_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 128 * 1024.0
"""The longest pause, and the least rate of a link: as of an upload (core/upload_limits.py of the syncer)."""

SILENT_SECONDS = START_SECONDS + (MAX_TRANSFERS + 1) * RAW_CHUNK / MIN_BYTES_PER_SECOND
"""A stream may be without a new chunk for this long: a pause, and one chunk in each stream that shares its link."""

MERGE_SECONDS = 300.0
"""That of a result may be for this much longer: so long, the syncer waits for one more chunk of its merge."""

WATCH_SECONDS = 1.0
"""Interval at which streams are checked."""


def fetch(channel: grpc.Channel, assembly: Assembly, cancel: CancelToken) -> Payloads | None:
    """
    Download one fragment.

    A stream that brings no new chunk for too long is replaced by another one, for what has not arrived. If the
    version has changed meanwhile, or the round is over, it begins again with what is current.

    Args:
        channel: bulk channel.
        assembly: what to download; `discard` is called on it if there are no payloads.
        cancel: stops the download.

    Returns:
        The payloads; None when the round was aborted, or the download stopped.

    Raises:
        DilocoError: the syncer refused, the connection broke, or chunks stayed damaged.
    """
    try:
        while not cancel.stopped:
            outcome = _request(channel, assembly, cancel)
            if outcome is Outcome.COMMITTED:
                return assembly.payloads()
            if outcome is Outcome.ABORTED:
                return None
            if outcome is Outcome.UNDECIDED:
                cancel.wait(UNDECIDED_SECONDS)
        return None
    finally:
        assembly.discard()


def _request(channel: grpc.Channel, assembly: Assembly, cancel: CancelToken) -> Outcome:
    method: Any = channel.unary_stream(METHOD)  # bytes in, bytes out: no serializers
    call = method(assembly.request())
    cancel.on_stop(call.cancel)
    silence, ended = Silence(assembly), threading.Event()
    threading.Thread(
        target=_watch, args=(silence, call, ended), name="download-watch", daemon=True
    ).start()
    try:
        for message in call:
            assembly.add(message)
    except grpc.RpcError as problem:
        error = error_of(problem)
        if silence.expired and not cancel.stopped:
            log.warning(
                "%s: requested again: no new chunk for %g s", assembly, silent_seconds(assembly)
            )
            return Outcome.UNDECIDED
        if cancel.stopped or not assembly.refused(error):
            raise error from None
        return Outcome.DAMAGED
    finally:
        ended.set()
        call.cancel()
    return assembly.end()


class Silence:
    """
    How long one stream of a download has brought no new chunk.

    It is counted by checks, so that a pause of this process, however long, counts as one interval.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self._arrived, self._seconds = assembly, assembly.arrived, 0.0
        self.expired = False
        """It lasted too long."""

    def check(self) -> bool:
        """Call it every WATCH_SECONDS; returns whether the silence has lasted too long."""
        if self._assembly.arrived != self._arrived:
            self._arrived, self._seconds = self._assembly.arrived, 0.0
        else:
            self._seconds += WATCH_SECONDS
        self.expired = self._seconds >= silent_seconds(self._assembly)
        return self.expired


def _watch(silence: Silence, call: Any, ended: threading.Event) -> None:
    # The total is not limited: a slow link is shared by all streams of a learner, and by all learners of a region.
    while not ended.wait(WATCH_SECONDS):
        if silence.check():
            call.cancel()
            return


def silent_seconds(assembly: Assembly) -> float:
    """How long one stream of a download may bring no new chunk."""
    return SILENT_SECONDS + MERGE_SECONDS if assembly.of_round else SILENT_SECONDS
