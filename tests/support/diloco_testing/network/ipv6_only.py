"""
A job where nothing has an IPv4 address: a real syncer, a scripted learner, metrics, and two agents.

Run in a network namespace (tests/integration/test_ipv6_only.py), so ports are those of a pod.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from pathlib import Path

from diloco_agent.probe_server import Server
from diloco_agent.probes import Reply
from diloco_agent.rank_zero import RankZero
from diloco_agent.unit import Follower, Leader
from diloco_testing.learners.scripted import ScriptedLearner, good_round, random_delta
from diloco_testing.syncers.process import RealSyncer, make_spec, until

ADDRESS = "fd00::7"
"""Of the machine, besides ::1."""


class Syncer(RealSyncer):
    """It listens where the operator configures it to, and is dialed by its pod's address."""

    @property
    def endpoint(self) -> str:
        return f"[{ADDRESS}]:{self.port}"


def without_ipv4() -> None:
    """Make sure that the test shows something."""
    with socket.socket(socket.AF_INET) as probe:
        assert probe.connect_ex(("127.0.0.1", 7070)) != 0
        assert probe.getsockname()[0] == "0.0.0.0"


def a_job(folder: Path) -> None:
    """From Hello to merges, and the metrics."""
    flags = ("--listen", "0.0.0.0:7070", "--metrics-port", "9090")
    with Syncer(folder, make_spec(), *flags) as syncer, ScriptedLearner(syncer) as learner:
        learner.join()
        learner.initialise([random_delta(f, f.index, size=1.0) for f in learner.layout.fragments])
        for seed in range(3):
            good_round(learner, seed=seed)
        assert syncer.status().merges == 3
        with urllib.request.urlopen(f"http://[{ADDRESS}]:9090/metrics", timeout=20) as answer:
            assert b"diloco_learners{" in answer.read()
        syncer.assert_audit()


def two_ranks() -> None:
    """The agents of the pods of one learner reach each other."""
    leader = Leader(boot="a", size=2)

    def answer(path: str, query: str) -> Reply:
        return Reply(ok=True, message=json.dumps(leader.order(1).to_json()))

    server = Server(8080, answer)
    rank_zero = RankZero((ADDRESS, server.port), Follower(boot="b", rank=1).report)
    until(lambda: rank_zero.reply is not None, expected="a reply of rank 0")
    assert rank_zero.reply is not None
    assert rank_zero.reply[1] <= time.monotonic()


if __name__ == "__main__":
    without_ipv4()
    a_job(Path(sys.argv[1]))
    two_ranks()
    print("done")
