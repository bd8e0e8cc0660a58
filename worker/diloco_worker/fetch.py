"""Download of the syncer's model by an observer (the evaluator). No torch."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from diloco.codec import formats
from diloco.errors import UnavailableError
from diloco.model import elements, tensorfile
from diloco.model.fragments import Layout, cut
from diloco.rpc.tensor_info import from_proto
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_worker.link import download
from diloco_worker.link.assembly import Assembly, Payloads, Wanted, decode_into
from diloco_worker.link.transfer import CancelToken, Identity

OBSERVER = Identity(learner="", epoch=0, incarnation=0)


def fetch_model(
    channel: grpc.Channel, *, status: pb.StatusReply, spec: RunSpec
) -> dict[str, npt.NDArray[Any]]:
    """
    Download the current model: every fragment in fp32, and the constants.

    Args:
        channel: bulk channel.
        status: describes the tensors.
        spec: defines how they are cut into fragments.

    Returns:
        Every tensor under each of its names, in its shape: fp32, except for constants and buffers that are
        not floating point. Frozen parameters that stay with the learners are not among them. Fragments are
        downloaded one after the other: each is that of the global step of `status` or a newer one.

    Raises:
        DilocoError: there is no model yet, or the connection broke; try again.
    """
    if not status.tensors:
        raise UnavailableError("the syncer has no model yet; wait for its first learner")
    layout = _layout(status, spec)
    out: dict[str, npt.NDArray[Any]] = {}
    for fragment in layout.fragments:
        payloads = _download(channel, layout, fragment.index)
        flat_N = np.empty(fragment.elements, np.float32)
        decode_into(payloads, fragment, flat_N)
        for slot in fragment.slots:
            for name in (slot.tensor.name, *slot.tensor.aliases):
                out[name] = slot.values(flat_N)
    payloads = _download(channel, layout, len(layout.fragments))
    constants = _constants(payloads.buffer[: payloads.size_bytes])
    for tied in status.tied_constants:
        if tied.name in constants:
            constants.update(dict.fromkeys(tied.aliases, constants[tied.name]))
    return {**constants, **out}


def _layout(status: pb.StatusReply, spec: RunSpec) -> Layout:
    tensors = [from_proto(t) for t in status.tensors]
    return cut(tensors, num_fragments=spec.fragments, average=spec.average_parameters)


def _download(channel: grpc.Channel, layout: Layout, index: int) -> Payloads:
    constants = index == len(layout.fragments)
    wanted = Wanted(
        identity=OBSERVER,
        fragment=index,
        format=formats.RAW if constants else formats.FP32,
        expected=None if constants else layout.fragments[index],
    )
    assembly = Assembly(wanted, lambda size: np.empty(size, np.uint8), lambda buffer: None)
    payloads = download.fetch(channel, assembly, CancelToken())
    if payloads is None:
        raise UnavailableError(f"fragment {index} was not committed; try again")
    return payloads


def _constants(data: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    out: dict[str, npt.NDArray[Any]] = {}
    if data.size == 0:
        return out
    for name, entry in tensorfile.parse(data.data, data.size).items():
        values = elements.numbers(data[entry.lo : entry.hi].tobytes(), entry.dtype)
        kind = np.dtype(np.float32) if values.dtype.kind == "f" else values.dtype
        out[name] = values.astype(kind).reshape(entry.shape)
    return out
