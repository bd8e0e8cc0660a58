"""
Learners take the state of their optimizers from each other over mutual TLS: real processes, with the certificates
that `diloco certs` writes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.journal.audit import audit
from diloco.rpc.identity import learner_server_name, server_name
from diloco.rpc.tls import Tls
from diloco_testing.learners.small import PROGRAM
from diloco_testing.network.certificates import Authority, mount
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOB = "j"


class Process:
    """A learner that answers others on 127.0.0.1, over all its processes."""

    def __init__(self, folder: Path, syncer: RealSyncer, name: str, tls: Tls) -> None:
        self.state, self.name = folder / name / "state", name
        folder.joinpath(name).mkdir(parents=True)
        spec = folder / name / "spec.json"
        spec.write_text(syncer.spec.to_json())
        self.tls = mount(folder / name / "tls", tls)
        values = {
            "JOB": JOB, "LEARNER": name, "SYNCER": syncer.endpoint, "SPEC": str(spec), "STATE": str(self.state),
            "TLS": str(self.tls), "PEER": "127.0.0.1:0",
        }  # fmt: skip
        self._env = os.environ | {f"DILOCO_{key}": value for key, value in values.items()}
        self._log = folder / name / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=self._env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self

    def lose(self) -> None:
        """Kill it and its link, and delete its disk."""
        self.kill()
        shutil.rmtree(self.state)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def log(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture
def authority():
    return Authority()


@pytest.fixture
def syncer(tmp_path, authority):
    tls = authority.make(regions=["eu"], names=[server_name(JOB)])
    spec = make_spec(learners={"eu": 3, "us": 1})
    with RealSyncer(tmp_path / "job", spec, tls=mount(tmp_path / "tls", tls)) as running:
        yield running


@pytest.fixture
def start(tmp_path, syncer, authority):
    """Start a learner with a certificate of its region; `names` replaces its DNS names."""
    started = []

    def begin(name, *, names=None, made_by=authority):
        region = name.partition("/")[0]
        own = [learner_server_name(JOB, region)] if names is None else names
        tls = made_by.make(job=JOB, regions=[region], names=own)
        process = Process(tmp_path, syncer, name, tls)
        started.append(process)
        return process.start()

    yield begin
    for process in started:
        process.kill()


def recoveries(syncer, learner):
    return [line for line in syncer.events("recovery") if line["learner"] == learner]


def until_trained(syncer, *learners):
    """Until their moments are of value: H is 2, and none began later than a few steps ago."""
    until(
        lambda: {m["learner"] for line in syncer.events("merge")[-4:] for m in line["members"]} >= {*learners},
        expected=f"merges of {learners}", seconds=240,
    )  # fmt: skip
    begin = step(syncer)
    until(lambda: step(syncer) > begin + 8, expected="H steps", seconds=240)


def step(syncer):
    """Global step of the last merge."""
    return syncer.events("merge")[-1]["step"]


def again(syncer, process, *, expected):
    """Lose a learner's disk and start it; its recovery."""
    before = len(recoveries(syncer, process.name))
    process.lose()
    process.start()
    until(lambda: len(recoveries(syncer, process.name)) > before, expected=expected, seconds=240)
    return recoveries(syncer, process.name)[-1]


@pytest.mark.slow_tier
def test_a_learner_that_lost_its_disk_takes_the_moments_of_its_region_over_mutual_tls(
    syncer, start
):
    lost = start("eu/1")
    start("us/0")
    start("eu/0")
    until_trained(syncer, "eu/0", "eu/1", "us/0")
    found = again(syncer, lost, expected="eu/1 recovers")
    assert (found["source"], found["peer"]) == ("Peer", "eu/0"), lost.log()
    assert found["bytes"] > 8 * (8 * 16 + 16 * 4), "two moments of each parameter"
    joins = [line for line in syncer.events("join") if line["learner"] == "eu/1" and line["fresh"]]
    assert found["stateStep"] >= joins[-1]["step"], "it is of the moment of the request"
    assert found["seconds"] > 0
    assert "the optimizers continue with the state of eu/0" in lost.log()
    verdict = audit((syncer.dir / "events.jsonl").read_text().rpartition("\n")[0].splitlines())
    assert verdict.ok, verdict.violations
    # Those that joined late at the beginning may have taken the state of another one as well.
    assert verdict.recoveries[-1].peer == "eu/0"
    assert "with the optimizers' state of a peer" in verdict.recovery


def test_impostors_are_refused_with_a_sentence_and_the_next_peer_is_asked(syncer, start, authority):
    lost = start("eu/1")
    other = start("us/0")
    # Its own name is that of another region: the syncer admits it, and its peers must not trust it.
    impostor = start("eu/0", names=[learner_server_name(JOB, "eu")])
    until_trained(syncer, "eu/0", "eu/1", "us/0")
    # It announced its address with the right name; new connections meet another certificate.
    mount(
        impostor.tls,
        authority.make(job=JOB, regions=["eu"], names=[learner_server_name(JOB, "us")]),
    )
    found = again(syncer, lost, expected="eu/1 recovers")
    assert (found["source"], found["peer"]) == ("Peer", "us/0"), lost.log()
    assert (
        "eu/0 has not sent its state: the server at its address has no certificate with the DNS name eu.j-learners"
        in lost.log()
    )
    other.kill()
    found = again(syncer, lost, expected="eu/1 begins without a peer")
    assert (found["source"], found["peer"]) == ("None", "")
    assert "no certificate with the DNS name eu.j-learners" in found["problem"]


@pytest.mark.slow_tier
def test_a_learner_whose_certificate_lacks_the_name_is_not_offered(syncer, start):
    lost = start("eu/1")
    nameless = start("eu/0", names=[])
    until_trained(syncer, "eu/0", "eu/1")
    found = again(syncer, lost, expected="eu/1 begins without a peer")
    assert (found["source"], found["peer"]) == ("None", "")
    assert "the syncer named no learner to ask" in found["problem"]
    assert "tls.crt lacks the DNS name eu.j-learners" in nameless.log()
