"""Writes the files of a new training program: `diloco new`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from diloco.errors import ConfigError, StorageError

NAMES = ("README.md", "job.yaml", "train.py", "eval.py", "Dockerfile")
"""Files of the folder `template` beside this module."""

PLACEHOLDER = "my-training"
"""Stands for the job's name in the files."""

MAX_NAME = 40
"""Characters of a job's name: those of the objects of its regions begin with it."""


def write_template(to: Path) -> str:
    """
    Write the template into the directory `to`, created if missing; returns the name of its job.

    Raises:
        ConfigError: `to` is a file, or has one of the files already.
        StorageError: a file cannot be written; those that were are removed.
    """
    job = job_name(to.absolute().name)
    source = files("diloco_cli") / "template"
    texts = {
        name: (source / name).read_text(encoding="utf-8").replace(PLACEHOLDER, job)
        for name in NAMES
    }
    if to.exists() and not to.is_dir():
        raise ConfigError(f"{to}: is a file; give a new or an empty directory")
    if found := [name for name in NAMES if (to / name).exists() or (to / name).is_symlink()]:
        raise ConfigError(
            f"{to}: already has {', '.join(found)}, and nothing was written; give a new or an empty directory"
        )
    _write(to, texts)
    return job


def _write(to: Path, texts: Mapping[str, str]) -> None:
    written: list[Path] = []
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (to / name).open("x", encoding="utf-8") as file:  # never through a link
                written.append(to / name)
                file.write(text)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise StorageError(
            f"{error.filename or to}: {error.strerror}; the template was not written"
        ) from None


def job_name(folder: str) -> str:
    """
    A valid name for a job, from that of a folder.

    >>> job_name("My_GPT 2"), job_name("7b"), job_name("…")
    ('my-gpt-2', 'job-7b', 'my-training')
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")
    if not name:
        return PLACEHOLDER
    if not name[0].isalpha():
        name = f"job-{name}"
    return name[:MAX_NAME].rstrip("-")
