"""
Images for clusters without a registry: built by buildah on a base made by debootstrap.

    operator, syncer, worker   the true ones, from the Dockerfile
    small                      Python alone; this environment's packages are mounted into its pods

Everything is kept in the cache folder and made again when what it is made of changes.
`python -m diloco_testing.clusters.images` builds all of them, before the tests that need them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_testing.clusters import images_slim, provision
from diloco_testing.clusters.provision import ROOT, cache

TARGETS = ("operator", "syncer", "worker")
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian releases by their Python: mounted packages fit no other release."""
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
BUILD_SECONDS = 2400.0
PINNED = re.compile(r"^[\w.-]+==[^\\\n]+", re.MULTILINE)
"""A package of requirements/*.txt with its version and marker, without its hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image by the name that pods use, and the archive that a node loads it from."""

    name: str
    archive: Path | None
    """None: the given cluster has it already."""


def given(target: str) -> Image | None:
    """The image that DILOCO_E2E_<TARGET>_IMAGE names, or None."""
    name = os.environ.get(f"DILOCO_E2E_{target.upper()}_IMAGE")
    return Image(name=name, archive=None) if name else None


def build(target: str) -> Image:
    """One of TARGETS, from the Dockerfile; the worker without CUDA, for which there is no device."""
    with one_session("images"):
        return _build(target)


def build_older(target: str, tree: Path) -> Image:
    """
    The operator or the syncer of an older tree, from that tree's Dockerfile.

    With the packages that this tree locks: an older one without locks would get whatever is newest.
    """
    locked = (ROOT / f"requirements/{target}.txt").read_text()
    folder = cache() / "older" / target
    with one_session("images"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "constraints.txt").write_text("\n".join(PINNED.findall(locked)))
        return _bud(
            f"localhost/older-diloco-{target}", target, tree,
            f"--volume={folder}:/locks:ro",
            "--build-arg=LOCKED=false",
            "--build-arg=PIP_ARGS=--constraint=/locks/constraints.txt",
        )  # fmt: skip


def unpack(*images: Image) -> None:
    """Let nodes of local clusters begin with these images: importing them takes 15 to 30 s of CPU."""
    provision.unpack([image.archive for image in images if image.archive is not None])


def _build(target: str) -> Image:
    arguments: list[str] = []
    if target == "worker":
        folder = cache() / "wheels"
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(images_slim.wheels(folder)))
        arguments += [
            # The stand-ins have other hashes than the wheels that are locked.
            "--build-arg=LOCKED=false",
            f"--volume={folder}:/wheels:ro",
            "--build-arg=PIP_ARGS=--find-links=/wheels --constraint=/wheels/constraints.txt",
        ]
    return _bud(f"localhost/diloco-{target}", target, ROOT, *arguments)


def _bud(name: str, target: str, tree: Path, *options: str) -> Image:
    arguments = [f"--build-arg=BASE_IMAGE={_base()}", f"--target={target}", "--layers", *options]
    if AUTHORITIES.exists():
        arguments += [f"--volume={AUTHORITIES}:/ca.crt:ro", "--build-arg=PIP_CERT=/ca.crt"]
    _run(
        "buildah", "bud", "--isolation=chroot", "--network=host", "--pull-never", "--quiet",
        *arguments, "--tag", f"{name}:latest", str(tree),
    )  # fmt: skip
    return _archived(name)


def small() -> Image:
    """Python and nothing else: `images_mounted` gives its pods the packages."""
    name = "localhost/diloco-small"
    with one_session("images"):
        _configured(
            name,
            "--env=PYTHONPATH=/opt/diloco/code:/opt/diloco/site", "--env=PYTHONUNBUFFERED=1",
            "--env=HOME=/tmp", "--env=OMP_WAIT_POLICY=PASSIVE", "--workingdir=/tmp", "--user=65532:65532",
        )  # fmt: skip
        return _archived(name)


@contextlib.contextmanager
def one_session(work: str) -> Iterator[None]:
    """Let one session at a time do this work; the others wait, and then find it done."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{work}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _base() -> str:
    """Debian with the Python of this environment; 35 seconds the first time."""
    version = sys.version_info[:2]
    suite = SUITES.get(version)
    assert suite, (
        f"this environment has Python {version[0]}.{version[1]}; local clusters need one of "
        f"{sorted(SUITES)}, for which there is a Debian release"
    )
    name = f"localhost/diloco-base:{suite}"
    if _id(name):
        return name
    root = cache() / f"debian-{suite}"
    shutil.rmtree(root, ignore_errors=True)
    _run(
        "debootstrap", "--variant=minbase",
        "--include=python3,python3-venv,ca-certificates,procps", suite, str(root),
    )  # fmt: skip
    container = _run("buildah", "from", "scratch")
    for part in (
        "var/cache/apt/archives",
        "var/lib/apt/lists",
        "usr/share/doc",
        "usr/share/locale",
    ):
        shutil.rmtree(root / part, ignore_errors=True)
    # apt inside a build wants these.
    (root / "var/cache/apt/archives/partial").mkdir(parents=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)
    _run("buildah", "copy", "--quiet", container, str(root), "/")
    _run("buildah", "commit", "--quiet", "--rm", container, name)
    shutil.rmtree(root)
    return name


def _configured(name: str, *options: str) -> None:
    if _id(f"{name}:latest"):
        return
    container = _run("buildah", "from", "--pull-never", _base())
    # torch and others ask for the name of the user.
    user = "echo diloco:x:65532:65532::/tmp:/usr/sbin/nologin >> /etc/passwd"
    _run("buildah", "run", "--isolation=chroot", container, "--", "sh", "-c", user)
    _run("buildah", "config", *options, container)
    _run("buildah", "commit", "--quiet", "--rm", container, f"{name}:latest")


def _archived(name: str) -> Image:
    """Named by its content, so that the kubelet sees a changed image as a new one."""
    identity = _id(f"{name}:latest")[:12]
    archive = cache() / "images" / f"{name.rpartition('/')[2]}-{identity}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        for old in archive.parent.glob(f"{name.rpartition('/')[2]}-*.tar*"):
            old.unlink()
        part = archive.with_suffix(".part")
        part.unlink(missing_ok=True)
        _run(
            # gzip takes twice the processor time, here and where a node unpacks it.
            "buildah", "push", "--quiet", "--compression-format=zstd", "--compression-level=1",
            f"{name}:latest", f"oci-archive:{part}:{name}:{identity}",
        )  # fmt: skip
        part.rename(archive)
    return Image(name=f"{name}:{identity}", archive=archive)


def _id(name: str) -> str:
    """The image's identity; "" if there is none."""
    done = subprocess.run(
        ["buildah", "inspect", "--type=image", "--format={{.FromImageID}}", name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() if done.returncode == 0 else ""


def _run(*command: str, seconds: float = BUILD_SECONDS) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds
    )
    output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"{' '.join(command)}: code {done.returncode}:\n{output}"
    return done.stdout.strip()


if __name__ == "__main__":
    _built = {"small": small()} | {t: build(t) for t in TARGETS if given(t) is None}
    unpack(*(image for name, image in _built.items() if name != "worker"))  # one cluster runs that
    print(*(image.name for image in _built.values()), sep="\n")
