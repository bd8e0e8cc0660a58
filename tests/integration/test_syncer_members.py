"""Which learners the real syncer admits or refuses and why, and how a round continues when a member is lost."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from diloco.errors import (
    ConfigError,
    DilocoError,
    MismatchError,
    NotFiniteError,
    ProtocolError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.model.fragments import Tensor
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core.engine import HEARTBEAT_SECONDS, LATE_HEARTBEATS
from diloco_testing.learners.scripted import (
    END,
    TENSORS,
    Model,
    ScriptedLearner,
    chunk,
    committed,
    encoded,
    good_round,
    random_delta,
    thetas_of,
)
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow

STEP_SECONDS = 4.0
"""Rounds wait for a report about as long, and twice as long for an upload (core/upload_limits.py)."""


@pytest.fixture(scope="module")
def syncer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    with RealSyncer(folder, make_spec()) as running:
        with ScriptedLearner(running, "us/0") as first:
            first.join().initialise(thetas_of(first))
            first.expect("ready")
        yield running


@pytest.fixture
def learner(syncer):
    with ScriptedLearner(syncer, "eu/0") as learner:
        learner.join()
        learner.local_step += 1000
        yield learner
    until(
        lambda: {x.state for x in syncer.status().learners} == {"Gone"},
        expected="all learners are gone",
    )


def model_now(learner: ScriptedLearner) -> Model:
    """Tests that use it check one round, and take the momentum before it into account."""
    return Model(learner.layout, learner.spec, [learner.theta(p) for p in range(2)])


# ---------------------------------------------------------------- who may join


def changed(tensors: tuple[Tensor, ...], name: str, **how: object) -> tuple[Tensor, ...]:
    return tuple(replace(t, **how) if t.name == name else t for t in tensors)


MODELS: dict[str, tuple[tuple[Tensor, ...], str]] = {
    "a tensor is missing": (TENSORS[1:], "parameter a is missing"),
    "a tensor too many": (
        (*TENSORS, Tensor(name="z", shape=(3,), dtype="float32")),
        "parameter z is not part of the job's model",
    ),
    "another shape": (
        changed(TENSORS, "d", shape=(334,)),
        "parameter d has shape [334] instead of [333]",
    ),
    "another dtype": (
        changed(TENSORS, "d", dtype="bfloat16"),
        "parameter d has dtype bfloat16 instead of float32",
    ),
    "no embedding": (changed(TENSORS, "emb", embedding=False), "parameter emb is tied or used as"),
}


@pytest.mark.parametrize("model", MODELS)
def test_another_model_is_refused_with_the_difference(syncer, learner, model):
    tensors, message = MODELS[model]
    with ScriptedLearner(syncer, "eu/1", tensors=tensors) as other:
        with pytest.raises(MismatchError, match="trains a different model") as seen:
            other.join()
        assert message in str(seen.value)
    assert message in syncer.events("refuse")[-1]["detail"]
    good_round(learner)


HELLOS: dict[str, tuple[type[DilocoError], dict[str, object], str]] = {
    "another job": (MismatchError, {"job": "k"}, "belongs to job 'k', but this syncer runs 'j'"),
    "another spec": (MismatchError, {"spec_hash": "abc"}, "runs spec abc, this syncer runs"),
    "unknown region": (
        UnavailableError,
        {"learner": "as/0", "region": "as"},
        "as/0 belongs to region as",
    ),
    "another region's name": (UnknownLearnerError, {"region": "us"}, "'eu/1'"),
    "no index": (UnknownLearnerError, {"learner": "eu/x"}, "'eu/x'"),
    "a path": (UnknownLearnerError, {"learner": "eu/../../0"}, "'eu/../../0'"),
    "no name": (UnknownLearnerError, {"learner": "", "region": ""}, "''"),
    "a name twice": (
        ConfigError,
        {"tensors": [pb.TensorInfo(name="a", shape=[2])] * 2},
        "duplicate",
    ),
    "too few tensors": (ConfigError, {"tensors": [pb.TensorInfo(name="a")]}, "fragments: 2"),
}


@pytest.mark.parametrize("hello", HELLOS)
def test_a_hello_that_does_not_belong_here_is_refused(syncer, learner, hello):
    error, changes, message = HELLOS[hello]
    refused = len(syncer.events("refuse"))
    with ScriptedLearner(syncer, "eu/1") as other:
        with pytest.raises(error) as seen:
            other.join(**changes)
        assert type(seen.value) is error
        assert message in str(seen.value)
    [line] = syncer.events("refuse")[refused:]
    assert (line["reason"], message in line["detail"]) == (error.reason, True)
    good_round(learner)


def test_the_status_names_learners_with_another_spec_until_they_join_with_that_of_the_job(
    syncer, learner
):
    def differing():
        return [(x.learner, x.spec_hash) for x in syncer.status().differing]

    with ScriptedLearner(syncer, "eu/1") as other:
        with pytest.raises(MismatchError):
            other.join(spec_hash="abc")
        assert differing() == [("eu/1", "abc")]
    with ScriptedLearner(syncer, "eu/1") as other:
        other.join()
        assert differing() == []


@pytest.mark.parametrize(
    "first", [pb.LearnerMessage(heartbeat=pb.Heartbeat()), pb.LearnerMessage()]
)
def test_a_session_that_does_not_begin_with_hello_is_refused(syncer, learner, first):
    with ScriptedLearner(syncer, "eu/1") as other:
        other.begin(first)
        with pytest.raises(ProtocolError, match="begins with Hello"):
            other.expect("welcome")
    good_round(learner)


# ---------------------------------------------------------------- incarnations


def test_a_successor_replaces_its_predecessor_whose_uploads_count_no_more(syncer, learner):
    pull = learner.pull()
    fragment = learner.layout.fragments[pull.fragment]
    payloads, _, norms = encoded(fragment, random_delta(fragment, 1))
    stream = learner.stream(learner.header(pull, norms=norms)).send(chunk(0, payloads[0]), END)
    assert stream.reply().again
    before = learner.theta(pull.fragment)
    with ScriptedLearner(syncer, "eu/0") as successor:
        successor.join()
        assert successor.incarnation == learner.incarnation + 1
        with pytest.raises(StaleIncarnationError, match="joined again as incarnation"):
            learner.expect("complete", seconds=60)
        # The upload in progress, and an upload that begins now.
        stream.send(*(chunk(i, p) for i, p in enumerate(payloads)), END)
        with pytest.raises(UnavailableError):
            stream.reply()
        assert learner.upload(pull, random_delta(fragment, 1)).refused == "StaleIncarnation"
        with pytest.raises(StaleIncarnationError):
            learner.theta(0)
        with (
            ScriptedLearner(syncer, "eu/0") as replaced,
            pytest.raises(StaleIncarnationError, match="this process must stop"),
        ):
            replaced.join(incarnation=learner.incarnation)
        np.testing.assert_array_equal(successor.theta(pull.fragment), before)
        successor.local_step += 10
        good_round(successor)
        until(  # the line is written in the background
            lambda: (
                syncer.events("merge")[-1]["members"][0]["incarnation"] == successor.incarnation
            ),
            expected="a merge of the successor",
        )
    assert {"StaleIncarnation"} == {x["reason"] for x in syncer.events("refuse")[-2:]}
    syncer.assert_audit()


def test_a_process_that_lost_its_stream_keeps_its_incarnation(syncer, learner):
    good_round(learner)
    with ScriptedLearner(syncer, "eu/0") as again:
        again.join(incarnation=learner.incarnation, local_step=learner.local_step)
        assert again.incarnation == learner.incarnation
        assert again.local_step == learner.local_step
        good_round(again)
    syncer.assert_audit()


@pytest.mark.parametrize(("stated", "counted"), [("3", 3), ("", 0), ("-1", 0), ("9" * 30, 0)])
def test_the_status_counts_the_restarts_of_a_learner(syncer, learner, stated, counted):
    with ScriptedLearner(syncer, "eu/1") as other:
        other.join(facts={"restarts": stated})
        found = {x.name: x.restarts for x in syncer.status().learners}
        assert (found["eu/1"], found["eu/0"]) == (counted, 0)


# ---------------------------------------------------------------- members that are lost


@dataclass
class Pair:
    """A learner that does everything right, and what Θ has to be."""

    syncer: RealSyncer
    learner: ScriptedLearner
    model: Model

    def pulled(self, second: ScriptedLearner) -> pb.Pull:
        """Both report and are pulled together: a learner that never reported is not waited for."""
        second.step()
        until(
            lambda: self.syncer.status().learners[1].local_step == second.local_step,
            expected="eu/1 reports",
        )
        self.readmit(second)
        self.learner.step()
        pull = self.learner.expect("pull")
        assert second.expect("pull") == pull
        return pull

    def readmit(self, second: ScriptedLearner) -> None:
        """After a test in which eu/1 did not deliver, it is probed first."""
        while self.syncer.status().learners[1].state == "Ejected":
            second.step()
            probe = second.expect("pull")
            assert probe.probe
            delta_N = random_delta(second.layout.fragments[probe.fragment], 9)
            assert second.upload(probe, delta_N).done
            until(
                lambda: self.syncer.status().learners[1].state == "Training", expected="readmitted"
            )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The grace window is as long as a step, and learners report long steps: rounds wait for all of them."""
    folder, spec = tmp_path_factory.mktemp("pair"), make_spec(grace_max_steps=1.0)
    with (
        RealSyncer(folder, spec) as running,
        ScriptedLearner(running, "eu/0") as learner,
    ):
        learner.step_seconds = STEP_SECONDS
        learner.join().initialise(thetas_of(learner))
        model = Model(learner.layout, spec, thetas_of(learner))
        good_round(learner, model)
        yield Pair(running, learner, model)


@pytest.fixture
def second(pair):
    with ScriptedLearner(pair.syncer, "eu/1") as learner:
        learner.step_seconds = STEP_SECONDS
        learner.join()
        yield learner
    until(lambda: pair.syncer.status().learners[1].state == "Gone", expected="eu/1 is gone")


LOSSES = {
    "its stream is cut": ("StreamBroken",),
    "its process is gone": ("StreamBroken",),  # or none: its session may end first
    "it sends Goodbye": (),
    "it stops sending": ("Stalled",),
    "it never starts to send": ("Stalled",),
    "it sends NaN": ("NotFinite",),
    "it ends early": ("StreamBroken",),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_member_that_is_lost_on_the_way_costs_only_its_own_part(pair, second, loss):
    """The round is tried again with the other member: what it commits is the other's delta alone."""
    learner, refused = pair.learner, len(pair.syncer.events("refuse"))
    pull = pair.pulled(second)
    ejected = len(pair.syncer.events("eject"))
    fragment = learner.layout.fragments[pull.fragment]
    mine_N = random_delta(fragment, 1)
    payloads, _, norms = encoded(fragment, random_delta(fragment, 2))
    upload = learner.sent(pull, mine_N)
    stream = second.stream(second.header(pull, norms=norms))
    if loss != "it never starts to send":
        stream.send(chunk(0, payloads[0]), END)
        assert stream.reply().again  # now it is in the middle of the merge
    if loss == "its stream is cut":
        stream.cancel()
    elif loss == "its process is gone":
        second.__exit__()
    elif loss == "it sends Goodbye":
        second.send(goodbye=pb.Goodbye(reason="Closed"))
    elif loss == "it ends early":
        stream.close()
    elif loss == "it sends NaN":
        nan = np.float32(np.nan).tobytes()
        stream.send(*(chunk(i, nan + p[4:]) for i, p in enumerate(payloads) if i), END)
    again = learner.expect("pull", seconds=60)
    assert (again.round, again.attempt) == (pull.round, pull.attempt + 1)
    assert learner.upload(again, mine_N).done
    committed(learner, again)
    [member] = pair.syncer.events("merge")[-1]["members"]
    assert member["learner"] == "eu/0"
    pair.model.merge(fragment.index, (1.0, mine_N))
    pair.model.check(learner)
    with contextlib.suppress(UnavailableError):  # the end of the attempt may cut the stream first
        assert upload.reply().done or True
    lines = pair.syncer.events("refuse")[refused:]
    if loss != "its process is gone":
        assert len(lines) == bool(LOSSES[loss])
    assert all(x["learner"] == "eu/1" for x in lines)
    assert all(x["reason"] in LOSSES[loss] for x in lines)
    at_fault = set(LOSSES[loss]) - {"StreamBroken"}
    assert [x["reason"] for x in pair.syncer.events("eject")[ejected:]] == list(at_fault)
    assert "cannot be processed" not in pair.syncer.output()
    pair.syncer.assert_audit()


def test_a_round_waits_for_a_member_that_is_slow_but_makes_progress(pair, second):
    """Chunk by chunk, for as long as the rounds in flight hide."""
    pull = pair.pulled(second)
    fragment = pair.learner.layout.fragments[pull.fragment]
    deltas = [random_delta(fragment, i) for i in range(2)]
    upload = pair.learner.sent(pull, deltas[0])
    payloads, _, norms = encoded(fragment, deltas[1])
    stream = second.stream(second.header(pull, norms=norms))
    for message in (*(chunk(i, p) for i, p in enumerate(payloads)), END):
        time.sleep(0.15 * STEP_SECONDS)
        stream.send(message)
    assert stream.reply().done
    assert upload.reply().done
    committed(pair.learner, pull)
    assert len(pair.syncer.events("merge")[-1]["members"]) == 2
    pair.model.merge(fragment.index, (1.0, deltas[0]), (1.0, deltas[1]))
    pair.model.check(pair.learner)


def test_a_silent_learner_is_removed_however_busy_the_others_are(pair, second):
    """Its stream stays open (a stopped process); reports of the others arrive faster than the engine sleeps."""
    second.step()
    until(lambda: pair.syncer.status().learners[1].state == "Training", expected="eu/1 trains")
    second.beating.clear()
    deadline = time.monotonic() + 15
    while not [x for x in pair.syncer.events("leave") if x["reason"] == "HeartbeatLate"]:
        assert time.monotonic() < deadline, "eu/1 is silent, and the syncer does not notice"
        pair.learner.step()
        time.sleep(0.05)
    with pytest.raises(UnavailableError, match="nothing received from eu/1"):
        second.expect("complete")
    pull = pair.learner.expect("pull")
    delta_N = random_delta(pair.learner.layout.fragments[pull.fragment], 5)
    assert pair.learner.upload(pull, delta_N).done
    committed(pair.learner, pull)
    pair.model.merge(pull.fragment, (1.0, delta_N))


def test_10_a_syncer_that_stood_still_drops_no_learner_and_loses_no_upload(tmp_path):
    """SIGSTOP for longer than the heartbeats of a learner may be late."""
    with (
        RealSyncer(tmp_path, make_spec(learners={"eu": 3})) as stopped,
        contextlib.ExitStack() as all_,
    ):
        learners = [all_.enter_context(ScriptedLearner(stopped, f"eu/{i}")) for i in range(3)]
        learners[0].join().initialise(thetas_of(learners[0]))
        for learner in learners[1:]:
            learner.join().expect("ready")
        pull = learners[0].pull()
        fragment = learners[0].layout.fragments[pull.fragment]
        payloads, _, norms = encoded(fragment, random_delta(fragment, 1))
        upload = learners[0].stream(learners[0].header(pull, norms=norms))
        assert stopped.process is not None
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(HEARTBEAT_SECONDS * LATE_HEARTBEATS + 2)
            upload.send(*(chunk(i, payload) for i, payload in enumerate(payloads)), END)
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        assert upload.reply().done
        committed(learners[0], pull)
        assert stopped.events("pause")
        assert not stopped.events("leave")
        assert [m["step"] for m in stopped.events("merge")] == [pull.round]


# ---------------------------------------------------------------- Θ^(0)


@pytest.fixture
def fresh(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as running:
        yield running


def test_a_learner_whose_initial_parameters_are_not_finite_is_refused_and_the_next_is_asked(fresh):
    with ScriptedLearner(fresh, "eu/0") as learner, ScriptedLearner(fresh, "eu/1") as second:
        learner.join()
        second.join()
        learner.expect("initialise")
        payloads, _, _ = encoded(learner.layout.fragments[0], thetas_of(learner)[0])
        nan = [np.float32(np.nan).tobytes() + p[4:] for p in payloads]
        header = learner.header(pb.Pull(fragment=0), content=bulk.INITIAL, norms=[], base=None)
        stream = learner.stream(header).send(*map(chunk, range(len(nan)), nan), END)
        assert stream.reply().refused == "NotFinite"
        with pytest.raises(NotFiniteError, match="NaN or Inf"):
            learner.expect("ready")
        second.initialise(thetas_of(second))
        second.expect("ready")


def test_initial_parameters_come_completely_from_the_learner_that_was_asked(fresh):
    """Parts of two learners or two incarnations are never mixed; every refusal has a reason."""
    with ScriptedLearner(fresh, "eu/0") as learner, ScriptedLearner(fresh, "eu/1") as second:
        learner.join()
        second.join()
        learner.expect("initialise")
        with pytest.raises(UnavailableError, match="no parameters yet"):
            learner.theta(0)
        wrong = [t + 1 for t in thetas_of(learner)]
        mine = {"content": bulk.INITIAL, "norms": [], "base": None}
        where = pb.Pull(fragment=0)
        assert learner.upload(where, wrong[0], **mine).done
        assert second.upload(where, wrong[0], **mine).refused == "Protocol"
        assert learner.constants(b"", elements=1 << 60, chunks=1 << 31).refused == "Protocol"
        assert learner.constants(b"noise").refused == "Protocol"
        late = learner.stream(learner.header(pb.Pull(fragment=1), **mine))
        late.send(
            *(chunk(i, p) for i, p in enumerate(encoded(learner.layout.fragments[1], wrong[1])[0]))
        )
        # It restarts from the beginning while a part of the previous upload is still on its way.
        with ScriptedLearner(fresh, "eu/0") as successor:
            successor.join()
            successor.initialise(thetas_of(successor)[:1])
            late.send(END)
            with pytest.raises(UnavailableError, match="CANCELLED"):
                late.reply()
            assert (
                learner.upload(pb.Pull(fragment=1), wrong[1], **mine).refused == "StaleIncarnation"
            )
            successor.initialise(thetas_of(successor), asked=False)
            successor.expect("ready")
            for index, theta_N in enumerate(thetas_of(successor)):
                np.testing.assert_array_equal(second.theta(index), theta_N)
    assert fresh.status().state in ("Waiting", "Training")
    assert [x["reason"] for x in fresh.events("refuse")] == [
        "Protocol", "Protocol", "Protocol", "StaleIncarnation",
    ]  # fmt: skip
