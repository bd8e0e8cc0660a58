"""
From a requested download to the inbox: what to request, what is held, how it is placed. No I/O.
"""

from __future__ import annotations

import itertools
import logging

from diloco.codec import formats
from diloco.errors import DilocoError
from diloco.spec import RunSpec
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Staged
from diloco_worker.link.assembly import Assembly, Payloads, Wanted, decode_into
from diloco_worker.link.buffers import BufferPool
from diloco_worker.link.memory import Memory
from diloco_worker.link.transfer import Identity

log = logging.getLogger("diloco.link")


class Placement:
    """
    Complete downloads that are not in an inbox yet.

    `begin` and `stage` may be called from the threads of downloads, `place` and `discard` from one.

    Args:
        memory: where fragments and constants are placed.
        spec: gives the format of results.
        buffers: for downloads; each is released by `place` or `discard`, or by its Assembly.
    """

    def __init__(self, memory: Memory, spec: RunSpec, buffers: BufferPool) -> None:
        self._memory, self._buffers = memory, buffers
        self._down = spec.wire_down
        self._staged: dict[int, Payloads] = {}
        self._tickets = itertools.count()

    def begin(self, request: ev.Download, identity: Identity) -> Assembly:
        """The assembly of a download."""
        fragments = self._memory.layout.fragments
        if request.fragment == len(fragments):
            expected, fmt = None, formats.RAW
        else:
            # A fresh learner starts from exactly Θ; everything later comes in the job's format.
            expected = fragments[request.fragment]
            exact = request.round == 0 and request.exact
            fmt = formats.FP32 if exact else formats.of_fragment(self._down, expected)
        wanted = Wanted(
            identity=identity,
            fragment=request.fragment,
            round=request.round,
            attempt=request.attempt,
            format=fmt,
            expected=expected,
            # By the second try the syncer may have forgotten the round. Its result is the current
            # version then, or it was aborted.
            or_current=request.round > 0 and request.tries > 1,
        )
        return Assembly(wanted, self._buffers.acquire, self._buffers.release)

    def stage(self, request: ev.Download, payloads: Payloads) -> Staged:
        """
        Hold a complete download; constants are copied to where the trainer reads them.

        Raises:
            DilocoError: the constants are larger than those of this learner; nothing is held.
        """
        if request.fragment == len(self._memory.layout.fragments):
            room = self._memory.constants
            if payloads.size_bytes > room.size:
                self._buffers.release(payloads.buffer)
                raise DilocoError(
                    f"constants of {payloads.size_bytes} bytes, expected at most {room.size}"
                )
            room[: payloads.size_bytes] = payloads.buffer[: payloads.size_bytes]
        ticket = next(self._tickets)
        self._staged[ticket] = payloads
        return Staged(fragment=request.fragment, version=payloads.version, ticket=ticket)

    def place(self, decision: ev.Place) -> ev.Placed:
        """Decode a staged fragment into its inbox, and release it."""
        staged = decision.staged
        fragment = self._memory.layout.fragments[staged.fragment]
        error = ""
        with self._memory.lock(fragment.index):
            self._memory.invalidate_inbox(fragment.index)
            try:
                decode_into(
                    self._staged[staged.ticket], fragment, self._memory.inbox(fragment.index)
                )
            except DilocoError as problem:
                log.error("fragment %d of version %s: %s", fragment.index, staged.version, problem)
                error = str(problem)
            else:
                self._memory.publish(fragment.index, decision.generation, staged.version)
        self.discard(staged)
        return ev.Placed(fragment=fragment.index, error=error)

    def discard(self, staged: Staged) -> None:
        """Release a staged download."""
        self._buffers.release(self._staged.pop(staged.ticket).buffer)
