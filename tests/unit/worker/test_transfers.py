"""The link's transfers without a network: bytes held while the trainer is stopped, and afterwards."""

from __future__ import annotations

import dataclasses
import random
import weakref

import numpy as np
import pytest

from diloco.codec import formats
from diloco.errors import DilocoError, NotFiniteError
from diloco.model.fragments import Tensor, cut
from diloco.spec import RunSpec
from diloco_testing.learners.plain_memory import PlainMemory
from diloco_testing.syncers.streams import ABORTED, stream, wanted
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Slot
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import TrainerState
from diloco_worker.ipc.shared_memory import HostCopy
from diloco_worker.link.assembly import Outcome, Payloads
from diloco_worker.link.buffers import SLACK, BufferPool, most_idle_bytes, most_transfers
from diloco_worker.link.encoder import Encoder
from diloco_worker.link.placement import Placement
from diloco_worker.link.schedule import Schedule
from diloco_worker.link.transfer import Identity

LAYOUT = cut(
    [
        Tensor(name="embedding", shape=(64, 256), dtype="float32", embedding=True),
        *(Tensor(name=f"w{i}", shape=(8 + 4 * i, 128), dtype="float32") for i in range(10)),
    ],
    num_fragments=6,
)
P = len(LAYOUT.fragments)
SPEC = RunSpec(job="j", steps=1000, fragments=P, interval=P, overlap=2, wire_up="Int4")
IDENTITY = Identity(learner="eu/0", epoch=1, incarnation=1)
TRAINER = TrainerState(model_loaded=True, stepped=True, local_step=1, applied=[1] * P)
PAYLOADS = [formats.encoded_bytes(formats.BF16, f.elements) for f in LAYOUT.fragments]


class LinkedPair:
    """The parts of a link, its protocol, and transfers that end when the test ends them."""

    def __init__(self) -> None:
        self.memory = PlainMemory(LAYOUT)
        for fragment in LAYOUT.fragments:
            self.memory.publish(fragment.index, 1, (1, 0))
            copy = HostCopy(local_step=1, steps=1, tokens=10, base=1)
            self.memory.copies[fragment.index] = copy
        self.buffers = BufferPool(most_idle_bytes=most_idle_bytes(LAYOUT, SPEC))
        self.encoder = Encoder(self.memory, SPEC, self.buffers)
        self.placement = Placement(self.memory, SPEC, self.buffers)
        self.running = []
        most = most_transfers(SPEC)
        self.downloads = Schedule(most, lambda job, cancel: self.running.append((job, cancel)))
        self.uploads = []
        self.protocol = LinkProtocol(
            slots=[Slot(fragment=p, published=1, applied=1, version=(1, 0)) for p in range(P)],
            has_constants=False, next_delay=lambda: 0.1, reset_delay=lambda: None, syncer="s",
        )  # fmt: skip
        self.peak = 0
        self.handle(ev.TrainerUpdate(state=TRAINER))
        welcomed = ev.Welcomed(
            epoch=1, incarnation=1, step=0, steps=1000, local_step=0, total_tokens=0,
            heartbeat_seconds=2.0, use_checkpoint=False,
        )  # fmt: skip
        self.handle(welcomed)
        self.handle(ev.ModelReady())

    def handle(self, event: ev.Event) -> None:
        for decision in self.protocol.handle(event, 0.0):
            match decision:
                case ev.Download():
                    self.downloads.add(decision.fragment, decision, round=decision.round)
                case ev.Upload():
                    self.uploads.append(self.encoder.pull(decision.pull, IDENTITY))
                case ev.Place():
                    self.handle(self.placement.place(decision))
                case ev.Discard():
                    self.placement.discard(decision.staged)
                case ev.CancelTransfers():
                    self.downloads.cancel_all()
        self.peak = max(self.peak, self.buffers.held_bytes)

    def end_download(self, index: int, *, trailer=None) -> None:
        """One running download receives everything."""
        request, cancel = self.running.pop(index)
        assembly = self.placement.begin(request, IDENTITY)
        fragment = LAYOUT.fragments[request.fragment]
        values = np.full(fragment.elements, request.round, np.float32)
        asked = assembly.request()
        for message in stream(
            asked, fragment, values, version=(1, request.round),
            **({"trailer": trailer} if trailer else {}),
        ):  # fmt: skip
            assembly.add(message)
        self.peak = max(self.peak, self.buffers.held_bytes)
        staged = None
        if assembly.end() is Outcome.COMMITTED:
            staged = self.placement.stage(request, assembly.payloads())
        assembly.discard()
        event = ev.Downloaded(request=request, staged=staged, aborted=staged is None)
        if self.downloads.ended(cancel):
            self.handle(event)
        elif staged is not None:
            self.placement.discard(staged)
        self.downloads.proceed()

    def end_upload(self, index: int) -> None:
        upload = self.uploads.pop(index)
        assert list(upload.messages())
        upload.close()

    def round(self, step: int) -> None:
        fragment = step % P
        pull = ev.Pulled(round=step, attempt=1, fragment=fragment, versions=((1, 0),))
        if len(self.uploads) < most_transfers(SPEC):
            self.handle(pull)
        self.handle(ev.ResultAnnounced(round=step, attempt=1, fragment=fragment))


def most_held_bytes() -> int:
    """The bound that link/buffers.py states, for transfers that are all in the formats of the job."""
    down, up = formats.format_of(SPEC.wire_down), formats.format_of(SPEC.wire_up)
    results = [formats.encoded_bytes(down, f.elements) for f in LAYOUT.fragments]
    uploads = [formats.encoded_bytes(up, f.elements) for f in LAYOUT.fragments]
    in_flight = most_transfers(SPEC) * (max(results) + max(uploads))
    return int(SLACK * (sum(results) + in_flight)) + most_idle_bytes(LAYOUT, SPEC)


@pytest.fixture
def world():
    return LinkedPair()


def test_16_a_stopped_trainer_does_not_make_the_link_hold_more_than_its_bound(world):
    rng = random.Random(0)
    bound = most_held_bytes()
    for step in range(1, 201):
        world.round(step)
        while len(world.running) > rng.randint(0, 2):
            trailer = ABORTED if rng.random() < 0.1 else None
            world.end_download(rng.randrange(len(world.running)), trailer=trailer)
        while len(world.uploads) > rng.randint(0, 2):
            world.end_upload(rng.randrange(len(world.uploads)))
        assert world.buffers.held_bytes <= bound
    assert world.peak <= bound
    while world.running:
        world.end_download(0)
    while world.uploads:
        world.end_upload(0)
    # Now only the newest result of each fragment is held; the one before is in its inbox.
    assert world.buffers.used_bytes <= SLACK * sum(PAYLOADS)
    assert world.buffers.used_bytes >= sum(PAYLOADS)
    for _ in range(2):
        world.buffers.sweep()
    assert world.buffers.held_bytes == world.buffers.used_bytes


def test_16_after_a_pause_of_the_trainer_nothing_is_held(world):
    for step in range(1, 61):
        world.round(step)
        while world.running:
            world.end_download(0)
        while world.uploads:
            world.end_upload(0)
    for generation in (2, 3):
        state = dataclasses.replace(TRAINER, local_step=generation, applied=[generation] * P)
        world.handle(ev.TrainerUpdate(state=state))
    assert world.buffers.used_bytes == 0
    assert [world.memory.inbox(p)[0] for p in range(P)] == [60, 55, 56, 57, 58, 59]


def test_a_session_that_is_over_leaves_no_buffer_behind(world):
    for step in range(1, 6):
        world.round(step)
    world.handle(ev.SessionLost(text="cut"))
    while world.running:
        world.end_download(0)
    while world.uploads:
        world.end_upload(0)
    assert world.downloads.running == 0
    assert world.buffers.used_bytes == 0
    assert world.protocol.link_state.ready == ()


def test_an_upload_takes_as_many_bytes_as_its_format_needs(world):
    fragment = LAYOUT.fragments[0]
    pull = ev.Pulled(round=1, attempt=1, fragment=0, versions=((1, 0),))
    delta = world.encoder.pull(pull, IDENTITY)
    assert world.buffers.used_bytes == formats.encoded_bytes(formats.INT4, fragment.elements)
    delta.close()
    delta.close()
    whole = world.encoder.pull(dataclasses.replace(pull, versions=()), IDENTITY)
    assert world.buffers.used_bytes == 4 * fragment.elements
    whole.close()
    assert world.buffers.used_bytes == 0


def test_error_feedback_keeps_no_buffer_of_an_upload_that_has_ended(world):
    spec = dataclasses.replace(SPEC, error_feedback=True)
    encoder = Encoder(world.memory, spec, world.buffers)
    acquired = []
    acquire = world.buffers.acquire

    def remember(size):
        buffer = acquire(size)
        acquired.append(weakref.ref(buffer))
        return buffer

    world.buffers.acquire = remember
    pull = ev.Pulled(round=1, attempt=1, fragment=0, versions=((1, 0),))
    upload = encoder.pull(pull, IDENTITY)
    assert list(upload.messages())
    upload.close()
    assert len(list(upload.repeat((0,)))) == 1  # the end
    for _ in range(2):
        world.buffers.sweep()
    assert [buffer() for buffer in acquired] == [None]


def test_an_upload_that_cannot_be_encoded_holds_no_buffer(world):
    world.memory.host(0)[5] = np.nan
    for versions in (((1, 0),), ()):
        pull = ev.Pulled(round=1, attempt=1, fragment=0, versions=versions)
        upload = world.encoder.pull(pull, IDENTITY)
        assert np.isnan(upload.header.norms).all()
        assert len(list(upload.messages())) == 2  # header and end
        assert world.buffers.used_bytes == 0
    with pytest.raises(NotFiniteError):
        next(world.encoder.initial(IDENTITY))
    assert world.buffers.used_bytes == 0


@pytest.mark.parametrize(
    ("request_", "fmt", "round_"),
    [
        (ev.Download(fragment=0), formats.FP32, 0),
        (ev.Download(fragment=0, exact=False), formats.BF16, 0),
        (ev.Download(fragment=0, round=7, attempt=2), formats.BF16, 7),
        (ev.Download(fragment=P), formats.RAW, 0),
    ],
)
def test_what_a_download_requests(world, request_, fmt, round_):
    asked = wanted(world.placement.begin(request_, IDENTITY).request())
    assert (asked.format, asked.round, asked.fragment) == (fmt, round_, request_.fragment)


def test_the_initial_model_is_encoded_one_fragment_at_a_time(world):
    largest = 4 * max(f.elements for f in LAYOUT.fragments)
    count = 0
    for upload in world.encoder.initial(IDENTITY):
        count += 1
        assert world.buffers.used_bytes <= SLACK * largest
        upload.close()
        assert world.buffers.used_bytes == 0
    assert count == P + 1  # the fragments, then the constants


def test_constants_that_do_not_fit_are_refused_and_hold_no_buffer(world):
    payloads = Payloads(
        format=formats.RAW, version=(1, 0), step=0, buffer=world.buffers.acquire(10), size_bytes=10
    )
    with pytest.raises(DilocoError, match="constants of 10 bytes, expected at most 0"):
        world.placement.stage(ev.Download(fragment=P), payloads)
    assert world.buffers.used_bytes == 0


def test_a_result_that_cannot_be_decoded_is_not_published_and_the_answer_states_why(world):
    size = PAYLOADS[0]
    buffer = world.buffers.acquire(size)
    buffer[:] = 0xFF  # NaN
    payloads = Payloads(format=formats.BF16, version=(1, 5), step=5, buffer=buffer, size_bytes=size)
    staged = world.placement.stage(ev.Download(fragment=0, round=5), payloads)
    assert (staged.fragment, staged.version) == (0, (1, 5))
    placed = world.placement.place(ev.Place(staged=staged, generation=2))
    assert placed.fragment == 0
    assert "NaN or Inf" in placed.error
    assert world.buffers.used_bytes == 0


def test_a_result_is_placed_under_the_lock_of_its_fragment(world):
    locked, lock = [], world.memory.lock
    world.memory.lock = lambda fragment: (locked.append(fragment), lock(fragment))[1]
    buffer = world.buffers.acquire(PAYLOADS[1])
    buffer[:] = 0
    payloads = Payloads(
        format=formats.BF16, version=(1, 5), step=5, buffer=buffer, size_bytes=PAYLOADS[1]
    )
    staged = world.placement.stage(ev.Download(fragment=1, round=5), payloads)
    assert world.placement.place(ev.Place(staged=staged, generation=2)).error == ""
    assert locked == [1]
