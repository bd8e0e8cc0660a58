"""The messages of a request to a peer, from one end to the other without a connection."""

from __future__ import annotations

import hashlib

import pytest

from diloco.errors import StorageError
from diloco.model import tensorfile
from diloco.model.tensorfile import Entry
from diloco.v1 import peer_pb2 as pb
from diloco_worker.core import events as ev
from diloco_worker.core.peer_files import select
from diloco_worker.core.sealed import unsealed
from diloco_worker.link.peer_messages import Arrival, answers, chunks, parts, refusal

REQUEST = ev.AskPeer(number=1, peer=ev.PeerAddress("eu/0", "h:1"), step=10, run="r")
STATED = {"job": "j", "layout": "d", "run": "r", "step": 7, "interval": 4}
MANIFEST = {
    "local_step": 7, "global_step": 11, "run": "r", "digest": "d", "optimizers": ["AdamW"],
    "tree": {"dict": [["optimizers", {"list": [{"tensor": "m"}]}]]},
}  # fmt: skip


def answer(size=100):
    data = bytes(range(100))
    header, [entry], _ = tensorfile.plan([Entry(name="m", dtype="uint8", shape=(100,))])
    file = header + data
    selection = select(MANIFEST, {"m": entry})
    pieces = chunks(selection, lambda at, most: file[at : at + most], size)
    return list(parts(MANIFEST, selection, pieces)), data


def arrive(messages, request=REQUEST, **changes):
    arrival = Arrival(request, **{"layout": "d", "elements": 100, **changes})
    written = b"".join(arrival.add(each) for each in messages)
    return written, *arrival.end(), arrival


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_what_arrives_is_what_was_sent_in_pieces_of_whatever_size(size):
    messages, data = answer(size)
    written, text, state, arrival = arrive(messages)
    assert written.endswith(data)
    assert (unsealed(text)["sha256"], arrival.over) == (hashlib.sha256(written).hexdigest(), True)
    assert (state.learner, state.local_step, state.global_step) == ("eu/0", 7, 11)
    assert state.bytes == sum(len(each.chunk) for each in messages)


def test_a_state_is_of_the_steps_of_its_manifest_whatever_the_header_states():
    """The manifest is checked, and is what the trainer loads; the line of the recovery must be of it."""
    [first, *rest], _ = answer()
    first.header.local_step, first.header.global_step = 70, 900
    _, _, state, _ = arrive([first, *rest])
    assert (state.local_step, state.global_step) == (7, 11)


def test_what_is_damaged_incomplete_or_of_another_size_than_stated_is_refused():
    messages, _ = answer()
    damaged = [*messages]
    damaged[2] = pb.PeerPart(chunk=bytes(len(messages[2].chunk)))
    for changed in (damaged, messages[:-1], [*messages[:-2], messages[-1]], messages[:1]):
        with pytest.raises(StorageError, match="arrived damaged or incomplete"):
            arrive(changed)
    with pytest.raises(StorageError, match="it sent more than"):
        arrive([*messages[:-1], messages[1], messages[-1]])
    with pytest.raises(StorageError, match="it states a manifest of 0 bytes"):
        arrive([])
    with pytest.raises(StorageError, match="bytes of tensors, expected at most"):
        arrive([pb.PeerPart(header=pb.PeerHeader(manifest_bytes=1, tensors_bytes=1 << 40))])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"job": "other"}, "it trains another model"),
        ({"layout": "other"}, "it trains another model"),
        ({"run": "other"}, "it is in another run of the job"),
        ({"step": 5}, "it is at global step 5, far before 10"),
        ({"step": 6}, ""),
    ],
)
def test_a_request_that_nothing_serves_is_refused_in_one_sentence(changes, why):
    request = pb.PeerRequest(job="j", learner="us/0", layout="d", run="r", step=10)
    assert refusal(request, **{**STATED, **changes}) == why


@pytest.mark.parametrize(
    ("changes", "answered"),
    [({}, True), ({"global_step": 10}, True), ({"global_step": 9}, False), ({"run": "s"}, False),
     ({"digest": "e"}, False), ({"pieces": []}, False)],
)  # fmt: skip
def test_a_checkpoint_of_one_process_of_the_step_or_a_later_one_answers(changes, answered):
    request = pb.PeerRequest(job="j", learner="us/0", layout="d", run="r", step=10)
    assert answers({**MANIFEST, **changes}, request) is answered


def test_a_file_that_ends_too_early_is_not_sent():
    _, [entry], _ = tensorfile.plan([Entry(name="m", dtype="uint8", shape=(100,))])
    pieces = chunks(select(MANIFEST, {"m": entry}), lambda at, most: b"")
    with pytest.raises(StorageError, match=rf"^the file ends at byte {entry.lo}$"):
        list(pieces)
