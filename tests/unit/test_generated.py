"""Generated files equal the generator's current output."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    "charts/diloco/README.md",
    "charts/diloco/files/crd.yaml",
    "docs/adr/0013-one-package-per-program.md",
    "docs/reference.md",
]


@pytest.fixture(scope="module")
def generator():
    """The generator as a module."""
    helpers = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts/generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        for name in helpers & sys.modules.keys():
            del sys.modules[name]
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Current output of the generator, stubs included: the plugins of protoc are processes."""
    out = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, ROOT / "scripts" / "generate.py", "--out", out], check=True)
    return out


@pytest.mark.slow
def test_checked_in_stubs_are_what_the_generator_writes(made):
    stubs = {p.relative_to(made): p.read_text() for p in (made / "protos").rglob("*_pb2*")}
    there = [p for p in (ROOT / "protos").rglob("*_pb2*") if p.suffix in (".py", ".pyi")]
    assert stubs.keys() == {p.relative_to(ROOT) for p in there}
    for path, text in stubs.items():
        assert text == (ROOT / path).read_text(), f"{path} is stale: run scripts/generate.py"


@pytest.mark.parametrize("path", TEXTS)
def test_checked_in_texts_are_what_the_generator_writes(generator, path):
    text = generator.TEXTS[path]()
    assert text == (ROOT / path).read_text(encoding="utf-8"), "stale: run scripts/generate.py"


def test_no_other_text_is_generated(generator):
    assert sorted(generator.TEXTS) == TEXTS


@pytest.mark.slow
def test_the_command_writes_these_texts_and_nothing_but_stubs_besides(made):
    others = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    others = {path for path in others if not path.startswith("protos/")}
    assert others == set(TEXTS)
    for path in TEXTS:
        assert (made / path).read_bytes() == (ROOT / path).read_bytes(), path


def test_every_documented_value_of_the_chart_is_in_its_readme():
    values = (ROOT / "charts" / "diloco" / "values.yaml").read_text(encoding="utf-8")
    readme = (ROOT / "charts" / "diloco" / "README.md").read_text(encoding="utf-8")
    comments = re.findall(r"# -- (.+)", values)
    assert re.findall(r"^\| `\S+` \| .+ \| `.+?` \| (.+) \|$", readme, re.MULTILINE) == comments
