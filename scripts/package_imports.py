"""The table of docs/adr/0013: modules of each package, and imports between packages."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "docs/adr/0013-one-package-per-program.md"
GENERATED = {"v1", "template"}
"""Folders whose files are no modules of the project: stubs, and what `diloco new` copies."""


def packages(root: Path) -> dict[str, Path]:
    """The packages of the wheel: name → folder."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {Path(path).name: root / path for path in wheel["packages"]}


def modules(folder: Path) -> list[Path]:
    """The modules of a package, with every `__init__.py`, without generated ones."""
    paths = sorted(folder.rglob("*.py"))
    return [path for path in paths if not GENERATED & set(path.relative_to(folder).parts)]


def imported(source: str) -> Counter[str]:
    """
    Number of import statements by top-level package.

    >>> sorted(imported("import a.b, a.c, d\\nfrom a import e").items())
    [('a', 2), ('d', 1)]
    """
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                counts.update({name.name.partition(".")[0] for name in names})
            case ast.ImportFrom(module=str(module), level=0):
                counts[module.partition(".")[0]] += 1
    return counts


def counted(root: Path) -> tuple[int, list[str]]:
    """The number of imports between packages, and the rows of the table."""
    found = packages(root)
    imports = {
        name: sum((imported(p.read_text(encoding="utf-8")) for p in modules(folder)), Counter())
        for name, folder in found.items()
    }
    used = [name for name in found if any(imports[other][name] for other in found if other != name)]
    short = [name if name == "diloco" else name.removeprefix("diloco") for name in used]
    rows = [
        f"| after: imports from \\ of | modules | {' | '.join(f'`{name}`' for name in short)} |",
        "| --- " * (len(used) + 2) + "|",
    ]
    total = 0
    for name, folder in found.items():
        cells = [imports[name][other] if other != name else 0 for other in used]
        total += sum(cells)
        shown = "".join(f" {number} |" if number else " |" for number in cells)
        rows.append(f"| `{name}` | {len(modules(folder))} |{shown}")
    return total, rows


def adr() -> str:
    """The page with current counts."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    total, rows = counted(ROOT)
    text, sums = re.subn(r"(?<=^After: )\d+(?=,)", str(total), text, flags=re.MULTILINE)
    text, tables = re.subn(
        r"^\| after: .*\n(?:\|.*\n)+", lambda _: "\n".join(rows) + "\n", text, flags=re.MULTILINE
    )
    if (sums, tables) != (1, 1):
        raise SystemExit(f"{PAGE}: found {sums} sums and {tables} tables, expected one of each")
    return text
