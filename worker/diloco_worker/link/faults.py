"""Fault injection into uploads (tests only): see `Fault` in settings.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from diloco.codec import frames
from diloco.v1 import bulk_pb2 as bulk
from diloco_worker.link.transfer import U8
from diloco_worker.settings import Fault

log = logging.getLogger(__name__)


class FaultInjector:
    """Chooses the faults of each upload that answers a pull."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = [f for f in faults if f.point == "upload"]
        self._uploads = 0

    def next_upload(self) -> Effects:
        """The effects on the next upload."""
        self._uploads += 1
        active = [f for f in self._faults if f.times is None or self._uploads <= f.times]
        return Effects(active)


class Effects:
    """Turns the chunks of a first transmission into messages, with faults if there are any."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = {f.effect: f for f in faults}

    def messages(self, header: bulk.UploadHeader, parts: list[U8]) -> Iterator[bytes]:
        """One message per chunk; fewer, more or damaged ones as the faults demand."""
        order = list(range(len(parts)))
        if self._faults:
            for effect in self._faults:
                log.warning("fault upload:%s in fragment %d", effect, header.fragment)
            order = order[::-1] if "reorder" in self._faults else order
            order = [i for i in order for _ in range(2)] if "repeat" in self._faults else order
        for index in order:
            message = frames.pack(
                frames.Kind.CHUNK, index, self._payload(header, index, parts[index])
            )
            yield self._damaged(index, len(parts), message) if self._faults else message

    def _payload(self, header: bulk.UploadHeader, index: int, payload: U8) -> U8:
        if "nan" not in self._faults or index != self._faults["nan"].value:
            return payload
        # The first value, or in a format with scales the first scale, becomes NaN; the checksum is
        # computed afterwards, so it matches.
        changed = payload.copy()
        changed[:4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        if header.format == bulk.BF16:
            changed[:2] = (0xC0, 0x7F)
        return changed

    def _damaged(self, index: int, count: int, message: bytes) -> bytes:
        corrupt, truncate = self._faults.get("corrupt-chunk"), self._faults.get("truncate")
        if corrupt is not None and index == min(corrupt.value, count - 1):
            return message[:-1] + bytes([message[-1] ^ 1])
        if truncate is not None and index == count - 1:
            return message[: len(message) // 2]
        return message
