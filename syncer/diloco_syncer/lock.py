"""
One syncer per directory.

A pod that is deleted runs for a while beside its successor, on the same volume: with both at work the
successor would begin from a snapshot that is not the last, and events.jsonl would tell two stories.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from threading import Event

from diloco.errors import StorageError

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""For the predecessor: twice the grace period that a pod is given."""
LOOK_SECONDS = 0.1


def hold(directory: Path, stop: Event, *, wait_seconds: float = WAIT_SECONDS) -> int | None:
    """
    Wait until no other syncer works in this directory, and be the one that does.

    Args:
        directory: of the run; it exists.
        stop: give up without a word.
        wait_seconds: how long another one may take to end.

    Returns:
        A file descriptor: the directory is held until it is closed or the process ends, however it
        ends. None: stopped.

    Raises:
        StorageError: another syncer still works there, or the disk refused.
    """
    path = directory / "syncer.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    looks = max(1, round(wait_seconds / LOOK_SECONDS))
    for look in range(looks):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if look == 0:
                log.warning("%s: another syncer works here; waiting until it has ended", directory)
        except OSError as error:
            # Paper leaves this open: some network file systems know no locks; one pod mounts them.
            log.warning("%s: no lock (%s): see that no other syncer uses it", path, error.strerror)
            return fd
        if stop.wait(LOOK_SECONDS):
            os.close(fd)
            return None
    os.close(fd)
    raise StorageError(
        f"{directory}: another syncer has worked here for {wait_seconds:g} s, expected none; end it, or "
        "give this one a directory of its own"
    )
