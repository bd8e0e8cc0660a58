"""
Objects of S3, Google Cloud Storage and Azure, and files of a directory, through obstore.

Shell. Credentials, region and endpoint come from the environment or the identity of the workload, as each
service documents it, and never from the manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, from_url

from diloco.runtime.formatting import shorten
from diloco_syncer.storage.object_store import PART_BYTES, MissingError, ObjectsError

log = logging.getLogger(__name__)

MAX_PARTS = 9000
"""A service takes at most 10,000 parts of an object: those of a large one are larger."""
PARALLEL = 4
"""Requests at the same time: bounds the memory to this × a part."""

REQUEST_SECONDS = 300
"""One part may take this long: 28 kB/s."""
RETRIES = 3
RETRY_SECONDS = 120
"""Of one request, by the library; what then still fails is repeated by the caller, with its own back-off."""

MAX_DETAIL = 300
"""Characters of an error of the library: it shows the body of the reply."""

_ERRORS = (BaseError, OSError, ValueError)


class ObstoreObjects:
    """
    Objects of a service that obstore knows, or files of a directory.

    Args:
        url: s3://bucket/path, gs://bucket/path, az://container/path or file:///path.
        folder: below it; names are relative to it.
        plain_http: allow an endpoint without TLS.

    An environment that does not suffice, such as an account of Azure that is missing, is logged, and an error of each
    use: a job that has its state on its volume trains without the service.
    """

    def __init__(self, url: str, folder: str, *, plain_http: bool = False) -> None:
        self.url = f"{url.rstrip('/')}/{folder}"
        self._base, self._plain_http = url, plain_http
        self._opened: Any = None
        try:
            self._store()
        except ObjectsError as error:
            log.warning("%s", error)

    def _store(self) -> Any:
        if self._opened is None:
            try:
                self._opened = _open(self._base, self.url, plain_http=self._plain_http)
            except _ERRORS as error:
                raise _translated(self.url, error) from None
        return self._opened

    def names(self, folder: str) -> Mapping[str, int]:
        """See `Objects`."""
        try:
            batches = obstore.list(self._store(), prefix=folder)
            return {meta["path"]: int(meta["size"]) for batch in batches for meta in batch}
        except FileNotFoundError:
            return {}
        except _ERRORS as error:
            raise _translated(f"{self.url}/{folder}", error) from None

    def read(self, name: str, lo: int, hi: int) -> bytes:
        """See `Objects`."""
        if lo == hi:
            return b""
        try:
            data = bytes(obstore.get_range(self._store(), name, start=lo, end=hi))
        except _ERRORS as error:
            raise _translated(f"{self.url}/{name}", error) from None
        if len(data) != hi - lo:
            raise ObjectsError(
                f"{self.url}/{name}: {len(data)} bytes came, {hi - lo} were requested"
            )
        return data

    def put(self, name: str, parts: Iterable[bytes], *, size_bytes: int) -> None:
        """See `Objects`."""
        each = max(PART_BYTES, -(-size_bytes // MAX_PARTS))
        many = size_bytes > each
        content = iter(parts) if many else b"".join(parts)
        try:
            obstore.put(
                self._store(), name, content, use_multipart=many, chunk_size=each,
                max_concurrency=PARALLEL,
            )  # fmt: skip
        except _ERRORS as error:
            raise _translated(f"{self.url}/{name}", error) from None

    def put_new(self, name: str, data: bytes) -> bool:
        """See `Objects`."""
        try:
            obstore.put(self._store(), name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except _ERRORS as error:
            raise _translated(f"{self.url}/{name}", error) from None
        return True

    def remove(self, name: str) -> None:
        """See `Objects`."""
        try:
            obstore.delete(self._store(), name)
        except FileNotFoundError:
            return
        except _ERRORS as error:
            raise _translated(f"{self.url}/{name}", error) from None


def _open(base: str, url: str, *, plain_http: bool) -> object:
    parts = urlsplit(url)
    if parts.scheme == "file":
        # On a volume that is not mounted, it would be an empty place to begin at step 0.
        if not Path(urlsplit(base).path).is_dir():
            raise NotADirectoryError(f"{base}: is no directory; create it, or mount its volume")
        return LocalStore(Path(parts.path), mkdir=True)
    return from_url(
        url,
        client_options={
            "timeout": timedelta(seconds=REQUEST_SECONDS),
            **({"allow_http": True} if plain_http else {}),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
    )


def _translated(where: str, error: Exception) -> ObjectsError:
    # Only the first lines are for people; then the library repeats them as its own data.
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    message = f"{where}: {shorten(text, MAX_DETAIL)}"
    if isinstance(error, FileNotFoundError):
        return MissingError(message)
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    return ObjectsError(message, denied=denied)
