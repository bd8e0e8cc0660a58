"""
Every wrong upload of a learner, against one real syncer that survives them.

After each fault: the syncer answers, Θ is bit by bit unchanged, a `refuse` line gives the reason, the next good round
of the same learner commits the float64 result (so the momentum did not change either), and the audit is clean.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from diloco.codec import frames
from diloco.errors import (
    DamagedError,
    DilocoError,
    ProtocolError,
    StaleEpochError,
    StaleIncarnationError,
    UnavailableError,
)
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.learners.scripted import (
    END,
    F32,
    Model,
    ScriptedLearner,
    Stream,
    chunk,
    committed,
    encoded,
    good_round,
    random_delta,
)  # fmt: skip
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow

NAN, INF = float("nan"), float("inf")


@dataclass
class Subject:
    """One syncer, one learner that is at fault, and what Θ must be."""

    syncer: RealSyncer
    learner: ScriptedLearner
    model: Model

    def refusals(self) -> list[tuple[str, str]]:
        return [(line["learner"], line["reason"]) for line in self.syncer.events("refuse")]


@dataclass
class Try:
    """One upload in progress."""

    learner: ScriptedLearner
    pull: pb.Pull
    delta_N: F32
    payloads: list[bytes]
    norms: list[float]

    def chunks(self) -> list[bytes]:
        return [chunk(i, p) for i, p in enumerate(self.payloads)]

    def begin(self, **changes: object) -> Stream:
        return self.learner.stream(
            self.learner.header(self.pull, **{"norms": self.norms, **changes})
        )

    def whole_upload(self, **changes: object) -> Stream:
        return self.begin(**changes).send(*self.chunks(), END)

    def poisoned(self, value: float, fmt: int = bulk.FP32, **changes: object) -> Stream:
        """One value (or scale) of the last chunk is not finite; the header claims finite values."""
        self.payloads, _, norms = encoded(
            self.learner.layout.fragments[self.pull.fragment], self.delta_N, fmt
        )
        damaged = bytearray(self.payloads[-1])
        if fmt == bulk.BF16:
            damaged[:2] = (
                (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
            )
        else:
            damaged[:4] = np.float32(value).tobytes()
        self.payloads[-1] = bytes(damaged)
        return self.whole_upload(**{"norms": norms, "format": fmt, **changes})


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    with (
        RealSyncer(tmp_path_factory.mktemp("bad"), make_spec()) as syncer,
        ScriptedLearner(syncer) as learner,
    ):
        learner.join()
        thetas = [random_delta(f, f.index, size=1.0) for f in learner.layout.fragments]
        learner.initialise(thetas)
        model = Model(learner.layout, syncer.spec, thetas)
        good_round(learner, model, seed=1)
        yield Subject(syncer, learner, model)


@pytest.fixture
def intact(subject):
    """The promise of the module, checked after every test."""
    before = [subject.learner.theta(p) for p in range(2)]
    merges = len(subject.syncer.events("merge"))
    yield
    assert subject.syncer.status().state == "Training"
    if len(subject.syncer.events("merge")) == merges:
        for fragment, theta_N in enumerate(before):
            np.testing.assert_array_equal(subject.learner.theta(fragment), theta_N)
    good_round(subject.learner, subject.model, seed=len(subject.syncer.events()))
    subject.model.check(subject.learner)
    subject.syncer.assert_audit()


def trying(subject, seed=7) -> Try:
    pull = subject.learner.pull()
    fragment = subject.learner.layout.fragments[pull.fragment]
    delta_N = random_delta(fragment, seed)
    payloads, _, norms = encoded(fragment, delta_N)
    return Try(subject.learner, pull, delta_N, payloads, norms)


FAULTS: dict[str, tuple[str, Callable[[Try], Stream]]] = {
    "unknown fragment": ("Protocol", lambda t: t.whole_upload(fragment=7)),
    "other fragment": ("Protocol", lambda t: t.whole_upload(fragment=1 - t.pull.fragment)),
    "too many values": ("Protocol", lambda t: t.whole_upload(elements=len(t.delta_N) + 128)),
    "no values": ("Protocol", lambda t: t.whole_upload(elements=0, chunks=0)),
    "more chunks announced": ("Protocol", lambda t: t.whole_upload(chunks=len(t.payloads) + 1)),
    "fewer chunks announced": ("Protocol", lambda t: t.whole_upload(chunks=len(t.payloads) - 1)),
    "unknown format": ("Protocol", lambda t: t.whole_upload(format=9)),
    "a file's format": ("Protocol", lambda t: t.whole_upload(format=bulk.RAW)),
    "unknown content": ("Protocol", lambda t: t.whole_upload(content=0)),
    "initial parameters again": ("Protocol", lambda t: t.whole_upload(content=bulk.INITIAL)),
    "constants again": ("Protocol", lambda t: t.whole_upload(content=bulk.CONSTANTS)),
    "a base that never was": ("Protocol", lambda t: t.whole_upload(base=pb.Version(epoch=9, step=9))),
    "a norm too few": ("Protocol", lambda t: t.whole_upload(norms=t.norms[1:])),
    "norm NaN": ("NotFinite", lambda t: t.whole_upload(norms=[NAN, *t.norms[1:]])),
    "norm Inf": ("NotFinite", lambda t: t.whole_upload(norms=[INF, *t.norms[1:]])),
    "norm below zero": ("Protocol", lambda t: t.whole_upload(norms=[-1.0, *t.norms[1:]])),
    "norm that disagrees": ("Protocol", lambda t: t.whole_upload(norms=[1.01 * n for n in t.norms])),
    "norms that disagree by little": ("Protocol", lambda t: t.whole_upload(norms=[n + 0.01 for n in t.norms])),
    "NaN in fp32": ("NotFinite", lambda t: t.poisoned(NAN)),
    "Inf in fp32": ("NotFinite", lambda t: t.poisoned(-INF)),
    "bf16 to a job in fp32": ("Protocol", lambda t: t.poisoned(NAN, bulk.BF16)),
    "int8 to a job in fp32": ("Protocol", lambda t: t.poisoned(NAN, bulk.INT8)),
    "int4 to a job in fp32": ("Protocol", lambda t: t.poisoned(INF, bulk.INT4)),
    "NaN in a whole": ("NotFinite", lambda t: t.poisoned(NAN, content=bulk.WHOLE, norms=[])),
    "short chunk": ("Damaged", lambda t: t.begin().send(chunk(0, t.payloads[0][:-4]), *t.chunks()[1:], END)),
    "long chunk": ("Damaged", lambda t: t.begin().send(chunk(0, t.payloads[0] + b"\0" * 4), *t.chunks()[1:], END)),
    "empty chunk": ("Damaged", lambda t: t.begin().send(chunk(0, b""), *t.chunks()[1:], END)),
    "short chunk of a whole": (
        "Damaged",
        lambda t: t.begin(content=bulk.WHOLE, norms=[]).send(chunk(0, t.payloads[0][:-4]), END),
    ),
    "a chunk beyond the last": ("Protocol", lambda t: t.begin().send(*t.chunks(), chunk(9, t.payloads[0]), END)),
    "a header among the chunks": ("Protocol", lambda t: t.begin().send(frames.pack(frames.Kind.HEADER, 0), END)),
}  # fmt: skip


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize("fault", FAULTS)
def test_refused_with_its_reason_and_nothing_merged(subject, fault):
    reason, do = FAULTS[fault]
    before = subject.refusals()
    reply = do(trying(subject)).reply()
    assert (reply.refused, reply.done) == (reason, False), reply.detail
    assert len(reply.detail) > 20
    until(lambda: subject.refusals()[len(before) :], expected="a refuse line")
    assert subject.refusals()[len(before) :] == [("eu/0", reason)]


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize(
    "damage", ["flipped bit", "flipped index", "cut in half", "nothing", "missing"]
)
def test_a_damaged_chunk_is_asked_for_again_and_the_result_is_unaffected(subject, damage):
    this = trying(subject, seed=11)
    good = this.chunks()
    bad = {
        "flipped bit": good[1][:-1] + bytes([good[1][-1] ^ 1]),
        "flipped index": bytes([good[1][0] ^ 2]) + good[1][1:],
        "cut in half": good[1][: len(good[1]) // 2],
        "nothing": b"",
    }.get(damage)
    stream = this.begin().send(good[0], *([bad] if bad is not None else []), *good[2:], END)
    assert list(stream.reply().again) == [1]
    assert stream.send(good[1], END).reply().done
    committed(subject.learner, this.pull)
    subject.model.merge(this.pull.fragment, (1.0, this.delta_N))
    subject.model.check(subject.learner)


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize("kind", ["never sent", "always damaged"])
def test_a_chunk_that_stays_missing_is_refused_after_three_repeats(subject, kind):
    this = trying(subject)
    good = this.chunks()
    again = [good[0][:-1] + bytes([good[0][-1] ^ 1])] if kind == "always damaged" else []
    stream = this.begin().send(*again, *good[1:], END)
    for _ in range(3):
        assert list(stream.reply().again) == [0]
        stream.send(*again, END)
    reply = stream.reply()
    assert reply.refused == "Damaged"
    assert "after 3 repeats" in reply.detail
    until(lambda: subject.refusals()[-1] == ("eu/0", "Damaged"), expected="a refuse line")


WRONG_SENDERS: dict[str, tuple[str, dict[str, object]]] = {
    "a syncer that was replaced": ("StaleEpoch", {"epoch": 0}),
    "a syncer to come": ("StaleEpoch", {"epoch": 99}),
    "an old incarnation": ("StaleIncarnation", {"incarnation": 0}),
    "a future incarnation": ("StaleIncarnation", {"incarnation": 99}),
    "a learner that never joined": ("StaleIncarnation", {"learner": "eu/77"}),
    "a round to come": ("Aborted", {"round": 10**6}),
    "another attempt": ("Aborted", {"attempt": 77}),
}


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize("who", WRONG_SENDERS)
def test_an_upload_of_another_sender_does_not_affect_the_round(subject, who):
    """The refused upload names a round that is running, with a learner's name that is in it."""
    reason, identity = WRONG_SENDERS[who]
    before = subject.refusals()
    this = trying(subject)
    reply = this.whole_upload(**identity).reply()
    assert reply.refused == reason, reply
    if reason != "Aborted":
        named = identity.get("learner", "eu/0")
        # The line is written on a thread of its own, perhaps after the reply.
        until(lambda: len(subject.refusals()) > len(before), expected="the line of the refusal")
        assert subject.refusals()[len(before) :] == [(named, reason)]
    # The pull is still open: the honest upload on the same attempt is what commits.
    assert this.whole_upload().reply().done
    committed(subject.learner, this.pull)
    subject.model.merge(this.pull.fragment, (1.0, this.delta_N))


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize(
    "first", ["nothing", "a chunk", "a damaged header", "a header of noise", "an empty message"]
)
def test_an_upload_without_a_header_is_refused(subject, first):
    this = trying(subject)
    stream = this.learner.stream()
    if first == "nothing":
        stream.close()
    elif first == "a chunk":
        stream.send(this.chunks()[0])
    elif first == "a damaged header":
        stream.send(frames.pack(frames.Kind.HEADER, 0, b"abc")[:-1])
    elif first == "a header of noise":
        stream.send(frames.pack(frames.Kind.HEADER, 0, b"\xff" * 40))
    else:
        stream.send(b"")
    assert stream.reply().refused in ("Protocol", "Damaged")
    assert this.whole_upload().reply().done
    committed(subject.learner, this.pull)
    subject.model.merge(this.pull.fragment, (1.0, this.delta_N))


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize("end", ["cut", "half-closed early", "half-closed at once"])
def test_a_stream_that_breaks_ends_the_attempt(subject, end):
    this = trying(subject)
    before = subject.refusals()
    if end == "cut":
        stream = this.begin().send(this.chunks()[0], END)
        assert stream.reply().again  # so it is in the middle of the merge
        stream.cancel()
    else:  # what gRPC may present instead of a cut
        stream = this.begin()
        if end == "half-closed early":
            stream.send(this.chunks()[0])
        stream.close()
        reply = stream.reply()
        assert (reply.refused, reply.done) == ("Unavailable", False)
        assert "chunks early" in reply.detail
    until(lambda: subject.refusals()[len(before) :], expected="a refuse line", seconds=60)
    assert subject.refusals()[len(before) :] == [("eu/0", "StreamBroken")]
    # `intact` shows that the learner's next report is pulled again.


@pytest.mark.usefixtures("intact")
def test_an_upload_that_stalls_ends_when_another_of_its_learner_begins_or_its_round_ends(subject):
    this = trying(subject)

    def stalled():
        stream = this.begin(content=bulk.WHOLE, base=None, norms=[]).send(this.chunks()[0], END)
        assert stream.reply().again  # its header was accepted
        return stream

    streams = [stalled() for _ in range(2)]
    with pytest.raises(UnavailableError, match="CANCELLED"):
        streams[0].reply()
    assert this.whole_upload().reply().done
    with pytest.raises(UnavailableError, match="CANCELLED"):
        streams[1].reply()
    committed(subject.learner, this.pull)
    subject.model.merge(this.pull.fragment, (1.0, this.delta_N))
    late = this.begin(content=bulk.WHOLE, base=None, norms=[])
    assert late.reply().refused == "Aborted"
    assert subject.syncer.status().state == "Training"


@pytest.mark.usefixtures("intact")
def test_a_report_that_was_merged_is_not_merged_again(subject):
    merged = subject.syncer.events("merge")[-1]["members"][0]["step"]
    this = trying(subject)
    stream = this.whole_upload(local_step=merged)
    with contextlib.suppress(UnavailableError):  # the end of the attempt may cut the stream first
        assert stream.reply().refused == "Aborted"


@pytest.mark.usefixtures("intact")
def test_a_learner_that_was_not_asked_is_no_member(subject):
    with ScriptedLearner(subject.syncer, "eu/3") as other:
        other.join()
        this = trying(subject)
        uninvited = other.sent(this.pull, this.delta_N)
        assert this.whole_upload().reply().done
        assert uninvited.reply().refused == "Protocol"
        committed(subject.learner, this.pull)
        subject.model.merge(this.pull.fragment, (1.0, this.delta_N))
        assert [m["learner"] for m in subject.syncer.events("merge")[-1]["members"]] == ["eu/0"]


def request(learner: ScriptedLearner, **fields: object) -> bytes:
    wanted = {
        "epoch": learner.epoch,
        "learner": learner.name,
        "incarnation": learner.incarnation,
        **fields,
    }
    return frames.pack(frames.Kind.HEADER, 0, bulk.DownloadRequest(**wanted).SerializeToString())


DOWNLOADS: dict[str, tuple[type[DilocoError], Callable[[ScriptedLearner], bytes]]] = {
    "unknown fragment": (ProtocolError, lambda x: request(x, fragment=9)),
    "unknown chunk": (ProtocolError, lambda x: request(x, chunks=[99])),
    "unknown chunk of the constants": (
        ProtocolError,
        lambda x: request(x, fragment=2, chunks=[99]),
    ),
    "unknown format": (ProtocolError, lambda x: request(x, format=99)),
    "a round that is over": (UnavailableError, lambda x: request(x, round=10**6, attempt=1)),
    "a syncer that was replaced": (StaleEpochError, lambda x: request(x, epoch=0)),
    "an old incarnation": (StaleIncarnationError, lambda x: request(x, incarnation=0)),
    "noise": (DamagedError, lambda x: frames.pack(frames.Kind.HEADER, 0, b"\xff" * 9)),
    "no envelope": (DamagedError, lambda x: b"hello"),
}


@pytest.mark.usefixtures("intact")
@pytest.mark.parametrize("what", DOWNLOADS)
def test_a_wrong_download_is_refused(subject, what):
    error, ask = DOWNLOADS[what]
    with pytest.raises(error) as seen:
        subject.learner.ask(ask(subject.learner))
    assert type(seen.value) is error


@pytest.mark.usefixtures("intact")
def test_every_line_of_the_log_of_events_is_json(subject):
    for line in (subject.syncer.dir / "events.jsonl").read_text().splitlines():
        assert json.loads(line)["epoch"] == 1
