"""
One syncer per directory.

A deleted pod may run beside its successor for a while, on the same volume. The successor would then
start from a snapshot that is not the last, and events.jsonl would mix two histories.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from threading import Event

from diloco.errors import StorageError
from diloco.runtime.disk import PRIVATE

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""For the predecessor to end: twice the grace period of a pod."""
POLL_SECONDS = 0.1


def hold(directory: Path, stop: Event, *, wait_seconds: float = WAIT_SECONDS) -> int | None:
    """
    Wait until no other syncer holds this directory, and hold it.

    Args:
        directory: of the run; it exists.
        stop: ends the wait.
        wait_seconds: how long another syncer may take to end.

    Returns:
        A file descriptor; the directory is held until it is closed or the process ends. None: stopped.

    Raises:
        StorageError: another syncer still holds it, or the disk reported an error.
    """
    path = directory / "syncer.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    for attempt in range(max(1, round(wait_seconds / POLL_SECONDS))):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if attempt == 0:
                log.warning(
                    "%s: another syncer holds this directory; waiting for it to end", directory
                )
        except OSError as error:
            # Some network file systems have no locks; only one pod mounts such a volume.
            log.warning(
                "%s: no lock (%s); make sure that no other syncer uses it", path, error.strerror
            )
            return fd
        if stop.wait(POLL_SECONDS):
            os.close(fd)
            return None
    os.close(fd)
    raise StorageError(
        f"{directory}: another syncer has held this directory for {wait_seconds:g} s, expected none; end it, or "
        "use another directory"
    )
