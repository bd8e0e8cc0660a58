"""Ctrl-C while the command's modules are imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "arguments", [("-m", "diloco_cli"), ("-c", "from diloco_cli.__main__ import main; main()")]
)
def test_an_interrupt_during_the_imports_prints_no_traceback(tmp_path, arguments):
    (tmp_path / "typer.py").write_text("import os, signal\nsignal.raise_signal(signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")
