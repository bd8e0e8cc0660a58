"""
Mutual TLS between real processes: which learners the syncer admits, what a refused learner logs, and
certificates that are replaced while everything runs.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from diloco.errors import UnauthorisedError, UnavailableError
from diloco.rpc.certificates import tls_facts
from diloco.rpc.channels import Connection
from diloco.rpc.connection_reasons import advice, explain
from diloco.rpc.identity import server_name
from diloco.rpc.status_client import SyncerClient
from diloco.rpc.tls import Tls
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_testing.learners.scripted import ScriptedLearner, good_round, random_delta
from diloco_testing.learners.small import PROGRAM
from diloco_testing.network.certificates import Authority, mount, write
from diloco_testing.network.relay import Relay
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANIFEST = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  steps: 20
  learner: {recipe: {name: gpt}}
  regions: [{name: eu, learners: 1}, {name: us, learners: 1}]
  tls: {mode: Secret, secretName: j-tls}
"""


class Trainer:
    """A real learner: training process and link; a context manager."""

    def __init__(self, folder: Path, port: int, name: str, tls: Path | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(make_spec().to_json())
        self._log = folder / "log"
        values = {
            "JOB": "j", "LEARNER": name, "SYNCER": f"127.0.0.1:{port}", "SPEC": str(folder / "spec.json"),
            "STATE": str(folder / "state"), **({"TLS": str(tls)} if tls else {}),
        }  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env=os.environ | {f"DILOCO_{key}": value for key, value in values.items()},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(30)

    def log(self) -> str:
        """Everything it printed."""
        return self._log.read_text(errors="replace")

    def wait_for_log(self, *texts: str) -> None:
        """Wait until its log has all of these texts; it still runs then."""
        until(
            lambda: all(text in self.log() for text in texts) or self.process.poll() is not None,
            expected=f"{texts} in the log of the learner", seconds=240,
        )  # fmt: skip
        assert self.process.poll() is None, self.log()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> dict[str, Tls]:
    """What `diloco certs` puts into the Secrets of eu (the syncer's region), us, and all."""
    folder = tmp_path_factory.mktemp("certs")
    (folder / "job.yaml").write_text(MANIFEST)
    command = [sys.executable, "-m", "diloco_cli", "certs", "job.yaml", "--out", "out"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    found = {}
    for file in (folder / "out").glob("*.yaml"):
        data = yaml.safe_load(file.read_text())["data"]
        certificate, key, authority = (
            base64.b64decode(data[name]) for name in ("tls.crt", "tls.key", "ca.crt")
        )
        found[file.stem] = Tls(certificate=certificate, key=key, authority=authority)
    return found


@pytest.fixture
def syncer(tmp_path, secrets) -> Iterator[RealSyncer]:
    tls = mount(tmp_path / "syncer-tls", secrets["eu"])
    with RealSyncer(tmp_path / "job", make_spec(), tls=tls) as running:
        yield running


def merged(syncer: RealSyncer) -> list[set[str]]:
    """Who was in each merge so far."""
    return [{m["learner"] for m in line["members"]} for line in syncer.events("merge")]


def refusals(syncer: RealSyncer, learner: str) -> list[dict[str, Any]]:
    return [line for line in syncer.events("refuse") if line["learner"] == learner]


# ---------------------------------------------------------------- which learners are admitted


def test_each_region_trains_with_its_own_secret_at_an_address_that_no_certificate_names(
    tmp_path, secrets, syncer
):
    served = tls_facts(secrets["eu"].certificate, secrets["eu"].authority, datetime.now(UTC))
    assert served.server_names == ("j-syncer", "eu.j-learners")
    with (
        Trainer(tmp_path / "eu", syncer.port, "eu/0", mount(tmp_path / "a", secrets["eu"])),
        Trainer(tmp_path / "us", syncer.port, "us/0", mount(tmp_path / "b", secrets["us"])),
    ):
        until(
            lambda: {"eu/0", "us/0"} <= set().union(*merged(syncer)),
            expected="both regions are merged", seconds=240,
        )  # fmt: skip
    # What was under way when a learner left is refused as well, for another reason.
    assert "Unauthorised" not in {line["reason"] for line in syncer.events("refuse")}
    syncer.assert_audit()


def test_a_join_names_the_serial_number_of_the_certificate_and_the_address(secrets, syncer):
    with ScriptedLearner(syncer, "us/0", tls=secrets["us"]) as learner:
        learner.join()
        [line] = until(lambda: syncer.events("join"), expected="the join is written")
    certificate = x509.load_pem_x509_certificate(secrets["us"].certificate)
    assert line["certificate"] == f"{certificate.serial_number:x}"
    assert line["peer"].startswith("ipv")
    other = x509.load_pem_x509_certificate(secrets["eu"].certificate)
    assert other.serial_number != certificate.serial_number, "it distinguishes the clusters"


def test_a_certificate_of_another_region_is_refused_until_it_is_replaced(tmp_path, secrets, syncer):
    tls = mount(tmp_path / "us-tls", secrets["eu"])
    with Trainer(tmp_path / "us", syncer.port, "us/0", tls) as learner:
        learner.wait_for_log(
            "the syncer refused the certificate of this learner: us/0 presented a certificate for "
            "region eu of job j, expected one with the URI name diloco://j/region/us: apply the "
            "Secret of region us"
        )
        # The line is written after the reply.
        first, *_ = until(lambda: refusals(syncer, "us/0"), expected="the refusal is written")
        assert first["reason"] == "Unauthorised"
        assert "certificate for region eu" in first["detail"]
        assert syncer.events("join") == []
        mount(tls, secrets["us"])
        until(lambda: merged(syncer), expected="us/0 is merged", seconds=240)
        assert learner.process.poll() is None
        assert len(refusals(syncer, "us/0")) < 10, "a refused learner does not fill the audit"


def test_bulk_calls_in_the_name_of_another_regions_learner_are_refused(secrets, syncer):
    def forged() -> ScriptedLearner:
        return ScriptedLearner(syncer, "eu/0", tls=secrets["eu"], bulk_tls=secrets["us"])

    with ScriptedLearner(syncer, "eu/0", tls=secrets["eu"]) as honest:
        thetas = [random_delta(f, f.index, size=1.0) for f in honest.layout.fragments]
        honest.join().initialise(thetas)
        honest.expect("ready")
        good_round(honest)
        with forged() as impostor:
            impostor.epoch, impostor.incarnation = honest.epoch, honest.incarnation
            with pytest.raises(
                UnauthorisedError, match="eu/0 presented a certificate for region us"
            ):
                impostor.download(0, format=bulk.FP32)
            pull = honest.pull()
            reply = impostor.upload(pull, random_delta(impostor.layout.fragments[pull.fragment], 1))
            assert (reply.done, reply.refused) == (False, "Unauthorised")
            # A reader needs no region: this is how an evaluator reads the model.
            impostor.name = ""
            impostor.download(0, format=bulk.FP32, epoch=0, incarnation=0)
        assert honest.upload(pull, random_delta(honest.layout.fragments[pull.fragment], 1)).done
        until(lambda: len(syncer.events("merge")) == 2, expected="the round commits")
    until(lambda: len(refusals(syncer, "eu/0")) == 2, expected="both refusals are written")
    assert {line["reason"] for line in refusals(syncer, "eu/0")} == {"Unauthorised"}


def test_a_session_needs_the_region_of_its_learner_whatever_it_claims(secrets, syncer):
    with ScriptedLearner(syncer, "us/0", tls=secrets["eu"]) as impostor:
        with pytest.raises(UnauthorisedError, match="expected one with the URI name"):
            impostor.join()
    with ScriptedLearner(syncer, "eu/0", tls=secrets["eu"]) as honest:
        honest.join()


def test_a_certificate_of_another_job_is_valid_for_no_region(tmp_path):
    authority = Authority()
    tls = write(tmp_path / "tls", authority.make())
    with RealSyncer(tmp_path / "job", make_spec(), tls=tls) as syncer:
        other = authority.make(job="k", regions=["eu", "us"])
        with ScriptedLearner(syncer, "eu/0", tls=other) as learner:
            with pytest.raises(UnauthorisedError, match="a certificate for no region of job j"):
                learner.join()


def test_any_certificate_of_the_authority_may_ask_for_the_status(secrets, syncer):
    for tls in secrets.values():
        with closing(SyncerClient(syncer.endpoint, tls=tls, server_name="j-syncer")) as client:
            assert client.status(timeout_seconds=60).job == "j"


def test_only_the_syncers_own_certificate_may_report_that_the_job_failed(secrets, syncer):
    """`eu` runs the syncer; the report changes the status and nothing else."""
    with (
        closing(SyncerClient(syncer.endpoint, tls=secrets["eu"], server_name="j-syncer")) as eu,
        closing(SyncerClient(syncer.endpoint, tls=secrets["us"], server_name="j-syncer")) as us,
    ):
        with pytest.raises(UnauthorisedError, match="does not have the DNS name j-syncer"):
            us.failed("DeadlineExceeded", "by us", timeout_seconds=60)
        before = us.status(timeout_seconds=60)
        assert not before.HasField("failure")
        eu.failed("DeadlineExceeded", "by eu", timeout_seconds=60)
        found = us.status(timeout_seconds=60)
    assert (found.failure.reason, found.failure.message) == ("DeadlineExceeded", "by eu")
    assert found.state == before.state


def test_only_a_regions_own_certificate_may_report_that_it_failed(secrets, syncer):
    with (
        closing(SyncerClient(syncer.endpoint, tls=secrets["eu"], server_name="j-syncer")) as eu,
        closing(SyncerClient(syncer.endpoint, tls=secrets["us"], server_name="j-syncer")) as us,
    ):
        with pytest.raises(UnauthorisedError, match="does not have the URI name diloco://j/region"):
            eu.region_failed("us", "LearnerRefused", "by eu", timeout_seconds=10)
        assert not us.status(timeout_seconds=10).region_failures
        us.region_failed("us", "LearnerRefused", "by us", learners=3, timeout_seconds=10)
        [reported] = eu.status(timeout_seconds=10).region_failures
        found = (reported.region, reported.reason, reported.message, reported.learners)
        assert found == ("us", "LearnerRefused", "by us", 3)
        us.region_failed("us", "", "", timeout_seconds=10)
        assert not eu.status(timeout_seconds=10).region_failures
    assert "Unauthorised" in [line["reason"] for line in refusals(syncer, "")]


# ---------------------------------------------------------------- what a refused learner logs


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Iterator[dict[str, Trainer]]:
    """Learners that are refused, all at once: their processes take long to start."""
    folder = tmp_path_factory.mktemp("refused")
    ours, theirs = Authority(), Authority("another")
    tls = write(folder / "tls", ours.make())
    forged = replace(theirs.make(), authority=ours.made.bundle)
    expired = ours.make(expires_in_seconds=-60)
    with ExitStack() as stack:

        def learner(name: str, port: int, given: Tls | None) -> Trainer:
            directory = write(folder / f"{name}-tls", given) if given else None
            return stack.enter_context(Trainer(folder / name, port, "eu/0", directory))

        secure = stack.enter_context(RealSyncer(folder / "secure", make_spec(), tls=tls))
        plain = stack.enter_context(RealSyncer(folder / "plain", make_spec()))
        yield {
            "other authority": learner("other", secure.port, theirs.make()),
            "forged": learner("forged", secure.port, forged),
            "expired": learner("expired", secure.port, expired),
            "plain text": learner("plain-text", secure.port, None),
            "plain syncer": learner("plain-syncer", plain.port, ours.make()),
        }
        assert secure.events("join") == plain.events("join") == []


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("other authority", [advice("CertificateOfOtherAuthority")]),
        ("forged", [advice("HandshakeRefused"), "refused by its own ca.crt: unable to get local"]),
        ("expired", [advice("HandshakeRefused"), "refused by its own ca.crt: certificate has exp"]),
        ("plain text", [advice("HandshakeRefused")]),
        ("plain syncer", [advice("PlainText")]),
    ],
)
def test_a_refused_learner_logs_why_and_retries(refused, case, texts):
    refused[case].wait_for_log(*texts)


# ---------------------------------------------------------------- replaced while running


def test_replaced_certificates_are_used_by_both_ends_without_a_restart(tmp_path):
    old, new = Authority("old"), Authority("new")
    here, there = tmp_path / "syncer-tls", tmp_path / "learner-tls"
    for directory in (here, there):
        mount(directory, old.make())
    with (
        RealSyncer(tmp_path / "job", make_spec(), tls=here) as syncer,
        Relay(syncer.port) as relay,
        Trainer(tmp_path / "learner", relay.port, "eu/0", there) as learner,
    ):
        until(lambda: merged(syncer), expected="a merge", seconds=240)
        mount(here, old.make(expires_in_seconds=-60))
        mount(there, old.make(expires_in_seconds=-60))

        def fresh(tls: Tls) -> str:
            with closing(SyncerClient(syncer.endpoint, tls=tls, server_name="j-syncer")) as client:
                try:
                    return client.status(timeout_seconds=60).state
                except UnavailableError as error:
                    return explain(str(error))

        # New connections meet the expired certificate; established connections persist.
        assert fresh(old.make()) == "CertificateExpired"
        count = len(merged(syncer))
        until(lambda: len(merged(syncer)) > count + 3, expected="merges on old connections")
        assert "session lost" not in learner.log()

        relay.cut()
        learner.wait_for_log(advice("CertificateExpired"))
        mount(here, new.make())
        until(lambda: fresh(new.make()) == "Waiting" or None, expected="the syncer has the new one")
        learner.wait_for_log(advice("CertificateOfOtherAuthority"))
        count = len(merged(syncer))
        mount(there, new.make())
        until(lambda: len(merged(syncer)) > count + 3, expected="merges under new certificates")
        assert {line["incarnation"] for line in syncer.events("join")} == {1}
        assert len(syncer.events("start")) == 1
        assert learner.process.poll() is None
        syncer.assert_audit()


def test_an_observer_reconnects_with_replaced_files(tmp_path):
    old, new = Authority("old"), Authority("new")
    here, there = mount(tmp_path / "a", old.make()), mount(tmp_path / "b", old.make())

    def state(connection: Connection) -> str:
        asked = SyncerStub(connection.channel).GetStatus
        return str(asked(pb.StatusRequest(), timeout=10, wait_for_ready=True).state)

    with RealSyncer(tmp_path / "job", make_spec(), tls=here) as syncer:
        connection = Connection(
            syncer.endpoint, tls_dir=there, purpose="control", server_name=server_name("j")
        )
        with closing(connection):
            assert state(connection) == "Initialising"
            mount(here, new.make())
            mount(there, new.make())
            assert connection.renew()
            assert state(connection) == "Initialising"
