"""What the import contracts cannot show: pure folders call no clock and no file."""

import ast
from pathlib import Path

import pytest

import diloco_operator

ROOT = Path(diloco_operator.__file__).parent
PURE = [
    file for folder in ("decide", "resources", "state") for file in (ROOT / folder).glob("*.py")
]
IMPURE_CALLS = {"open", "now", "utcnow", "today", "read_text", "read_bytes", "write_text", "Path"}


def called_name(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


@pytest.mark.parametrize("file", PURE, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_pure_module_calls_no_clock_and_no_file(file):
    tree = ast.parse(file.read_text())
    calls = {called_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & IMPURE_CALLS
