"""
Copies files out of a container through `kubectl exec`, also when the stream breaks.

The container needs Python and no other tool. A small program there sends files in chunks, each with
its SHA-256, and an end marker. When a stream breaks or stalls, the next one resumes after the last
verified chunk; what a file grows by in the meantime is left for the next fetch.

The container is not trusted: only regular files that were asked for are written, below the target, up
to a size for each and for all together. No archive is unpacked, and no link is made.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import random
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from diloco.errors import StorageError, UnavailableError
from diloco.runtime import files
from diloco.runtime.backoff import Backoff
from diloco.runtime.disk import LOCAL
from diloco.runtime.formatting import size as size_text

_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_MAX_MESSAGE = 400
_EXIT_SECONDS = 3.0

_SEND = f"""
import fnmatch, hashlib, json, os, sys
folder, known, out = sys.argv[1], json.loads(sys.argv[2]), sys.stdout.buffer
def header(**fields):
    out.write(json.dumps(fields).encode() + b"\\n")
def files(wanted):
    parent, pattern = os.path.split(wanted)
    try:
        entries = sorted(os.listdir(os.path.join(folder, parent)))
    except FileNotFoundError:
        return
    for name in [os.path.join(parent, e) for e in entries if fnmatch.fnmatchcase(e, pattern)]:
        if os.path.isfile(os.path.join(folder, name)):
            yield name
for name in [name for wanted in sys.argv[3:] for name in files(wanted)]:
    with open(os.path.join(folder, name), "rb") as file:
        found = os.fstat(file.fileno())
        inode, size, offset = found.st_ino, found.st_size, 0
        if name in known and known[name][0] == inode:
            _, size, offset = known[name]
        header(file=name, inode=inode, size=size, offset=offset)
        file.seek(offset)
        while offset < size:
            data = file.read(min({_CHUNK_BYTES}, size - offset))
            if not data:
                sys.exit(name + " was truncated")
            header(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            out.write(data)
            offset += len(data)
header(end=True)
out.flush()
"""

_PERMANENT = (
    *("(NotFound)", "Forbidden", "(Unauthorized)", "(BadRequest)", "stopped container"),
    *("executable file not found", "does not exist", "have a resource type"),
    *("(AlreadyExists)", "is invalid"),
)
"""Parts of kubectl's messages about errors that a retry cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """When a request to the cluster is repeated, and when it fails."""

    attempts: int = 6
    """In a row without progress."""
    first_seconds: float = 1.0
    """Upper bound of the first delay; it doubles."""
    max_seconds: float = 15.0
    stall_seconds: float = 60.0
    """A stream without data for this long counts as broken."""
    chunk_seconds: float = 600.0
    """A fetch that completes no chunk (1 MiB, or the rest of a file) for this long fails."""
    announce: Callable[[str], object] = lambda text: None
    """Shows a person why a request is repeated."""

    def backoff(self) -> Backoff:
        """The delays between attempts."""
        return Backoff(self.first_seconds, self.max_seconds, random.Random())  # noqa: S311


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The most that one fetch writes."""

    file_bytes: int = 1 << 30
    total_bytes: int = 4 << 30
    files: int = 1000


DEFAULT_CAPS = Caps()


def is_permanent(message: str) -> bool:
    """Whether an error message of kubectl rules out that a retry helps."""
    return any(part.lower() in message.lower() for part in _PERMANENT)


def copy_files(
    command: Sequence[str], folder: str, wanted: Sequence[str], to: Path, retries: Retries,
    caps: Caps = DEFAULT_CAPS,
) -> None:  # fmt: skip
    """
    Copy regular files out of a container; missing ones are skipped.

    Args:
        command: runs its further arguments in the container: `kubectl exec POD --`.
        folder: directory in the container.
        wanted: paths in `folder`; the last component may be a pattern ("events.*.jsonl").
        to: created if missing. A file appears there when it is complete.
        retries: how often a broken stream is resumed.
        caps: a container that sends more is refused.

    Raises:
        StorageError: a local file cannot be written, or the container sends more than `caps`.
        UnavailableError: the stream breaks repeatedly; the message names what is missing.
    """
    backoff, failures = retries.backoff(), 0
    try:
        to.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=to) as partial:
            copy = _Copy(wanted=tuple(wanted), to=to, partial=Path(partial), caps=caps)
            while problem := copy.attempt(command, folder, retries):
                failures = 0 if copy.progressed else failures + 1
                if copy.progressed:
                    backoff.reset()
                delay = backoff.next()
                late = copy.seconds_since_chunk() + delay > retries.chunk_seconds
                if is_permanent(problem):
                    raise UnavailableError(copy.failure(problem))
                if failures >= retries.attempts or late:
                    raise UnavailableError(f"{copy.failure(problem)}; run the command again")
                if failures:
                    retries.announce(f"{copy.failure(problem)}; trying again")
                time.sleep(delay)
    except OSError as error:
        raise StorageError(f"{error.filename or to}: {error.strerror}") from None


class _BrokenError(Exception):
    """The stream ended early, stalled, or contains something else than files."""


@dataclass(slots=True)
class _File:
    inode: int
    size: int
    received: int = 0


@dataclass(slots=True, kw_only=True)
class _Copy:
    """The state of a copy across attempts."""

    wanted: tuple[str, ...]
    to: Path
    partial: Path
    caps: Caps
    progressed: bool = False
    """Whether the last attempt verified a chunk or completed a file."""
    _files: dict[str, _File] = field(default_factory=dict)
    _received: int = 0
    """Bytes in all attempts, also of files that were replaced meanwhile and are sent again."""
    _chunk_at: float = field(default_factory=time.monotonic)
    """When the last chunk was complete, or the copy began. Empty files do not count: they have no end."""

    def seconds_since_chunk(self) -> float:
        """Since the last complete chunk, or the beginning."""
        return time.monotonic() - self._chunk_at

    def attempt(self, command: Sequence[str], folder: str, retries: Retries) -> str:
        """Send for what is missing; why the stream broke, or "" when all files are complete."""
        self.progressed = False
        known = {name: [f.inode, f.size, f.received] for name, f in self._files.items()}
        argv = [*command, "python3", "-c", _SEND, folder, json.dumps(known), *self.wanted]
        errors = _End()
        try:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors.pipe)  # noqa: S603
        finally:
            os.close(errors.pipe)
        with process:
            try:
                self._receive(_Stream(process.stdout, retries, self.seconds_since_chunk))
            except _BrokenError as error:
                problem = str(error)
            else:
                return ""
            finally:
                # What kubectl logs at its end explains the problem.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_EXIT_SECONDS)
                process.kill()
            return errors.text() or problem

    def failure(self, problem: str) -> str:
        """What is missing, and why."""
        missing = [
            f"{name} ({size_text(file.received)} of {size_text(file.size)} received)"
            for name, file in self._files.items()
            if file.received < file.size
        ]
        return f"{', '.join(missing)}: {problem}" if missing else problem

    def _receive(self, stream: _Stream) -> None:
        name = ""
        while True:
            match stream.header():
                case {"end": True}:
                    return
                case {"file": str(name), "inode": int(inode), "size": int(size), "offset": int(at)}:
                    self._begin(name, inode, size, at)
                case {"bytes": int(count), "sha256": str(digest)} if name and count > 0:
                    data = stream.read(count)
                    if hashlib.sha256(data).hexdigest() != digest:
                        raise _BrokenError(f"a chunk of {name} was damaged")
                    self._append(name, data)
                case _:
                    raise _BrokenError("the stream does not contain files")

    def _begin(self, name: str, inode: int, size: int, offset: int) -> None:
        # Names appear in messages, and some, such as those with NUL, are no paths.
        if not name.isprintable() or not any(_matches(name, wanted) for wanted in self.wanted):
            raise _BrokenError(f"the container sent {name!r}, which was not requested")
        others = sum(file.size for other, file in self._files.items() if other != name)
        self._limit(name, size, self.caps.file_bytes)
        self._limit("all files together", others + size, self.caps.total_bytes)
        self._limit(name, size, shutil.disk_usage(self.partial).free)
        if len({*self._files, name}) > self.caps.files:
            raise StorageError(f"the container sends more than {self.caps.files} files")
        file = self._files.get(name)
        if file is None or (file.inode, file.size, file.received) != (inode, size, offset):
            if offset:
                raise _BrokenError(f"the container resumed {name} at the wrong offset")
            self._files[name] = _File(inode, size)
            part = self.partial / name
            part.parent.mkdir(parents=True, exist_ok=True)
            # What syncer and learners keep private stays so here.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.close(files.open_unlinked(part, flags))
            if size == 0:
                self._complete(name)

    def _limit(self, what: str, size_bytes: int, most_bytes: int) -> None:
        if not 0 <= size_bytes <= most_bytes:
            raise StorageError(
                f"{what}: {size_bytes} bytes in the container, at most {size_text(most_bytes)} are "
                "copied; inspect the container, and copy what you need with kubectl cp"
            )

    def _append(self, name: str, data: bytes) -> None:
        file = self._files[name]
        self._received += len(data)
        self._limit("what was sent so far", self._received, 2 * self.caps.total_bytes)
        if file.received + len(data) > file.size:
            raise _BrokenError(f"the container sent more of {name} than its size")
        with (self.partial / name).open("ab") as part:
            part.write(data)
        file.received += len(data)
        self.progressed, self._chunk_at = True, time.monotonic()
        if file.received == file.size:
            self._complete(name)

    def _complete(self, name: str) -> None:
        (self.to / name).parent.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        LOCAL.rename(self.partial / name, self.to / name, durable=False)
        self.progressed = True


def _matches(name: str, wanted: str) -> bool:
    parts, patterns = name.split("/"), wanted.split("/")
    return (
        len(parts) == len(patterns)
        and parts[:-1] == patterns[:-1]
        and parts[-1] not in ("", ".", "..")
        and fnmatch.fnmatchcase(parts[-1], patterns[-1])
    )


class _End:
    """Keeps the end of what comes through `pipe`: a container may write to standard error without end."""

    def __init__(self) -> None:
        source, self.pipe = os.pipe()
        self._bytes = b""
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()

    def _read(self, source: int) -> None:
        with open(source, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                self._bytes = (self._bytes + data)[-4 * _MAX_MESSAGE :]

    def text(self) -> str:
        """The last characters, when its writers have ended, or after a moment."""
        self._thread.join(_EXIT_SECONDS)
        return self._bytes.decode(errors="replace").strip()[-_MAX_MESSAGE:]


class _Stream:
    """Reads a pipe; raises _BrokenError at its end, after a stall, and without chunks for too long."""

    def __init__(
        self, pipe: IO[bytes] | None, retries: Retries, seconds_since_chunk: Callable[[], float]
    ) -> None:
        if pipe is None:
            raise ValueError("the process has no pipe")
        self._fd, self._retries = pipe.fileno(), retries
        self._seconds_since_chunk = seconds_since_chunk
        self._buffer = bytearray()

    def header(self) -> dict[str, Any]:
        """The next line, a JSON object."""
        self._fill(lambda: b"\n" in self._buffer or len(self._buffer) > _MAX_HEADER_BYTES)
        line, newline, rest = self._buffer.partition(b"\n")
        try:
            found = json.loads(line) if newline else None
        except (ValueError, RecursionError):  # nested too deeply
            found = None
        if not isinstance(found, dict):
            raise _BrokenError("the stream does not contain files")
        self._buffer = rest
        return found

    def read(self, count: int) -> bytes:
        """The next bytes."""
        if count > _CHUNK_BYTES:
            raise _BrokenError("the stream does not contain files")
        self._fill(lambda: len(self._buffer) >= count)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _fill(self, enough: Callable[[], bool]) -> None:
        while not enough():
            stall, most = self._retries.stall_seconds, self._retries.chunk_seconds
            left = most - self._seconds_since_chunk()
            if left <= 0 or not select.select([self._fd], [], [], min(stall, left))[0]:
                if left <= stall:
                    raise _BrokenError(f"no complete chunk for {most:g} s")
                raise _BrokenError(f"no data for {stall:g} s")
            if not (data := os.read(self._fd, 1 << 16)):
                raise _BrokenError("the stream ended early")
            self._buffer += data
