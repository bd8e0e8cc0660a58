"""Older versions of this project, from the history of the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

from diloco_testing.clusters.provision import ROOT


def why_not(commit: str) -> str:
    """Why this checkout cannot give the files of a commit; "": it can."""
    done = _git("cat-file", "-e", f"{commit}^{{commit}}")
    if done.returncode == 0:
        return ""
    return (
        f"commit {commit[:7]} is not in the history of this checkout, which may be shallow "
        f"(git fetch --unshallow): {done.stderr.decode(errors='replace').strip()}"
    )


def tree(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder; returns the folder."""
    done = _git("archive", "--format=tar", commit)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    # Python's tarfile needs 3.11.4 or newer to take only data from an archive; Debian 12 has 3.11.2.
    subprocess.run(("tar", "-x", "-f", "-", "-C", str(folder)), input=done.stdout, check=True)
    return folder


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    # Without git itself, as without a repository, there is no history.
    try:
        return subprocess.run(
            ("git", "-C", str(ROOT), *arguments), stdin=subprocess.DEVNULL, capture_output=True
        )
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(arguments, 127, b"", str(error).encode())
