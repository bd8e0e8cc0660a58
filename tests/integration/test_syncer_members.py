"""Who may join the real syncer, who is refused and why, and what becomes of a round when a member is lost."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from diloco.errors import (
    ConfigError,
    DilocoError,
    MismatchError,
    ProtocolError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.fragments import Tensor
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_testing.real_syncer import RealSyncer, make_spec, until
from diloco_testing.scripted_learner import (
    END,
    TENSORS,
    Model,
    ScriptedLearner,
    chunk,
    committed,
    encoded,
    good_round,
    random_delta,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STALL_SECONDS = 1.5


def thetas_of(learner: ScriptedLearner) -> list[np.ndarray]:
    return [random_delta(f, 50 + f.index, size=1.0) for f in learner.layout.fragments]


@pytest.fixture(scope="module")
def syncer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    with RealSyncer(folder, make_spec(), "--stall-seconds", str(STALL_SECONDS)) as running:
        with ScriptedLearner(running, "us/0") as first:
            first.join().initialise(thetas_of(first))
            first.expect("ready")
        yield running


@pytest.fixture
def one(syncer):
    with ScriptedLearner(syncer, "eu/0") as learner:
        learner.join()
        learner.local_step += 1000
        yield learner
    until(
        lambda: {x.state for x in syncer.status().learners} == {"Gone"}, saying="everybody is gone"
    )


def model_now(learner: ScriptedLearner) -> Model:
    """Tests that use it look at one round; the momentum before it counts, so it is measured by it."""
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
def test_another_model_is_refused_with_the_difference(syncer, one, model):
    tensors, said = MODELS[model]
    with ScriptedLearner(syncer, "eu/1", tensors=tensors) as other:
        with pytest.raises(MismatchError, match="trains another model") as seen:
            other.join()
        assert said in str(seen.value)
    assert said in syncer.events("refuse")[-1]["detail"]
    good_round(one)


HELLOS: dict[str, tuple[type[DilocoError], dict[str, object], str]] = {
    "another job": (MismatchError, {"job": "k"}, "is of job 'k', this syncer runs 'j'"),
    "another spec": (MismatchError, {"spec_hash": "abc"}, "runs spec abc, this syncer runs"),
    "unknown region": (UnknownLearnerError, {"learner": "as/0", "region": "as"}, "'as/0'"),
    "another region's name": (UnknownLearnerError, {"region": "us"}, "'eu/1'"),
    "no index": (UnknownLearnerError, {"learner": "eu/x"}, "'eu/x'"),
    "a path": (UnknownLearnerError, {"learner": "eu/../../0"}, "'eu/../../0'"),
    "no name": (UnknownLearnerError, {"learner": "", "region": ""}, "''"),
    "a name twice": (ConfigError, {"tensors": [pb.TensorInfo(name="a", shape=[2])] * 2}, "twice"),
    "too few tensors": (ConfigError, {"tensors": [pb.TensorInfo(name="a")]}, "fragments: 2"),
}


@pytest.mark.parametrize("hello", HELLOS)
def test_a_hello_that_does_not_belong_here_is_refused(syncer, one, hello):
    error, changes, said = HELLOS[hello]
    refused = len(syncer.events("refuse"))
    with ScriptedLearner(syncer, "eu/1") as other:
        with pytest.raises(error) as seen:
            other.join(**changes)
        assert type(seen.value) is error
        assert said in str(seen.value)
    [line] = syncer.events("refuse")[refused:]
    assert (line["reason"], said in line["detail"]) == (error.reason, True)
    good_round(one)


def test_the_status_names_who_runs_another_spec_until_it_comes_with_ours(syncer, one):
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
def test_a_session_that_does_not_begin_with_hello_is_refused(syncer, one, first):
    with ScriptedLearner(syncer, "eu/1") as other:
        other.begin(first)
        with pytest.raises(ProtocolError, match="begins with Hello"):
            other.expect("welcome")
    good_round(one)


# ---------------------------------------------------------------- lives


def test_a_successor_replaces_its_predecessor_whose_uploads_count_no_more(syncer, one):
    pull = one.pull()
    fragment = one.layout.fragments[pull.fragment]
    payloads, _, norms = encoded(fragment, random_delta(fragment, 1))
    stream = one.stream(one.header(pull, norms=norms)).send(chunk(0, payloads[0]), END)
    assert stream.reply().again
    before = one.theta(pull.fragment)
    with ScriptedLearner(syncer, "eu/0") as heir:
        heir.join()
        assert heir.incarnation == one.incarnation + 1
        with pytest.raises(StaleIncarnationError, match="joined again as incarnation"):
            one.expect("complete", seconds=10)
        # The upload that was on its way, and one that begins now.
        stream.send(*(chunk(i, p) for i, p in enumerate(payloads)), END)
        with pytest.raises(UnavailableError):
            stream.reply()
        assert one.upload(pull, random_delta(fragment, 1)).refused == "StaleIncarnation"
        with pytest.raises(StaleIncarnationError):
            one.theta(0)
        with (
            ScriptedLearner(syncer, "eu/0") as zombie,
            pytest.raises(StaleIncarnationError, match="this process must stop"),
        ):
            zombie.join(incarnation=one.incarnation)
        np.testing.assert_array_equal(heir.theta(pull.fragment), before)
        heir.local_step += 10
        good_round(heir)
        [member] = syncer.events("merge")[-1]["members"]
        assert member["incarnation"] == heir.incarnation
    assert {"StaleIncarnation"} == {x["reason"] for x in syncer.events("refuse")[-2:]}
    syncer.assert_audit()


def test_a_process_that_lost_its_stream_keeps_its_incarnation(syncer, one):
    good_round(one)
    with ScriptedLearner(syncer, "eu/0") as again:
        again.join(incarnation=one.incarnation, local_step=one.local_step)
        assert again.incarnation == one.incarnation
        assert again.local_step == one.local_step
        good_round(again)
    syncer.assert_audit()


@pytest.mark.parametrize(("said", "counted"), [("3", 3), ("", 0), ("-1", 0), ("9" * 30, 0)])
def test_status_says_how_often_a_learner_was_restarted(syncer, one, said, counted):
    with ScriptedLearner(syncer, "eu/1") as other:
        other.join(facts={"restarts": said})
        found = {x.name: x.restarts for x in syncer.status().learners}
        assert (found["eu/1"], found["eu/0"]) == (counted, 0)


# ---------------------------------------------------------------- members that are lost


@dataclass
class Pair:
    """A learner that does everything right, and what Θ has to be."""

    syncer: RealSyncer
    one: ScriptedLearner
    model: Model

    def pulled(self, two: ScriptedLearner) -> pb.Pull:
        """Both report and are pulled together: a learner that never reported is not waited for."""
        two.step()
        until(
            lambda: self.syncer.status().learners[1].local_step == two.local_step,
            saying="eu/1 reports",
        )
        self.one.step()
        pull = self.one.expect("pull")
        assert two.expect("pull") == pull
        return pull


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The grace window is as long as a step, and a step is said to take a minute: rounds wait for everybody."""
    folder, spec = tmp_path_factory.mktemp("pair"), make_spec(grace_max_steps=1.0)
    with (
        RealSyncer(folder, spec, "--stall-seconds", str(STALL_SECONDS)) as running,
        ScriptedLearner(running, "eu/0") as one,
    ):
        one.step_seconds = 60.0
        one.join().initialise(thetas_of(one))
        model = Model(one.layout, spec, thetas_of(one))
        good_round(one, model)
        yield Pair(running, one, model)


@pytest.fixture
def two(pair):
    with ScriptedLearner(pair.syncer, "eu/1") as learner:
        learner.step_seconds = 60.0
        learner.join()
        yield learner
    until(lambda: pair.syncer.status().learners[1].state == "Gone", saying="eu/1 is gone")


LOSSES = {
    "its stream is cut": ("Protocol", "Damaged"),
    "its process is gone": ("Protocol", "Damaged"),  # or none: its session may end first
    "it says goodbye": (),
    "it stops sending": ("Stalled",),
    "it never starts to send": ("Stalled",),
    "it sends NaN": ("NotFinite",),
    "it ends early": ("Damaged",),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_member_that_is_lost_on_the_way_costs_only_its_own_part(pair, two, loss):
    """The round is tried again with the other member: what it commits is the other's delta alone."""
    one, refused = pair.one, len(pair.syncer.events("refuse"))
    pull = pair.pulled(two)
    fragment = one.layout.fragments[pull.fragment]
    mine_N = random_delta(fragment, 1)
    payloads, _, norms = encoded(fragment, random_delta(fragment, 2))
    upload = one.sent(pull, mine_N)
    stream = two.stream(two.header(pull, norms=norms))
    if loss != "it never starts to send":
        stream.send(chunk(0, payloads[0]), END)
        assert stream.reply().again  # now it is in the middle of the merge
    if loss == "its stream is cut":
        stream.cancel()
    elif loss == "its process is gone":
        two.__exit__()
    elif loss == "it says goodbye":
        two.send(goodbye=pb.Goodbye(reason="Closed"))
    elif loss == "it ends early":
        stream.close()
    elif loss == "it sends NaN":
        nan = np.float32(np.nan).tobytes()
        stream.send(*(chunk(i, nan + p[4:]) for i, p in enumerate(payloads) if i), END)
    again = one.expect("pull", seconds=10)
    assert (again.round, again.attempt) == (pull.round, pull.attempt + 1)
    assert one.upload(again, mine_N).done
    committed(one, again)
    [member] = pair.syncer.events("merge")[-1]["members"]
    assert member["learner"] == "eu/0"
    pair.model.merge(fragment.index, (1.0, mine_N))
    pair.model.check(one)
    with contextlib.suppress(UnavailableError):  # the end of the attempt may cut the stream first
        assert upload.reply().done or True
    lines = pair.syncer.events("refuse")[refused:]
    if loss != "its process is gone":
        assert len(lines) == bool(LOSSES[loss])
    assert all(x["learner"] == "eu/1" for x in lines)
    assert all(x["reason"] in LOSSES[loss] for x in lines)
    pair.syncer.assert_audit()


def test_a_member_that_is_slow_but_moves_is_waited_for(pair, two):
    """Longer than the limit for one that is stalled, chunk by chunk."""
    pull = pair.pulled(two)
    fragment = pair.one.layout.fragments[pull.fragment]
    deltas = [random_delta(fragment, i) for i in range(2)]
    upload = pair.one.sent(pull, deltas[0])
    payloads, _, norms = encoded(fragment, deltas[1])
    stream = two.stream(two.header(pull, norms=norms))
    for message in (*(chunk(i, p) for i, p in enumerate(payloads)), END):
        time.sleep(0.5 * STALL_SECONDS)
        stream.send(message)
    assert stream.reply().done
    assert upload.reply().done
    committed(pair.one, pull)
    assert len(pair.syncer.events("merge")[-1]["members"]) == 2
    pair.model.merge(fragment.index, (1.0, deltas[0]), (1.0, deltas[1]))
    pair.model.check(pair.one)


def test_a_silent_learner_is_gone_however_busy_the_others_are(pair, two):
    """Its stream lives on (a stopped process); the reports of the others come faster than the engine sleeps."""
    two.step()
    until(lambda: pair.syncer.status().learners[1].state == "Training", saying="eu/1 trains")
    two.beating.clear()
    deadline = time.monotonic() + 15
    while not [x for x in pair.syncer.events("leave") if x["reason"] == "HeartbeatLate"]:
        assert time.monotonic() < deadline, "eu/1 says nothing, and nobody notices"
        pair.one.step()
        time.sleep(0.05)
    with pytest.raises(UnavailableError, match="nothing heard from eu/1"):
        two.expect("complete")
    pull = pair.one.expect("pull")
    delta_N = random_delta(pair.one.layout.fragments[pull.fragment], 5)
    assert pair.one.upload(pull, delta_N).done
    committed(pair.one, pull)
    pair.model.merge(pull.fragment, (1.0, delta_N))


# ---------------------------------------------------------------- Θ^(0)


@pytest.fixture
def fresh(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as running:
        yield running


def test_initial_parameters_are_taken_whole_from_the_one_who_was_asked(fresh):
    """Parts of two learners or two lives are never mixed; what is wrong with a part is said."""
    with ScriptedLearner(fresh, "eu/0") as one, ScriptedLearner(fresh, "eu/1") as two:
        one.join()
        two.join()
        one.expect("initialise")
        with pytest.raises(UnavailableError, match="no parameters yet"):
            one.theta(0)
        wrong = [t + 1 for t in thetas_of(one)]
        mine = {"content": bulk.INITIAL, "norms": [], "base": None}
        where = pb.Pull(fragment=0)
        assert one.upload(where, wrong[0], **mine).done
        assert two.upload(where, wrong[0], **mine).refused == "Protocol"
        payloads, _, _ = encoded(one.layout.fragments[0], wrong[0])
        nan = [np.float32(np.nan).tobytes() + p[4:] for p in payloads]
        stream = one.stream(one.header(where, **mine)).send(*map(chunk, range(len(nan)), nan), END)
        assert stream.reply().refused == "NotFinite"
        assert one.constants(b"", elements=1 << 60, chunks=1 << 31).refused == "Protocol"
        assert one.constants(b"noise").refused == "Protocol"
        late = one.stream(one.header(pb.Pull(fragment=1), **mine))
        late.send(
            *(chunk(i, p) for i, p in enumerate(encoded(one.layout.fragments[1], wrong[1])[0]))
        )
        # Its next life begins anew, while a part of the last one is still on its way.
        with ScriptedLearner(fresh, "eu/0") as heir:
            heir.join()
            heir.initialise(thetas_of(heir)[:1])
            late.send(END)
            assert late.reply().refused == "StaleIncarnation"
            heir.initialise(thetas_of(heir), asked=False)
            heir.expect("ready")
            for index, theta_N in enumerate(thetas_of(heir)):
                np.testing.assert_array_equal(two.theta(index), theta_N)
    assert fresh.status().state in ("Waiting", "Training")
    assert [x["reason"] for x in fresh.events("refuse")] == [
        "Protocol", "NotFinite", "Protocol", "Protocol", "StaleIncarnation",
    ]  # fmt: skip
