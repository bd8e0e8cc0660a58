"""A replay is bitwise equal on every CPU of an architecture: no kernel lets the compiler order a sum."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

SUPPORT = Path(__file__).parents[2] / "support"

GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
"""The least that the architecture has: on x86-64 neither AVX nor fused multiply-add."""


def run(**cpu: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "diloco_testing.syncers.merge_digest"],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), **cpu},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_18_a_merge_has_the_same_bytes_on_every_cpu_of_an_architecture(tmp_path):
    features = llvmlite.binding.get_host_cpu_features()
    if not any(features.get(name) for name in ("fma", "neon")):
        pytest.skip("this CPU has no vector instructions beyond those of the generic one")
    found = []
    # The kernels of this CPU are in numba's cache already.
    for process in [run(), run(**GENERIC, NUMBA_CACHE_DIR=str(tmp_path))]:
        with process:
            output, _ = process.communicate(timeout=500)
        assert process.returncode == 0
        found.append(output.splitlines())
    host, generic = found
    assert len(host) == 24
    assert host == generic
