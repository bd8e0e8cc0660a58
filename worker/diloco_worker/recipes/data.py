"""
Text as bytes: a recipe's data, its split, and the batches.

The split into training and validation text depends only on the files (names and content), so all
learners and the evaluator agree without communication. A batch is a pure function of (seed,
learner, local step): there is no loader state to save, and a restarted learner continues with its
next batch (docs/algorithm.md, "Data position").

Shape letters: N = bytes of a text, B = windows of a batch, T = bytes of context.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigError

Bytes = NDArray[np.uint8]

STDLIB = "stdlib"
"""Value of `data` for the source text of Python's standard library."""

SEPARATOR = b"\0"
"""Separates two files; text never contains it."""

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Generated tables (code pages, the text of the language reference): a tenth of the bytes, but no
# Python to learn.
_NOT_PROSE = {"encodings", "pydoc_data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text in two disjoint parts."""

    train: Bytes
    validation: Bytes


def load(source: str, *, context: int, validation_fraction: float = 0.05) -> Corpus:
    """
    Read a text and split it.

    A folder (and the standard library) is split by file: the hash of a file's relative path
    decides, so a new file does not move any other. Of a single file, the tail is the validation
    text.

    Args:
        source: `stdlib`, or the path of a folder or a file.
        context: bytes of one window; both parts must hold at least one window and its target.
        validation_fraction: share of the files (or of the single file) kept for validation.

    Raises:
        ConfigError: the path does not exist, or holds no or too little text.
    """
    path = Path(source).expanduser()
    if source == STDLIB:
        corpus = _split_files(_stdlib(), validation_fraction, where="the standard library")
    elif path.is_dir():
        corpus = _split_files(_folder(path), validation_fraction, where=str(path))
    elif path.is_file():
        corpus = _split_tail(_single_file(path), validation_fraction)
    else:
        raise ConfigError(
            f"data: there is no file or folder {path.absolute()}; give a path that exists on every "
            f"learner, or {STDLIB}"
        )
    for part, text_N in (("training", corpus.train), ("validation", corpus.validation)):
        if text_N.size <= context:
            raise ConfigError(
                f"data: {source} gives {text_N.size} bytes of {part} text, a context of {context} "
                f"needs at least {context + 1}; give more text or a smaller context"
            )
    return corpus


def batch(
    text_N: Bytes, *, seed: int, learner: str, step: int, batch: int, context: int
) -> NDArray[np.int64]:
    """
    The windows that `learner` trains on in its local step `step`: shape (B, T + 1), inputs and
    targets overlap.

    Windows are drawn with replacement. The raw bits of PCG64 are the same in all numpy versions and
    on all machines.
    """
    name = int.from_bytes(hashlib.sha256(learner.encode()).digest()[:8], "little")
    raw_B = np.random.PCG64(np.random.SeedSequence([seed, name, step])).random_raw(batch)
    starts_B = (raw_B % np.uint64(text_N.size - context)).astype(np.int64)
    return _windows(text_N, starts_B, context)


def validation_windows(text_N: Bytes, *, tokens: int, context: int) -> NDArray[np.int64]:
    """
    About `tokens` targets spread evenly over the text, always the same: shape (B, T + 1), B at
    least 1.
    """
    count = max(1, min(tokens // context, (text_N.size - 1) // context))
    starts_B = np.linspace(0, text_N.size - context - 1, count).astype(np.int64)
    return _windows(text_N, starts_B, context)


def _windows(text_N: Bytes, starts_B: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    windows: NDArray[np.int64] = text_N[starts_B[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows


def _stdlib() -> Iterator[tuple[str, bytes]]:
    """
    (relative path, content) of the source files of the standard library, without tests and
    generated tables, in sorted order.
    """
    root, found = Path(sysconfig.get_path("stdlib")), []
    # What is left out is not entered either: site-packages may hold a hundred times as many files.
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _NOT_STDLIB - _NOT_PROSE
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def _folder(root: Path) -> Iterator[tuple[str, bytes]]:
    """
    (relative path, content) of every text file under `root`, in sorted order; hidden and binary
    files are not text.
    """
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            content = _read(path)
            if _is_text(content):
                yield relative.as_posix(), content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data: {path}: {error.strerror}; make it readable or move it elsewhere"
        ) from None


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return SEPARATOR not in content


def _single_file(path: Path) -> Bytes:
    """The bytes of one file, memory-mapped, so it may be larger than memory."""
    if path.stat().st_size == 0:
        raise ConfigError(f"data: {path} is empty; give a file with text")
    try:
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise ConfigError(f"data: {path}: {error.strerror}; make it readable") from None


def _split_files(files: Iterator[tuple[str, bytes]], fraction: float, *, where: str) -> Corpus:
    ranked = [(_rank(name), content) for name, content in files if content]
    if not ranked:
        raise ConfigError(
            f"data: {where} holds no text (UTF-8 files that are not hidden); "
            "give a folder that does"
        )
    if len(ranked) == 1:
        return _split_tail(np.frombuffer(ranked[0][1], np.uint8), fraction)
    # The hash may put all of a few files on the same side: then the lowest is validation text, the
    # highest training text.
    lowest, highest = min(rank for rank, _ in ranked), max(rank for rank, _ in ranked)
    limit = min(max(fraction, lowest), np.nextafter(highest, 0))
    return Corpus(
        train=_join(content for rank, content in ranked if rank > limit),
        validation=_join(content for rank, content in ranked if rank <= limit),
    )


def _rank(name: str) -> float:
    """A number in [0, 1) that depends only on the file's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _join(contents: Iterator[bytes]) -> Bytes:
    return np.frombuffer(SEPARATOR.join(contents), np.uint8)


def _split_tail(text_N: Bytes, fraction: float) -> Corpus:
    cut = text_N.size - round(text_N.size * fraction)
    return Corpus(train=text_N[:cut], validation=text_N[cut:])
