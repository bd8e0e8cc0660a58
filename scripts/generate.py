"""Regenerate every checked-in artifact; `--check` only compares, and names what is stale."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from chart_readme import chart_readme
from package_imports import PAGE, adr

from diloco_job.crd import crd_yaml
from diloco_job.reference import reference

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
KINDS = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet:"}
TEXTS = {
    "charts/diloco/files/crd.yaml": crd_yaml,
    "charts/diloco/README.md": chart_readme,
    "docs/reference.md": reference,
    PAGE: adr,
}


def stubs(out: Path) -> None:
    """Compile protos/**/*.proto into Python stubs with types."""
    from grpc_tools import protoc  # the texts need no compiler

    files = [str(p) for p in sorted(PROTOS.rglob("*.proto"))]
    flags = [f"--{kind}_out={option}{out}" for kind, option in KINDS.items()]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # finds the plugins
    if protoc.main(["protoc", f"-I{PROTOS}", *flags, *files]):
        raise SystemExit("protoc failed")


def generate(target: Path) -> None:
    """Write everything generated below `target`."""
    (target / "protos").mkdir(parents=True, exist_ok=True)
    stubs(target / "protos")
    for path, text in TEXTS.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(), encoding="utf-8")


def stale(made: Path) -> list[str]:
    """Files below `made` that differ from the tree, or that it lacks."""
    files = sorted(p.relative_to(made) for p in made.rglob("*") if p.is_file())
    return [
        str(path)
        for path in files
        if not (ROOT / path).exists() or (ROOT / path).read_bytes() != (made / path).read_bytes()
    ]


def main() -> None:
    """Write to the tree or below DIR, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, metavar="DIR")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.out)
        return
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        if files := stale(Path(directory)):
            raise SystemExit(f"stale: {', '.join(files)}; run scripts/generate.py")


if __name__ == "__main__":
    main()
