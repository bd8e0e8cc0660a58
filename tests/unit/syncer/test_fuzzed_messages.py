"""
Whatever a peer sends, it is accepted or refused with a reason: never another exception (a14, a15).

Every message goes as far as it gets: through its parser, admission, engine and merge, as in a process.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from diloco.codec import frames
from diloco.errors import DilocoError
from diloco.model.fragments import Tensor
from diloco.rpc.tensor_info import to_proto
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core import events as ev
from diloco_syncer.rpc import status, telemetry
from diloco_syncer.rpc.receiver import UploadReceiver
from diloco_syncer.rpc.source import open_download
from diloco_syncer.rpc.transfers import unpack
from diloco_testing.learners.scripted import END, thetas_of
from diloco_testing.network.fuzz import wire_bytes
from diloco_testing.properties import examples
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, driven_spec

TENSORS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(4))
SPEC = driven_spec()
FRAGMENTS = SPEC.fragments

HELLO = pb.LearnerMessage(
    hello=pb.Hello(
        job="j", learner="eu/1", region="eu", spec_hash=SPEC.hash, tensors=map(to_proto, TENSORS),
        facts={"restarts": "1"},
    )
)  # fmt: skip
REPORT = pb.LearnerMessage(
    report=pb.Report(
        local_step=1, steps=[1] * FRAGMENTS, tokens=[100] * FRAGMENTS, offers=range(FRAGMENTS),
        total_tokens=100, step_seconds=1.0, loss=2.0, has_loss=True,
    )
)  # fmt: skip
GOODBYE = pb.LearnerMessage(goodbye=pb.Goodbye(reason="SIGTERM"))
EVALUATION = pb.Evaluation(step=1, loss=2.0, detail='{"accuracy": 0.5}')
REGION_FAILURE = pb.RegionFailure(region="eu", reason="LearnersFailed", message="exit code 1")

fuzzed = settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
)


def training() -> tuple[DrivenSyncer, DrivenLearner]:
    """A syncer whose parameters exist, and its learner."""
    syncer = DrivenSyncer(SPEC)
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    learner.initialise(thetas_of(learner))
    return syncer, learner


def alive(syncer: DrivenSyncer, learner: DrivenLearner) -> None:
    """Its decisions continue, and what people and controllers ask is answered."""
    syncer.now += 1.0
    syncer.run(ev.Heartbeat(session=learner.session.number, learner="eu/0"), ev.Tick())
    found = status.reply(syncer.state, syncer.metrics)
    for each in found.learners:
        assert all(math.isfinite(value) for _, value in each.ListFields() if type(value) is float)
    assert pb.StatusReply.FromString(found.SerializeToString()).job == "j"


@fuzzed
@given(first=st.one_of(wire_bytes(HELLO), wire_bytes(REPORT)), fresh=st.booleans())
def test_a_first_message_of_a_session_is_refused_or_joins(first, fresh):
    syncer, learner = (DrivenSyncer(SPEC), None) if fresh else training()
    with contextlib.suppress(DilocoError):
        hello = telemetry.hello(first)
        applicant = telemetry.applicant(hello)
        _ = applicant.model
        session = syncer.coordinator.admit(applicant)
        syncer.run(
            telemetry.joined(hello, session=session.number, incarnation=hello.incarnation or 9)
        )
    if learner is not None:
        alive(syncer, learner)


@fuzzed
@given(
    sent=st.lists(st.one_of(wire_bytes(REPORT), wire_bytes(GOODBYE), wire_bytes(HELLO)), max_size=4)
)
def test_a_message_of_a_session_is_refused_or_counts(sent):
    syncer, learner = training()
    for data in sent:
        with contextlib.suppress(DilocoError):
            event = telemetry.received(
                data, session=learner.session.number, learner="eu/0", fragments=FRAGMENTS
            )
            syncer.run(event)
    alive(syncer, learner)


@fuzzed
@given(
    evaluation=wire_bytes(EVALUATION),
    detail=st.text(alphabet='{}[]":,0123456789eE+-.ntrufalsNaN\\ \ud83d', max_size=40),
)
def test_a_score_is_refused_or_has_finite_numbers(evaluation, detail):
    with contextlib.suppress(DilocoError):
        message = telemetry.parse(evaluation, pb.Evaluation, most=10_000)
        found = telemetry.score(message, steps=1000)
        assert math.isfinite(found.loss)
    with contextlib.suppress(DilocoError):
        found = telemetry.score(
            pb.Evaluation(step=1, loss=1.0, detail=detail.encode("utf-8", "replace").decode()),
            steps=2,
        )
        assert all(math.isfinite(x) for x in found.detail.values() if isinstance(x, float))


@fuzzed
@given(
    failure=wire_bytes(pb.Failure(reason="DeadlineExceeded", message="x")),
    region=wire_bytes(REGION_FAILURE), request=wire_bytes(pb.StatusRequest()),
)  # fmt: skip
def test_what_operators_send_is_refused_or_short(failure, region, request):
    with contextlib.suppress(DilocoError):
        reason, message = telemetry.failure(telemetry.parse(failure, pb.Failure, most=10_000))
        assert len(reason) <= telemetry.MAX_REASON
        assert len(message) <= telemetry.MAX_MESSAGE
    with contextlib.suppress(DilocoError):
        telemetry.region_failure(telemetry.parse(region, pb.RegionFailure, most=10_000), {"eu": 1})
    with contextlib.suppress(DilocoError):
        telemetry.parse(request, pb.StatusRequest, most=10_000)


@fuzzed
@given(data=st.data())
def test_an_upload_is_refused_or_counts(data):
    syncer, learner = training()
    [pull] = learner.step()
    fragment = learner.layout.fragments[pull.fragment]
    honest = learner.header(pull, norms=[1.0] * len(fragment.slots))
    header = data.draw(wire_bytes(honest))
    chunks = st.one_of(
        st.binary(max_size=100),
        st.builds(
            frames.pack, st.sampled_from(frames.Kind), st.integers(0, 3),
            st.one_of(st.binary(max_size=64), st.just(np.ones(fragment.elements, np.float32).tobytes())),
        ),
        st.just(END),
        st.none(),
    )  # fmt: skip
    receiver = UploadReceiver(
        syncer, syncer.initial, authorise=lambda learner: None, cancel=lambda: None,
        refuse=lambda learner, error: None,
    )  # fmt: skip
    first = data.draw(
        st.one_of(st.just(frames.pack(frames.Kind.HEADER, 0, header)), st.just(header))
    )
    for message in [first, *data.draw(st.lists(chunks, max_size=4))]:
        if receiver.waiting is not None:
            syncer.run()
            receiver.resume(syncer.now)
        if receiver.waiting is None:
            receiver.receive(message, syncer.now)
    receiver.lost()
    syncer.run()
    alive(syncer, learner)


@fuzzed
@given(data=st.data())
def test_a_request_for_a_download_is_refused_or_answered(data):
    syncer, learner = training()
    honest = bulk.DownloadRequest(
        epoch=1, learner="eu/0", incarnation=learner.incarnation, fragment=0, format=bulk.BF16
    )
    request = data.draw(wire_bytes(honest))
    with contextlib.suppress(DilocoError):
        source = open_download(
            syncer, unpack(frames.pack(frames.Kind.HEADER, 0, request), bulk.DownloadRequest)
        )
        for _ in range(50):
            frame = source.next_frame(syncer.now)
            if frame is None:
                break
            frames.unpack(frame)
    alive(syncer, learner)
