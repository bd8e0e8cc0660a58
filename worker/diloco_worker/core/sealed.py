"""
Manifests of local checkpoints, which state their own digest. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from diloco.errors import StorageError

SEAL = "manifestSha256"
"""Member of a manifest: the SHA-256 of the JSON of all others."""


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as JSON, with its own digest: a flipped bit would change an option or a counter unseen."""
    text = json.dumps(manifest)
    return json.dumps({**manifest, SEAL: hashlib.sha256(text.encode()).hexdigest()}).encode()


def unsealed(text: bytes) -> dict[str, Any]:
    """
    A manifest; those of older versions have no digest.

    Raises:
        StorageError: it is not what was written.
        ValueError: it is not JSON.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise StorageError("the manifest is not a JSON object")
    expected = data.pop(SEAL, None)
    found = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    if expected is not None and found != expected:
        raise StorageError(
            f"the manifest has SHA-256 {found[:16]}…, expected {str(expected)[:16]}…"
        )
    return data
