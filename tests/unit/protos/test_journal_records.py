"""Records of the journal keep the bytes of the file."""

from __future__ import annotations

import json

import pytest

from diloco.journal import records

LINES = [
    '{"epoch":1,"event":"start","step":0,"steps":40,"fragments":3,"interval":6,"quorum":2,"spec":"ab"}',
    '{"epoch":1,"event":"limits","learners":{"eu":2},"step":3}',
    '{"epoch":1,"event":"join","learner":"eu/0","incarnation":1,"step":0,"fresh":true,"localStep":0}',
    '{"epoch":1,"event":"recovery","learner":"eu/0","incarnation":2,"step":50,"source":"Peer","peer":"eu/1",'
    '"stateStep":48,"age":2,"bytes":4399,"seconds":0.5,"problem":""}',
    '{"epoch":1,"event":"leave","learner":"eu/0","incarnation":1,"reason":"Closed"}',
    '{"epoch":1,"event":"refuse","learner":"eu/0","reason":"Damaged","detail":"x"}',
    '{"epoch":1,"event":"refuse","learner":"eu/0","reason":"Damaged","detail":"x","step":6,"fragment":0}',
    '{"epoch":1,"event":"eject","learner":"eu/0","reason":"AnswerLate","probeSeconds":5.0}',
    '{"epoch":1,"event":"readmit","learner":"eu/0"}',
    '{"epoch":1,"event":"pause","seconds":12.5}',
    '{"epoch":1,"event":"error","decision":"Pull","reason":"OSError(5)"}',
    '{"epoch":1,"event":"initialised","learner":"eu/0"}',
    '{"epoch":1,"event":"unchanged","step":9,"rounds":8,"learners":"eu/0, eu/1"}',
    '{"epoch":1,"event":"halt","step":9,"fragment":1,"reason":"x","learners":"eu/0"}',
    '{"epoch":1,"event":"merge","step":6,"fragment":0,"attempt":1,"quorum":1,"quorumSeconds":0.5,'
    '"graceSeconds":0.0,"syncSeconds":1.25,"bytesUp":10,"bytesDown":20,"deltaNorm":0.5,"members":['
    '{"learner":"eu/0","incarnation":1,"step":7,"steps":3,"tokens":30,"weight":300.0,"base":null},'
    '{"learner":"eu/1","incarnation":2,"step":8,"steps":4,"tokens":40,"weight":400.0,"base":6}]}',
    '{"epoch":1,"event":"data","items":9,"size":2,"learner":"eu/0","next":4,"free":[{"first":1,"count":2}],"open":[]}',
    '{"epoch":1,"event":"lease","learner":"eu/0","incarnation":1,"blocks":[{"first":1,"count":2}]}',
    '{"epoch":1,"event":"trained","learner":"eu/0","incarnation":1,"blocks":[{"block":1,"begin":0,"end":5}]}',
    '{"epoch":1,"event":"release","learner":"eu/0","incarnation":1,"blocks":[{"first":2,"count":1}],"reason":"x"}',
    '{"epoch":1,"event":"snapshot","step":6,"ok":true,"seconds":0.1}',
    '{"epoch":1,"event":"snapshot","step":6,"ok":false,"detail":"full"}',
    '{"epoch":1,"event":"copy","step":6,"ok":true,"seconds":2.5}',
    '{"epoch":1,"event":"copy","step":6,"ok":false,"detail":"no route"}',
    '{"epoch":1,"event":"export","step":6,"ok":false,"detail":"full"}',
    '{"epoch":1,"event":"complete","step":40,"tokens":99}',
    '{"epoch":1,"event":"stop","step":40}',
    '{"epoch":0,"event":"restart","process":"eu/0","reason":"exit code 1","exitCode":1,"restarts":2}',
    '{"epoch":0,"event":"restart","process":"eu/0","reason":"signal 9","signal":9,"restarts":2}',
    '{"epoch":3,"event":"rotate","part":2,"fragments":3,"interval":6}',
    '{"epoch":3,"event":"dropped","lines":3,"events":{"merge":2,"join":1}}',
    '{"epoch":3,"event":"dropped","lines":0,"events":{},"torn":1}',
]


@pytest.mark.parametrize("line", LINES)
def test_a_record_read_and_written_again_gives_the_same_bytes(line: str):
    event = json.loads(line)
    record = records.decode(event)
    assert record is not None
    assert json.dumps(records.encode(record, epoch=event["epoch"]), separators=(",", ":")) == line


def test_every_kind_of_event_is_tried():
    assert {json.loads(line)["event"] for line in LINES} == records.KINDS.keys()


def test_unknown_kinds_and_fields_are_ignored_and_missing_ones_have_defaults():
    assert records.decode({"event": "dance"}) is None
    assert records.decode({}) is None
    found = records.decode({"event": "join", "learner": "a", "incarnation": 2, "mood": "good"})
    assert found == records.Join(learner="a", incarnation=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"incarnation": 1}, "has learner None, expected a string"),
        ({"learner": "a", "incarnation": True}, "has incarnation True, expected a whole number"),
        ({"learner": "a", "incarnation": 1, "fresh": 1}, "has fresh 1, expected true or false"),
    ],
)
def test_a_field_of_another_type_is_named(fields: dict[str, object], message: str):
    with pytest.raises(records.RecordError, match=message):
        records.decode({"event": "join", **fields})
