"""The real syncer process, with scripted learners: a job from Hello to committed results."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from diloco.codec import formats
from diloco.model.fragments import CHUNK, Tensor, cut
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
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
)  # fmt: skip
from diloco_testing.syncers.process import RealSyncer, make_spec

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("merge", ["Radial", "Average"])
def test_from_hello_to_committed_results_equal_to_float64(tmp_path, merge):
    spec = make_spec(merge=merge, quorum=2)
    with RealSyncer(tmp_path, spec) as syncer, ScriptedLearner(syncer, "eu/0") as learner:
        learner.join()
        assert (learner.epoch, learner.incarnation, learner.welcome.use_checkpoint) == (1, 1, False)
        thetas = thetas_of(learner)
        learner.initialise(thetas)
        assert [(v.epoch, v.step) for v in learner.expect("ready").versions] == [(1, 0), (1, 0)]
        assert set(learner.expect("open").fragments) == {0, 1}
        for fragment, theta_N in enumerate(thetas):
            np.testing.assert_array_equal(learner.theta(fragment), theta_N)
        model = Model(learner.layout, spec, thetas)
        with ScriptedLearner(syncer, "us/0") as other:
            other.join()
            other.expect("ready")
            for number in range(4):  # every fragment twice: momentum counts
                learner.step(steps=2, tokens=300)
                other.step()
                pulls = [learner.expect("pull"), other.expect("pull")]
                assert pulls[0] == pulls[1]
                fragment = learner.layout.fragments[pulls[0].fragment]
                deltas = [random_delta(fragment, 10 * number + i) for i in range(2)]
                streams = [
                    learner.sent(pulls[0], deltas[0], steps=2, tokens=300),
                    other.sent(pulls[1], deltas[1], steps=1, tokens=100),
                ]
                assert all(stream.reply().done for stream in streams)
                header = committed(learner, pulls[0])
                assert committed(other, pulls[1]).version == header.version
                assert (header.version.epoch, header.version.step) == (1, number + 1)
                model.merge(fragment.index, (300**2 / 2, deltas[0]), (100**2, deltas[1]))
                model.check(other)
        last = syncer.events("merge")[-1]
        assert [m["weight"] for m in last["members"]] == [45000.0, 10000.0]
        syncer.assert_audit()


@pytest.mark.parametrize(("fmt", "share"), [("BF16", 2**-8), ("Int8", 0.02), ("Int4", 0.2)])
def test_a_smaller_wire_format_loses_no_more_than_it_must(tmp_path, fmt, share):
    spec = make_spec(wire_up=fmt, wire_down="BF16" if fmt == "BF16" else "FP32")
    with RealSyncer(tmp_path, spec) as syncer, ScriptedLearner(syncer) as learner:
        learner.join()
        thetas = thetas_of(learner)
        learner.initialise(thetas)
        model, exact = Model(learner.layout, spec, thetas), Model(learner.layout, spec, thetas)
        pull = learner.pull()
        fragment = learner.layout.fragments[pull.fragment]
        delta_N = random_delta(fragment, 1)
        assert learner.upload(pull, delta_N, fmt=formats.format_of(fmt)).done
        header = committed(learner, pull)
        assert header.format == formats.format_of(spec.wire_down)
        # What was sent is merged exactly ...
        model.merge(fragment.index, (1.0, encoded(fragment, delta_N, formats.format_of(fmt))[1]))
        model.check(learner)
        # ... and it is near to what was meant.
        exact.merge(fragment.index, (1.0, delta_N))
        wrong_N = model.theta[fragment.index] - exact.theta[fragment.index]
        assert 0 < np.linalg.norm(wrong_N) < share * np.linalg.norm(delta_N)


def test_a_learner_that_has_another_version_sends_it_whole_or_against_an_older_one(tmp_path):
    spec = make_spec(outer_learning_rate=1.0, outer_momentum=0.0)
    with RealSyncer(tmp_path, spec) as syncer, ScriptedLearner(syncer) as learner:
        learner.join()
        thetas = thetas_of(learner)
        learner.initialise(thetas)
        first = good_round(learner, seed=1)
        good_round(learner, seed=2)
        # With rate 1 and without momentum Θ becomes what the learner has.
        pull = learner.pull()
        assert pull.fragment == first.fragment
        mine_N = random_delta(learner.layout.fragments[pull.fragment], 3, size=1.0)
        assert learner.upload(pull, mine_N, content=bulk.WHOLE, base=None, norms=[]).done
        committed(learner, pull)
        np.testing.assert_allclose(learner.theta(pull.fragment), mine_N, atol=1e-6)
        good_round(learner, seed=4)
        pull = learner.pull()
        assert [(v.epoch, v.step) for v in pull.versions] == [(1, 3), (1, 1)]
        delta_N = random_delta(learner.layout.fragments[pull.fragment], 5)
        base_N = thetas[pull.fragment] - random_delta(learner.layout.fragments[pull.fragment], 1)
        assert learner.upload(pull, delta_N, base=pb.Version(epoch=1, step=1)).done
        committed(learner, pull)
        np.testing.assert_allclose(learner.theta(pull.fragment), base_N - delta_N, atol=1e-6)
        assert [m["members"][0]["base"] for m in syncer.events("merge")] == [0, 0, None, 2, 1]
        syncer.assert_audit()


def test_constants_come_back_as_they_were_sent(tmp_path):
    rng = np.random.default_rng(1)
    table = rng.standard_normal((700, 700)).astype(np.float32)
    blob = safetensors.numpy.save({"table": table})
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as learner:
        info = pb.TensorInfo(name="table", shape=table.shape, dtype="float32")
        learner.layout = cut(
            TENSORS, num_fragments=2,
            constants=[Tensor(name="table", shape=table.shape, dtype="float32")],
        )  # fmt: skip
        learner.join(constants=[info])
        learner.initialise(thetas_of(learner), blob)
        learner.expect("ready")
        header, payload, trailer = learner.download(2)
        assert (header.chunks, trailer.committed) == (2, True)
        assert payload == blob


def test_a_lost_chunk_of_a_result_can_be_asked_for_again(tmp_path):
    with RealSyncer(tmp_path, make_spec()) as syncer, ScriptedLearner(syncer) as learner:
        learner.join()
        learner.initialise(thetas_of(learner))
        pull = good_round(learner)
        where = {"round": pull.round, "attempt": pull.attempt}
        _, everything, _ = learner.download(pull.fragment, **where)
        _, part, trailer = learner.download(pull.fragment, chunks=[1], **where)
        assert trailer.committed
        assert part == everything[4 * CHUNK : 8 * CHUNK]


def test_chunks_may_come_in_any_order_and_twice(tmp_path):
    with (
        RealSyncer(tmp_path, make_spec(quorum=2)) as syncer,
        ScriptedLearner(syncer, "eu/0") as learner,
        ScriptedLearner(syncer, "eu/1") as other,
    ):
        learner.join()
        thetas = thetas_of(learner)
        learner.initialise(thetas)
        other.join()
        model = Model(learner.layout, syncer.spec, thetas)
        learner.step()
        other.step()
        pull = learner.expect("pull")
        other.expect("pull")
        fragment = learner.layout.fragments[pull.fragment]
        deltas = [random_delta(fragment, i) for i in range(2)]
        payloads, _, norms = encoded(fragment, deltas[0])
        stream = learner.stream(learner.header(pull, norms=norms))
        backwards = [chunk(i, p) for i, p in reversed(list(enumerate(payloads)))]
        other = other.sent(pull, deltas[1])
        stream.send(*(m for m in backwards for _ in range(2)), END)
        assert stream.reply().done
        assert other.reply().done
        committed(learner, pull)
        model.merge(fragment.index, (1.0, deltas[0]), (1.0, deltas[1]))
        model.check(learner)
