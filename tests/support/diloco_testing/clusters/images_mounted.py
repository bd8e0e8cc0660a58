"""
This environment's packages and this checkout's code, or an older tree's, inside pods of the small image.

Both are read-only hostPath volumes, so a local cluster alone can have them; they save the minutes
and gigabytes of a true worker image in the tests that are not about it.
"""

from __future__ import annotations

import compileall
import functools
import hashlib
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from diloco_testing.clusters.provision import ROOT, cache

CODE = (
    "protos/diloco",
    "job/diloco_job",
    "agent/diloco_agent",
    "syncer/diloco_syncer",
    "worker/diloco_worker",
    "operator/diloco_operator",
)
NUMBA = "/opt/diloco/numba"
"""Where the containers' first process looks for compiled kernels."""


@functools.cache
def code(tree: Path = ROOT) -> Path:
    """A copy of a tree's packages as they are now, which does not change while pods read it; with bytecode."""
    digest = hashlib.sha256()
    for package in CODE:
        for path in sorted((tree / package).rglob("*.py")):
            digest.update(f"{path.relative_to(tree)}\n".encode())
            digest.update(path.read_bytes())
    folder = cache() / "code" / digest.hexdigest()[:16]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Sessions that run at the same time make a copy each; the first to finish provides it.
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        for package in CODE:
            shutil.copytree(
                tree / package,
                part / Path(package).name,
                ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"),
            )
        compileall.compile_dir(part, quiet=1)
        part.chmod(0o755)  # pods of another user read it
        try:
            part.rename(folder)
        except OSError:
            shutil.rmtree(part)
            if not folder.exists():
                raise
    return folder


def numba(code_folder: Path) -> Path:
    """Compiled kernels of that code; pods of it fill it once (`compiling_pod`)."""
    return cache() / "numba" / code_folder.name


def pod_fields(tree: Path = ROOT, *, kernels: bool = True) -> dict[str, Any]:
    """
    Fields of podTemplate.spec with which a pod of the small image finds everything.

    Args:
        tree: whose code.
        kernels: also the compiled kernels, which must be there already.
    """
    folder = code(tree)
    places = {
        "site": (Path(sysconfig.get_paths()["purelib"]).resolve(), "/opt/diloco/site"),
        "code": (folder, "/opt/diloco/code"),
    }
    if kernels:
        places["kernels"] = (numba(folder), NUMBA)
    return {
        "volumes": [
            {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}
            for name, (path, _) in places.items()
        ],
        "containers": [
            {
                "name": "main",
                "volumeMounts": [
                    {"name": name, "mountPath": at, "readOnly": True}
                    for name, (_, at) in places.items()
                ],
            }
        ],
    }


def compiling_pod(image: str, tree: Path = ROOT) -> dict[str, Any]:
    """A pod that compiles the kernels on the machine and at the paths where pods will look."""
    fields = pod_fields(tree, kernels=False)
    folder = numba(code(tree))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    container = fields["containers"][0]
    program = (
        "from diloco.codec import formats; from diloco_syncer.merging import streaming; "
        "formats.warm_up(); streaming.warm_up()"
    )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "compile-kernels"},
        "spec": {
            "restartPolicy": "Never",
            "volumes": [
                *fields["volumes"],
                {"name": "kernels", "hostPath": {"path": str(folder), "type": "Directory"}},
            ],
            "containers": [
                {
                    **container,
                    "image": image,
                    "command": ["python3", "-c", program],
                    "env": [{"name": "NUMBA_CACHE_DIR", "value": NUMBA}],
                    "volumeMounts": [
                        *container["volumeMounts"],
                        {"name": "kernels", "mountPath": NUMBA},
                    ],
                }
            ],
        },
    }
