"""
Which syncer writes to an object store: the one that claimed it last.

Shell. The claims and what follows from them are described in `catalog`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from diloco.errors import StorageError
from diloco_syncer.storage import catalog
from diloco_syncer.storage.catalog import Claim
from diloco_syncer.storage.object_store import MissingError, Objects, ObjectsError, read_whole

log = logging.getLogger(__name__)

ATTEMPTS = 8
"""Other starts may claim at the same moment."""
MAX_CLAIM = 4096
"""Bytes; a larger object is no claim that a syncer wrote."""


class FencedError(StorageError):
    """Another syncer writes to the object store."""


def claim(objects: Objects, *, directory: str, start: str, restores: bool) -> Claim:
    """
    Become the syncer that writes to the store; earlier ones notice it before their next object.

    Args:
        objects: the store.
        directory: see `Store.directory_id`.
        start: see `Store.start_id`.
        restores: see `catalog.may_claim`.

    Raises:
        FencedError: another directory writes there.
        ObjectsError: the store cannot be reached, or refused a request.
    """
    for _ in range(ATTEMPTS):
        names = objects.names(catalog.CLAIMS)
        newest = _newest(objects, names)
        if not catalog.may_claim(newest, directory=directory, restores=restores):
            raise FencedError(
                f"{objects.url} belongs to another syncer (claim {newest.number if newest else 0}), which began "
                "after this directory last wrote there: snapshots are not copied. To continue from what is there, "
                "start with an empty directory; to let this directory write, delete the claims there"
            )
        # A person may have deleted the claims, and snapshots of later ones are there.
        number = 1 + max(
            catalog.newest_claim(names),
            *(copy.claim for copy in catalog.complete(objects.names(catalog.SNAPSHOTS))),
            0,
        )
        own = Claim(number=number, directory=directory, start=start)
        # Some services ignore the condition: what is there counts.
        if objects.put_new(own.name, own.encode()) and _read(objects, own.name, own) == own:
            _remove(objects, catalog.older_claims(names, own.number))
            return own
    raise StorageError(
        f"{objects.url}: {ATTEMPTS} attempts to claim it failed, because other syncers claim it"
    )


def confirm(objects: Objects, own: Claim) -> None:
    """
    No later claim exists.

    Raises:
        FencedError: there is one.
    """
    number = catalog.newest_claim(objects.names(catalog.CLAIMS))
    if number > own.number:
        raise FencedError(
            f"{objects.url}: another syncer has claimed it (claim {number}, this one has {own.number}): "
            "snapshots of this one are not copied; end one of the two"
        )


def _remove(objects: Objects, names: Iterable[str]) -> None:
    """They no longer count: a service that deletes nothing costs no snapshot."""
    try:
        for name in names:
            objects.remove(name)
    except ObjectsError as error:
        log.warning("older claims stay in the object store: %s", error)


def _newest(objects: Objects, names: Mapping[str, int]) -> Claim | None:
    number = catalog.newest_claim(names)
    if not number:
        return None
    name = catalog.claim_name(number)
    if names[name] > MAX_CLAIM:
        return Claim.decode(number, b"")
    try:
        return Claim.decode(number, read_whole(objects, name, names[name]))
    except MissingError:
        return None  # its successor has deleted it, so this attempt fails


def _read(objects: Objects, name: str, expected: Claim) -> Claim:
    """What is there under the name of a claim that was just written."""
    return Claim.decode(expected.number, read_whole(objects, name, len(expected.encode())))
