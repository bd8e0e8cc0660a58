"""The Python that `make setup` takes."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/python"


def chosen(tmp_path: Path, *, path_python: int, system_python: int | None) -> str:
    """What the script prints if these are the exit statuses of both Pythons; None: there is none."""
    system = tmp_path / "system-python"
    path = tmp_path / "bin"
    path.mkdir()
    for file, status in ((path / "python3", path_python), (system, system_python)):
        if status is not None:
            file.write_text(f"#!/bin/sh\nexit {status}\n")
            file.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{path}:{os.environ['PATH']}",
        "DILOCO_SYSTEM_PYTHON": str(system),
    }
    done = subprocess.run([SCRIPT], env=environment, check=True, capture_output=True, text=True)
    return done.stdout.replace(str(system), "system").strip()


@pytest.mark.parametrize(
    ("path_python", "system_python", "expected"),
    [(0, 0, "python3"), (1, 0, "system"), (1, 1, "python3"), (1, None, "python3")],
    ids=["optimized", "not optimized", "the system's is incomplete", "no other"],
)
def test_the_systems_python_is_chosen_only_where_that_of_the_path_is_not_optimized(
    tmp_path, path_python, system_python, expected
):
    found = chosen(tmp_path, path_python=path_python, system_python=system_python)
    assert found == expected
