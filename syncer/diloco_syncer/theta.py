"""
Θ: the syncer's parameters and outer momentum, per fragment, with the versions learners may still refer to.

Arrays are never changed once they are here; a commit puts new ones in their place. So readers (downloads, snapshots,
the export) hold references and need no copies, and a torn state cannot be seen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import StorageError
from diloco.fragments import Layout, Tensor, cut
from diloco.spec import RunSpec
from diloco_syncer.core.events import Version

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """One fragment as it is now."""

    theta_N: F32
    momentum_N: F32
    version: Version


class Theta:
    """
    All fragments of one model.

    Args:
        layout: the cut; fixes the length of every fragment.
        thetas: one flat fp32 vector per fragment.
        momenta: likewise; None: zeros.
        versions: of each fragment.
        constants: safetensors blob of what is not trained.
        keep_old: how many replaced fragments stay, so that a delta against them can still be rebuilt (decision 9).
    """

    def __init__(
        self,
        layout: Layout,
        thetas: list[F32],
        versions: list[Version],
        *,
        momenta: list[F32] | None = None,
        constants: bytes = b"",
        keep_old: int = 4,
    ) -> None:
        self.layout = layout
        self.constants = constants
        self._lock = threading.Lock()
        self._keep_old = keep_old
        self._old: OrderedDict[tuple[int, Version], F32] = OrderedDict()
        momenta = momenta or [np.zeros_like(t) for t in thetas]
        self._held = [
            Held(theta_N=t, momentum_N=m, version=v)
            for t, m, v in zip(thetas, momenta, versions, strict=True)
        ]

    def held(self, fragment: int) -> Held:
        """One fragment as it is now."""
        with self._lock:
            return self._held[fragment]

    def all(self) -> list[Held]:
        """Every fragment as it is now, all from the same instant."""
        with self._lock:
            return list(self._held)

    def versions(self, fragment: int) -> list[Version]:
        """Versions of a fragment that a delta may be based on, newest first."""
        with self._lock:
            old = [v for (f, v) in reversed(self._old) if f == fragment]
            return [self._held[fragment].version, *old]

    def at(self, fragment: int, version: Version) -> F32 | None:
        """A fragment's values at a version; None if that is no longer (or was never) here."""
        with self._lock:
            held = self._held[fragment]
            return held.theta_N if held.version == version else self._old.get((fragment, version))

    def commit(self, fragment: int, held: Held) -> None:
        """Replace a fragment; the values before it stay for a while."""
        with self._lock:
            before = self._held[fragment]
            self._held[fragment] = held
            self._old[(fragment, before.version)] = before.theta_N
            while len(self._old) > self._keep_old:
                self._old.popitem(last=False)

    def named(self) -> dict[str, npt.NDArray[Any]]:
        """Trained parameters by name in their own shapes (views), aliases of tied weights included."""
        out: dict[str, npt.NDArray[Any]] = {}
        for fragment, held in zip(self.layout.fragments, self.all(), strict=True):
            for slot in fragment.slots:
                flat = held.theta_N[slot.offset : slot.offset + slot.tensor.elements]
                for name in (slot.tensor.name, *slot.tensor.aliases):
                    out[name] = flat.reshape(slot.tensor.shape)
        return out

    # ------------------------------------------------------------ durable form

    def to_snapshot(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Arrays and JSON facts from which `from_snapshot` makes an equal Theta. Nothing is copied."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        versions = []
        for index, held in enumerate(self.all()):
            arrays[f"theta.{index}"] = held.theta_N
            arrays[f"momentum.{index}"] = held.momentum_N
            versions.append(list(held.version))
        arrays["constants"] = np.frombuffer(self.constants, np.uint8)
        return arrays, {
            "versions": versions,
            "digest": self.layout.digest,
            "tensors": [tensor_to_json(t) for t in self.layout.tensors],
            "constants": [tensor_to_json(t) for t in self.layout.constants],
        }

    @classmethod
    def from_snapshot(
        cls,
        arrays: Mapping[str, npt.NDArray[Any]],
        facts: Mapping[str, Any],
        spec: RunSpec,
        *,
        keep_old: int,
    ) -> Theta:
        """
        What `to_snapshot` wrote.

        Raises:
            StorageError: the spec now cuts the model differently, or a fragment has another length.
        """
        layout = cut(
            [tensor_from_json(t) for t in facts["tensors"]],
            num_fragments=spec.fragments,
            constants=[tensor_from_json(t) for t in facts["constants"]],
            average=spec.average_parameters,
        )
        if layout.digest != facts["digest"]:
            raise StorageError(
                "the snapshot's model is cut differently by this spec; "
                "run it with the spec that wrote it or start a new job"
            )
        thetas = [arrays[f"theta.{i}"] for i in range(len(layout.fragments))]
        for fragment, array in zip(layout.fragments, thetas, strict=True):
            if array.size != fragment.elements:
                raise StorageError(
                    f"snapshot: fragment {fragment.index} has {array.size} values, "
                    f"expected {fragment.elements}"
                )
        return cls(
            layout,
            thetas,
            [(int(e), int(s)) for e, s in facts["versions"]],
            momenta=[arrays[f"momentum.{i}"] for i in range(len(layout.fragments))],
            constants=arrays["constants"].tobytes(),
            keep_old=keep_old,
        )


def tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    """A tensor's description as JSON values."""
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "embedding": tensor.embedding,
        "aliases": list(tensor.aliases),
    }


def tensor_from_json(data: Mapping[str, Any]) -> Tensor:
    """What `tensor_to_json` wrote."""
    return Tensor(
        name=data["name"],
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        embedding=data["embedding"],
        aliases=tuple(data["aliases"]),
    )
