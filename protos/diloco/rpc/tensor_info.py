"""The description of a tensor as a protobuf message; both ends convert with it."""

from __future__ import annotations

from diloco.model.fragments import Tensor
from diloco.v1 import syncer_pb2 as pb


def to_proto(tensor: Tensor) -> pb.TensorInfo:
    """The tensor as a message."""
    return pb.TensorInfo(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        embedding=tensor.embedding,
        aliases=tensor.aliases,
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
        buffer=info.buffer,
    )
