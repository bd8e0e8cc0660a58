"""Manifests as jobs, from files or from text."""

from collections.abc import Sequence
from pathlib import Path

from diloco_job.manifest_file import parse_job
from diloco_job.types import DiLoCoJob


def load_job(source: Path | str, sets: Sequence[str] = ()) -> DiLoCoJob:
    """The job of a manifest, given as a file or as YAML text."""
    return parse_job(source.read_text() if isinstance(source, Path) else source, sets)
