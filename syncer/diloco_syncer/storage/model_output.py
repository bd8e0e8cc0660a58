"""
Copies the exported model to a URL: model.safetensors and, last, model.json with its SHA-256.

Shell. An existing model.json there always describes the model.safetensors beside it. A file beside the model in the
run directory records that the copy is complete: without it, a job is not.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from diloco.errors import StorageError
from diloco.runtime.disk import LOCAL, Disk, Mode, read
from diloco.runtime.disk import replace as replace_file
from diloco_syncer.storage.capture import ExportedModel
from diloco_syncer.storage.durable import os_errors, pieces
from diloco_syncer.storage.object_store import Objects, StoppedError, until

DATA, FACTS = "model.safetensors", "model.json"
RECORD = "output.json"
"""File beside the model: what was copied where."""


class Output:
    """
    Where the model goes, besides the run directory.

    Args:
        objects: below the URL and the name of the job.
        directory: the run directory.
        disk: holds it.
    """

    def __init__(self, objects: Objects, directory: Path, *, disk: Disk = LOCAL) -> None:
        self._objects, self._directory, self._disk = objects, directory / "model", disk
        self._changed = threading.Condition()
        self._stopping = False

    @property
    def url(self) -> str:
        """For messages."""
        return self._objects.url

    def write(self, model: ExportedModel) -> None:
        """
        Copy the model; blocks until it is there, or until `stop`.

        Raises:
            StorageError: it is not; an earlier model there may be without its model.json.
        """
        ended = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self._write(model)
            except BaseException as error:  # a panic of obstore is no Exception
                errors.append(error)
            ended.set()
            with self._changed:
                self._changed.notify_all()

        # A request that hangs must not keep the process from ending.
        threading.Thread(target=run, name="output", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: ended.is_set() or self._stopping)
        if not ended.is_set():
            raise StoppedError("the process ends")
        for error in errors:
            if isinstance(error, StorageError):
                raise error
            raise StorageError(f"{self.url}: {type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """End `write`; any thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _write(self, model: ExportedModel) -> None:
        data, facts = self._directory / DATA, self._directory / FACTS
        with os_errors(self._disk, data, "copying"):
            description = read(self._disk, facts)
            with self._disk.open(data, Mode.READ) as file:
                size_bytes = file.size()
                content = (bytes(piece) for piece in pieces(file, 0, size_bytes))
                self._objects.remove(FACTS)
                self._objects.put(
                    DATA, until(lambda: self._stopping, content), size_bytes=size_bytes
                )
        self._objects.put(FACTS, [description], size_bytes=len(description))
        record = json.dumps({"url": self.url, "sha256": model.sha256}) + "\n"
        with os_errors(self._disk, self._directory / RECORD, "writing"):
            replace_file(self._disk, self._directory / RECORD, record)


def is_copied(directory: Path, model: ExportedModel, url: str, *, disk: Disk = LOCAL) -> bool:
    """
    Whether an earlier process has copied this model.

    Args:
        directory: the run directory.
        model: in it.
        url: `Output.url`.
        disk: holds the directory.
    """
    try:
        stated = json.loads(read(disk, directory / "model" / RECORD))
        return bool(stated == {"url": url, "sha256": model.sha256})
    except (OSError, ValueError):
        return False
