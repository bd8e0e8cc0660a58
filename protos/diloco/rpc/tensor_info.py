"""The description of tensors as protobuf messages; both ends convert with it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from diloco.errors import ConfigError, ProtocolError
from diloco.model.fragments import Tensor
from diloco.v1 import syncer_pb2 as pb

FROZEN_BYTES = 16 << 20
"""Of FrozenTensors before they are compressed: at 120 bytes per tensor, a base of 139,000 tensors."""

PACKED_BYTES = 3 << 20
"""Of `Hello.frozen`: 1 MiB is left to the other fields of a message, which may have 4 MiB."""

_TAG = 0x0A
"""Of field 1, `FrozenTensors.tensors`."""


def to_proto(tensor: Tensor) -> pb.TensorInfo:
    """The tensor as a message."""
    return pb.TensorInfo(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        embedding=tensor.embedding,
        aliases=tensor.aliases,
        digest=tensor.digest,
        buffer=tensor.buffer,
    )


def from_proto(info: pb.TensorInfo) -> Tensor:
    """The tensor that a message describes; nothing is validated."""
    return Tensor(
        name=info.name,
        shape=tuple(info.shape),
        dtype=info.dtype,
        embedding=info.embedding,
        aliases=tuple(info.aliases),
        digest=info.digest,
        buffer=info.buffer,
    )


def pack_frozen(tensors: Iterable[Tensor]) -> bytes:
    """
    `Hello.frozen`; empty for no tensors.

    Raises:
        ConfigError: the descriptions have more bytes than a Hello may have.
    """
    infos = [to_proto(tensor).SerializeToString() for tensor in tensors]
    if not infos:
        return b""
    plain = pb.FrozenTensors(tensors=infos).SerializeToString()
    packed = zlib.compress(plain)
    for size, most, kind in (
        (len(plain), FROZEN_BYTES, "bytes"),
        (len(packed), PACKED_BYTES, "compressed bytes"),
    ):
        if size > most:
            raise ConfigError(
                f"model: the names and digests of its {len(infos)} frozen parameters take {size} {kind}, at most "
                f"{most} are supported; set sync.frozen to Ship in a new job, or merge small frozen tensors"
            )
    return packed


def unpack_frozen(data: bytes, *, most: int) -> Sequence[bytes]:
    """
    The TensorInfos that `pack_frozen` compressed, not parsed; never more than FROZEN_BYTES are inflated.

    Of more than `most`, only `most` + 1 are returned: 16 KB of zlib can hold 8 million empty ones.

    Raises:
        ProtocolError: there are more bytes, or they are something else.
    """
    if not data:
        return ()
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, FROZEN_BYTES + 1)
        if len(plain) > FROZEN_BYTES:
            raise ProtocolError(
                f"frozen parameters: more than {FROZEN_BYTES} bytes of descriptions"
            )
        if not inflater.eof:
            raise ProtocolError("frozen parameters: the compressed descriptions are cut off")
    except zlib.error as error:
        raise ProtocolError(f"frozen parameters: no valid descriptions: {error}") from None
    return list(islice(_fields(plain), most + 1))


def _fields(plain: bytes) -> Iterator[bytes]:
    """The values of a FrozenTensors, one by one: protobuf would make all of them at once."""
    at = 0
    while at < len(plain):
        if plain[at] != _TAG:
            raise ProtocolError("frozen parameters: no valid descriptions: an unknown field")
        begin, size = _length(plain, at + 1)
        at = begin + size
        if at > len(plain):
            raise ProtocolError("frozen parameters: no valid descriptions: one is cut off")
        yield plain[begin:at]


def _length(plain: bytes, at: int) -> tuple[int, int]:
    """Where the varint that begins at `at` has ended, and its value."""
    value = 0
    for place, byte in enumerate(plain[at : at + 5]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return at + place + 1, value
    raise ProtocolError("frozen parameters: no valid descriptions: no length")
