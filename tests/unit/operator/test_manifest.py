"""Reading YAML, --set, and writing a manifest again."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco_operator.manifest import apply_set, dump_job, examine, load_job, parse_yaml

EVERYTHING = Path(__file__).parents[3] / "tests/golden/everything.yaml"


def test_a_key_that_comes_twice_is_named_with_both_lines():
    value, problems = parse_yaml("a: {b: 1}\nc:\n- d: 1\n  e: 2\n  d: 3\n")
    assert problems == ["c[0].d: comes twice, in line 3 and 5"]
    assert value["c"][0]["d"] == 3


def test_a_merged_key_may_be_said_again():
    value, problems = parse_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\n")
    assert problems == []
    assert value["d"] == {"b": 3, "c": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the manifest: is empty"),
        ("# nothing\n", "the manifest: is empty"),
        ("a: 1\n---\nb: 2\n", "line 2: a second document begins here"),
        ("a: 1\nb: [\n", "line 3: not YAML: "),
        ("a: \tb\n\tc: 1", "line 1: not YAML: "),
        ("a: \x00", "the manifest: not YAML: "),
        ("a: &x [*x]\n", "a[0]: line 1: holds itself"),
        ("a: *x\n", "line 1: not YAML: found undefined alias"),
        ("a: !!python/object:x.Y {}", "a: line 1: has the YAML tag !!python/object:x.Y"),
        ("a: !!binary aGk=", "a: line 1: has the YAML tag !!binary"),
        ("a: !own x", "a: line 1: has the YAML tag !own"),
        ("spec: {1: a}", 'spec: line 1: the key "1" is not text'),
        ("a: .inf", "a: line 1: .inf is no number"),
        ("a: -.INF", "a: line 1: -.INF is no number"),
        ("a: .nan", "a: line 1: .nan is no number"),
        ("[" * 5000, "the manifest: nested too deep"),
        ("a: " + "9" * 5000, "the manifest: not YAML: "),
    ],
    ids=lambda v: str(v)[:20],
)
def test_text_that_is_no_manifest_is_refused_with_its_line(text, words):
    value, problems = parse_yaml(text)
    assert value is None
    assert problems[0].startswith(words)
    assert examine(text) == (None, problems)


@pytest.mark.parametrize("text", ["5", "[]", "text"])
def test_a_document_that_is_no_object_is_refused(text):
    job, [problem] = examine(text)
    assert job is None
    assert problem.endswith("is not an object with fields")


def test_scalars_mean_what_they_mean_to_kubectl():
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


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_job(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8"):
        load_job(tmp_path / "latin.yaml")


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
    data = parse_yaml(EVERYTHING.read_text())[0]
    place = apply_set(data, change)
    for part in path:
        place = place[part]
    assert place == value


def test_later_sets_win():
    job = load_job(EVERYTHING, ["spec.sync.quorum=2", "spec.sync.quorum=3"])
    assert job.spec.sync.quorum == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("spec.steps", "has no value; write path=value"),
        ("=5", "a path begins with spec or metadata"),
        ("steps=5", "a path begins with spec or metadata"),
        ("spec..steps=5", "cannot be read from"),
        ("spec.regions[=5", 'cannot be read from "["'),
        ("spec.regions[7].learners=5", "no entry [7]; there are 2: [0] eu, [1] us"),
        ("spec.regions[asia].learners=5", "no entry [asia]; there are 2: [0] eu, [1] us"),
        ("spec.regions.learners=5", "no entry [learners]"),
        ("spec.steps.more=5", "2000 has no field more"),
        ("spec.steps=[", "not YAML"),
        ("spec.steps={a: 1, a: 2}", "comes twice"),
    ],
)
def test_a_set_that_leads_nowhere_is_refused_in_words(change, words):
    [problem] = examine(EVERYTHING, [change])[1]
    assert problem.startswith(f"--set {change}: ")
    assert words in problem


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
    job = load_job(EVERYTHING)
    assert job.spec.learner.recipe is not None
    job.spec.learner.recipe.config["value"] = value
    again = load_job(dump_job(job))
    assert again == job
    assert again.spec.learner.recipe is not None
    assert repr(again.spec.learner.recipe.config["value"]) == repr(value)


def test_what_was_not_written_stays_unwritten():
    text = dump_job(load_job(EVERYTHING, ["spec.sync={}"]))
    assert "fragments" not in text
