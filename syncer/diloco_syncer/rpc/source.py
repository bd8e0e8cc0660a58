"""
The sending end of one download, without I/O and without waiting: the next frame, or "not yet".

A gRPC thread drives it (downloads.py), and so does the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from diloco.codec import formats, frames
from diloco.errors import AbortedError, DilocoError, ProtocolError, UnavailableError
from diloco.model.fragments import CHUNK, Fragment
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.attempts import Attempt
from diloco_syncer.core.contribution import Version
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND, START_SECONDS
from diloco_syncer.rpc.transfers import Host, Waiting, check_sender, pack
from diloco_syncer.storage.parameters import FragmentParameters, Parameters

log = logging.getLogger(__name__)

OUTPUT_SECONDS = 300.0
"""The longest that a download waits for one more chunk of a running merge, or for its commit."""

ASK_SECONDS = 30.0
"""How often a thread that waits for a merge asks again; the merge wakes it."""


class _Content(Protocol):
    """What one download sends."""

    header: bulk.DownloadHeader

    def chunk(self, index: int) -> bytes | None:
        """A packed chunk; None: not yet."""

    def outcome(self) -> bool | None:
        """Whether the chunks count; None: not decided yet."""

    def waiting(self, index: int | None) -> Waiting | None:
        """For this chunk, or for the outcome."""


class _Reading(NamedTuple):
    """What the peer of a download has read. Another thread asks, so it is replaced as a whole."""

    ahead: float = 0.0
    """By how many seconds a learner over the slowest link would be behind; without the waits for a merge."""
    unread_bytes: int = 0
    """Of the frame that it reads now."""
    since: float = float("inf")
    """When that was sent, monotonic; infinite: there is none."""

    def read(self, now: float) -> _Reading:
        """It has read the frame, if there was one; a fast beginning does not pay for a long silence."""
        ahead = self._ahead(now) + self.unread_bytes / MIN_BYTES_PER_SECOND
        return _Reading(min(START_SECONDS, ahead))

    def is_slow(self, now: float) -> bool:
        """Whether a learner over the slowest link would have read more, up to the end of this frame."""
        allowed = min(START_SECONDS, self.ahead + self.unread_bytes / MIN_BYTES_PER_SECOND)
        return allowed < max(0.0, now - self.since)

    def _ahead(self, now: float) -> float:
        return self.ahead - max(0.0, now - self.since)


class DownloadSource:
    """
    Header, chunks and trailer of one download.

    Args:
        content: what to send.
        chunks: only these; none: all.
    """

    def __init__(self, content: _Content, chunks: Sequence[int] = ()) -> None:
        self._content = content
        self._left = list(reversed(chunks or range(content.header.chunks)))
        self._begun = False
        self._since = float("inf")
        self._reading = _Reading()
        self.over = False
        """The trailer was returned."""

    def next_frame(self, now: float) -> bytes | None:
        """
        The next frame to send.

        Args:
            now: monotonic seconds.

        Returns:
            None: not yet, see `waiting`; or the download is `over`.
        """
        self._reading = self._reading.read(now)
        if self.over:
            return None
        try:
            frame = self._frame()
        except DilocoError as error:
            aborted = isinstance(error, AbortedError)
            if not aborted:
                log.info("download of fragment %d: %s", self._content.header.fragment, error)
            return self._trailer(committed=False, aborted=aborted, reason=str(error))
        if frame is not None:
            self._since = float("inf")
            self._reading = self._reading._replace(unread_bytes=len(frame), since=now)
            return frame
        self._since = min(self._since, now)
        if now - self._since < OUTPUT_SECONDS:
            return None
        reason = f"not decided within {OUTPUT_SECONDS:g} s; request it again"
        return self._trailer(committed=False, aborted=False, reason=reason)

    def may_end(self, parameters: Parameters, now: float) -> bool:
        """
        Whether only downloads keep this version in memory, and the peer of this one hardly reads it.

        Over a slow link, no download would complete if each ended that takes longer than two merges.
        """
        header = self._content.header
        if header.fragment == len(parameters.layout.fragments):
            return False
        version = (header.version.epoch, header.version.step)
        return self._reading.is_slow(now) and version < min(parameters.versions(header.fragment))

    @property
    def waiting(self) -> Waiting | None:
        """What must happen before there is another frame; None: nothing."""
        if self.over or not self._begun:
            return None
        return self._content.waiting(self._left[-1] if self._left else None)

    def _frame(self) -> bytes | None:
        if not self._begun:
            self._begun = True
            return pack(frames.Kind.HEADER, self._content.header)
        if self._left:
            chunk = self._content.chunk(self._left[-1])
            if chunk is not None:
                self._left.pop()
            return chunk
        outcome = self._content.outcome()
        if outcome is None:
            return None
        reason = "" if outcome else "the round was aborted"
        return self._trailer(committed=outcome, aborted=not outcome, reason=reason)

    def _trailer(self, *, committed: bool, aborted: bool, reason: str) -> bytes:
        self.over = True
        trailer = bulk.DownloadTrailer(committed=committed, aborted=aborted, reason=reason)
        return pack(frames.Kind.TRAILER, trailer)


def open_download(host: Host, wanted: bulk.DownloadRequest) -> DownloadSource:
    """
    Check a request and find what it asks for.

    Raises:
        UnavailableError: there are no parameters, or the round is over.
        StaleEpochError, StaleIncarnationError, ProtocolError: it cannot be answered.
    """
    parameters = host.facts.parameters
    if parameters is None:
        raise UnavailableError("there are no parameters yet; wait for Ready")
    if wanted.learner:
        check_sender(host, wanted)
    content = _content(host, parameters, wanted)
    if max(wanted.chunks, default=0) >= max(1, content.header.chunks):
        raise ProtocolError(
            f"chunk {max(wanted.chunks)} of fragment {wanted.fragment}; "
            f"it has {content.header.chunks}"
        )
    return DownloadSource(content, tuple(wanted.chunks))


def _content(host: Host, parameters: Parameters, wanted: bulk.DownloadRequest) -> _Content:
    layout = parameters.layout
    if wanted.fragment == len(layout.fragments):
        return _Constants(parameters, wanted.fragment)
    if wanted.fragment > len(layout.fragments):
        raise ProtocolError(
            f"fragment {wanted.fragment} does not exist; the model has {len(layout.fragments)}"
        )
    fragment, step = layout.fragments[wanted.fragment], host.facts.step
    down = formats.of_fragment(host.spec.wire_down, fragment)
    if wanted.round == 0:
        current = parameters.current(fragment.index, wanted.learner)
        return _Current(current, fragment, fmt=wanted.format or down, step=step)
    attempt = host.attempts.get(wanted.round, wanted.attempt)
    if attempt is None or attempt.fragment != wanted.fragment:
        raise UnavailableError(
            f"round {wanted.round} attempt {wanted.attempt} is over; request the current version"
        )
    return _Result(attempt, fragment, fmt=down, step=step)


def _header(fragment: Fragment, version: Version, *, fmt: int, step: int) -> bulk.DownloadHeader:
    return bulk.DownloadHeader(
        fragment=fragment.index,
        format=bulk.Format.ValueType(fmt),
        elements=fragment.elements,
        chunks=fragment.chunks,
        version=pb.Version(epoch=version[0], step=version[1]),
        step=step,
    )


class _Committed:
    """What exists already: it counts, and nothing is waited for."""

    def outcome(self) -> bool | None:
        return True

    def waiting(self, index: int | None) -> Waiting | None:
        return None


class _Current(_Committed):
    """The committed version, encoded chunk by chunk."""

    def __init__(
        self, current: FragmentParameters, fragment: Fragment, *, fmt: int, step: int
    ) -> None:
        self._fragment, self._fmt, self._theta_N = fragment, fmt, current.theta_N
        self._buffer = np.empty(formats.encoded_bytes(fmt, min(CHUNK, fragment.elements)), np.uint8)
        self.header = _header(fragment, current.version, fmt=fmt, step=step)

    def chunk(self, index: int) -> bytes | None:
        lo, hi = self._fragment.chunk(index)
        size = formats.encode(self._fmt, self._theta_N[lo:hi], self._buffer)
        return frames.pack(frames.Kind.CHUNK, index, self._buffer[:size])


class _Constants(_Committed):
    """Frozen parameters and buffers as one safetensors file."""

    _CHUNK_BYTES = CHUNK * 4

    def __init__(self, parameters: Parameters, fragment: int) -> None:
        self._blob = parameters.constants
        self.header = bulk.DownloadHeader(
            fragment=fragment,
            format=bulk.RAW,
            elements=len(self._blob),
            chunks=-(-len(self._blob) // self._CHUNK_BYTES),
            version=pb.Version(epoch=parameters.current(0).version[0], step=0),
        )

    def chunk(self, index: int) -> bytes | None:
        size = self._CHUNK_BYTES
        return frames.pack(frames.Kind.CHUNK, index, self._blob[index * size : (index + 1) * size])


class _Result:
    """Chunks as the merge finishes them; only the commit makes them count."""

    def __init__(self, attempt: Attempt, fragment: Fragment, *, fmt: int, step: int) -> None:
        self._attempt = attempt
        self.header = _header(fragment, attempt.version, fmt=fmt, step=step)

    def chunk(self, index: int) -> bytes | None:
        merge = self._attempt.running()
        return None if merge is None else merge.ready(index)

    def outcome(self) -> bool | None:
        return self._attempt.outcome

    def waiting(self, index: int | None) -> Waiting | None:
        if index is None:
            return Waiting(until=self._attempt.wait_for_outcome, seconds=ASK_SECONDS)
        try:
            merge = self._attempt.running()
        except AbortedError:
            return None
        if merge is None:
            return Waiting(until=self._attempt.wait_for_merge, seconds=ASK_SECONDS)
        return Waiting(until=partial(merge.wait_for_output, index), seconds=ASK_SECONDS)
