"""
What an object store holds of the snapshots of a job, and what follows from it. Pure.

    claims/000003.json                                   who writes here: the newest claim counts
    snapshots/000003-000007-epoch-2-step-96.safetensors  data, as in the directory of claim 3
    snapshots/000003-000007-epoch-2-step-96.json         written last: the snapshot is complete

A start of a syncer writes under a claim of its own, so no two ever write an object of the same name. The
newest claim is the only one that may delete (docs/adr/0030-snapshots-in-an-object-store.md).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import StorageError
from diloco.spec import canonical

SNAPSHOTS = "snapshots"
CLAIMS = "claims"

_FORMAT = 1
_COPY = re.compile(r"snapshots/(\d{6,})-(\d{6,})-epoch-(\d+)-step-(\d+)\.(safetensors|json)")
_CLAIM = re.compile(r"claims/(\d{6,})\.json")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Copy:
    """A snapshot in the store; a later claim counts more, and within it the later number."""

    claim: int
    number: int
    epoch: int
    step: int

    @property
    def data(self) -> str:
        """Name of its data."""
        return f"{self._stem}.safetensors"

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return f"{self._stem}.json"

    @property
    def _stem(self) -> str:
        return f"{SNAPSHOTS}/{self.claim:06d}-{self.number:06d}-epoch-{self.epoch}-step-{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who writes from here on."""

    number: int
    directory: str
    """Of the syncer, see `Store.directory_id`; "": the claim cannot be read."""
    start: str
    """The one start of it that may write."""

    @property
    def name(self) -> str:
        """Of its object."""
        return claim_name(self.number)

    def encode(self) -> bytes:
        """The object."""
        return canonical({"directory": self.directory, "start": self.start}).encode()

    @classmethod
    def decode(cls, number: int, data: bytes) -> Claim:
        """The claim of an object; one that is damaged is of no directory."""
        try:
            stated = json.loads(data)
            return cls(
                number=number, directory=str(stated["directory"]), start=str(stated["start"])
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            return cls(number=number, directory="", start="")


def claim_name(number: int) -> str:
    """Name of the object of a claim."""
    return f"{CLAIMS}/{number:06d}.json"


def newest_claim(names: Collection[str]) -> int:
    """The largest number among the names of claims; 0: there is none."""
    return max((int(m[1]) for name in names if (m := _CLAIM.fullmatch(name))), default=0)


def older_claims(names: Collection[str], own: int) -> list[str]:
    """Claims that no longer count."""
    return sorted(n for n in names if (m := _CLAIM.fullmatch(n)) and int(m[1]) < own)


def complete(names: Collection[str]) -> list[Copy]:
    """The snapshots that have a manifest, the newest first."""
    return sorted(
        (copy for copy, suffix in _copies(names) if suffix == "json"),
        reverse=True,
    )


def outdated(names: Collection[str], *, keep: int, kept: Collection[Copy | None]) -> list[str]:
    """
    The objects to delete, in this order: a manifest before its data.

    Args:
        names: all objects of snapshots.
        keep: how many complete snapshots stay.
        kept: further ones that stay: the last that was verified.
    """
    copies = complete(names)
    if not copies:
        return []
    staying = {*copies[:keep], *kept}
    # What is newer than the newest complete snapshot may be on its way.
    old = {c for c, _ in _copies(names) if c not in staying and c < copies[0]}
    return [name for copy in sorted(old) for name in (copy.manifest, copy.data) if name in names]


def may_claim(newest: Claim | None, *, directory: str, restores: bool) -> bool:
    """
    Whether a syncer may write here.

    Args:
        newest: None: there is no claim.
        directory: of the syncer.
        restores: it starts from what is here, so that it continues whatever was written last.
    """
    return newest is None or restores or newest.directory == directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a copy: that of the snapshot as it is in its directory, and its run."""

    run: str
    """See `Store.run`."""
    body: Mapping[str, Any]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for copies of the same snapshot: who wrote it, and which it is."""
        return (self.body.get("startId"), self.body.get("file"), self.body.get("headerSha256"))

    @property
    def spec(self) -> str:
        """The hash of the RunSpec."""
        meta = self.body.get("meta")
        return str(meta.get("spec", "")) if isinstance(meta, Mapping) else ""

    def encode(self) -> bytes:
        """The object."""
        content = {"format": _FORMAT, "run": self.run, "manifest": dict(self.body)}
        return canonical({"copy": content, "sha256": _sha(content)}).encode()

    @classmethod
    def decode(cls, name: str, data: bytes) -> Manifest:
        """
        The manifest of an object.

        Raises:
            StorageError: it is damaged, or of another format.
        """
        try:
            outer = json.loads(data)
            content, stated = outer["copy"], outer["sha256"]
            actual = _sha(content)
            if stated != actual:
                raise StorageError(f"{name}: its SHA-256 is {actual}, expected {stated}")
            if content["format"] != _FORMAT:
                raise StorageError(f"{name}: not in format {_FORMAT}, the one this syncer reads")
            body = content["manifest"]
            if not isinstance(body, dict):
                raise StorageError(f"{name}: has no manifest of a snapshot")
            return cls(run=str(content["run"]), body=body)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StorageError(f"{name}: not a manifest: {error!r}") from None


def _sha(content: object) -> str:
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def _copies(names: Collection[str]) -> list[tuple[Copy, str]]:
    found = [_COPY.fullmatch(name) for name in names]
    return [
        (Copy(claim=int(m[1]), number=int(m[2]), epoch=int(m[3]), step=int(m[4])), m[5])
        for m in found
        if m
    ]
