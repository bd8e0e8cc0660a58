"""Top-level folders are named after the programs; these tests keep the names from hiding modules."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPONENTS = (
    "protos", "job", "agent", "syncer", "worker", "operator", "local", "cli", "sim", "experiment",
)  # fmt: skip


def test_component_folders_are_not_packages():
    """operator/__init__.py would hide the standard library's operator module."""
    for folder in COMPONENTS:
        assert not (ROOT / folder / "__init__.py").exists()


def test_each_component_folder_holds_exactly_one_package():
    for folder in COMPONENTS:
        packages = [p.parent.name for p in (ROOT / folder).glob("*/__init__.py")]
        assert len(packages) == 1, packages


def test_every_folder_of_modules_is_a_package():
    """The import contracts do not see the modules of other folders."""
    folders = {path.parent for folder in COMPONENTS for path in (ROOT / folder).rglob("*.py")}
    others = {path for path in folders if not (path / "__init__.py").exists()}
    assert others == {ROOT / "cli/diloco_cli/template"}  # what `diloco new` copies


def test_the_components_are_the_packages_of_the_wheel():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert [path.split("/")[0] for path in build["targets"]["wheel"]["packages"]] == list(
        COMPONENTS
    )


def test_tests_are_not_packages():
    """tests/unit/operator/__init__.py would replace sys.modules["operator"]."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


FOLDERS = [
    path.relative_to(ROOT)
    for folder in COMPONENTS
    for path in sorted((ROOT / folder).rglob("__init__.py"))
    if path.parent.name != "v1"  # generated
]


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.parent.name)
def test_every_package_describes_what_it_may_import_and_where_to_begin(path):
    text = " ".join((ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").split())
    assert re.search(r"\b[Ii]mports?\b", text), "what may it import?"
    begin = re.search(r"[Bb]egin with(.*)", text)
    assert begin, "where does a reader begin?"
    folder = ROOT / path.parts[0]
    modules = {part for p in folder.rglob("*.py") for part in (p.stem, p.parent.name)}
    modules |= set(re.findall(r"^def (\w+)", (ROOT / path).read_text(), re.MULTILINE))
    first = re.findall(r"`([a-z_]+)`", begin[1].partition(". ")[0])
    named = {*first, *re.findall(r"\b(\w+)\.py\b", text)}
    assert not named - modules, "modules that do not exist"


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with those within them: ten times as fast as `ast.walk`, which visits the expressions too."""
    for statement in body:
        yield statement
        for blocks in ("handlers", "cases"):
            for block in getattr(statement, blocks, ()):
                yield from statements(block.body)
        for inner in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, inner, ()))


def imported_parts(path: Path) -> set[str]:
    """What the modules beside this `__init__.py` import: other programs, parts of their own and of the contract."""
    _, package, *folder, _ = path.parts
    found = set()
    for file in (ROOT / path).parent.glob("*.py"):
        for node in statements(ast.parse(file.read_text()).body):
            match node:
                case ast.Import(names=names):
                    modules = [name.name for name in names]
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    modules = [f"{module}.{name.name}" for name in names]
                case _:
                    continue
            for other, part, *_ in ([*module.split("."), ""] for module in modules):
                if other == package:
                    found |= {part} - {*folder} if folder else set()
                elif other == "diloco":
                    found.add(part)
                elif other.startswith("diloco_"):
                    found.add(other.removeprefix("diloco_"))
    return found


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.parent.name)
def test_the_description_of_a_package_names_what_it_imports(path):
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    named = {*re.findall(r"\w+", text.replace("diloco_", ""))}
    wholes = {"contract": ROOT / "protos/diloco", "rest": (ROOT / path).parents[1]}
    for word in wholes.keys() & named:
        named |= {part.stem for part in wholes[word].iterdir()}
    assert not imported_parts(path) - named


def test_the_decision_shows_every_package_and_the_packages_within():
    text = (ROOT / "docs/adr/0013-one-package-per-program.md").read_text()
    [layout] = re.findall(r"```\n(before .*?)```", text, re.DOTALL)
    after = [line[layout.index("after") :] for line in layout.split("\n")]
    for path in FOLDERS:
        [line] = [line for line in after if line.startswith(f"{path.parts[0]}/{path.parts[1]} ")]
        assert all(f" {folder}/" in line for folder in path.parts[2:-1]), path


def test_the_maps_name_every_package_and_the_packages_within():
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(
        r"^\| `(diloco\w*)` \|(.*)$", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    for path in FOLDERS:
        folder, package, *within, _ = path.parts
        assert f"]({folder}/{package}" in readme, folder
        assert all(f"`{name}/`" in dict(rows)[package] for name in (folder, *within)), path


def test_standard_operator_wins_in_the_repo_root():
    code = "import operator; assert operator.add(1, 2) == 3; import collections"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_syncer_operator_and_contract_import_without_torch():
    """Their images have no torch; the training side alone may import it."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import diloco_syncer.__main__, diloco_cli.__main__, diloco_local.supervisor\n"
        "import diloco_worker.link.__main__, diloco_worker.fetch"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_source_file_is_longer_than_600_lines():
    """Over 600 lines is a sign that a file does two things."""
    for folder in (*COMPONENTS, "tests", "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            if "_pb2" not in path.name:
                assert len(path.read_text().splitlines()) <= 600, path


def test_modules_have_one_name_only_where_the_decision_lists_it():
    places = {
        (folder, path.stem)
        for folder in COMPONENTS
        for path in (ROOT / folder).rglob("*.py")
        if not path.stem.startswith("__") and not {"v1", "template"} & set(path.parts)
    }
    counts = Counter(name for _, name in places)
    decision = (ROOT / "docs/adr/0013-one-package-per-program.md").read_text()
    [names] = re.findall(r"\*\*Names\.\*\*.*?A file is", decision, re.DOTALL)
    listed = set(re.findall(r"`([a-z_]+)`", names))
    assert {name for name, count in counts.items() if count > 1} == listed


def test_only_settings_read_the_environment():
    """ruff bans os.environ by name; this finds the other spellings."""
    for folder in COMPONENTS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "settings.py" or "_pb2" in path.name:
                continue
            text = path.read_text()
            if "environ" not in text and "getenv" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                    raise AssertionError(f"{path}:{node.lineno} reads the environment")


def test_only_files_and_disk_rename_files():
    """`files` and `disk` also sync what they rename, and the simulator's disk stands in for them."""
    renames = re.compile(r"\bos\.(replace|rename)\(|shutil\.move\(")
    found = {
        str(path.relative_to(ROOT))
        for folder in COMPONENTS
        for path in (ROOT / folder).rglob("*.py")
        if renames.search(path.read_text())
    }
    assert found == {f"protos/diloco/runtime/{name}.py" for name in ("files", "disk")}


def test_the_hooks_before_a_commit_run_the_fast_checks_of_the_test_command():
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
    ]
    commands = {hook["entry"].replace(".venv/bin/", "") for hook in hooks}
    checks = re.findall(r"^heading \"[a-z ]+\"; (.+)$", (ROOT / "scripts/check").read_text(), re.M)
    assert len(checks) == 4
    assert commands == {
        *(check.replace(" --quiet", "").replace(" .", "") for check in checks),
        "python scripts/generate.py --check",
    }
    needed = {"ruff", "mypy", "lint-imports", "python"}
    assert {hook["entry"].split()[0] for hook in hooks} == {f".venv/bin/{name}" for name in needed}
    for name in needed:
        assert shutil.which(name, path=str(Path(sys.executable).parent)), name


def test_the_images_are_built_from_every_package_of_the_wheel():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    folders = {path.split("/")[0] for path in wheel["targets"]["wheel"]["packages"]}
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    sent = set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert folders <= copied & sent, folders - (copied & sent)
