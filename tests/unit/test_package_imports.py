"""How scripts/package_imports.py counts; test_generated.py compares the page with the tree."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import package_imports

    yield package_imports
    del sys.modules["package_imports"]


def test_modules_and_imports_of_each_package_are_counted_without_generated_files(page, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.hatch.build.targets.wheel]\npackages = ['protos/diloco', 'job/diloco_job']\n"
    )
    for path, text in {
        "protos/diloco/__init__.py": "import os",
        "protos/diloco/v1/stub.py": "import diloco_job",
        "job/diloco_job/__init__.py": "",
        "job/diloco_job/plan.py": "import diloco.spec\ndef f():\n    from diloco.model import a, b",
        "job/diloco_job/crd.py": "import diloco.a, diloco.b, os\nfrom diloco_job import plan",
        "job/diloco_job/template/train.py": "import diloco",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    total, rows = page.counted(tmp_path)
    assert total == 3
    assert rows[0].endswith("| modules | `diloco` |")
    assert rows[2:] == ["| `diloco` | 1 | |", "| `diloco_job` | 3 | 3 |"]


def test_a_page_without_its_table_is_an_error_that_names_it(page, tmp_path, monkeypatch):
    (tmp_path / "docs/adr").mkdir(parents=True)
    (tmp_path / page.PAGE).write_text("After: 3, none of them upward.\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(page, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"0013.*found 1 sums and 0 tables"):
        page.adr()
