"""study.yaml: cells of the grid, and a clear message for what cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco.errors import ConfigError
from diloco_experiment import study as studies
from diloco_experiment.study import Cell, Study
from diloco_experiment.tasks import Method, Moments

JOB: dict[str, Any] = {
    "apiVersion": "diloco.dev/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "steps": 12,
        "sync": {"fragments": 4, "interval": 4, "quorum": 1, "overlap": 1},
        "learner": {"recipe": {"name": "gpt", "config": {"layers": 1}}},
        "regions": [{"name": "eu", "learners": 2}],
    },
}


def written(folder: Path, study: dict[str, Any], job: dict[str, Any] = JOB) -> Path:
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "job": "job.yaml", **study}))
    return path


def cells(folder: Path, **study: Any) -> list[Cell]:
    return studies.cells(*studies.load(written(folder, study)))


def refusal(folder: Path, **study: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        cells(folder, **study)
    return str(refused.value)


def test_every_combination_is_a_cell(tmp_path):
    found = cells(
        tmp_path,
        grid={"spec.sync.interval": [4, 8]},
        sweep={"spec.learner.recipe.config.learningRate": [0.01, 0.02, 0.03]},
        seeds=[1, 2],
        methods=["Streaming", "Decoupled"],
        scenarios={"equal": {}, "slow": {"stepSeconds": [1, 5]}},
    )
    assert len(found) == 2 * 3 * 2 * 2 * 2 == len({cell.digest for cell in found})
    assert {cell.task.spec.interval for cell in found} == {4, 8}
    assert {cell.task.spec.seed for cell in found} == {1, 2}
    assert {dict(cell.task.configs[0][1])["learningRate"] for cell in found} == {0.01, 0.02, 0.03}


def test_a_field_that_does_not_concern_a_method_does_not_make_another_task(tmp_path):
    found = cells(
        tmp_path,
        grid={"spec.sync.wire.up": ["BF16", "Int8"]},
        scenarios={"a": {}, "b": {"stepSeconds": [1, 2]}},
    )
    different = {method: len({c.digest for c in found if c.method is method}) for method in Method}
    assert different == {
        Method.SYNCHRONOUS: 1, Method.DILOCO: 2, Method.STREAMING: 4, Method.DECOUPLED: 4,
    }  # fmt: skip


def test_a_variant_chooses_what_happens_to_the_moments(tmp_path):
    variants = {
        "local": {},
        "overwrite": {"moments": "Overwrite"},
        "average": {"moments": "Average"},
    }
    found = cells(tmp_path, variants=variants)
    chosen = {c.variant: c.task.moments for c in found if c.method is Method.DECOUPLED}
    assert chosen == {moments.value.lower(): moments for moments in Moments}
    different = {method: len({c.digest for c in found if c.method is method}) for method in Method}
    assert different == {m: 1 if m is Method.SYNCHRONOUS else 3 for m in Method}
    unknown = refusal(tmp_path, variants={"a": {"moments": "Mean"}})
    assert "variants.a.moments" in unknown
    assert "'Average'" in unknown


def test_methods_have_the_settings_that_define_them(tmp_path):
    spec = {cell.method: cell.task.spec for cell in cells(tmp_path)}
    assert (spec[Method.DILOCO].fragments, spec[Method.DILOCO].quorum) == (1, 2)
    assert (spec[Method.STREAMING].fragments, spec[Method.STREAMING].quorum) == (4, 2)
    assert (spec[Method.DECOUPLED].fragments, spec[Method.DECOUPLED].quorum) == (4, 1)


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        ({"girds": {}}, "girds: there is no such field; known are name, job, set, grid"),
        ({"scenarios": {"a": {"goodput": 1}}}, "known are stepSeconds"),
        ({"scenarios": {"a": {"failures": {"rate": 1}}}}, "known are goodput, outageSteps"),
        ({"scenarios": {"a": {"failures": {"goodput": 1.2}}}}, "less than 1"),
        ({"scenarios": {"a": {"scavenging": {"begin": 0.5, "end": 0.5}}}}, "is not less than end"),
        ({"scenarios": {"a": {"faults": ["1..2 nonsense eu/0"]}}}, "is not a fault"),
        ({"scenarios": {"a": {"faults": ["1..2 nan eu/0"]}}}, "expected one of"),
        ({"scenarios": {"a": {"faults": ["1..2 crash eu/7"]}}}, "there are eu/0, eu/0+trainer"),
        ({"scenarios": {"a": {"stepSeconds": [1, 2, 3]}}}, "3 values, expected 1 or 2"),
        ({"scenarios": {"a": {"stepSeconds": [1, 0.09]}}}, "stepSeconds[1]: Input should be greater than or equal to"),
        ({"evaluation": {"everySteps": 1}, "set": {"spec.steps": 10_001}},
         "evaluation.everySteps: 1 of 10,001 steps, an experiment at most 10,000 evaluations; raise it"),
        ({"scenarios": {"a": {"scavenging": {"extra": 8}}}, "set": {"spec.regions[0].learners": 10}}, "more than 64"),
        ({"methods": ["Asynchronous"]}, "methods[0]: Input should be 'Synchronous'"),
        ({"seeds": []}, "seeds: "),
        ({"seeds": [1, 1]}, "seeds: a value is there twice"),
        ({"grid": {"spec.sync.interval": []}}, "A list should have at least 1 item"),
        ({"grid": {"spec.sync.interval": 4}}, "Input should be a valid list"),
        ({"grid": {"spec.seed": [1]}}, "write seeds instead"),
        ({"grid": {"spec.steps": [1]}, "set": {"spec.steps": 2}}, "is in set and in grid"),
        ({"grid": {"spec.steps": [5, 5]}}, "a value is there twice"),
        ({"grid": {"spec.sync.intervall": [4]}}, "intervall"),
        ({"grid": {"spec.sync.interval": [2]}}, "interval"),
        ({"grid": {"steps": [2]}}, "a path starts with spec or metadata"),
        ({"set": {"spec.regions[0].learners": 65}}, "65 learners, an experiment has 1 to 64"),
        ({"seeds": list(range(2001))}, "8,004 cells, at most 2,000"),
        ({"job": "missing.yaml"}, "missing.yaml: No such file"),
        ({"variants": {"a": {"set": {"spec.steps": 5}}}, "grid": {"spec.steps": [6]}}, "is in variant a, and in grid"),
        ({"variants": {"a": {"scenarios": ["slow"]}}}, "variant a: no scenario slow; there are equal"),
        ({"variants": {"a": {"set": {"spec.seed": 1}}}}, "write seeds instead"),
        ({"variants": {"a": {"steps": 1}}}, "known are set, methods, scenarios"),
        ({"evaluation": {}}, "evaluation.everySteps: missing"),
        ({"name": "a b"}, "name: "),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_reason(tmp_path, study, expected):
    assert expected in refusal(tmp_path, **study)


def test_a_problem_of_many_cells_is_shown_once_with_their_number(tmp_path):
    text = refusal(tmp_path, grid={"spec.sync.interval": [2, 4]}, seeds=[1, 2, 3])
    first, second = text.splitlines()[:2]
    assert first == "12 of 24 cells cannot run"
    assert second.startswith("Synchronous, scenario equal, seed 1, spec.sync.interval=2: ")
    assert text.count("scenario equal") == 1


def test_an_own_program_is_refused(tmp_path):
    job = {**JOB, "spec": {**JOB["spec"], "learner": {"command": ["python", "train.py"]}}}
    found, manifest = studies.load(written(tmp_path, {}, job))
    with pytest.raises(ConfigError, match="experiments train the built-in recipe"):
        studies.cells(found, manifest)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "the study: is empty; write a study"), (b"- 1", "is not an object"), (b"a: [", "line 1: not YAML"),
     (b"a: 1\n---\n", "line 2: a second document starts here; a study is one document"),
     (b"a: .inf", "not a number that a study can contain"), (b"[" * 10_000, "the study: nested too deeply; a study"),
     (b"\xff", "not UTF-8"), (b"#" * (1 << 20) + b"#", "more than")],
)  # fmt: skip
def test_a_file_that_holds_something_else_is_refused(tmp_path, content, expected):
    path = tmp_path / "study.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as refused:
        studies.load(path)
    assert "manifest" not in str(refused.value)


def test_an_evaluation_of_the_study_replaces_that_of_the_job(tmp_path):
    assert {c.task.evaluate_every for c in cells(tmp_path)} == {1}
    assert {c.task.evaluate_every for c in cells(tmp_path, evaluation={"everySteps": 6})} == {6}


def test_a_study_needs_only_a_name_and_a_job():
    assert Study(name="s", job="j").count == len(Method)


def test_a_variant_replaces_fields_methods_and_scenarios_of_the_study(tmp_path):
    found = cells(
        tmp_path,
        set={"spec.steps": 20, "spec.sync.interval": 8},
        methods=["Decoupled"],
        scenarios={"equal": {}, "slow": {"stepSeconds": [1, 5]}},
        seeds=[1, 2],
        variants={
            "first": {"methods": ["Synchronous"], "scenarios": ["equal"]},
            "second": {"set": {"spec.sync.interval": 4}},
        },
    )
    assert [(c.variant, c.method, c.scenario, c.seed) for c in found] == [
        ("first", Method.SYNCHRONOUS, "equal", 1),
        ("first", Method.SYNCHRONOUS, "equal", 2),
        ("second", Method.DECOUPLED, "equal", 1),
        ("second", Method.DECOUPLED, "equal", 2),
        ("second", Method.DECOUPLED, "slow", 1),
        ("second", Method.DECOUPLED, "slow", 2),
    ]
    assert {(c.task.spec.steps, c.task.spec.interval) for c in found[2:]} == {(20, 4)}
    assert found[2].label == "Decoupled second seed=1"


def test_the_studies_of_the_repository_are_valid():
    folder = Path(__file__).parents[3] / "benchmarks" / "studies"
    files = [file for file in sorted(folder.glob("*/*.yaml")) if file.name != "job.yaml"]
    assert len(files) > 3
    for file in files:
        found, manifest = studies.load(file)
        assert len(studies.cells(found, manifest)) == found.count
