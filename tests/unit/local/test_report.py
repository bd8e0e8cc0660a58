"""The report: complete for any run directory, without external resources."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_local.report import plot, run_files, style
from diloco_local.report.page import page, write_report
from diloco_local.report.run_files import Lifetime, load
from diloco_testing.local.written_run import BEGIN, append, stamp, suspended

P = H = 24


def loss_at(tokens: float) -> float:
    return 1.25 + 4.3 / (1 + tokens / 2e5) ** 0.6


class FakeRun:
    """Writes what a real run leaves behind: two learners killed, the syncer killed once."""

    def __init__(self, directory: Path, *, learners: int, steps: int, step_seconds: float = 0.2):
        self.directory, self.steps, self.step_seconds = directory, steps, step_seconds
        regions = ["eu"] * (learners - learners // 2) + ["us"] * (learners // 2)
        self.names = [f"{r}/{regions[:i].count(r)}" for i, r in enumerate(regions)]
        self.rng = np.random.default_rng(3)
        self.incarnation = {name: number for number, name in enumerate(self.names, 1)}
        self.next_incarnation = learners + 1
        self.events: list[dict[str, Any]] = []

    def write(self) -> FakeRun:
        spec = {
            "job": "stdlib-gpt",
            "steps": self.steps,
            "fragments": P,
            "interval": H,
            "quorum": 2,
        }
        status = {"state": "Complete", "step": self.steps, "steps": self.steps}
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "spec.json").write_text(json.dumps(spec))
        (self.directory / "status.json").write_text(json.dumps(status))
        (self.directory / "model").mkdir()
        (self.directory / "model" / "sample.txt").write_text("def <b>main</b>():\n    return 1\n")
        killed, syncer_dead = self._outages()
        self._start(1, 0.0)
        self._merges(killed, syncer_dead)
        self._learner_steps(killed)
        end = self.steps * self.step_seconds + 2
        self.event(end, 2 if syncer_dead else 1, "complete", step=self.steps)
        append(self.directory / "events.jsonl", self.events)
        return self

    def event(self, seconds: float, epoch: int, kind: str, **fields: object) -> None:
        self.events.append({"time": stamp(seconds), "epoch": epoch, "event": kind, **fields})

    def _outages(self) -> tuple[dict[str, tuple[float, float]], tuple[float, float] | None]:
        total = self.steps * self.step_seconds
        if len(self.names) < 4:
            return {}, None
        killed = {
            self.names[1]: (0.3 * total, 0.36 * total),
            self.names[-1]: (0.45 * total, 0.5 * total),
        }
        return killed, (0.7 * total, 0.72 * total)

    def _start(self, epoch: int, seconds: float) -> None:
        self.event(seconds, epoch, "start", step=0, fragments=P, interval=H, quorum=2)
        for name in self.names:
            joined = {"learner": name, "incarnation": self.incarnation[name]}
            self.event(seconds + 0.5, epoch, "join", **joined)

    def _merges(
        self, killed: dict[str, tuple[float, float]], dead: tuple[float, float] | None
    ) -> None:
        epoch, step, seconds = 1, 0, 1.0
        while step < self.steps:
            seconds += self.step_seconds
            if dead and epoch == 1 and seconds > dead[0]:
                epoch, seconds, step = 2, dead[1], step - step % 48
                self._start(2, seconds)
            here = []
            for name in self.names:
                down = killed.get(name)
                if down and down[0] < seconds < down[1]:
                    if not any(e["event"] == "leave" and e["learner"] == name for e in self.events):
                        gone = {"learner": name, "incarnation": self.incarnation[name]}
                        self.event(seconds, epoch, "leave", **gone, reason="StreamEnded")
                        self.event(seconds, 0, "restart", process=name, signal=9, restarts=1)
                    continue
                if down and seconds > down[1] and self.incarnation[name] <= len(self.names):
                    self.incarnation[name], self.next_incarnation = (
                        self.next_incarnation,
                        self.next_incarnation + 1,
                    )
                    back = {"learner": name, "incarnation": self.incarnation[name]}
                    self.event(seconds, epoch, "join", **back)
                if self.rng.random() < 0.93:
                    here.append(name)
            if len(here) >= 2:
                self._merge(epoch, step, seconds, here)
            step += 1

    def _merge(self, epoch: int, step: int, seconds: float, here: list[str]) -> None:
        steps, tokens = H, H * 2048
        members = [
            {
                "learner": name, "incarnation": self.incarnation[name],
                "step": round(seconds / self.step_seconds), "steps": steps, "tokens": tokens,
                "weight": tokens**2 / steps, "base": max(0, step - H),
            }
            for name in here
        ]  # fmt: skip
        self.event(
            seconds, epoch, "merge", step=step, fragment=step % P, attempt=1, quorum=2,
            quorumSeconds=float(self.rng.lognormal(-2, 0.7)),
            graceSeconds=float(0.16 * self.rng.random()),
            syncSeconds=float(self.rng.lognormal(-4, 0.4)),
            bytesUp=180_000 * len(here), bytesDown=90_000 * len(self.names), deltaNorm=0.3,
            members=members,
        )  # fmt: skip

    def _learner_steps(self, killed: dict[str, tuple[float, float]]) -> None:
        scores = []
        for name in self.names:
            rows = []
            for number in range(self.steps):
                seconds = 1 + number * self.step_seconds
                down = killed.get(name)
                if down and down[0] < seconds < down[1]:
                    continue
                loss = loss_at(number * 2048 * len(self.names)) * math.exp(
                    0.05 * self.rng.standard_normal()
                )
                rows.append(
                    {
                        "time": stamp(seconds), "incarnation": 1, "localStep": number + 1,
                        "globalStep": number, "tokens": 2048, "loss": loss,
                        "seconds": self.step_seconds, "syncSeconds": 0.0007,
                    }
                )  # fmt: skip
            append(self.directory / "learners" / name.replace("/", "-") / "steps.jsonl", rows)
        for step in range(0, self.steps + 1, max(1, self.steps // 20)):
            tokens = step * 2048 * len(self.names)
            at = stamp(1 + step * self.step_seconds)
            score = {"time": at, "step": step, "tokens": tokens, "loss": loss_at(tokens) + 0.04}
            scores.append(score)
        append(self.directory / "eval.jsonl", scores)


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "stdlib-gpt"
    FakeRun(directory, learners=4, steps=400).write()
    write_report(directory)
    return directory


def test_the_page_shows_the_result_of_the_run(ordinary: Path):
    shown = (ordinary / "report.html").read_text()
    for text in ("stdlib-gpt", "Complete", "400 / 400", "eu/0", "us/1", "Passed: "):
        assert text in shown


def test_the_page_is_self_contained(ordinary: Path):
    text = (ordinary / "report.html").read_text()
    assert not re.search(r"https?:|<script|<link|@import|url\(", text)
    assert set(re.findall(r'src="([^,"]*)', text)) == {"data:image/png;base64"}


def test_what_the_model_wrote_is_shown_as_text(ordinary: Path):
    assert "def &lt;b&gt;main&lt;/b&gt;():" in (ordinary / "report.html").read_text()


def test_the_figure_has_a_readable_size(ordinary: Path):
    width, height = size_of_png(ordinary / "report.png")
    assert 1200 <= width <= 3000
    assert 900 <= height <= 3000


def test_nothing_half_written_stays(ordinary: Path):
    assert not list(ordinary.glob("*.tmp"))


def test_incarnations_merges_and_epochs_are_those_of_the_events(ordinary: Path):
    run = load(ordinary)
    assert [learner.name for learner in run.learners] == ["eu/0", "eu/1", "us/0", "us/1"]
    assert [len(learner.lifetimes) for learner in run.learners] == [1, 2, 1, 2]
    assert [learner.restart_times.size for learner in run.learners] == [0, 1, 0, 1]
    assert [epoch.number for epoch in run.epochs] == [1, 2]
    first, second = run.learners[1].lifetimes
    assert first.end == pytest.approx(0.3 * 80, abs=0.5)
    assert second.begin == pytest.approx(0.36 * 80, abs=0.5)
    assert sum(learner.merge_times.size for learner in run.learners) == run.merges.members.sum()


def test_tokens_are_those_of_all_learners_together(ordinary: Path):
    run = load(ordinary)
    lines = sum(
        len(path.read_text().splitlines()) for path in ordinary.glob("learners/*/steps.jsonl")
    )
    assert run.tokens == lines * 2048
    assert run.tokens_at(np.array([0.0, run.seconds])).tolist() == [0.0, lines * 2048]


def test_a_learner_that_logs_running_totals_is_understood(tmp_path: Path):
    rows = [{"time": stamp(i), "tokens": 100 * (i + 1), "loss": 2.0} for i in range(10)]
    append(tmp_path / "learners" / "eu-0" / "steps.jsonl", rows)
    assert load(tmp_path).tokens == 1000


def test_steps_and_scores_of_the_older_parts_are_in_the_report(tmp_path: Path):
    state = tmp_path / "learners" / "eu-0"
    for part, first in (("1.jsonl", 0), ("jsonl", 10)):
        steps = [{"time": stamp(first + i), "tokens": 7, "loss": 2.0} for i in range(10)]
        append(state / f"steps.{part}", steps)
        append(tmp_path / f"eval.{part}", [{"time": stamp(first), "tokens": first, "loss": 3.0}])
    run = load(tmp_path)
    assert run.tokens == 140
    assert run.scores.tokens.tolist() == [0.0, 10.0]


def test_an_empty_directory_gives_a_report(tmp_path: Path):
    write_report(tmp_path)
    assert tmp_path.name in (tmp_path / "report.html").read_text()
    assert size_of_png(tmp_path / "report.png")[0] > 1000


@pytest.mark.slow
def test_a_run_that_just_began_gives_a_report(tmp_path: Path):
    append(tmp_path / "events.jsonl", [{"time": stamp(0), "epoch": 1, "event": "start"}])
    write_report(tmp_path)
    join = {"time": stamp(1), "epoch": 1, "event": "join", "learner": "eu/0", "incarnation": 1}
    append(tmp_path / "events.jsonl", [join])
    row = {"time": stamp(2), "localStep": 1, "tokens": 64, "loss": None}
    append(tmp_path / "learners" / "eu-0" / "steps.jsonl", [row])
    write_report(tmp_path)
    assert "eu/0" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_damaged_lines_and_odd_values_are_left_out(tmp_path: Path):
    FakeRun(tmp_path / "run", learners=2, steps=30).write()
    for path in tmp_path.glob("run/**/*.jsonl"):
        with path.open("a") as file:
            file.write('{"time":"now","loss":1}\n[1]\nnull\n{"time":"2026-01-0')
    append(
        tmp_path / "run" / "learners" / "eu-0" / "steps.jsonl",
        [{"time": stamp(9), "loss": float("nan"), "tokens": None}],
    )
    (tmp_path / "run" / "status.json").write_text("{")
    write_report(tmp_path / "run")
    assert load(tmp_path / "run").state == "Complete"


@pytest.mark.parametrize("kind", ["join", "leave"])
@pytest.mark.parametrize(
    "odd",
    [
        {"learner": "eu/0"},
        {"learner": "eu/0", "incarnation": [1]},
        {"learner": "eu/0", "incarnation": "1"},
        {"learner": ["eu/0"], "incarnation": 1},
        {"learner": {"a": 1}, "incarnation": 1},
        {"incarnation": None},
        {"learner": "eu/0", "incarnation": 1, "time": "0001-01-01T00:00:00"},
        {"learner": "eu/0", "incarnation": 1, "time": "9999-12-31T23:59:59-23:00"},
    ],
    ids=range(8),
)
def test_lines_of_learners_without_a_whole_incarnation_or_a_time_are_left_out(
    tmp_path: Path, kind: str, odd: dict[str, Any]
):
    joined = {"time": stamp(0), "epoch": 1, "event": "join", "learner": "eu/0", "incarnation": 7}
    append(
        tmp_path / "events.jsonl",
        [joined, joined | {"time": stamp(1), "incarnation": 8, "event": kind} | odd],
    )
    append(
        tmp_path / "learners" / "eu-0" / "steps.jsonl",
        [{"time": stamp(2), "tokens": 5, "loss": 1.0}],
    )
    run = load(tmp_path)
    assert [learner.name for learner in run.learners] == ["eu/0"]
    assert run.learners[0].tokens == 5
    assert run.learners[0].lifetimes[0].number in (1, 7)


def test_a_resumed_run_counts_suspensions_and_only_real_restarts(tmp_path: Path):
    run = load(suspended(tmp_path / "run"))
    assert run.suspensions == ((10.5, 110.0),)
    assert {learner.name: learner.restarts for learner in run.learners} == {"eu/0": 0, "us/0": 1}
    html = page(run, b"")
    assert "<span>restarts</span>1</div>" in html
    assert "<span>suspensions</span>1</div>" in html


def test_the_page_lists_with_which_state_processes_began(tmp_path: Path):
    rows = [
        {"time": stamp(0), "epoch": 1, "event": "start", "fragments": P, "interval": H},
        *(
            {"time": stamp(1), "epoch": 1, "event": "join", "learner": name, "incarnation": number}
            for number, name in enumerate(("eu/0", "eu/1"))
        ),
        {
            "time": stamp(2), "epoch": 1, "event": "recovery", "learner": "eu/1", "incarnation": 1, "step": 50,
            "source": "Peer", "peer": "eu/0", "stateStep": 48, "age": 2, "bytes": 3 << 20, "seconds": 0.5,
        },
    ]  # fmt: skip
    append(tmp_path / "events.jsonl", rows)
    html = page(load(tmp_path), b"")
    state = "the optimizers&#x27; state of a peer"
    cells = ("eu/1", "1", "50", state, "eu/0", "2", "3.00 MiB", "0.5 s", "–")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in html
    (tmp_path / "events.jsonl").unlink()
    assert "<h2>Recovery</h2>" not in page(load(tmp_path), b"")


def test_a_crash_of_the_syncer_alone_is_not_a_suspension(ordinary: Path):
    run = load(ordinary)
    assert len(run.epochs) == 2
    assert run.suspensions == ()
    assert sum(learner.restarts for learner in run.learners) == 2


def test_no_line_is_drawn_across_a_suspension(tmp_path: Path):
    run = load(suspended(tmp_path / "run"))
    over_time = plot.draw(run).axes[1]
    for line in over_time.get_lines():
        times = np.asarray(line.get_xdata(), float)
        values = np.asarray(line.get_ydata(), float)
        between = [
            np.isnan(values[i : i + 2]).any()
            for i in range(times.size - 1)
            if np.isnan(times[i + 1]) or times[i] <= 10.5 < times[i + 1]
        ]
        assert between
        assert all(between)


def test_each_of_a_few_learners_has_its_own_color_and_name(tmp_path: Path):
    figure = plot.draw(load(suspended(tmp_path / "run")))
    lines = {line.get_label(): line.get_color() for line in figure.axes[1].get_lines()}
    assert {"eu/0", "us/0", "mean of learners", "validation of Θ"} == lines.keys()
    assert len(set(lines.values())) == 4


def test_learning_rates_and_ages_of_results_are_those_of_the_steps(tmp_path: Path):
    run = load(suspended(tmp_path / "run"))
    assert run.learners[0].steps.learning_rate == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert run.learners[1].steps.result_age[3:].tolist() == [3, 4, 5]
    axes = {axes.get_title(loc="left"): axes for axes in plot.draw(run).axes}
    rates = axes["Learning rate of each learner"].get_lines()
    assert len(rates) == 2
    assert np.nanmax(rates[0].get_ydata()) == pytest.approx(0.6)
    ages = {
        line.get_label(): list(line.get_ydata())
        for line in axes["Age of results when learners apply them"].get_lines()
    }
    assert ages == {"largest": [3, 5], "median": [3, 4.5]}


def test_scores_of_a_clock_that_was_set_back_have_the_tokens_of_their_time(tmp_path: Path):
    rows = [{"time": stamp(i), "tokens": 10, "loss": 2.0} for i in range(9)]
    append(tmp_path / "learners" / "eu-0" / "steps.jsonl", rows)
    scores = [{"time": stamp(at), "tokens": 10 * at, "loss": 2.0} for at in (6, 7, 8, 1, 2)]
    append(tmp_path / "eval.jsonl", scores)
    lines = {line.get_label(): line for line in plot.draw(load(tmp_path)).axes[0].get_lines()}
    assert list(lines["validation of Θ"].get_xdata()) == [10, 20, 60, 70, 80]


def test_a_plot_of_the_first_learners_states_how_many_there_are(tmp_path: Path):
    for number in range(34):
        rows = [{"time": stamp(i), "tokens": 1, "loss": 1.0, "seconds": 0.5} for i in range(3)]
        append(tmp_path / "learners" / f"eu-{number}" / "steps.jsonl", rows)
    [axes] = [
        axes
        for axes in plot.draw(load(tmp_path)).axes
        if axes.get_title(loc="left") == "Duration of a step"
    ]
    assert axes.get_title(loc="right") == "the first 32 of 34 learners"
    assert len(axes.get_yticks()) == 32


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_forty_thousand_restarts_and_forty_suspensions_are_counted_within_a_minute(tmp_path: Path):
    lives = tuple(Lifetime(number=i, begin=i + 0.2, end=i + 0.4) for i in range(40_000))
    epochs = [Lifetime(number=k, begin=1000 * k, end=1000 * k + 999.5) for k in range(40)]
    [learner, _] = load(suspended(tmp_path / "run")).learners
    learners = [dataclasses.replace(learner, lifetimes=lives)]
    [counted], gaps = run_files._without_resumes(learners, epochs)
    assert len(gaps) == 39
    assert counted.restarts == 39_999 - 39


def test_weights_throughput_norms_and_bases_are_those_of_the_events(tmp_path: Path):
    run = load(suspended(tmp_path / "run"))
    eu, us = run.learners
    assert (eu.merge_numbers.tolist(), eu.merge_shares.tolist()) == ([0, 1, 2], [0.75, 1.0, 0.75])
    assert (us.merge_numbers.tolist(), us.merge_shares.tolist()) == ([0, 2], [0.25, 0.25])
    assert run.merges.tokens.tolist() == [40, 30, 40]
    assert run.merges.base_age.tolist() == [4, 2, 4]
    assert run.merges.delta_norm.tolist() == [0.5, 0.5, 0.5]
    titles = {axes.get_title(loc="left") for axes in plot.draw(run).axes}
    assert "Part of the weight in each merge" in titles


def test_tokens_per_second_and_step_times_are_those_of_steps_and_merges(tmp_path: Path):
    """The area below each line is what was trained on, and what merges took: half a model each."""
    run = load(suspended(tmp_path / "run"))
    axes = {axes.get_title(loc="left"): axes for axes in plot.draw(run).axes}
    lines = {line.get_label(): line for line in axes["Tokens per second"].get_lines()}
    assert lines.keys() == {"trained", "merged"}
    for label, tokens in (("trained", 2 * 6 * 8), ("merged", (40 + 30 + 40) / 2)):
        seconds = run.seconds / len(lines[label].get_ydata())
        assert sum(lines[label].get_ydata()) * seconds == pytest.approx(tokens), label
    times = axes["Duration of a step"]
    middle = [path.vertices[0][0] for c in times.collections[1::2] for path in c.get_paths()]
    assert middle == [0.5, 0.5]
    assert [text.get_text() for text in times.get_yticklabels()] == ["eu/0", "us/0"]


def test_refusals_and_the_users_own_metrics_are_on_the_page(tmp_path: Path):
    run = load(suspended(tmp_path / "run"))
    assert dict(run.learners[1].refusals) == {"NotFinite": 3}
    html = page(run, b"")
    assert "<td>NotFinite 3</td>" in html
    cells = ["accuracy", "0.025", "0.56", "0.025", "0.56"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in html


def test_the_number_of_metrics_of_a_score_is_limited(tmp_path: Path):
    score = {"time": stamp(1), "step": 1, "loss": 1.0} | {f"m{i}": i for i in range(100)}
    append(tmp_path / "eval.jsonl", [score])
    assert len(load(tmp_path).scores.others) == 16


def test_violations_are_shown_on_the_page(tmp_path: Path):
    FakeRun(tmp_path / "run", learners=2, steps=30).write()
    events = tmp_path / "run" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    merge = next(line for line in reversed(lines) if '"merge"' in line)
    events.write_text("".join([*lines, merge]))
    shown = page(load(tmp_path / "run"), b"")
    assert 'class="audit broken"' in shown
    assert "counts twice" in shown


@pytest.mark.slow
def test_losses_of_zero_and_below_are_drawn_too(tmp_path: Path):
    rows = [{"time": stamp(i), "tokens": 1, "loss": 1.0 - i / 10} for i in range(30)]
    append(tmp_path / "learners" / "eu-0" / "steps.jsonl", rows)
    write_report(tmp_path)


@pytest.mark.slow
def test_many_steps_are_thinned_out_and_keep_their_sum(tmp_path: Path):
    path = tmp_path / "learners" / "eu-0" / "steps.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for i in range(450_000):
            file.write(f'{{"time":{BEGIN + i},"localStep":{i + 1},"tokens":10,"loss":2.5}}\n')
    begun = time.monotonic()
    run = load(tmp_path)
    assert time.monotonic() - begun < 20
    assert run.learners[0].steps.time.size == 150_000
    assert run.learners[0].steps.last_local_step == 450_000
    assert run.tokens == 4_500_000


@pytest.mark.slow
def test_sixty_four_learners_fit_on_the_page(tmp_path: Path):
    FakeRun(tmp_path / "run", learners=64, steps=60).write()
    write_report(tmp_path / "run")
    run = load(tmp_path / "run")
    assert len(run.learners) == 64
    assert run.learners[9].name == "eu/9"
    assert run.learners[10].name == "eu/10"
    assert size_of_png(tmp_path / "run" / "report.png")[1] < 4000


def test_binning_keeps_means_and_few_points():
    x = np.arange(10_000.0)
    at, mean = style.binned(x, np.where(x < 5000, 1.0, 3.0), bins=100)
    assert at.size == 100
    assert (mean[0], mean[-1]) == (1.0, 3.0)
    at, mean = style.binned(np.array([2.0, 1.0, 3.0]), np.array([20.0, 10.0, np.nan]))
    assert (at.tolist(), mean.tolist()) == ([1.0, 2.0], [10.0, 20.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999_900, "1M"), (1234567, "1.23M"), (2.5e9, "2.5G"), (math.nan, "–")],
)
def test_quantities_have_three_digits_and_a_letter(value: float, text: str):
    assert style.quantity(value) == text


def test_b03_hostile_names_neither_stop_the_report_nor_reach_the_browser_as_controls(tmp_path):
    evil = "<script>alert(1)</script>\x1b[31m\x9b\u202e$\\frac{a}{$/0"
    base = {"time": stamp(0), "epoch": 1}
    member = {"learner": evil, "incarnation": 1, "step": 1, "steps": 1, "tokens": 1, "weight": 5}
    append(
        tmp_path / "events.jsonl",
        [
            {**base, "event": "start", "fragments": 1, "interval": 1},
            {**base, "event": "join", "learner": evil, "incarnation": 1},
            {**base, "event": "merge", "step": 1, "fragment": 0, "quorum": 1, "members": [member]},
        ],
    )
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({**base, "event": "merge", "step": 10**400, "fragment": 0}) + "\n")
        file.write(json.dumps({**base, "event": "merge", "step": 2, "bytesUp": 1e400}) + "\n")
        file.write("[" * 100_000 + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sample.txt").write_text(evil)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "alert(1)" in page
    assert "<script" not in page
    assert not any(control in page for control in "\x1b\x9b\u202e")
