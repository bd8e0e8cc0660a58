"""Parsing YAML, --set, and writing YAML that reads back equal."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_job.manifest_file import Dumper, apply_set, examine, parse_job, parse_yaml

EVERYTHING = (Path(__file__).parents[3] / "tests/golden/everything.yaml").read_text()


def test_a_duplicate_key_is_reported_with_both_lines():
    value, problems = parse_yaml("a: {b: 1}\nc:\n- d: 1\n  e: 2\n  d: 3\n")
    assert problems == ["c[0].d: duplicate key in lines 3 and 5"]
    assert value["c"][0]["d"] == 3


def test_a_merged_key_may_be_repeated():
    value, problems = parse_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\n")
    assert problems == []
    assert value["d"] == {"b": 3, "c": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the manifest: is empty"),
        ("# nothing\n", "the manifest: is empty"),
        ("a: 1\n---\nb: 2\n", "line 2: a second document starts here"),
        ("a: 1\nb: [\n", "line 3: not YAML: "),
        ("a: \tb\n\tc: 1", "line 1: not YAML: "),
        ("a: \x00", "the manifest: not YAML: "),
        ("a: &x [*x]\n", "a[0]: line 1: contains itself"),
        ("a: *x\n", "line 1: not YAML: found undefined alias"),
        ("a: !!python/object:x.Y {}", "a: line 1: has the YAML tag !!python/object:x.Y"),
        ("a: !!binary aGk=", "a: line 1: has the YAML tag !!binary"),
        ("a: !own x", "a: line 1: has the YAML tag !own"),
        ("spec: {1: a}", 'spec: line 1: the key "1" is not text'),
        ("a: .inf", "a: line 1: .inf is not a number"),
        ("a: -.INF", "a: line 1: -.INF is not a number"),
        ("a: .nan", "a: line 1: .nan is not a number"),
        ("[" * 500, "the manifest: nested too deeply"),
        ("a: " + "9" * 5000, "the manifest: not YAML: "),
    ],
    ids=lambda v: str(v)[:20],
)
def test_text_that_is_not_a_manifest_is_refused_with_its_line(text, expected):
    value, problems = parse_yaml(text)
    assert value is None
    assert problems[0].startswith(expected)
    assert examine(text) == (None, problems)


@pytest.mark.parametrize("text", ["5", "[]", "text"])
def test_a_document_that_is_not_an_object_is_refused(text):
    job, [problem] = examine(text)
    assert job is None
    assert problem.endswith("is not an object with fields")


def test_scalars_have_the_types_that_kubectl_reads():
    text = (
        "a: 3e-4\nb: 12:30\nc: 2026-01-01\nd: 010\ne: 0x1F\nf: no\ng: '='\nh: =\ni: 1_0\nj: -.5\n"
    )
    assert parse_yaml(text) == (
        {
            "a": 3e-4,
            "b": "12:30",
            "c": "2026-01-01",
            "d": 8,
            "e": 31,
            "f": False,
            "g": "=",
            "h": "=",
            "i": 10,
            "j": -0.5,
        },
        [],
    )


# ------------------------------------------------------------------------------ --set


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("spec.sync.quorum=2", ("spec", "sync", "quorum"), 2),
        ("spec.sync.merge=Average", ("spec", "sync", "merge"), "Average"),
        ('spec.sync.outer.momentum="0.9"', ("spec", "sync", "outer", "momentum"), "0.9"),
        ("spec.regions[0].learners=3", ("spec", "regions", 0, "learners"), 3),
        ("spec.regions[us].learners=3", ("spec", "regions", 1, "learners"), 3),
        (
            "spec.learner.recipe.config.data=a=b",
            ("spec", "learner", "recipe", "config", "data"),
            "a=b",
        ),
        ("spec.syncer.endpoint=", ("spec", "syncer", "endpoint"), ""),
        ("spec.evaluation=null", ("spec", "evaluation"), None),
        ("spec.evaluation={everySteps: 5}", ("spec", "evaluation"), {"everySteps": 5}),
        ("metadata.labels[a.b/c]=d", ("metadata", "labels", "a.b/c"), "d"),
        ("spec.new.deep.field=1", ("spec", "new", "deep", "field"), 1),
    ],
)
def test_set_changes_one_field(change, path, value):
    data = parse_yaml(EVERYTHING)[0]
    place = apply_set(data, change)
    for part in path:
        place = place[part]
    assert place == value


def test_later_sets_win():
    job = parse_job(EVERYTHING, ["spec.sync.quorum=2", "spec.sync.quorum=3"])
    assert job.spec.sync.quorum == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("spec.steps", "has no value; write path=value"),
        ("=5", "a path starts with spec or metadata"),
        ("steps=5", "a path starts with spec or metadata"),
        ("spec..steps=5", "is malformed at"),
        ("spec.regions[=5", 'is malformed at "["'),
        ("spec.regions[7].learners=5", "no entry [7]; there are 2: [0] eu, [1] us"),
        ("spec.regions[²].learners=5", "no entry [²]; there are 2: [0] eu, [1] us"),
        (f"spec.regions[{5000 * '0'}].learners=5", "there are 2: [0] eu, [1] us"),
        ("spec.regions[asia].learners=5", "no entry [asia]; there are 2: [0] eu, [1] us"),
        ("spec.regions.learners=5", "no entry [learners]"),
        ("spec.steps.more=5", "2000 has no field more"),
        ("spec.steps=[", "not YAML"),
        ("spec.steps={a: 1, a: 2}", "duplicate key"),
    ],
)
def test_an_invalid_set_is_refused_with_the_reason(change, expected):
    [problem] = examine(EVERYTHING, [change])[1]
    assert problem.startswith(f"--set {change}: ")
    assert expected in problem


# ------------------------------------------------------------------------------ writing

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]))
    | st.sampled_from(["3e-4", "0.7", "12:30", "2026-01-01", "no", "=", "<<", "0o7", ".inf", "~"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner),
    max_leaves=8,
)


@settings(deadline=None)  # a busy machine is no failure
@given(json_values)
def test_what_is_written_reads_back_equal_and_of_the_same_type(value):
    text = yaml.dump({"value": value}, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    again, problems = parse_yaml(text)
    assert problems == []
    assert again["value"] == value
    assert repr(again["value"]) == repr(value)
