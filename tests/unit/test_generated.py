"""Generated files equal what the generator makes today."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_checked_in_stubs_are_what_the_generator_writes(tmp_path):
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate.py", "--check", tmp_path], check=True
    )
    for folder in ("protos",):
        made = {p.relative_to(tmp_path): p.read_text() for p in (tmp_path / folder).rglob("*_pb2*")}
        stubs = [p for p in (ROOT / folder).rglob("*_pb2*") if p.suffix in (".py", ".pyi")]
        there = {p.relative_to(ROOT): p.read_text() for p in stubs}
        assert made.keys() == there.keys()
        for path, text in made.items():
            assert text == there[path], f"{path} is stale: run scripts/generate.py"
