"""Regenerate every checked-in artifact. `--check DIR` writes to DIR instead (used by the test)."""

import argparse
import os
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
KINDS = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet:"}


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
    target = out / "protos" if out else PROTOS
    target.mkdir(parents=True, exist_ok=True)
    stubs(target)


if __name__ == "__main__":
    main()
