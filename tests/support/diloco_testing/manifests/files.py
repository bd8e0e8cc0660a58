"""Manifests as jobs, from files or from text."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from diloco_job.manifest_file import parse_job
from diloco_job.types import DiLoCoJob


def load_job(source: Path | str, sets: Sequence[str] = ()) -> DiLoCoJob:
    """The job of a manifest, given as a file or as YAML text."""
    return _parsed(source.read_text() if isinstance(source, Path) else source, tuple(sets))


@cache
def _parsed(text: str, sets: tuple[str, ...]) -> DiLoCoJob:
    return parse_job(text, sets)
