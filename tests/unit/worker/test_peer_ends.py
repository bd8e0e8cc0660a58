"""The two ends of a request to a peer, over gRPC on 127.0.0.1, with real local checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
import torch
from torch import nn

from diloco.errors import StorageError
from diloco.model.fragments import Layout
from diloco.runtime import files
from diloco.v1 import peer_pb2 as pb
from diloco.v1.peer_pb2_grpc import PeerServicer, PeerStub, add_PeerServicer_to_server
from diloco_testing.network.certificates import Authority, mount, write
from diloco_testing.syncers.process import make_spec
from diloco_worker.core import events as ev
from diloco_worker.core.peer_files import PEER_MANIFEST, PEER_TENSORS, received, select
from diloco_worker.core.sealed import sealed
from diloco_worker.joined import JoinedTrainer
from diloco_worker.link.peer_client import PeerClient
from diloco_worker.link.peer_ends import Peers
from diloco_worker.link.peer_server import Facts, PeerServer
from diloco_worker.settings import LearnerSettings
from diloco_worker.trainer.checkpoint import Checkpoints

DIGEST = "d" * 64


def trained(seed: int, steps: int = 3):
    torch.manual_seed(seed)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def moments(optimizer):
    return [state["exp_avg"].clone() for state in optimizer.state.values()]


class Peer:
    """A learner that answers others."""

    def __init__(self, directory, **changes):
        self.checkpoints = Checkpoints(directory, keep=2, digest=DIGEST)
        self.model, self.optimizer = trained(1)
        self.wanted = queue.SimpleQueue()
        self.saves = True
        facts = Facts(
            run=lambda: "r",
            step=lambda: 10,
            saves=lambda: self.saves,
            step_seconds=lambda: 0.0,
            uploading=lambda: False,
            wanted=self.wanted.put,
        )
        values = {
            "job": "j",
            "layout": DIGEST,
            "directory": directory,
            "interval": 4,
            "facts": facts,
            "tls": None,
        }
        self.server = PeerServer(**{**values, **changes})
        self.address = f"127.0.0.1:{self.server.listen('127.0.0.1:0')}"

    def save(self, *, global_step, local_step=7):
        self.checkpoints.start(
            self.model, [self.optimizer], local_step=local_step, global_step=global_step, facts={}, run="r"
        )  # fmt: skip
        assert self.checkpoints.finish()


@pytest.fixture
def peer(tmp_path):
    peer = Peer(tmp_path / "peer")
    yield peer
    peer.server.close()


class Newcomer:
    def __init__(self, directory, **changes):
        directory.mkdir(exist_ok=True)
        self.directory, self.answers = directory, queue.SimpleQueue()
        values = {
            "job": "j", "learner": "eu/0", "layout": DIGEST, "elements": 90_300, "directory": directory,
            "tls": None, "post": self.answers.put,
        }  # fmt: skip
        self.client = PeerClient(**{**values, **changes})

    def ask(self, address, *, step=10, number=1, run="r"):
        peer = ev.PeerAddress("eu/1", address)
        self.client.ask(ev.AskPeer(number=number, peer=peer, step=step, run=run))

    def answer(self):
        return self.answers.get(timeout=60)


@pytest.fixture
def newcomer(tmp_path):
    return Newcomer(tmp_path / "newcomer")


def test_the_optimizers_of_the_newcomer_have_the_moments_of_the_peer(peer, newcomer):
    peer.save(global_step=12)
    newcomer.ask(peer.address)
    state = newcomer.answer().state
    assert (state.learner, state.local_step, state.global_step) == ("eu/1", 7, 12)
    tensors, manifest = (newcomer.directory / name for name in (PEER_TENSORS, PEER_MANIFEST))
    # The manifest arrived without the digest that the newcomer adds.
    assert 0 < state.bytes - tensors.stat().st_size < manifest.stat().st_size
    # Only the optimizers' tensors travel, and others cannot read them.
    size = (newcomer.directory / PEER_TENSORS).stat().st_size
    assert size < 0.8 * next((peer.checkpoints._directory).glob("*.safetensors")).stat().st_size
    assert stat.S_IMODE((newcomer.directory / PEER_TENSORS).stat().st_mode) == 0o600
    model, optimizer = trained(2)
    before = model.weight.clone()
    checkpoints = Checkpoints(newcomer.directory, keep=2, digest=DIGEST)
    checkpoints.load_optimizers(checkpoints.of_peer(), model, [optimizer])
    for ours, theirs in zip(moments(optimizer), moments(peer.optimizer), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(model.weight, before)
    assert checkpoints.newest() is None
    names = {path.name for path in newcomer.directory.iterdir()}
    assert names == {PEER_MANIFEST, PEER_TENSORS}


def test_it_waits_for_a_checkpoint_of_the_step_and_asks_for_it_once(peer, newcomer):
    peer.save(global_step=9)
    newcomer.ask(peer.address, step=10)
    assert peer.wanted.get(timeout=60) == 10
    peer.save(global_step=10, local_step=8)
    assert newcomer.answer().state.local_step == 8
    assert peer.wanted.empty()


def test_it_serves_one_at_a_time(peer, newcomer, tmp_path):
    newcomer.ask(peer.address)
    peer.wanted.get(timeout=60)
    other = Newcomer(tmp_path / "other")
    other.ask(peer.address)
    assert other.answer().error == "it is serving another learner"
    newcomer.client.drop(1)
    assert newcomer.answer().state is None


def test_a_peer_without_local_checkpoints_refuses_at_once_also_one_that_stops_to_write_them(
    peer, newcomer
):
    newcomer.ask(peer.address)
    assert peer.wanted.get(timeout=60) == 10
    peer.saves = False
    assert newcomer.answer().error == "it writes no local checkpoints"
    newcomer.ask(peer.address, number=2)
    assert newcomer.answer().error == "it writes no local checkpoints"
    assert peer.wanted.empty()


def test_a_request_of_a_far_step_does_not_stop_later_ones(peer, newcomer):
    newcomer.ask(peer.address, step=1 << 62)
    assert "it is at global step 10" in newcomer.answer().error
    assert peer.wanted.empty()


def test_a_state_that_is_complete_when_it_is_abandoned_leaves_nothing(peer, newcomer, monkeypatch):
    peer.save(global_step=12)
    fetch = newcomer.client._fetch

    def late(request):
        state = fetch(request)
        newcomer.client.drop(request.number)
        return state

    monkeypatch.setattr(newcomer.client, "_fetch", late)
    newcomer.ask(peer.address)
    assert newcomer.answer().state is None
    assert list(newcomer.directory.iterdir()) == []


def test_what_a_killed_newcomer_left_is_deleted_at_its_next_start(tmp_path):
    for name in (PEER_MANIFEST, PEER_TENSORS):
        (tmp_path / name).touch()
        files.temporary(tmp_path / name).touch()
    trainer = JoinedTrainer.__new__(JoinedTrainer)
    trainer._state = tmp_path
    trainer._forget_peer_state()
    assert list(tmp_path.iterdir()) == []


def test_newcomers_that_are_gone_in_the_middle_leave_no_thread_and_no_file_open(peer, tmp_path):
    peer.save(global_step=12)
    newcomer = Newcomer(tmp_path / "n")
    newcomer.ask(peer.address)
    assert newcomer.answer().state is not None

    def held():
        return threading.active_count(), sum(
            ".safetensors" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        )

    before = held()
    for _ in range(20):
        with grpc.insecure_channel(peer.address) as wire:
            call = PeerStub(wire).GetState(
                pb.PeerRequest(job="j", learner="eu/0", layout=DIGEST, run="r", step=10),
                wait_for_ready=True,
            )
            with contextlib.suppress(grpc.RpcError):  # the one before is not noticed yet
                next(call)
            call.cancel()
    deadline = time.monotonic() + 60
    number = 1
    while True:  # it serves again
        number += 1
        newcomer.ask(peer.address, number=number)
        if newcomer.answer().state is not None:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while held()[0] > before[0] + 4 or held()[1] > before[1]:
        assert time.monotonic() < deadline, (before, held())
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("changes", "asked", "error"),
    [
        ({"job": "k"}, {}, "it trains another model"),
        ({"layout": "e"}, {}, "it trains another model"),
        ({}, {"run": "s"}, "it is in another run of the job"),
        ({"elements": -10_000_000}, {}, "bytes of tensors, expected at most"),
    ],
)
def test_what_does_not_fit_is_refused(peer, tmp_path, changes, asked, error):
    peer.save(global_step=12)
    newcomer = Newcomer(tmp_path / "n", **changes)
    newcomer.ask(peer.address, **asked)
    answer = newcomer.answer()
    assert answer.state is None
    assert error in answer.error
    assert list(newcomer.directory.iterdir()) == []


def test_a_peer_that_is_gone_is_an_answer_with_the_reason(peer, newcomer):
    peer.server.close()
    newcomer.ask(peer.address)
    answer = newcomer.answer()
    assert (answer.state, bool(answer.error)) == (None, True)


class Scripted(PeerServicer):
    """Sends what a test gives it."""

    parts: Sequence[pb.PeerPart] = ()

    def GetState(self, request, context):  # noqa: N802
        yield from self.parts


@pytest.fixture
def scripted():
    server = grpc.server(ThreadPoolExecutor(2))
    peer = Scripted()
    add_PeerServicer_to_server(peer, server)
    peer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield peer
    server.stop(None)


def honest(peer):
    """The parts that an honest peer sends."""
    request = pb.PeerRequest(job="j", learner="eu/0", layout=DIGEST, run="r", step=10)
    with grpc.insecure_channel(peer.address) as wire:
        return [*PeerStub(wire).GetState(request)]


def flip(parts):
    data = bytearray(parts[-2].chunk)
    data[len(data) // 2] ^= 1
    parts[-2].chunk = bytes(data)


def cut_short(parts):
    del parts[-2:]


def lacks_a_chunk(parts):
    del parts[-2]


def longer(parts):
    parts.insert(-1, pb.PeerPart(chunk=b"x"))


def nothing(parts):
    parts.clear()


@pytest.mark.parametrize("damage", [flip, cut_short, lacks_a_chunk, longer, nothing])
def test_what_arrives_damaged_is_no_state_and_leaves_nothing(peer, scripted, newcomer, damage):
    peer.save(global_step=12)
    scripted.parts = honest(peer)
    damage(scripted.parts)
    newcomer.ask(scripted.address)
    answer = newcomer.answer()
    assert (answer.state, answer.error != "no reason") == (None, True)
    assert list(newcomer.directory.iterdir()) == []
    # The next peer is asked with the same client.
    newcomer.ask(peer.address, number=2)
    assert newcomer.answer().state is not None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"digest": "e"}, "another model"),
        ({"run": "s"}, "another run"),
        ({"global_step": 9}, "global step 9, expected 10 or later"),
        ({"optimizers": None}, "does not describe its optimizers"),
    ],
)
def test_a_manifest_of_something_else_is_refused(change, error):
    known = {"digest": DIGEST, "run": "r", "global_step": 10, "optimizers": []}
    manifest = sealed({**known, **change})
    with pytest.raises(StorageError, match=error):
        received(manifest, sha256="", tensors_bytes=0, digest=DIGEST, run="r", step=10)


def test_a_flipped_bit_of_a_manifest_is_found():
    manifest = sealed({"digest": DIGEST, "run": "r", "global_step": 10, "tree": 1})
    data = json.loads(manifest)
    data["tree"] = 2
    with pytest.raises(StorageError, match="SHA-256"):
        received(
            json.dumps(data).encode(), sha256="", tensors_bytes=0, digest=DIGEST, run="r", step=10
        )


def test_a_checkpoint_of_an_earlier_release_is_not_sent():
    with pytest.raises(StorageError, match="does not describe its optimizers"):
        select({"tree": {"dict": []}}, {})


# ---------------------------------------------------------------- certificates

NAMES = ("eu.j-learners",)


@pytest.fixture(scope="module")
def authority():
    return Authority()


def answer_over_tls(tmp_path, peers, newcomers):
    """What a newcomer learns from a peer; None: plain text."""
    peer = Peer(tmp_path / "peer", tls=write(tmp_path / "a", peers) if peers else None)
    peer.save(global_step=12)
    newcomer = Newcomer(tmp_path / "n", tls=write(tmp_path / "b", newcomers))
    try:
        newcomer.ask(peer.address)
        answer = newcomer.answer()
    finally:
        peer.server.close()
    assert answer.state is not None or list(newcomer.directory.iterdir()) == []
    return answer


def test_certificates_of_the_region_of_each_let_both_in(tmp_path, authority):
    peers = authority.make(regions=["eu"], names=NAMES)
    answer = answer_over_tls(tmp_path, peers, authority.make(regions=["eu"], names=NAMES))
    assert answer.state is not None, answer.error


@pytest.mark.parametrize(
    ("changes", "seen"), [({"regions": ["us"]}, "region us"), ({"job": "k", "regions": ["eu"]}, "no region")]
)  # fmt: skip
def test_a_learner_of_another_region_or_job_is_refused_whatever_it_claims(
    tmp_path, authority, changes, seen
):
    peers = authority.make(regions=["eu"], names=NAMES)
    answer = answer_over_tls(tmp_path, peers, authority.make(**changes))
    assert answer.state is None
    assert answer.error == (
        f"eu/0 presented a certificate for {seen} of job j, expected one with the URI name diloco://j/region/eu"
    )


@pytest.mark.parametrize(
    "names",
    [("j-syncer", "localhost"), ("us.j-learners",), ("eu.k-learners",)],
    ids=["no learner", "another region", "another job"],
)
def test_an_impostor_at_the_address_of_a_peer_is_refused(tmp_path, authority, names):
    peers = authority.make(names=names)
    answer = answer_over_tls(tmp_path, peers, authority.make())
    assert answer.state is None
    assert answer.error.startswith(
        "the server at its address has no certificate with the DNS name eu.j-learners: "
    )


@pytest.mark.parametrize(
    ("peers", "error"),
    [
        (lambda own: Authority("other").make(names=NAMES), "was not issued by the authority in ca.crt"),
        (lambda own: own.make(names=NAMES, expires_in_seconds=-60), "has expired: renew the Secret"),
        (lambda own: None, "did not negotiate TLS"),
    ],
    ids=["other authority", "expired", "plain text"],
)  # fmt: skip
def test_a_peer_without_a_valid_certificate_is_refused(tmp_path, authority, peers, error):
    answer = answer_over_tls(tmp_path, peers(authority), authority.make())
    assert answer.state is None
    assert error in answer.error


def test_a_newcomer_whose_certificate_is_forged_learns_where_to_look(tmp_path, authority):
    forged = replace(Authority("other").make(), authority=authority.made.bundle)
    answer = answer_over_tls(tmp_path, authority.make(names=NAMES), forged)
    assert answer.state is None
    assert "check tls.crt of this learner" in answer.error


def peers_of(tmp_path, **changes):
    """Both ends of eu/0, as its link makes them."""
    values = {
        "job": "j", "learner": "eu/0", "syncer": "s:1", "spec": tmp_path, "state": tmp_path, "peer": "127.0.0.1:0",
        **changes,
    }  # fmt: skip
    facts = Facts(
        **dict.fromkeys(("run", "step", "saves", "step_seconds", "uploading", "wanted"), lambda: 0)
    )
    layout = Layout(fragments=(), tensors=())
    return Peers(
        LearnerSettings(**values), make_spec(), layout, facts=facts, post=lambda event: None
    )


def test_others_find_a_learner_at_its_host_and_the_port_that_it_got(tmp_path):
    assert peers_of(tmp_path).address.startswith("127.0.0.1:")
    found = peers_of(tmp_path, peer_host="j-eu-0.j-eu").address
    assert found.startswith("j-eu-0.j-eu:")
    assert int(found.rpartition(":")[2]) > 0
    assert peers_of(tmp_path, world_size=2).address == ""
    assert peers_of(tmp_path, peer="").address == ""


def test_a_learner_whose_certificate_lacks_the_name_is_not_asked_until_it_is_renewed(
    tmp_path, authority, caplog
):
    tls = mount(tmp_path / "tls", authority.make(regions=["eu"], names=[]))
    peers = peers_of(tmp_path, tls=tls)
    assert (peers.address, peers.address) == ("", "")
    [warning] = [r.getMessage() for r in caplog.records if "eu.j-learners" in r.getMessage()]
    assert "renew the Secret of region eu (diloco certs)" in warning
    mount(tls, authority.make(regions=["eu"], names=NAMES))
    assert peers.address.startswith("127.0.0.1:")
