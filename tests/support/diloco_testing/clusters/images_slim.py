"""
Stand-ins for the CUDA packages that torch asks for: 3 GB less in a worker image that has no GPU.

For tests alone. The image is still made by the Dockerfile from the real torch; pip finds these
wheels beside the index and prefers them by their tag. Their libraries hold the symbols that
torch's own libraries link, and every call of them fails.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])
_NAMES = ("nvidia-", "cuda-", "triton")
_FAILED = 35  # cudaErrorInsufficientDriver
_SYMBOL = re.compile(
    r"\s(GLOBAL|WEAK)\s+\w+\s+(?P<where>\w+)\s+(?P<name>\w+)(@@?(?P<node>[\w.]+))?"
)


def wheels(folder: Path) -> list[str]:
    """
    Write a wheel for each CUDA package of this environment.

    Args:
        folder: made if it is not there.

    Returns:
        Constraints for pip: the torch that these wheels fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _undefined((SITE / "torch/lib").glob("*.so"))
    for package in importlib.metadata.distributions(path=[str(SITE)]):
        if package.metadata["Name"].startswith(_NAMES):
            _write(package, wanted, folder)
    return [f"torch=={importlib.metadata.version('torch').partition('+')[0]}"]


def _write(package: importlib.metadata.Distribution, wanted: set[str], folder: Path) -> None:
    name, version = package.metadata["Name"].replace("-", "_"), package.version
    info = f"{name}-{version}.dist-info"
    # A tag nearer to the platform than any of the index's: pip takes it before the same version there.
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-manylinux_2_34_{platform.machine()}"
    files: dict[str, bytes] = {}
    for path in package.files or ():
        linked = re.search(r"/lib/lib[\w-]+\.so[.\d]*$", str(path)) and name != "triton"
        if linked and (library := _stand_in(SITE / path, wanted, folder)):
            files[str(path)] = library
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in package.requires or ())
    extras = "".join(
        f"Provides-Extra: {extra}\n" for extra in package.metadata.get_all("Provides-Extra") or ()
    )
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extras}{requires}".encode()
    )
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n"
    ).encode()
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


def _stand_in(library: Path, wanted: set[str], folder: Path) -> bytes | None:
    """A library of the same name with the symbols that are wanted of it; None: nothing is."""
    symbols = _output("readelf", "--dyn-syms", "--wide", str(library))
    nodes: dict[str, set[str]] = {}
    for found in map(_SYMBOL.search, symbols.splitlines()):
        if found and found["where"] != "UND" and found["name"] in wanted:
            nodes.setdefault(found["node"] or "", set()).add(found["name"])
    if not nodes:
        return None
    soname = re.search(r"soname: \[(.*)\]", _output("readelf", "--dynamic", str(library)))
    source, script, made = folder / "stub.c", folder / "stub.map", folder / "stub.so"
    # Registration of kernels happens while torch is loaded, and has to succeed.
    code = [
        f"int {name}(void) {{ return {0 if 'Register' in name else _FAILED}; }}\n"
        for name in sorted(set().union(*nodes.values()))
    ]
    source.write_text("".join(code))
    script.write_text(
        "".join(
            f"{node} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
            for node, names in nodes.items()
            if node
        )
    )
    flags = [f"-Wl,--version-script={script}"] if any(nodes) else []
    _output(
        "gcc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", "-nostdlib", "-o", str(made),
        f"-Wl,-soname,{soname[1] if soname else library.name}", *flags, str(source),
    )  # fmt: skip
    data = made.read_bytes()
    for path in (source, script, made):
        path.unlink()
    return data


def _undefined(libraries: Iterable[Path]) -> set[str]:
    """What these libraries want from others."""
    names = set()
    for library in libraries:
        symbols = _output("readelf", "--dyn-syms", "--wide", str(library))
        for found in map(_SYMBOL.search, symbols.splitlines()):
            if found and found["where"] == "UND":
                names.add(found["name"])
    return names


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
