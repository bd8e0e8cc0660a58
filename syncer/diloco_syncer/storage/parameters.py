"""
Θ: the syncer's parameters and outer momentum, per fragment, with the versions that learners may still refer to.

Stored arrays never change; a commit replaces them. So readers (downloads, snapshots, the export) hold references
instead of copies, and never see a partial update.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import StorageError
from diloco.model.fragments import Layout, Tensor, cut
from diloco.spec import RunSpec
from diloco_syncer.core.contribution import Version

KEPT_VERSIONS = 1
"""
Replaced versions of each fragment that stay in memory: a learner that missed one result still sends
a delta. No two rounds of one fragment are in flight, so it never is more than one behind by that.
"""

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FragmentParameters:
    """Values, outer momentum and version of one fragment."""

    theta_N: F32
    momentum_N: F32
    version: Version


class Parameters:
    """
    All fragments of one model; thread-safe.

    Args:
        layout: the cut; fixes the length of every fragment.
        thetas: one flat fp32 vector per fragment.
        momenta: likewise; None: zeros.
        versions: of each fragment.
        constants: safetensors blob of what the job stores without merging it.
        source: the learner that uploaded Θ^(0); "": not known.
        keep_old: how many replaced versions of each fragment stay, so that a delta against them can
            be rebuilt (docs/algorithm.md, "Wire formats"); each costs a fragment in fp32.
    """

    def __init__(
        self,
        layout: Layout,
        thetas: list[F32],
        versions: list[Version],
        *,
        momenta: list[F32] | None = None,
        constants: bytes = b"",
        source: str = "",
        keep_old: int = KEPT_VERSIONS,
    ) -> None:
        self.layout = layout
        self.constants, self.source = constants, source
        self._lock = threading.Lock()
        self._shown: dict[tuple[str, int], FragmentParameters] = {}
        """Learner and fragment → what the learner gets; empty but in a replay."""
        self._old: list[deque[tuple[Version, F32]]] = [deque(maxlen=keep_old) for _ in thetas]
        momenta = momenta or [np.zeros_like(t) for t in thetas]
        self._current = [
            FragmentParameters(theta_N=t, momentum_N=m, version=v)
            for t, m, v in zip(thetas, momenta, versions, strict=True)
        ]

    def current(self, fragment: int, learner: str = "") -> FragmentParameters:
        """The current version of one fragment; of a learner, the version that it is shown."""
        with self._lock:
            return self._shown.get((learner, fragment)) or self._current[fragment]

    def all(self, learner: str = "") -> list[FragmentParameters]:
        """`current` of every fragment, all from the same instant."""
        with self._lock:
            return [self._shown.get((learner, p)) or now for p, now in enumerate(self._current)]

    def show(self, learner: str, fragment: int, version: FragmentParameters) -> None:
        """Of a replay: the learner gets this version, whatever the current one is, until it is shown another."""
        with self._lock:
            self._shown[learner, fragment] = version

    def restore(self, fragments: Sequence[FragmentParameters]) -> None:
        """Of a replay: all fragments are what they were, as after a start from a snapshot."""
        with self._lock:
            self._current = [*fragments]
            for old in self._old:
                old.clear()

    def versions(self, fragment: int) -> list[Version]:
        """Versions of a fragment that a delta may be based on, newest first."""
        with self._lock:
            return [
                self._current[fragment].version,
                *(version for version, _ in self._old[fragment]),
            ]

    def at(self, fragment: int, version: Version) -> F32 | None:
        """A fragment's values at a version; None if that version is not kept or never existed."""
        with self._lock:
            now = self._current[fragment]
            if now.version == version:
                return now.theta_N
            return next((theta_N for v, theta_N in self._old[fragment] if v == version), None)

    def commit(self, fragment: int, merged: FragmentParameters) -> None:
        """Replace a fragment; its previous values are kept, its oldest are dropped."""
        with self._lock:
            before = self._current[fragment]
            self._current[fragment] = merged
            self._old[fragment].appendleft((before.version, before.theta_N))

    def named(self) -> dict[str, npt.NDArray[Any]]:
        """Trained parameters (views) and merged buffers by name in their own shapes, aliases included."""
        out: dict[str, npt.NDArray[Any]] = {}
        for fragment, current in zip(self.layout.fragments, self.all(), strict=True):
            for slot in fragment.slots:
                for name in (slot.tensor.name, *slot.tensor.aliases):
                    out[name] = slot.values(current.theta_N)
        return out

    # ------------------------------------------------------------ durable form

    def to_snapshot(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Arrays and JSON facts from which `from_snapshot` makes equal Parameters. Nothing is copied."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        versions = []
        for index, fragment in enumerate(self.all()):
            arrays[f"theta.{index}"] = fragment.theta_N
            arrays[f"momentum.{index}"] = fragment.momentum_N
            versions.append(list(fragment.version))
        arrays["constants"] = np.frombuffer(self.constants, np.uint8)
        return arrays, {
            "versions": versions,
            "digest": self.layout.digest,
            "tensors": [t.to_json() for t in self.layout.tensors],
            "constants": [t.to_json() for t in self.layout.constants],
            "frozen": [t.to_json() for t in self.layout.frozen],
            "source": self.source,
        }

    @classmethod
    def from_snapshot(
        cls,
        arrays: Mapping[str, npt.NDArray[Any]],
        facts: Mapping[str, Any],
        spec: RunSpec,
        *,
        epoch: int | None = None,
        keep_old: int = KEPT_VERSIONS,
    ) -> Parameters:
        """
        The parameters that `to_snapshot` described.

        Args:
            arrays: Θ, momentum and constants.
            facts: about them.
            spec: of the job.
            epoch: gives every fragment a version of this epoch: learners replace what they have, which is
                older, or of a history that a restored copy of the volume has ended; None: the versions
                stay, and learners keep what they have beyond them.
            keep_old: replaced versions of a fragment that stay available.

        Raises:
            StorageError: the spec now cuts the model differently, or a fragment has another length.
        """
        layout = cut(
            [Tensor.from_json(t) for t in facts["tensors"]],
            num_fragments=spec.fragments,
            constants=[Tensor.from_json(t) for t in facts["constants"]],
            # Both are missing in snapshots of earlier versions, whose constants include the frozen parameters.
            frozen=[Tensor.from_json(t) for t in facts.get("frozen", ())],
            average=spec.average_parameters,
        )
        if layout.digest != facts["digest"]:
            raise StorageError(
                "this spec divides the snapshot's model into other fragments; "
                "use the spec that wrote the snapshot, or start a new job"
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
            [(int(e) if epoch is None else epoch, int(s)) for e, s in facts["versions"]],
            momenta=[arrays[f"momentum.{i}"] for i in range(len(layout.fragments))],
            constants=arrays["constants"].tobytes(),
            source=str(facts.get("source", "")),
            keep_old=keep_old,
        )
