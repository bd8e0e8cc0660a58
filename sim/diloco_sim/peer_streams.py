"""
A simulated learner among its peers: what `PeerServer` and `PeerClient` do on threads, disks and gRPC.

A piece of a state stands for one of the real size, so that its pace has the real seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from diloco.errors import DamagedError, StorageError
from diloco.model import tensorfile
from diloco.model.fragments import Layout
from diloco.model.tensorfile import Entry
from diloco.spec import RunSpec
from diloco.v1 import peer_pb2 as pb
from diloco_sim.behaviour import Behaviour
from diloco_sim.clock import Process
from diloco_sim.faults import Kind
from diloco_sim.memory import U64
from diloco_sim.network import Network
from diloco_sim.stream import Connection, Endpoint
from diloco_sim.transfers import Channel
from diloco_sim.wire import BULK
from diloco_worker.core import events as ev
from diloco_worker.core import trainer as core
from diloco_worker.core.peer_files import select
from diloco_worker.core.peer_pace import YIELD_SECONDS, Pace, bytes_per_second
from diloco_worker.core.sealed import unsealed
from diloco_worker.link.peer_client import FAILED
from diloco_worker.link.peer_messages import CHUNK_BYTES, Arrival, answers, chunks, parts, refusal
from diloco_worker.link.peer_server import POLL_SECONDS, Facts

PIECE_BYTES = 512
"""Of a state; stands for `CHUNK_BYTES`."""


def address_of(name: str) -> str:
    """Where a learner answers others."""
    return f"{name.replace('/', '.')}:1"


@dataclass(slots=True)
class PeerDirectory:
    """What the state directory of a learner has of local checkpoints and of a peer; survives its processes."""

    saved: tuple[core.SaveCheckpoint, U64] | None = None
    """The newest local checkpoint that can be read: what it is of, and the state of the optimizers."""
    first: tuple[core.SaveCheckpoint, U64] | None = None
    sent: tuple[bytes, bytes] | None = None
    """Manifest and tensors that a peer sent."""

    def of_peer(self) -> U64:
        """
        The state that a peer sent, as `Checkpoints.of_peer` and `load_optimizers` read it.

        Raises:
            One of FAILED: it is not what was written.
        """
        if self.sent is None:
            raise StorageError("there is none")
        manifest, data = self.sent
        stated = unsealed(manifest)
        if (stated["sha256"], stated["bytes"]) != (hashlib.sha256(data).hexdigest(), len(data)):
            raise DamagedError("it is not what was written")
        found = tensorfile.parse(data, len(data))["moments"]
        return np.frombuffer(data[found.lo : found.hi], np.uint64)


def checkpoint(
    saved: tuple[core.SaveCheckpoint, U64], layout: str
) -> tuple[dict[str, Any], Mapping[str, Entry], bytes]:
    """Manifest, entries and file of a local checkpoint."""
    action, moments = saved
    entry = Entry(name="moments", dtype="uint64", shape=moments.shape)
    header, entries, _ = tensorfile.plan([entry])
    manifest = {
        "local_step": action.local_step, "global_step": action.global_step, "run": action.run, "digest": layout,
        "optimizers": ["Toy"], "tree": {"dict": [["optimizers", {"tensor": "moments"}]]},
    }  # fmt: skip
    return manifest, {each.name: each for each in entries}, header + moments.tobytes()


class SimulatedPeers:
    """
    Both ends of one link process.

    Args:
        process: of the link.
        network: connects it.
        name: of the learner.
        spec: of the job.
        layout: of the model.
        directory: of the learner.
        facts: of the learner, as the program has them.
        behaviour: how it misbehaves.
        post: takes `PeerAnswered`.
    """

    def __init__(
        self, process: Process, network: Network, *, name: str, spec: RunSpec, layout: Layout,
        directory: PeerDirectory, facts: Facts, behaviour: Behaviour, post: Callable[[ev.PeerAnswered], None],
    ) -> None:  # fmt: skip
        self.process, self.network, self.name, self.spec, self.layout = (
            process, network, name, spec, layout,
        )  # fmt: skip
        self.directory, self.facts, self.behaviour, self.post = directory, facts, behaviour, post
        self.serving: _Answer | None = None
        """One learner at a time."""
        self._request: _Request | None = None
        network.listen(process, self)

    def opened(self, endpoint: Endpoint, method: str) -> _Answer:
        """See `Listener`."""
        return _Answer(self, endpoint)

    def ask(self, request: ev.AskPeer) -> None:
        """See `PeerClient`."""
        self._request = _Request(self, request)

    def drop(self, number: int) -> None:
        """See `PeerClient`."""
        if self._request is not None and self._request.number <= number:
            self._request.finish("it was dropped")


class _Answer:
    """One stream of `PeerServer`."""

    def __init__(self, peers: SimulatedPeers, endpoint: Endpoint) -> None:
        self._peers, self._endpoint = peers, endpoint
        self._request: pb.PeerRequest | None = None
        self._parts: Iterator[pb.PeerPart] = iter(())
        self._pace: Pace
        self._yields_until = 0.0
        self._over = self._wanted = False

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        peers = self._peers
        try:
            request = self._request = pb.PeerRequest.FromString(data)
        except DecodeError:
            self._end("the request is damaged")
            return
        facts = peers.facts
        why = refusal(
            request, job=peers.spec.job, layout=peers.layout.digest, run=facts.run(), step=facts.step(),
            interval=peers.spec.interval,
        )  # fmt: skip
        if not why and peers.serving is not None:
            why = "it is serving another learner"
        if why:
            self._end(why)
            return
        peers.serving = self
        self._look()

    def finished(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`: the other end has gone."""
        self._close()

    def writable(self) -> None:
        """See `Receiver`."""
        self._next()

    def _look(self) -> None:
        """As `PeerServer._checkpoint`."""
        peers, request = self._peers, self._request
        if self._over or request is None or peers.behaviour.has(Kind.PEER_MUTE):
            return
        old, found = peers.behaviour.has(Kind.PEER_OLD), peers.directory.saved
        found = peers.directory.first if old else found
        if found is not None:
            manifest, entries, file = checkpoint(found, peers.layout.digest)
            if old or answers(manifest, request):
                self._begin(manifest, entries, file)
                return
        if not peers.facts.saves():
            self._end("it writes no local checkpoints")
            return
        if not self._wanted:
            self._wanted = True
            peers.facts.wanted(request.step)
        peers.process.after(POLL_SECONDS, self._look)

    def _begin(self, manifest: dict[str, Any], entries: Mapping[str, Entry], file: bytes) -> None:
        peers, scale = self._peers, CHUNK_BYTES // PIECE_BYTES
        selection = select(manifest, entries)
        pieces = chunks(selection, lambda at, size: file[at : at + size], PIECE_BYTES)
        self._parts = parts(manifest, selection, pieces)
        amounts = peers.behaviour.amounts
        if (way := amounts.get(Kind.PEER_FALSE)) is not None:
            self._parts = iter(_falsified([*self._parts], int(way)))
        slow = amounts.get(Kind.PEER_SLOW)
        rate = slow or bytes_per_second(
            scale * selection.tensors_bytes, interval=peers.spec.interval, step_seconds=peers.facts.step_seconds()
        ) / scale  # fmt: skip
        self._pace = Pace(rate, now=peers.process.now)
        self._next()

    def _next(self) -> None:
        """As `PeerServer._parts`."""
        while not self._over:
            part = next(self._parts, None)
            if part is None:
                self._end("")
            elif part.WhichOneof("kind") == "chunk":
                self._yields_until = self._peers.process.now + YIELD_SECONDS
                self._pause(part)
                return
            elif not self._endpoint.send(part.SerializeToString()):
                return

    def _pause(self, part: pb.PeerPart) -> None:
        process = self._peers.process
        if self._peers.facts.uploading() and process.now < self._yields_until:
            process.after(POLL_SECONDS, self._pause, part)
            return
        wait = self._pace.wait_seconds(len(part.chunk), now=process.now)
        process.after(wait, self._send, part)

    def _send(self, part: pb.PeerPart) -> None:
        if not self._over and self._endpoint.send(part.SerializeToString()):
            self._next()

    def _end(self, reason: str) -> None:
        self._close()
        self._endpoint.end(reason)

    def _close(self) -> None:
        self._over = True
        if self._peers.serving is self:
            self._peers.serving = None


def _falsified(sent: list[pb.PeerPart], way: int) -> list[pb.PeerPart]:
    """What a peer sends whose messages do not fit each other."""
    header, *pieces, trailer = sent
    match way:
        case 1:  # the only one that does no harm
            header.header.local_step += 1
            header.header.global_step += 1000
        case 2:
            pieces[-1].chunk = bytes(255 - byte for byte in pieces[-1].chunk)
        case 3:
            return [header, *pieces[:-1], trailer]
        case 4:
            return [header, *pieces, pieces[-1], trailer]
        case _:
            header.header.tensors_bytes += 1
    return [header, *pieces, trailer]


class _Request:
    """One request of `PeerClient`."""

    def __init__(self, peers: SimulatedPeers, request: ev.AskPeer) -> None:
        self.number = request.number
        self._peers, self._request = peers, request
        self._arrival = Arrival(request, layout=peers.layout.digest, elements=peers.layout.elements)
        self._tensors = bytearray()
        self._connection: Connection | None = None
        self._over = False
        host, _, _ = request.peer.address.partition(":")
        server = peers.process.clock.processes[host.replace(".", "/")]
        Channel(peers.process, peers.network, server, BULK).use(self._opened, self.finish)

    def _opened(self, connection: Connection) -> None:
        if self._over:
            connection.close()
            return
        self._connection = connection
        peers, asked = self._peers, self._request
        message = pb.PeerRequest(
            job=peers.spec.job, learner=peers.name, layout=peers.layout.digest, run=asked.run, step=asked.step,
        )  # fmt: skip
        endpoint = connection.open("GetState", self)
        endpoint.send(message.SerializeToString())
        endpoint.finish()

    def received(self, data: bytes) -> None:
        """See `Receiver`."""
        if self._over:
            return
        try:
            self._tensors += self._arrival.add(pb.PeerPart.FromString(data))
            if self._arrival.over:
                self._complete()
        except DecodeError:
            self.finish("a message is damaged")
        except FAILED as error:
            self.finish(str(error))

    def finished(self) -> None:
        """See `Receiver`."""

    def writable(self) -> None:
        """See `Receiver`."""

    def ended(self, reason: str) -> None:
        """See `Receiver`."""
        if self._over:
            return
        try:
            if not reason:
                self._complete()
        except FAILED as error:
            reason = str(error)
        self.finish(reason)

    def _complete(self) -> None:
        manifest, state = self._arrival.end()
        self._peers.directory.sent = manifest, bytes(self._tensors)
        self.finish("", state)

    def finish(self, error: str, state: ev.PeerState | None = None) -> None:
        """It has ended; the protocol receives that soon."""
        if self._over:
            return
        self._over = True
        if state is None:
            self._peers.directory.sent = None
        if self._connection is not None:
            self._connection.close()
        process = self._peers.process
        answered = ev.PeerAnswered(number=self.number, state=state, error=error)
        process.clock.at(process.clock.now, self._peers.post, answered, process=process)
