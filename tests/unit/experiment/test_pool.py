"""Whole studies of tiny models: resumed, damaged, with cells that diverge or fail; tables and page."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from diloco.errors import EXIT_USAGE, ConfigError
from diloco_experiment import cells as cell_runner
from diloco_experiment import models, pool
from diloco_experiment import study as studies
from diloco_experiment.__main__ import main
from diloco_experiment.plot import draw
from diloco_experiment.results import MAX_BYTES, Curve, Folder, Result, Status, parse, text_of
from diloco_experiment.summary import groups
from diloco_experiment.tasks import Method, Task
from diloco_testing import experiments
from diloco_testing.experiments import CONFIG, text
from diloco_testing.local.fake_run import alive, until

MADE_BY = re.compile(rb'"made_by": "[^"]*"')
RATE = "spec.learner.recipe.config.learningRate"


def written(folder: Path, **study: Any) -> Path:
    job = {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "steps": 8,
            "sync": {"fragments": 4, "interval": 4, "overlap": 1},
            "learner": {"recipe": {"name": "gpt", "config": {**CONFIG, "data": text(folder)}}},
            "regions": [{"name": "eu", "learners": 2}],
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "job": "job.yaml", **study}))
    return path


def ended(folder: Path, path: Path, name: str, jobs: int = 1) -> tuple[int, list[str], Path]:
    """Run a study to its end: failed cells, lines, directory."""
    found, manifest = studies.load(path)
    lines: list[str] = []
    directory = folder / name
    failed = pool.run(
        found, studies.cells(found, manifest), Folder(directory), jobs=jobs, show=lines.append
    )
    return failed, lines, directory


def rows(directory: Path, name: str = "results.csv") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((directory / name).read_text())))


def made_up(task: Task) -> Result:
    """A result without training: the loss grows with the method's distance and the seed."""
    loss = 1.0 + 0.01 * list(Method).index(task.method) + 0.001 * task.spec.seed
    return Result(status=Status.OK, curve=((task.spec.steps, loss),), steps=task.spec.steps)


@pytest.mark.slow
def test_a_study_that_was_interrupted_and_resumed_gives_the_same_table(tmp_path, monkeypatch):
    path = written(tmp_path, seeds=[1, 2], methods=["Synchronous", "Decoupled"])
    _, _, whole = ended(tmp_path, path, "whole")
    ran: list[str] = []
    real = cell_runner.run

    def interrupted(task: Task) -> Result:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(task.digest)
        return real(task)

    with monkeypatch.context() as patch:
        patch.setattr(cell_runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ended(tmp_path, path, "resumed")
    assert [row["status"] for row in rows(tmp_path / "resumed")] == ["ok", "ok", "", ""]
    again: list[str] = []

    def counted(task: Task) -> Result:
        again.append(task.digest)
        return real(task)

    monkeypatch.setattr(cell_runner, "run", counted)
    failed, lines, resumed = ended(tmp_path, path, "resumed")
    assert (failed, len(again), set(again) & set(ran)) == (0, 2, set())
    assert "2 are there already" in lines[0]
    for name in ("results.csv", "summary.csv", "report.html"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_cell_that_diverges_is_a_result_and_the_others_are_not_lost(tmp_path):
    path = written(tmp_path, methods=["Decoupled"], grid={RATE: [1e30, 0.01]})
    failed, lines, directory = ended(tmp_path, path, "out")
    assert failed == 0
    diverged, fine = rows(directory)
    assert (diverged["status"], diverged["loss"]) == ("diverged", "")
    assert "the loss of eu/" in diverged["detail"]
    assert fine["status"] == "ok"
    assert float(fine["loss"]) < 6
    assert "diverged (the loss of" in lines[1]
    assert "Cells that did not end well" in (directory / "report.html").read_text()


def test_a_cell_that_fails_costs_only_itself_and_runs_again(tmp_path, monkeypatch):
    path = written(tmp_path, methods=["Synchronous", "Streaming"])
    broken = True

    def run(task: Task) -> Result:
        if task.method is Method.SYNCHRONOUS and broken:
            raise ZeroDivisionError("a defect")
        return made_up(task)

    monkeypatch.setattr(cell_runner, "run", run)
    failed, _, directory = ended(tmp_path, path, "out")
    assert failed == 1
    assert [row["status"] for row in rows(directory)] == ["failed", "ok"]
    assert rows(directory)[0]["detail"] == "ZeroDivisionError: a defect"
    broken = False
    assert ended(tmp_path, path, "out")[0] == 0
    assert [row["status"] for row in rows(directory)] == ["ok", "ok"]


def changed(**fields: Any) -> bytes:
    """The file of a result, with other values than any cell gives."""
    data = json.loads(text_of(Result(status=Status.OK, curve=((8, 1.0),))))
    return (json.dumps({**data, **fields}, sort_keys=True) + "\n").encode()


DAMAGED = {
    "empty": b"",
    "no fields": b"{}",
    "not UTF-8": b"\xff",
    "few fields": b'{"status": "ok"}',
    "more fields": changed(colour=1),
    "deep": b"[" * 100_000,
    "null": changed(tokens=None),
    "text": changed(steps="8"),
    "NaN": changed(curve=[[8, math.nan]]),
    "no pair": changed(curve=[[8]]),
    "no status": changed(status="fine"),
    "a fraction": changed(merges=1.5),
    "a truth": changed(restarts=False),
    "too large": changed(detail="x" * MAX_BYTES),
}


@pytest.mark.slow  # half a second each
@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_result_is_computed_again(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(cell_runner, "run", made_up)
    path = written(tmp_path, methods=["Synchronous"])
    _, _, directory = ended(tmp_path, path, "out")
    (file,) = (directory / "cells").iterdir()
    before = file.read_bytes()
    file.write_bytes(damage.replace(b'"made_by": ""', MADE_BY.search(before)[0]))
    _, lines, _ = ended(tmp_path, path, "out")
    assert len(lines) == 2
    assert file.read_bytes() == before


def test_the_file_of_the_longest_curve_and_detail_is_read_again(tmp_path):
    curve = Curve()
    points = curve.points
    for index in range(studies.MAX_EVALUATIONS):
        curve.add(studies.MAX_STEPS - index, math.pi * 1e-100)
    assert curve.points is points  # no copy for each point
    result = Result(status=Status.OK, curve=tuple(points), detail="\U0001f600" * pool.MAX_DETAIL)
    folder = Folder(tmp_path)
    folder.write("a", result)
    assert Folder(tmp_path).read("a") == result == parse(folder.cell("a").read_bytes())


def test_a_cell_keeps_the_beginning_of_a_long_error(tmp_path, monkeypatch):
    def fail(task: Task) -> Result:
        raise ValueError("x" * (2 * MAX_BYTES))

    monkeypatch.setattr(cell_runner, "run", fail)
    _, _, directory = ended(tmp_path, written(tmp_path, methods=["Decoupled"]), "out")
    assert len(rows(directory)[0]["detail"]) == pool.MAX_DETAIL
    assert all(file.stat().st_size < MAX_BYTES for file in (directory / "cells").iterdir())


@pytest.mark.slow
def test_a_study_that_grows_runs_only_what_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(cell_runner, "run", made_up)
    ended(tmp_path, written(tmp_path, seeds=[1]), "out")
    _, lines, directory = ended(tmp_path, written(tmp_path, seeds=[1, 2]), "out")
    assert lines[0] == "s: 8 cells, 8 different, 4 are there already"
    assert len(lines) == 5
    assert len(rows(directory)) == 8


def test_the_lines_of_progress_have_the_number_the_cell_and_the_time_that_is_left(
    tmp_path, monkeypatch
):
    clock = [0.0]

    def run(task: Task) -> Result:
        clock[0] += 30.0
        return made_up(task)

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(cell_runner, "run", run)
    _, lines, _ = ended(tmp_path, written(tmp_path, grid={"spec.sync.interval": [4, 8]}), "out")
    assert lines[0] == "s: 8 cells, 7 different"
    assert lines[1] == "[1/7] Synchronous interval=4 seed=0: loss 1.0000, about 3 min left"
    assert lines[6].endswith("about 30 s left")
    assert lines[-1] == "[7/7] Decoupled interval=8 seed=0: loss 1.0300"


def test_groups_are_compared_with_synchronous_training_each_at_its_best_rate(tmp_path, monkeypatch):
    losses = {
        (Method.SYNCHRONOUS, 0.01): 2.0, (Method.SYNCHRONOUS, 0.02): 1.5,
        (Method.DECOUPLED, 0.01): 1.8, (Method.DECOUPLED, 0.02): 1.2,
    }  # fmt: skip

    def run(task: Task) -> Result:
        rate = task.configs[0][1]["learningRate"]
        if (task.method, rate, task.spec.seed) == (Method.DECOUPLED, 0.02, 2):
            return Result(status=Status.DIVERGED, detail="NaN")
        loss = losses[task.method, rate] + 0.1 * (task.spec.seed - 2)
        tokens = 1000 * task.spec.seed
        share = 1.0 if task.method is Method.SYNCHRONOUS else 0.75
        return Result(
            status=Status.OK, curve=((8, loss),), tokens=tokens, merged_tokens=int(share * tokens)
        )

    monkeypatch.setattr(cell_runner, "run", run)
    path = written(tmp_path, seeds=[1, 2, 3], methods=["Synchronous", "Decoupled"],
                   sweep={RATE: [0.01, 0.02]})  # fmt: skip
    _, _, directory = ended(tmp_path, path, "out")
    synchronous, decoupled = rows(directory, "summary.csv")
    assert (synchronous[f"best {RATE}"], synchronous["loss"], synchronous["deviation"]) == (
        "0.02",
        "1.5",
        "0.1",
    )
    # 0.02 has the lower loss, but one of its seeds diverged.
    assert (decoupled[f"best {RATE}"], decoupled["loss"], decoupled["seeds"]) == (
        "0.01",
        "1.8",
        "3",
    )
    assert (synchronous["tokens"], decoupled["not_ok"]) == ("2000", "0")
    assert (synchronous["distance_percent"], decoupled["distance_percent"]) == ("+0.00", "+20.00")
    name = "merged_tokens_ratio"
    assert (synchronous[name], decoupled[name]) == ("1.000", "0.750")
    page = (directory / "report.html").read_text()
    assert "<th>merged tokens, of Synchronous</th>" in page
    assert "<td>75.0 %</td>" in page


def test_a_variant_is_compared_with_the_synchronous_group_of_its_own_or_equal_work(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        cell_runner, "run",
        lambda task: Result(status=Status.OK, curve=((8, float(task.spec.steps)),)),
    )  # fmt: skip
    first = {"methods": ["Synchronous"], "set": {"spec.steps": 10}}
    own = {"methods": ["Synchronous", "Decoupled"], "set": {"spec.steps": 20}}
    same = {"methods": ["Decoupled"], "set": {"spec.steps": 10, RATE: 0.5}}
    other = {"methods": ["Decoupled"], "set": {"spec.steps": 15}}
    path = written(tmp_path, variants={"a": first, "b": own, "c": same, "d": other})
    _, _, directory = ended(tmp_path, path, "out")
    assert [(row["variant"], row["distance_percent"]) for row in rows(directory, "summary.csv")] == [
        ("a", "+0.00"), ("b", "+0.00"), ("b", "+0.00"), ("c", "+0.00"), ("d", ""),
    ]  # fmt: skip


def test_distances_are_over_the_seeds_that_both_groups_have(tmp_path, monkeypatch):
    def run(task: Task) -> Result:
        if task.method is Method.SYNCHRONOUS and task.spec.seed == 2:
            return Result(status=Status.DIVERGED, detail="NaN")
        seed = task.spec.seed
        return Result(status=Status.OK, curve=((8, float(seed)),), merged_tokens=100 * seed)

    monkeypatch.setattr(cell_runner, "run", run)
    path = written(tmp_path, seeds=[1, 2], methods=["Synchronous", "Decoupled"])
    _, _, directory = ended(tmp_path, path, "out")
    assert [
        (row["loss"], row["distance_percent"], row["merged_tokens_ratio"], row["missing"])
        for row in rows(directory, "summary.csv")
    ] == [("1", "+0.00", "1.000", "0"), ("1.5", "+0.00", "1.000", "0")]


def test_a_plot_of_distances_has_no_raw_losses_and_no_curve_of_a_halted_cell(tmp_path, monkeypatch):
    def run(task: Task) -> Result:
        if task.spec.seed == 2 and task.method is Method.DECOUPLED:
            return Result(status=Status.HALTED, curve=((4, 9.0),))
        return Result(status=Status.OK, curve=((8, 2.0),))

    monkeypatch.setattr(cell_runner, "run", run)
    first = {"methods": ["Synchronous", "Decoupled"]}
    other = {"methods": ["Decoupled"], "set": {"spec.steps": 16}}
    path = written(tmp_path, seeds=[1, 2], variants={"a": first, "b": other})
    _, _, directory = ended(tmp_path, path, "out")
    found, manifest = studies.load(path)
    cells = studies.cells(found, manifest)
    results = pool.found(cells, Folder(directory))
    curves, bars = draw("s", groups(cells, results), results).axes
    assert all(x == 0.0 for line in bars.lines for x in line.get_xdata())
    assert len(bars.lines) == 4  # two groups: the third has no reference
    assert {x for line in curves.lines for x in line.get_xdata()} == {8}


def test_without_a_synchronous_group_there_is_no_distance(tmp_path, monkeypatch):
    monkeypatch.setattr(cell_runner, "run", made_up)
    _, _, directory = ended(tmp_path, written(tmp_path, methods=["Decoupled"]), "out")
    (row,) = rows(directory, "summary.csv")
    assert (row["distance_percent"], row["merged_tokens_ratio"]) == ("", "")
    found, manifest = studies.load(tmp_path / "study.yaml")
    assert groups(studies.cells(found, manifest), {})[0].missing == 1


def test_text_of_a_cell_is_neither_a_formula_nor_markup(tmp_path, monkeypatch):
    bad = Result(status=Status.HALTED, detail='=cmd("x")\n<script>')
    monkeypatch.setattr(cell_runner, "run", lambda task: bad)
    _, _, directory = ended(tmp_path, written(tmp_path, methods=["Decoupled"]), "out")
    assert rows(directory)[0]["detail"] == '\'=cmd("x") <script>'
    assert "<script>" not in (directory / "report.html").read_text()


def test_what_the_recipe_refuses_is_found_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(cell_runner, "run", made_up)
    path = written(tmp_path, grid={"spec.learner.recipe.config.width": [16, 17]})
    with pytest.raises(ConfigError, match=r"Synchronous width=17 seed=0: eu/0: config\.width: 17"):
        ended(tmp_path, path, "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"width": 100_000}, "has 120,051,200,000 parameters"),
        ({"data": "/no/such/text"}, "there is no file or folder"),
    ],
)
def test_limits_and_data_are_checked_before_anything_runs(tmp_path, monkeypatch, config, expected):
    monkeypatch.setattr(cell_runner, "run", made_up)
    path = written(tmp_path, set={f"spec.learner.recipe.config.{k}": v for k, v in config.items()})
    with pytest.raises(ConfigError, match=expected):
        ended(tmp_path, path, "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_cells_that_other_versions_or_data_made_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cell_runner, "run", made_up)
    path = written(tmp_path, methods=["Synchronous"])
    _, _, directory = ended(tmp_path, path, "out")
    (before,) = rows(directory)
    assert "torch " in before["made_by"]
    assert len(ended(tmp_path, path, "out")[1]) == 1
    with (tmp_path / "text.txt").open("a") as file:
        file.write("one more line\n")
    assert len(ended(tmp_path, path, "out")[1]) == 2
    (after,) = rows(directory)
    assert after["made_by"] != before["made_by"]
    monkeypatch.setattr(models, "_versions", lambda: "torch 99")
    assert len(ended(tmp_path, path, "out")[1]) == 2
    assert rows(directory)[0]["made_by"].startswith("torch 99, data ")


def test_one_process_at_a_time_runs_a_study_in_a_directory(tmp_path, monkeypatch):
    path = written(tmp_path, methods=["Synchronous"])

    def twice(task: Task) -> Result:
        with pytest.raises(pool.BusyError, match="wait for its end, or give another --dir"):
            ended(tmp_path, path, "out")
        return made_up(task)

    monkeypatch.setattr(cell_runner, "run", twice)
    failed, _, directory = ended(tmp_path, path, "out")
    assert failed == 0, rows(directory)[0]["detail"]


def test_the_program_exits_with_2_for_a_study_that_is_not_valid(tmp_path, capsys):
    path = written(tmp_path, methods=["Asynchronous"])
    assert main([str(path), f"--dir={tmp_path / 'out'}"]) == EXIT_USAGE
    assert "methods[0]" in capsys.readouterr().err


def test_the_program_writes_the_tables_and_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cell_runner, "run", made_up)
    path, out = written(tmp_path), tmp_path / "out"
    assert main([str(path), f"--dir={out}", "--jobs=1"]) == 0
    assert {p.name for p in out.iterdir()} == {
        "cells", "results.csv", "summary.csv", "report.html", "report.png",
    }  # fmt: skip
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"{out}/report.html, results.csv, summary.csv"
    )


def test_an_interrupted_program_states_how_to_continue(tmp_path, capsys, monkeypatch):
    def interrupt(task: Task) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(cell_runner, "run", interrupt)
    assert main([str(written(tmp_path)), f"--dir={tmp_path / 'out'}", "--jobs=1"]) == 130
    assert "the same command continues" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(tmp_path):
    path = written(tmp_path, methods=["Synchronous", "Decoupled"], seeds=[1, 2])
    _, _, single = ended(tmp_path, path, "single")
    _, _, parallel = ended(tmp_path, path, "parallel", jobs=2)
    for file in ("results.csv", "summary.csv"):
        assert (single / file).read_bytes() == (parallel / file).read_bytes()


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_results_are_kept(tmp_path, monkeypatch):
    path = written(tmp_path, methods=["Synchronous", "Decoupled"])
    found, manifest = studies.load(path)
    first, second = studies.cells(found, manifest)
    directory = tmp_path / "out"
    Folder(directory).write(first.digest, made_up(first.task))
    monkeypatch.setattr(pool, "_run", experiments.killed)
    with pytest.raises(
        pool.EndedProcessError, match="one of: Synchronous seed=0; Decoupled seed=0"
    ):
        list(pool._results([first, second], 2))
    assert Folder(directory).read(first.digest) == made_up(first.task)


STUCK = """
import sys
from pathlib import Path
from diloco_experiment import pool, study
from diloco_testing import experiments
pool._run = experiments.stuck
list(pool._results(study.cells(*study.load(Path(sys.argv[1]))), 2))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_processes_of_a_study_that_is_killed_end(tmp_path):
    path = written(tmp_path, methods=["Synchronous", "Decoupled"])
    support = str(Path(experiments.__file__).parents[1])
    program = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(path)], env={**os.environ, "PYTHONPATH": support}
    )
    pids: list[int] = []
    try:
        until(
            lambda: len(list(tmp_path.glob("*.pid"))) == 2,
            "second process that trains",
            seconds=240,
        )
        pids += [int(file.stem) for file in tmp_path.glob("*.pid")]
        program.kill()
        program.wait()
        until(lambda: not any(map(alive, pids)), "end of the processes")
    finally:
        program.kill()
        program.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
