"""The layers of docs/architecture.md, enforced by import-linter (pyproject.toml), and what it cannot see of purity."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "pyproject.toml"
PROJECT = tomllib.loads(CONFIG.read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
PACKAGES = {Path(path).name: ROOT / path for path in WHEEL["packages"]}
CONTRACTS = {
    contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]
}
PURE = CONTRACTS["pure code does no I/O"]["source_modules"]
MODULES = {"grpcio": "grpc", "protobuf": "google", "pyyaml": "yaml"}
"""Names of modules that differ from those of their distributions."""


def lint(*search: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the project's configuration; packages in `search` hide the installed ones."""
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search))}
    return subprocess.run(
        [program, "--no-cache", "--config", CONFIG],
        cwd=search[0] if search else ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_import_contracts_are_kept():
    done = lint()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of all packages, to break contracts in."""
    for package in PACKAGES.values():
        skipped = shutil.ignore_patterns("__pycache__", "*.nb?")
        shutil.copytree(package, tmp_path / package.name, ignore=skipped)
    return tmp_path


@pytest.mark.slow
def test_a_copy_of_the_packages_keeps_the_contracts(copy):
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misplaced_import_is_refused(copy):
    path = copy / "diloco_syncer/core/engine.py"
    path.write_text(f"{path.read_text()}\nimport diloco_syncer.storage\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "layers of the syncer BROKEN" in done.stdout
    assert "diloco_syncer.core.engine -> diloco_syncer.storage" in done.stdout


def forbidden_import(contract: dict[str, Any]) -> tuple[str, str]:
    """A module and an import that this contract forbids in it."""
    if contract["type"] == "forbidden":
        return contract["source_modules"][0], contract["forbidden_modules"][0]
    [container] = contract.get("containers", [""])
    lowest, highest = (
        f"{container}.{contract['layers'][place].split(' | ')[0]}".lstrip(".") for place in (-1, 0)
    )
    return lowest, highest


@pytest.mark.slow
def test_every_contract_refuses_an_import_that_it_forbids(copy):
    for contract in CONTRACTS.values():
        module, imported = forbidden_import(contract)
        path = copy.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        path.write_text(f"{path.read_text()}\nimport {imported}\n")
    done = lint(copy)
    broken = re.findall(r"^(.+) BROKEN\b", done.stdout, re.MULTILINE)
    assert sorted(broken) == sorted(CONTRACTS), done.stdout + done.stderr


@pytest.mark.slow
def test_a_module_without_a_layer_is_refused_in_every_package(copy):
    packages = [path.parent for path in copy.rglob("__init__.py") if path.parent.name != "v1"]
    for package in packages:
        (package / "misplaced.py").touch()
    done = lint(copy)
    refused = re.findall(r"^- (\S+)\.misplaced$", done.stdout, re.MULTILINE)
    expected = [".".join(package.relative_to(copy).parts) for package in packages]
    assert sorted(refused) == sorted(expected), done.stdout + done.stderr


def test_the_command_line_may_import_only_the_resources_of_the_operator():
    modules = {
        f"diloco_operator.{path.stem}"
        for path in PACKAGES["diloco_operator"].iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    contract = CONTRACTS["the command line takes only the resources from the operator"]
    allowed = {"diloco_operator.__init__", "diloco_operator.resources"}
    assert set(contract["forbidden_modules"]) == modules - allowed


def test_the_first_process_of_a_container_imports_nothing_that_the_project_installs():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(d for n in extras if n not in ("dev", "mutants") for d in extras[n]),
    ]
    names = {re.split(r"[^A-Za-z0-9-]", dependency)[0] for dependency in wanted} - {"diloco"}
    modules = {MODULES.get(name, name.replace("-", "_")) for name in names}
    contract = CONTRACTS["the first process of a container needs the standard library only"]
    assert set(contract["forbidden_modules"]) == modules


@pytest.mark.parametrize("tool", ["importlinter", "mypy"])
def test_every_package_of_the_wheel_has_contracts_and_types_checked(tool):
    settings = PROJECT["tool"][tool]
    checked = settings["root_packages" if tool == "importlinter" else "packages"]
    assert sorted(checked) == sorted(PACKAGES)


def test_every_package_within_a_package_has_exhaustive_layers():
    containers = [
        container
        for contract in CONTRACTS.values()
        if contract.get("exhaustive")
        for container in contract["containers"]
    ]
    packages = {
        ".".join((name, *path.parent.relative_to(package).parts))
        for name, package in PACKAGES.items()
        for path in package.rglob("__init__.py")
    }
    assert sorted(containers) == sorted(packages - {"diloco.v1"})  # generated


def test_every_folder_of_a_package_is_in_the_wheel_and_on_the_path_of_ruff():
    folders = {path.parent.parent.name for path in ROOT.glob("*/diloco*/__init__.py")}
    assert folders == {package.parent.name for package in PACKAGES.values()}
    assert folders <= set(PROJECT["tool"]["ruff"]["src"])


def test_every_package_has_its_place_among_the_others():
    layers = [name for layer in CONTRACTS["packages"]["layers"] for name in layer.split(" | ")]
    assert sorted(layers) == sorted(PACKAGES)


# Purity: import-linter sees imports of modules, not builtins or members of modules.

BUILTINS = {"breakpoint", "eval", "exec", "input", "open", "print"}
CLOCKS = {"now", "today", "utcnow"}
PATHS = {"Path", "PosixPath", "WindowsPath"}
FILES = {"read_bytes", "read_text", "write_bytes", "write_text"}


def sources(module: str) -> list[Path]:
    """Files of a module or package, by its dotted name."""
    package, *names = module.split(".")
    path = PACKAGES[package].joinpath(*names)
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def impurities(text: str) -> Iterator[str]:
    """What in this source reads a clock, a file or a terminal, each with its line."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) if name in BUILTINS and isinstance(node.ctx, ast.Load):
                yield f"{node.lineno}: {name}"
            case ast.Attribute(
                value=ast.Name(id="datetime" | "date") | ast.Attribute(attr="datetime" | "date"),
                attr=name,
            ) if name in CLOCKS:
                yield f"{node.lineno}: datetime.{name}"
            case ast.ImportFrom(module="pathlib", names=names):
                yield from (f"{node.lineno}: pathlib.{n.name}" for n in names if n.name in PATHS)
            case ast.Attribute(value=ast.Name(id="pathlib"), attr=name) if name in PATHS:
                yield f"{node.lineno}: pathlib.{name}"
            case ast.Call(func=ast.Attribute(attr=name)) if name in FILES:
                yield f"{node.lineno}: {name}"


@pytest.mark.parametrize("module", PURE)
def test_pure_code_reads_no_clock_file_or_terminal(module):
    found = [
        f"{p.relative_to(ROOT)}:{it}" for p in sources(module) for it in impurities(p.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "open('x')", "list(map(print, []))", "eval('1')", "datetime.now()", "datetime.datetime.utcnow()",
        "clock = datetime.now", "date.today()", "from pathlib import Path", "pathlib.Path('x')",
        "path.read_text()", "path.write_bytes(b'')",
    ],
)  # fmt: skip
def test_the_check_of_purity_finds(text):
    assert len(list(impurities(text))) == 1


def test_the_check_of_purity_leaves_values_alone():
    allowed = (
        "from pathlib import PurePosixPath\nstate.now\nself.open()\ndatetime.fromisoformat('')"
    )
    assert not list(impurities(allowed))


def test_every_module_that_states_that_it_is_pure_is_held_to_it():
    claims, claim = [], re.compile(r"\bPure\b|\bNo I/O\b")
    for name, package in PACKAGES.items():
        for path in package.rglob("*.py"):
            text = path.read_text()
            if not claim.search(text):  # as most of them, and to parse them all takes a second
                continue
            if claim.search(ast.get_docstring(ast.parse(text)) or ""):
                parts = path.relative_to(package).with_suffix("").parts
                claims.append(".".join((name, *parts)).removesuffix(".__init__"))
    prefixes = tuple(f"{module}." for module in PURE)
    assert not [claim for claim in claims if not f"{claim}.".startswith(prefixes)]
    assert len(claims) > len(PURE)
