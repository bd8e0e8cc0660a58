"""The plots of the report: what they show of each merge, and that nothing covers it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import BboxBase

from diloco_job.names import MAX_REGION_NAME
from diloco_local.report import plot
from diloco_local.report.run_files import load

LONGEST = "europe-west4-a-gpu-pool1"


def figure_of(directory: Path, names: list[str]) -> Figure:
    """Of a run of three merges; the last learner takes no part in the second one."""
    begin = datetime(2026, 1, 1, tzinfo=UTC).timestamp()

    def line(after: float, **fields: Any) -> str:
        time = datetime.fromtimestamp(begin + after, UTC).isoformat()
        return json.dumps({"time": time, "epoch": 1, **fields}) + "\n"

    def member(number: int) -> dict[str, Any]:
        counted = {"step": 1, "steps": 1, "tokens": 9, "weight": 3.0 if number == 0 else 1.0}
        return {"learner": names[number], "incarnation": number + 1, **counted}

    events = [line(0, event="join", learner=name, incarnation=i) for i, name in enumerate(names, 1)]
    for number in range(3):
        members = [member(i) for i in range(len(names) - (number == 1))]
        seconds = {"quorumSeconds": 0.1, "graceSeconds": (number + 1) / 100, "syncSeconds": 0.2}
        merge = {"step": number, "fragment": 0, "quorum": 1, **seconds, "members": members}
        events.append(line(number, event="merge", **merge))
    (directory / "events.jsonl").write_text("".join(events))
    for name in names:
        steps = directory / "learners" / name.replace("/", "-") / "steps.jsonl"
        steps.parent.mkdir(parents=True)
        steps.write_text("".join(line(i, tokens=9, loss=3.0 - i, seconds=0.5) for i in range(3)))
    return plot.draw(load(directory))


def axes_of(figure: Figure, heading: str) -> Axes:
    [axes] = [axes for axes in figure.axes if axes.get_title(loc="left") == heading]
    return axes


def test_each_merge_has_its_grace_window_as_waited_beside_the_other_times(tmp_path):
    axes = axes_of(figure_of(tmp_path, ["eu/0"]), "Time per merge")
    times = {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}
    assert times["grace, as waited"] == pytest.approx([0.01, 0.02, 0.03])
    assert times["wait for quorum"] == pytest.approx([0.1, 0.1, 0.1])
    assert times["sync"] == pytest.approx([0.2, 0.2, 0.2])


def test_the_weights_of_each_learner_in_each_merge_are_a_map_without_those_it_missed(tmp_path):
    axes = axes_of(figure_of(tmp_path, ["eu/0", "us/0"]), "Part of the weight in each merge")
    [image] = axes.get_images()
    shown = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_allclose(shown, [[0.75, 1.0, 0.75], [0.25, np.nan, 0.25]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["eu/0", "us/0"]


@pytest.mark.slow
@pytest.mark.parametrize("region", ["eu", LONGEST])
def test_no_legend_covers_data_or_leaves_the_page_however_long_the_names_are(tmp_path, region):
    assert len(LONGEST) == MAX_REGION_NAME
    figure = figure_of(tmp_path, [f"{region}/{number}" for number in range(8)])
    figure.canvas.draw()
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    assert len(legends) >= 6
    for legend in legends:
        box = legend.get_window_extent()
        covered = [axes.get_title(loc="left") for axes in figure.axes if overlap(box, axes.bbox)]
        assert covered == []
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


def overlap(legend: BboxBase, axes: BboxBase) -> bool:
    """Whether they have more than the width of a line in common."""
    width = min(legend.x1, axes.x1) - max(legend.x0, axes.x0)
    height = min(legend.y1, axes.y1) - max(legend.y0, axes.y0)
    return width > 2 and height > 2
