"""The description of tensors as protobuf messages; both ends convert with it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from diloco.errors import ProtocolError
from diloco.model.fragments import Tensor
from diloco.v1 import syncer_pb2 as pb

FROZEN_BYTES = 16 << 20
"""Of FrozenTensors before they are compressed: at 120 bytes per tensor, a base of 139,000 tensors."""


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
    """`Hello.frozen`; empty for no tensors."""
    infos = [to_proto(tensor).SerializeToString() for tensor in tensors]
    return zlib.compress(pb.FrozenTensors(tensors=infos).SerializeToString()) if infos else b""


def unpack_frozen(data: bytes) -> Sequence[bytes]:
    """
    The TensorInfos that `pack_frozen` compressed, not parsed; never more than FROZEN_BYTES are inflated.

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
        return pb.FrozenTensors.FromString(plain).tensors
    except (zlib.error, DecodeError) as error:
        raise ProtocolError(f"frozen parameters: no valid descriptions: {error}") from None
