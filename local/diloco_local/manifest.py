"""Reads manifests from files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco.errors import ConfigError
from diloco_job.manifest_file import parse_job
from diloco_job.types import DiLoCoJob

STANDARD_INPUT = Path("-")
"""In place of the path of a manifest."""


def load_job(path: Path, sets: Sequence[str] = ()) -> DiLoCoJob:
    """
    The job of a manifest file.

    Args:
        path: a YAML file, or `STANDARD_INPUT`.
        sets: changes from the command line, such as `spec.sync.quorum=2`.

    Raises:
        ConfigError: the file cannot be read, or the manifest is not valid.
    """
    return parse_job(read_manifest(path), sets, name=str(path))


def read_manifest(path: Path) -> str:
    """
    The text of a manifest file, or of standard input, which is read once.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        if path == STANDARD_INPUT:
            return read_standard_input()
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; a manifest is a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a manifest") from None


@functools.cache
def read_standard_input() -> str:
    """Its text; later calls return the same."""
    return sys.stdin.buffer.read().decode()
