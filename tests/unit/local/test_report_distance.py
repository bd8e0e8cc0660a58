"""What the report states about the distance to synchronous training: the figures of the studies, and no others."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from diloco_local.report.distance import MEASURED, Measurement, known

STUDIES = Path(__file__).parents[3] / "benchmarks/studies"

EXAMPLE: dict[str, Any] = {
    "interval": 24,
    "merge": "Radial",
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.5,
    "learners": {"eu": 2, "us": 2},
}


SWEPT = "spec.learner.recipe.config.learningRate"


def losses(
    measured: Measurement, method: str
) -> dict[tuple[str, str], dict[int, tuple[int, float]]]:
    """Variant and swept learning rate → seed → tokens and loss, of the complete cells of a method."""
    folder, prefix = measured.source[0].split("/")
    files = (
        f"{prefix}-*results.csv" if prefix else "results.csv"
    )  # further seeds have a file of their own
    found: dict[tuple[str, str], dict[int, tuple[int, float]]] = {}
    for path in (STUDIES / folder).glob(files):
        with path.open() as file:
            for row in csv.DictReader(file):
                if row["method"] == method and row["status"] == "ok":
                    cells = found.setdefault((row["variant"], row.get(SWEPT, "")), {})
                    cells[int(row["seed"])] = int(row["tokens"]), float(row["loss"])
    return found


def mean(values: dict[int, tuple[int, float]]) -> float:
    return sum(loss for _, loss in values.values()) / len(values)


def tokens(values: dict[int, tuple[int, float]]) -> float:
    return sum(count for count, _ in values.values()) / len(values)


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: " ".join(m.source))
def test_each_figure_is_that_of_its_study(measured: Measurement) -> None:
    variant = measured.source[1]
    rates = [v for k, v in losses(measured, "Decoupled").items() if k[0] == variant]
    own = min(rates, key=mean)
    # The best synchronous training with the recipe of the variant and its tokens; others have another momentum of Muon.
    alike = [v for k, v in losses(measured, "Synchronous").items() if "muon" not in k[0]]
    same = [{seed: cell for seed, cell in values.items() if seed in own} for values in alike]
    reference = min(
        mean(values)
        for values in same
        if own.keys() == values.keys() and tokens(values) == pytest.approx(tokens(own), rel=0.01)
    )

    assert len(own) == measured.seeds
    assert measured.percent == pytest.approx(100 * (mean(own) / reference - 1), abs=0.05)


def test_a_job_with_measured_settings_gets_all_figures_that_fit_it() -> None:
    text = " ".join(known(EXAMPLE))

    assert text.startswith(
        "Measured for M = 4, H = 24, Radial, outer learning rate 0.7, momentum 0.5: +6"
    )
    assert text.count("parameters") == sum(
        m.setting.interval == 24 and m.learners == 4 for m in MEASURED
    )
    assert "learners of one speed" in text


@pytest.mark.parametrize(
    ("changed", "closest"),
    [
        ({"learners": {"eu": 32}}, "M = 16, H = 24, Radial"),
        ({"learners": {"eu": 3}}, "M = 4, H = 24, Radial"),
        ({"interval": 30}, "M = 4, H = 24, Radial"),
        ({"interval": 7, "merge": "Average"}, "M = 4, H = 6, Average"),
        ({"interval": 1000, "merge": "Average"}, "M = 4, H = 12, Average"),
        ({"outer_learning_rate": 0.9}, "M = 4, H = 24, Radial, outer learning rate 0.7"),
    ],
)
def test_a_job_with_other_settings_gets_the_closest_ones(
    changed: dict[str, Any], closest: str
) -> None:
    text = " ".join(known({**EXAMPLE, **changed}))

    assert text.startswith("Not measured for M = ")
    assert f"The closest settings are {closest}" in text


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {**EXAMPLE, "interval": 0},
        {**EXAMPLE, "interval": "24"},
        {**EXAMPLE, "merge": None},
        {**EXAMPLE, "outer_momentum": "x"},
        {**EXAMPLE, "learners": {}},
        {**EXAMPLE, "learners": [2]},
    ],
)
def test_an_incomplete_spec_gets_no_sentence(damaged: dict[str, Any]) -> None:
    assert known(damaged) == []
