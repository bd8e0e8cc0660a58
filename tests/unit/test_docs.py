"""The documentation: links resolve, whole manifests validate, commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from diloco_cli.__main__ import app

ROOT = Path(__file__).parents[2]
HIDDEN = {".venv", ".git", ".hypothesis", ".pytest_cache", "runs", "node_modules"}
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in HIDDEN]
"""Without the environment, which has a hundred times as many files as the project."""
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md")))
    if not HIDDEN.intersection(page.relative_to(ROOT).parts)
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
BLOCK = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in BLOCK.findall(page.read_text()) if language in languages]


def anchors(page: Path) -> set[str]:
    titles = HEADING.findall(BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page):
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading in {target.name}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name)
def test_every_path_in_the_documentation_exists(page):
    for path in re.findall(r"`([a-z]+/[\w./-]+)`", page.read_text()):
        if (ROOT / path.partition("/")[0]).is_dir() and not path.startswith("runs/"):
            assert (ROOT / path).exists(), path


FILES = [path for folder in FOLDERS for path in folder.rglob("*.py")]
FILE_NAMES = {path.name for path in FILES}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name)
def test_every_python_file_in_the_documentation_exists(page):
    named = set(re.findall(r"`(\w+\.py)`", page.read_text()))
    assert not named - FILE_NAMES


def test_the_modules_in_the_tables_of_the_architecture_exist():
    rows = re.findall(r"^\|.*$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    named = {
        part
        for row in rows
        for path in re.findall(r"`([a-z_/]+)`", row)
        for part in path.split("/")
    }
    modules = {part for path in FILES for part in (path.stem, *path.relative_to(ROOT).parts)}
    assert len(named) > 60
    assert not named - modules - {""}


PROGRAMS = {
    "contract": "protos/diloco", "job": "job", "agent": "agent", "syncer": "syncer", "worker": "worker",
    "operator": "operator", "local": "local", "cli": "cli", "simulator": "sim",
    "experiment": "experiment",
}  # fmt: skip


def test_each_row_of_pure_modules_in_the_architecture_names_modules_of_its_own_package():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \|(.*)$", text, re.MULTILINE))
    for row, folder in PROGRAMS.items():
        modules = {
            part for path in (ROOT / folder).rglob("*.py") for part in (path.stem, *path.parts)
        }
        named = {
            part for path in re.findall(r"`([a-z_/]+)`", rows[row]) for part in path.split("/")
        }
        assert not named - modules - {""}, row


def test_the_tests_that_the_page_of_failures_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failures.md").read_text()))
    defined = {
        function
        for file in (ROOT / "tests").rglob("test_*.py")
        for function in re.findall(r"def (test_\w+)\(", file.read_text())
    }
    assert len(named) > 40
    assert named <= defined, named - defined


def count_named_tests(text: str) -> int:
    """Asserts that they exist: paths are below tests/; `::name` is a function of the last path before it."""
    file, seen = "", 0
    for path, function in re.findall(r"`([a-z0-9]+/[\w/]*test_\w+\.py)?(?:::(test_\w+))?`", text):
        file = path or file
        assert not path or (ROOT / "tests" / path).exists(), path
        if function:
            assert f"def {function}(" in (ROOT / "tests" / file).read_text(), f"{file}::{function}"
            seen += 1
    return seen


def test_the_tests_that_the_checklist_names_exist():
    assert count_named_tests((ROOT / "docs" / "kubernetes-checklist.md").read_text()) > 80


EVIDENCE = {"soundness.md": 130, "platform.md": 140, "learners.md": 70, "project.md": 50}
"""The pages, and how many tests each names at least."""


@pytest.mark.parametrize(("page", "least"), EVIDENCE.items())
def test_the_tests_that_the_evidence_names_exist(page, least):
    """Each is named so that the check above can find it; scripts are below tests/golden/scripts/."""
    text = (ROOT / "docs" / "evidence" / page).read_text()
    assert count_named_tests(text) >= least
    whole = re.compile(r"[a-z0-9]+/[\w/]*test_\w+\.py(::test_\w+)?|::test_\w+")
    for named in re.findall(r"`([^`]*\btest_[^`]*)`", text):
        assert whole.fullmatch(named), named
    scripts = ROOT / "tests" / "golden" / "scripts"
    for kind, number in re.findall(r"\bscript (\w+)/(\w+)", text):
        assert len([*(scripts / kind).glob(f"{number}_*.txt")]) == 1, f"{kind}/{number}"


@pytest.mark.parametrize("page", EVIDENCE)
def test_each_row_of_the_evidence_has_an_id_of_its_own_a_promise_and_its_evidence(page):
    text = (ROOT / "docs" / "evidence" / page).read_text()
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows if row[0] not in ("id", "script", "---")]
    ids = [row[0] for row in rows]
    assert len(ids) == len({*ids})
    for row in rows:
        assert len(row) == 4, row
        assert all(row[:2]), row
        assert row[2] or row[3], f"{row[0]}: neither a test nor what is left open"


def whole_manifests() -> list[Any]:
    return [
        pytest.param(text, id=f"{name(page)}-{index}")
        for page in PAGES
        for index, text in enumerate(blocks(page, "yaml"))
        if "kind: DiLoCoJob" in text and "steps:" in text
    ]


@pytest.mark.parametrize("text", whole_manifests())
def test_every_whole_manifest_in_the_documentation_is_valid(text, tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text(text)
    checked = CliRunner().invoke(app, ["validate", str(manifest)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_yaml_block_is_yaml(page):
    for text in blocks(page, "yaml"):
        assert list(yaml.safe_load_all(text))


def test_the_example_of_the_manifest_page_is_the_golden_one():
    (example,) = blocks(ROOT / "docs" / "manifest.md", "yaml")
    _, golden = (ROOT / "tests" / "golden" / "everything.yaml").read_text().split("\n", 1)
    assert example == golden


def test_every_command_in_the_documentation_exists():
    commands = set(typer.main.get_command(app).commands)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        shell = "\n".join([*blocks(page, "sh", ""), *re.findall(r"`([^`\n]+)`", page.read_text())])
        used = set(re.findall(r"^(?:\.venv/bin/)?diloco ([a-z]+)", shell, re.MULTILINE))
        assert used <= commands, f"{name(page)}: {used - commands}"
        made = set(re.findall(r"^make ([a-z0-9-]+)", shell, re.MULTILINE))
        assert made <= targets, f"{name(page)}: {made - targets}"


def test_the_reading_order_names_ten_files_and_functions_that_they_define():
    text = (ROOT / "docs/README.md").read_text().partition("## Reading order")[2]
    items = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(items) == 10
    for item in items:
        path, text = re.findall(r"^\[.*?\]\((\S+?)\)(.*)", item, re.DOTALL)[0]
        code = (ROOT / "docs" / path).read_text()
        named = re.findall(r"`(?:\w+\.)?(\w+)(?:\(\))?`", text)
        assert not [name for name in named if f"def {name}(" not in code], path


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
