"""Parameters of unusual shapes: scalars, and tensors without an element, each a fragment of its own."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.codec import formats
from diloco.model.fragments import Tensor
from diloco_testing.learners.scripted import chunk, encoded, random_delta
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, DrivenUpload, driven_spec

TENSORS = (
    Tensor(name="scalar", shape=(), dtype="float32"),
    Tensor(name="empty", shape=(0, 7), dtype="float32"),
    Tensor(name="vector", shape=(5,), dtype="float32"),
)


@pytest.mark.parametrize("wire_up", ["FP32", "BF16", "Int4"])
@pytest.mark.parametrize("merge", ["Average", "Radial"])
def test_22_scalars_and_tensors_without_an_element_are_merged(wire_up, merge):
    """Deltas of zeros and of the smallest numbers as well."""
    spec = driven_spec(fragments=3, interval=3, wire_up=wire_up, merge=merge)
    syncer = DrivenSyncer(spec)
    learner = DrivenLearner(syncer, "eu/0", TENSORS)
    learner.initialise([np.zeros(f.elements, np.float32) for f in learner.layout.fragments])
    fmt = formats.format_of(wire_up)
    merged = []
    for size in (0.1, 0.1, 0.1, 0.0, 1e-30, 0.1):
        [pull] = learner.step()
        fragment = learner.layout.fragments[pull.fragment]
        before_N = syncer.facts.parameters.current(pull.fragment).theta_N.copy()
        delta_N = random_delta(fragment, pull.round, size=size)
        payloads, decoded_N, norms = encoded(fragment, delta_N, fmt)
        header = learner.header(pull, format=fmt, norms=norms)
        upload = DrivenUpload(learner, header, [chunk(i, p) for i, p in enumerate(payloads)])
        upload.send_all()
        syncer.run()
        upload.resume().send_all()
        assert upload.replies[-1].done, upload.replies
        syncer.run()
        moved_N = syncer.facts.parameters.current(pull.fragment).theta_N - before_N
        np.testing.assert_allclose(moved_N, -decoded_N, rtol=1e-5, atol=1e-7)
        merged.append(pull.fragment)
    assert syncer.merged() == [1, 2, 3, 4, 5, 6]
    assert sorted(merged) == [0, 0, 1, 1, 2, 2]
