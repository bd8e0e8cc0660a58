"""Certificates for tests of TLS, made as `diloco certs` makes them, and mounted as Kubernetes does."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from diloco.rpc.tls import FILES, Tls
from diloco_cli.authority import issue, new_authority

_generations = itertools.count(1)


class Authority:
    """Signs certificates for both ends of job j: all its regions, the syncer's name, localhost."""

    def __init__(self, name: str = "j") -> None:
        self.made = new_authority(name, datetime.now(UTC) - timedelta(days=100))

    def make(
        self,
        *,
        job: str = "j",
        regions: Sequence[str] = ("eu", "us"),
        names: Sequence[str] = ("j-syncer", "localhost", "127.0.0.1"),
        expires_in_seconds: float = 3600.0,
        observer: bool = False,
    ) -> Tls:
        """Files of one end; a negative time makes an expired certificate."""
        begins = datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=expires_in_seconds)
        issued = issue(
            self.made, job=job, regions=regions, server_names=names, now=begins, days=1, observer=observer
        )  # fmt: skip
        return Tls(certificate=issued.certificate, key=issued.key, authority=self.made.bundle)

    def issue(self, directory: Path) -> Path:
        """Write tls.crt, tls.key and ca.crt of a new pair; returns the directory."""
        return write(directory, self.make())


def write(directory: Path, tls: Tls) -> Path:
    """The three files, plain; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in zip(FILES, (tls.certificate, tls.key, tls.authority), strict=True):
        (directory / name).write_bytes(data)
    return directory


def mount(directory: Path, tls: Tls) -> Path:
    """
    The three files as the kubelet writes a Secret volume: replaced all at once by one rename.

    Each file is a link through `..data`, which is a link to a directory with a unique name.
    """
    before = directory / "..data"
    old = before.resolve() if before.is_symlink() else None
    own = f"..generation_{next(_generations)}"
    write(directory / own, tls)
    (directory / "..data_tmp").symlink_to(own)
    os.replace(directory / "..data_tmp", before)
    for name in FILES:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data") / name)
    if old is not None:
        shutil.rmtree(old)
    return directory
