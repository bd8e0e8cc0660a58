"""The syncer's model for those who only look at it (the evaluator). No torch."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from diloco import wire
from diloco.errors import UnavailableError
from diloco.fragments import Layout, Tensor, cut
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_worker import download
from diloco_worker.core import tensorfile
from diloco_worker.transfer import Cancel, Identity

OBSERVER = Identity(learner="", epoch=0, incarnation=0)


def fetch_model(
    channel: grpc.Channel, *, status: pb.StatusReply, spec: RunSpec
) -> tuple[int, dict[str, npt.NDArray[Any]]]:
    """
    Download what is current: every fragment in fp32, and the constants.

    Args:
        channel: bulk channel.
        status: says what the model looks like.
        spec: says how it is cut.

    Returns: The global step, and every tensor under every name it has, in its shape: fp32, except
        constants that are not floating point. Fragments are fetched one after the other; the step
        is the newest that any of them had.

    Raises:
        DilocoError: there is no model yet, or the connection broke; nothing was changed, try again.
    """
    if not status.tensors:
        raise UnavailableError("the syncer knows no model yet; wait for its first learner")
    layout = _layout(status, spec)
    out: dict[str, npt.NDArray[Any]] = {}
    newest = 0
    for fragment in layout.fragments:
        payloads = _one(channel, layout, fragment.index)
        flat_N = np.empty(fragment.elements, np.float32)
        download.decode_into(payloads, fragment, flat_N)
        newest = max(newest, payloads.step)
        for slot in fragment.slots:
            values = flat_N[slot.offset : slot.offset + slot.tensor.elements].reshape(
                slot.tensor.shape
            )
            for name in (slot.tensor.name, *slot.tensor.aliases):
                out[name] = values
    payloads = _one(channel, layout, len(layout.fragments))
    out.update(_constants(payloads.buffer[: payloads.size_bytes]))
    return newest, out


def _layout(status: pb.StatusReply, spec: RunSpec) -> Layout:
    tensors = [
        Tensor(
            name=t.name,
            shape=tuple(t.shape),
            dtype=t.dtype,
            embedding=t.embedding,
            aliases=tuple(t.aliases),
        )
        for t in status.tensors
    ]
    return cut(tensors, num_fragments=spec.fragments, average=spec.average_parameters)


def _one(channel: grpc.Channel, layout: Layout, index: int) -> download.Payloads:
    constants = index == len(layout.fragments)
    payloads = download.fetch(
        channel,
        identity=OBSERVER,
        fragment=index,
        round=0,
        attempt=0,
        fmt=wire.RAW if constants else wire.FP32,
        expected=None if constants else layout.fragments[index],
        take_buffer=lambda size: np.empty(size, np.uint8),
        cancel=Cancel(),
    )
    if payloads is None:
        raise UnavailableError(f"fragment {index} was not committed; try again")
    return payloads


def _constants(data: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    out: dict[str, npt.NDArray[Any]] = {}
    if data.size == 0:
        return out
    for name, entry in tensorfile.parse(data.data, data.size).items():
        raw = data[entry.lo : entry.hi].copy()
        if entry.dtype == "bfloat16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(np.dtype(entry.dtype))
            if values.dtype.kind == "f":
                values = values.astype(np.float32)
        out[name] = values.reshape(entry.shape)
    return out
