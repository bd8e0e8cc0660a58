import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.spec import DOWN_FORMATS, MERGES, UP_FORMATS, Checkpoint, RunSpec


def spec(**changes: object) -> RunSpec:
    return RunSpec(**{"job": "test", "steps": 100, **changes})  # type: ignore[arg-type]


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    fragments = draw(st.integers(1, 50))
    interval = draw(st.integers(fragments, 100))
    fraction = st.floats(0, 10, allow_nan=False)
    return RunSpec(
        job=draw(st.text(max_size=20)),
        steps=draw(st.integers(1, 10**9)),
        seed=draw(st.integers(0, 2**31 - 1)),
        fragments=fragments,
        interval=interval,
        overlap=draw(st.integers(1, max(1, min(interval - 1, fragments)))),
        quorum=draw(st.integers(1, 9)),
        grace_safety=draw(fraction),
        merge=draw(st.sampled_from(MERGES)),
        average_parameters=tuple(draw(st.lists(st.text(max_size=5), max_size=3))),
        buffers=draw(st.sampled_from(("Average", "Initial"))),
        moving_buffers=tuple(draw(st.lists(st.text(max_size=5), max_size=3))),
        outer_learning_rate=draw(fraction),
        wire_up=draw(st.sampled_from(UP_FORMATS)),
        wire_down=draw(st.sampled_from(DOWN_FORMATS)),
        error_feedback=draw(st.booleans()),
        learners=draw(st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)),
        syncer_checkpoint=Checkpoint(every_steps=draw(st.integers(1, 99)), keep=2),
        snapshot_url=draw(st.sampled_from(("", "s3://bucket"))),
        output_url=draw(st.sampled_from(("", "s3://bucket"))),
        evaluation_every_steps=draw(st.none() | st.integers(1, 99)),
        evaluation_command=tuple(draw(st.lists(st.text(max_size=5), max_size=3))),
        recipe=draw(st.none() | st.text(max_size=5)),
        recipe_config=draw(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)),
    )


@given(specs())
def test_what_is_written_is_read_back_equal_with_the_same_hash(written):
    read = RunSpec.from_json(written.to_json())
    assert read == written
    assert read.hash == written.hash


def test_the_hash_of_a_known_spec_is_what_it_was_in_the_first_release():
    assert (
        spec(recipe="gpt", recipe_config={"width": 128, "data": "stdlib"}).hash
        == "dc5948068493811e"
    )


MAY_CHANGE = {
    "steps": 101,
    "quorum": 2,
    "guard": 0.0,
    "learners": {"eu": 2},
    "learner_checkpoint": Checkpoint(every_steps=1, keep=1),
    "syncer_checkpoint": Checkpoint(every_steps=1, keep=1),
    "snapshot_url": "s3://bucket",
    "output_url": "s3://bucket",
    "evaluation_every_steps": 7,
    "evaluation_command": ("python", "eval.py"),
}
COMPARED_AT_JOIN = {"frozen": "Ship"}
MUST_AGREE = {
    "job": "other",
    "seed": 1,
    "fragments": 23,
    "interval": 25,
    "overlap": 3,
    "grace_max_steps": 2.0,
    "grace_safety": 0.5,
    "merge": "Average",
    "average_parameters": ("*.bias",),
    "buffers": "Initial",
    "moving_buffers": ("*.codes",),
    "outer_learning_rate": 0.5,
    "outer_momentum": 0.9,
    "outer_nesterov": False,
    "wire_up": "Int4",
    "wire_down": "FP32",
    "error_feedback": True,
    "recipe": "gpt",
    "recipe_config": {"width": 64},
}


def test_the_two_lists_of_this_test_name_every_field():
    named = {*MAY_CHANGE, *MUST_AGREE, *COMPARED_AT_JOIN}
    assert named == {f.name for f in dataclasses.fields(RunSpec)}


@pytest.mark.parametrize("name", MUST_AGREE)
def test_the_hash_covers_what_all_processes_must_share(name):
    assert spec(**{name: MUST_AGREE[name]}).hash != spec().hash


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_the_hash_leaves_out_what_may_change_while_the_job_runs(name):
    assert spec(**{name: MAY_CHANGE[name]}).hash == spec().hash


def test_where_frozen_parameters_are_is_not_in_the_hash_and_the_default_not_in_the_text():
    """A job that began before the field existed continues, with programs of either version."""
    assert spec(frozen="Ship").hash == spec().hash
    assert "frozen" not in json.loads(spec().to_json())
    assert RunSpec.from_json(spec().to_json()).frozen == "Keep"
    assert RunSpec.from_json(spec(frozen="Ship").to_json()).frozen == "Ship"
    with pytest.raises(ConfigError, match="frozen: 'Send' is not one of"):
        spec(frozen="Send")


def test_fields_that_older_versions_lack_are_stated_only_if_they_are_set():
    assert not {"buffers", "moving_buffers"} & json.loads(spec().to_json()).keys()
    assert json.loads(spec(buffers="Initial").to_json())["buffers"] == "Initial"


def test_the_order_of_mapping_keys_does_not_change_the_text():
    first = spec(recipe_config={"a": 1, "b": 2}).to_json()
    assert first == spec(recipe_config={"b": 2, "a": 1}).to_json()


def test_all_problems_are_in_one_message():
    with pytest.raises(ConfigError) as caught:
        spec(steps=0, fragments=5, interval=4, overlap=9, quorum=0, merge="Sum", wire_up="fp32")
    for message in (
        "steps: 0",
        "interval: 4 is less than the 5 fragments",
        "overlap: 9 is not in 1..3",
        "quorum: 0",
        "merge: 'Sum'",
        "wire_up: 'fp32'",
    ):
        assert message in str(caught.value)


def test_down_formats_are_fewer_than_up_formats():
    with pytest.raises(ConfigError, match="wire_down: 'Int4' is not one of"):
        spec(wire_down="Int4")


def changed(**changes: object) -> str:
    data = json.loads(spec().to_json())
    data.update(changes)
    return json.dumps({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 9000, "not JSON"),
        (
            changed(recipe_config=...)[:-1]
            + ', "recipe_config": '
            + 5000 * '{"a":'
            + "1"
            + 5001 * "}",
            "recursion",
        ),
        ("[]", "holds a list, expected an object"),
        (changed(colour=1, size=2), "unknown fields colour, size"),
        (changed(steps=..., hash=...), "steps"),
        (changed(seed=9), "write the file again"),
        (changed(hash="0" * 16), "states hash 0000000000000000"),
        (changed(learner_checkpoint=5), "learner_checkpoint"),
        (changed(learner_checkpoint={"every": 1}), "every"),
        (changed(average_parameters=5), "average_parameters"),
        (changed(steps="many"), "steps is 'many', expected int"),
        (changed(steps=True), "steps is True, expected int"),
        (changed(quorum=0, hash=...), "quorum: 0 is less than 1"),
    ],
)
def test_a_file_that_is_not_a_spec_is_refused_with_its_name_and_the_fault(text, message):
    with pytest.raises(ConfigError, match=r"^here\.json: ") as caught:
        RunSpec.from_json(text, source="here.json")
    assert message in str(caught.value)


def test_a_file_without_a_hash_is_accepted():
    assert RunSpec.from_json(changed(hash=...)) == spec()
