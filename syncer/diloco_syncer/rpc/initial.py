"""
Θ^(0): the initial parameters of a fresh job, uploaded by the learner that was asked for them.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from diloco.errors import DamagedError, ProtocolError, StaleIncarnationError
from diloco.model import tensorfile
from diloco.model.fragments import CHUNK, Layout
from diloco.v1 import bulk_pb2 as bulk
from diloco_syncer.attempts import MemberUpload
from diloco_syncer.coordinator import ParametersReceived
from diloco_syncer.core import events as ev
from diloco_syncer.rpc.transfers import Host, Waiting, decode_chunk
from diloco_syncer.storage.parameters import Parameters

F32 = npt.NDArray[np.float32]

CONSTANTS_PART = -1

PROGRESS_SECONDS = 1.0
"""The engine is notified that an upload makes progress at most this often."""

ADOPTION_SECONDS = 1.0
"""How often a thread asks again whether the parameters have been adopted."""


class InitialParameters:
    """
    Collects the parts of Θ^(0); once all parts of one incarnation have arrived, they become Θ.

    Parts of two incarnations are never mixed. Thread-safe.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._sender: tuple[str, int] | None = None
        """Learner and incarnation of the parts so far."""
        self._layout: Layout | None = None
        """The model of these parts: another one may count before they have arrived."""
        self._fragments: dict[int, F32] = {}
        self._constants: bytes | None = None
        self._uploads: dict[int, MemberUpload] = {}
        """Fragment (CONSTANTS_PART: the constants) → its upload so far."""

    def begin(self, header: bulk.UploadHeader, layout: Layout, upload: MemberUpload) -> InitialPart:
        """
        Receive a fragment or the constants, in place of an older upload of it and of all other senders'.

        Raises:
            ProtocolError: it was not requested, or its sizes do not fit the model.
        """
        facts, sender = self.host.facts, (header.learner, header.incarnation)
        if facts.parameters is not None:
            raise ProtocolError("the initial parameters have arrived already; download them")
        if facts.initialiser != header.learner:
            raise ProtocolError(
                f"{header.learner} uploads initial parameters, but {facts.initialiser} was asked"
            )
        if header.content == bulk.CONSTANTS:
            check_constants(header, layout)
        key = _key(header)
        with self._lock:
            if self._sender != sender or self._layout != layout:
                self._sender, self._layout, self._constants = sender, layout, None
                self._fragments.clear()
                older, self._uploads = list(self._uploads.values()), {}
            else:
                older = [self._uploads[key]] if key in self._uploads else []
            self._uploads[key] = upload
        _replace(older)
        return InitialPart(self, header, layout, upload)

    def keep(
        self, header: bulk.UploadHeader, layout: Layout, part: F32 | bytes, upload: MemberUpload
    ) -> threading.Event | None:
        """
        Keep a part that has arrived completely.

        Returns:
            Set once Θ exists; None: other parts are missing.

        Raises:
            StaleIncarnationError: another incarnation has begun to upload.
        """
        with self._lock:
            if self._sender != (header.learner, header.incarnation) or self._layout != layout:
                raise StaleIncarnationError(
                    f"{self._sender} uploads the initial parameters now; parts of two incarnations "
                    "or models are never mixed"
                )
            if isinstance(part, bytes):
                self._constants = part
            else:
                self._fragments[header.fragment] = part
            if self._uploads.get(_key(header)) is upload:
                del self._uploads[_key(header)]
            if self._constants is None or len(self._fragments) < len(layout.fragments):
                return None
            parameters = Parameters(
                layout,
                [self._fragments[f.index] for f in layout.fragments],
                [(self.host.facts.epoch, 0)] * len(layout.fragments),
                constants=self._constants,
                source=header.learner,
            )
            self._fragments.clear()
            older, self._uploads = list(self._uploads.values()), {}
        _replace(older)
        adopted = threading.Event()
        self.host.post(
            ParametersReceived(learner=header.learner, parameters=parameters, adopted=adopted.set)
        )
        return adopted


class InitialPart:
    """One upload of Θ^(0): a fragment or the constants."""

    def __init__(
        self, initial: InitialParameters, header: bulk.UploadHeader, layout: Layout,
        upload: MemberUpload,
    ) -> None:  # fmt: skip
        self._initial, self._header, self._layout = initial, header, layout
        self._upload = upload
        self._whole = header.content == bulk.CONSTANTS
        elements = 0 if self._whole else layout.fragments[header.fragment].elements
        self._values_N = np.zeros(elements, np.float32)
        # Not a bytearray, which writes its zeros: untouched pages cost nothing until data arrives.
        self._blob = np.zeros(header.elements if self._whole else 0, np.uint8)
        self._complete = False
        self.delivered = False
        """Nothing is left to do."""
        self._adopted: threading.Event | None = None
        self._bytes, self._posted_at = 0, float("-inf")

    def take(self, index: int, payload: memoryview, now: float) -> None:
        """
        Take one chunk.

        Raises:
            DamagedError: its length does not fit.
            NotFiniteError: it holds NaN or Inf.
        """
        self._post_progress(len(payload), now)
        if not self._whole:
            fragment = self._layout.fragments[self._header.fragment]
            decode_chunk(self._header.format, fragment, index, payload, self._values_N)
            return
        begin = index * CHUNK * 4
        if begin + len(payload) > len(self._blob):
            raise DamagedError(
                f"chunk {index} reaches beyond the {len(self._blob)} bytes announced"
            )
        self._blob[begin : begin + len(payload)] = np.frombuffer(payload, np.uint8)

    def _post_progress(self, size: int, now: float) -> None:
        self._bytes += size
        if now - self._posted_at >= PROGRESS_SECONDS:
            self._posted_at = now
            self._initial.host.post(
                ev.Progress(
                    learner=self._header.learner, round=0, attempt=0, received_bytes=self._bytes
                )
            )

    def end(self, now: float) -> None:
        """
        Every chunk has arrived.

        Raises:
            ProtocolError: the constants are not those of the model.
            StaleIncarnationError: another incarnation has begun to upload.
        """
        part: F32 | bytes = self._values_N
        if self._whole:
            part = self._blob.tobytes()
            _check_names(part, self._layout)
        self._adopted = self._initial.keep(self._header, self._layout, part, self._upload)
        self._complete = True
        self.resume(now)

    def resume(self, now: float) -> None:
        """Ask whether Θ exists: no other call may change the answer, or its sender would wait for a reply."""
        exists = self._adopted is None or self._adopted.is_set()
        self.delivered = self._complete and (
            exists or self._initial.host.facts.parameters is not None
        )

    @property
    def waiting(self) -> Waiting | None:
        """The last part: until all parts have become Θ, so that its sender can download them."""
        if self._adopted is None or self.delivered:
            return None
        return Waiting(until=self._adopted.wait, seconds=ADOPTION_SECONDS)


def _replace(uploads: list[MemberUpload]) -> None:
    """Without the lock: a stream that ends may call the collection."""
    for upload in uploads:
        upload.replaced = True
        upload.cancel()


def _key(header: bulk.UploadHeader) -> int:
    return CONSTANTS_PART if header.content == bulk.CONSTANTS else header.fragment


def check_constants(header: bulk.UploadHeader, layout: Layout) -> None:
    """Bound the size before memory is allocated for it; raises ProtocolError."""
    most = sum(16 * t.elements + 1024 for t in layout.constants) + 4096
    chunks = -(-header.elements // (CHUNK * 4))
    if header.elements > most or header.chunks != chunks:
        raise ProtocolError(
            f"constants of {header.elements} bytes in {header.chunks} chunks, expected at most "
            f"{most} for this model, in chunks of {CHUNK * 4}"
        )


def _check_names(blob: bytes, layout: Layout) -> None:
    """Raises ProtocolError now; otherwise a missing constant would surface only in the export."""
    expected = {t.name for t in layout.constants}
    try:
        found = tensorfile.parse(blob, len(blob)).keys() if blob else set()
    except DamagedError as error:
        raise ProtocolError(f"the constants cannot be read: {error}") from None
    if not expected <= found:
        raise ProtocolError(f"constants without {', '.join(sorted(expected - found))}")
