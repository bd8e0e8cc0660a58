"""The reference page is complete."""

from diloco.runtime.metric_table import METRICS
from diloco_job.reasons import CONDITIONS, REASONS
from diloco_job.reference import reference
from diloco_job.rules import CHANGES, FIXED, RULES
from diloco_job.status_types import Status

PAGE = reference()
LINES = PAGE.splitlines()


def row(field: str) -> list[str]:
    """The cells of the one row of the tables of fields that is about a field."""
    [found] = [line for line in LINES if line.startswith(f"| `{field}` |") and line.count("|") > 4]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_field_is_listed_with_type_bounds_default_change_and_meaning():
    assert row("spec.steps") == [
        "`spec.steps`",
        "integer, 1 to 1000000000",
        "required",
        "increase only",
        "T: global steps; the job is complete after this many.",
    ]
    assert row("spec.sync.fragments")[1:4] == ["integer, 1 to 1024", "`24`", "no"]
    assert row("spec.sync.quorum")[2:4] == ["`1`", "yes"]
    assert row("spec.sync.wire.up")[1] == "`FP32`, `BF16`, `Int8`, `Int4`"
    assert row("spec.learner.recipe.config")[3] == "no"
    assert row("spec.regions[].learners")[1:3] == ["integer, 0 to 1000", "required"]
    assert row("spec.learner.resources.limits")[1] == "map to quantity; at most 64"
    assert row("metadata.name")[1] == "text, at most 50 characters"


def test_every_rule_change_status_field_reason_and_metric_is_listed():
    for rule in (*RULES, *CHANGES):
        assert f"| `{rule.path}` | {rule.message.replace('{}', '…')} |" in LINES
    for path in FIXED:
        assert f"`{path}`" in PAGE
    for name, field in Status.model_fields.items():
        assert f"| `status.{field.alias or name}` |" in PAGE
    for condition in CONDITIONS:
        assert f"### {condition}" in LINES
    for row in REASONS:
        assert f"| {row.status} | `{row.reason}` | `{row.message}` | {row.event} |" in PAGE
    for metric in METRICS:
        assert f"| `{metric.name}` |" in PAGE


def test_tables_have_as_many_cells_in_every_row_as_in_their_head():
    width = 0
    for line in LINES:
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        assert cells == (width or cells), line
        width = cells
