"""The messages of one upload, without a connection."""

from __future__ import annotations

import numpy as np
import pytest

from diloco.codec import frames
from diloco.errors import AbortedError, DamagedError, NotFiniteError, ProtocolError
from diloco.v1 import bulk_pb2 as bulk
from diloco_worker.link.faults import Effects, Fault
from diloco_worker.link.upload_messages import UploadMessages

HEADER = bulk.UploadHeader(learner="eu/0", fragment=3)
PARTS = [np.full(4, value, np.uint8) for value in (1, 2, 3)]


def make(**rest):
    return UploadMessages(HEADER, list(PARTS), **rest)


def unpacked(messages):
    found = [frames.unpack(message) for message in messages]
    return [(m.kind, m.index, bytes(m.payload)) for m in found]


def reply(**fields):
    payload = bulk.UploadReply(**fields).SerializeToString()
    return frames.pack(frames.Kind.HEADER, 0, payload)


END = (frames.Kind.END, 0, b"")


def test_an_upload_is_its_header_its_chunks_in_order_and_an_end():
    upload = make()
    assert upload.header is HEADER
    assert unpacked(upload.messages()) == [
        (frames.Kind.HEADER, 0, HEADER.SerializeToString()),
        *((frames.Kind.CHUNK, i, bytes(part)) for i, part in enumerate(PARTS)),
        END,
    ]


def test_the_syncer_can_have_an_upload_once_its_last_chunk_was_handed_over():
    upload = make()
    messages = upload.messages()
    for _ in range(4):
        next(messages)
    assert not upload.complete
    next(messages)  # the end
    assert upload.complete


def test_what_is_requested_again_is_sent_again_and_what_does_not_exist_is_skipped():
    upload = make()
    list(upload.messages())
    assert upload.reply(reply(again=[2, 0, 3])) == (2, 0, 3)
    assert not upload.complete, "the syncer lacks something"
    assert unpacked(upload.repeat((2, 0, 3, 7))) == [
        (frames.Kind.CHUNK, 2, bytes(PARTS[2])), (frames.Kind.CHUNK, 0, bytes(PARTS[0])), END,
    ]  # fmt: skip
    assert upload.complete
    assert unpacked(upload.repeat(())) == [END]


def test_an_upload_is_done_when_the_syncer_confirms_it():
    upload = make()
    list(upload.messages())
    assert upload.reply(reply(done=True)) is None
    assert upload.complete


@pytest.mark.parametrize(
    ("reason", "error"),
    [("NotFinite", NotFiniteError), ("Aborted", AbortedError), ("Unheard", ProtocolError)],
)
def test_a_refused_upload_is_not_merged_and_its_error_has_the_reason(reason, error):
    upload = make()
    list(upload.messages())
    with pytest.raises(error, match="the value") as caught:
        upload.reply(reply(refused=reason, detail="the value 7"))
    assert type(caught.value) is error
    assert not upload.complete


def test_a_cancelled_upload_is_not_merged():
    upload = make()
    list(upload.messages())
    upload.refused()
    assert not upload.complete


def test_a_damaged_reply_is_an_error():
    message = reply(done=True)
    with pytest.raises(DamagedError):
        make().reply(message[:-1] + bytes([message[-1] ^ 1]))


def test_closing_releases_the_buffer_once():
    closed = []
    upload = make(close=closed.append)
    upload.close()
    upload.close()
    assert closed == [upload]
    assert unpacked(upload.repeat((0,))) == [END], "its chunks are gone"
    make().close()


def test_faults_concern_the_first_transmission_only():
    upload = make(effects=Effects([Fault(point="upload", effect="reorder", value=0, times=None)]))
    assert [index for _, index, _ in unpacked(upload.messages())] == [0, 2, 1, 0, 0]
    assert [index for _, index, _ in unpacked(upload.repeat((0, 1)))] == [0, 1, 0]
