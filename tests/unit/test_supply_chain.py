"""What goes into images and releases is pinned: actions, base image, packages."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
LOCKED = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)(?: ; (.+?))?(?: \\)?$", re.MULTILINE)
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_to_a_commit_and_names_its_version(workflow):
    used = re.findall(r"uses: (.+)", workflow.read_text())
    assert used
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line


def test_one_action_has_one_commit():
    lines = {line for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text())}
    assert len({line.partition("@")[0] for line in lines}) == len(lines)


def test_the_base_image_is_pinned_to_a_digest():
    bases = re.findall(r"^ARG BASE_IMAGE=(.+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}", bases[0])


def test_every_image_is_released_for_both_architectures_without_emulation():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    targets = re.findall(r"^FROM base AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.M)
    matrix = jobs["build"]["strategy"]["matrix"]
    assert matrix == {"target": targets, "arch": ["amd64", "arm64"]}
    assert "ubuntu-24.04-arm" in jobs["build"]["runs-on"]
    assert jobs["images"]["strategy"]["matrix"]["target"] == targets
    merged = next(step["run"] for step in jobs["images"]["steps"] if "imagetools" in str(step))
    assert all(f"$IMAGE:$VERSION-{arch}" in merged for arch in matrix["arch"])
    assert "qemu" not in str(jobs)


def test_images_install_what_is_locked_unless_configured_otherwise():
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG LOCKED=true\n" in text
    assert "--no-build-isolation" in text, "else pip fetches the build's own requirements"


def test_the_locks_are_those_of_pyproject():
    command = (sys.executable, ROOT / "scripts" / "lock.py", "--check")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_a_lock_for_each_image_and_for_the_build():
    assert [path.stem for path in LOCKS] == ["build", "operator", "syncer", "worker"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_locked_version_is_exact_has_a_hash_and_names_no_index(lock):
    text = lock.read_text()
    assert LOCKED.findall(text)
    for entry in re.split(r"\n(?=[^\s#])", re.sub(r"^#.*\n", "", text, flags=re.M).strip()):
        assert re.match(
            r"[a-z0-9][a-z0-9._-]*==\S+( ; .+?)? \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n?)+$",
            entry,
        ), entry
    assert "://" not in text
    assert "--index" not in text


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_all_that_its_packages_need(lock):
    """As far as they are installed here in the locked version: pip refuses a lock with a gap."""
    locked = {
        canonicalize_name(name): version for name, version, _ in LOCKED.findall(lock.read_text())
    }
    seen = 0
    for name, version in locked.items():
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if package.version.partition("+")[0] != version:
            continue
        seen += 1
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate(LINUX):
                assert canonicalize_name(requirement.name) in locked, f"{name} needs {requirement}"
    assert seen or lock.stem == "build"


def test_the_images_have_the_same_version_of_what_they_share():
    versions: dict[tuple[str, str], set[str]] = {}
    for lock in LOCKS:
        for name, version, marker in LOCKED.findall(lock.read_text()):
            versions.setdefault((name, marker), set()).add(version)
    assert {key: found for key, found in versions.items() if len(found) > 1} == {}
