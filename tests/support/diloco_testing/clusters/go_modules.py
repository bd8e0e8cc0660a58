"""Sources of other projects, from Go modules in the versions that a go.mod of these tests names."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path

from diloco_testing.clusters.provision import ROOT

FOLDER = ROOT / "tests/e2e/clusters"


@functools.cache
def source(module: str, name: str) -> Path:
    """
    Folder of a module's files, downloaded the first time.

    Args:
        module: its path.
        name: of the folder of tests/e2e/clusters whose go.mod names the version, and go.sum the hash.

    Raises:
        AssertionError: it cannot be downloaded, or differs from the hash.
    """
    folder = FOLDER / name
    named = re.search(rf"{re.escape(module)} (v\S+)", (folder / "go.mod").read_text())
    assert named is not None
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{module}@{named[1]}"],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(json.loads(done.stdout)["Dir"])
