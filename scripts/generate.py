"""Regenerate every checked-in artifact. `--check DIR` writes to DIR instead (used by the test)."""

import argparse
import os
import sys
from pathlib import Path

from grpc_tools import protoc

from diloco_operator.crd import crd_yaml
from diloco_operator.reference import reference

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
KINDS = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet:"}
TEXTS = {"charts/diloco/files/crd.yaml": crd_yaml, "docs/reference.md": reference}


def stubs(out: Path) -> None:
    """Compile protos/**/*.proto into Python stubs with types."""
    files = [str(p) for p in sorted(PROTOS.rglob("*.proto"))]
    flags = [f"--{kind}_out={option}{out}" for kind, option in KINDS.items()]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # finds the plugins
    if protoc.main(["protoc", f"-I{PROTOS}", *flags, *files]):
        raise SystemExit("protoc failed")


def main() -> None:
    """Write everything generated into the tree, or below DIR with --check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, default=None, metavar="DIR")
    out: Path | None = parser.parse_args().check
    target = out or ROOT
    (target / "protos").mkdir(parents=True, exist_ok=True)
    stubs(target / "protos")
    for path, text in TEXTS.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
