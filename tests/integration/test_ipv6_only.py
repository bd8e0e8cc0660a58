"""A machine with IPv6 alone, as a pod of an IPv6-only cluster: a network namespace without IPv4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
ALONE = """
ip link set lo up && ip address delete 127.0.0.1/8 dev lo && ip address add fd00::7/128 dev lo && exec "$@"
"""


def alone(*command: str) -> list[str]:
    """The command in a network namespace whose only addresses are ::1 and fd00::7."""
    return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", ALONE, "sh", *command]


def problem() -> str:
    """Why this machine cannot make such a namespace; "": it can."""
    try:
        done = subprocess.run(alone("true"), capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or "no network namespaces"


def test_a_job_its_metrics_and_its_ranks_need_no_ipv4(tmp_path):
    if why := problem():
        pytest.skip(f"no network namespace without IPv4: {why}")
    body = [sys.executable, "-m", "diloco_testing.network.ipv6_only", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(
        alone(*body), env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
