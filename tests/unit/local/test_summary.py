"""The last lines of a run: what is missing, why, and how to get it."""

import json

import pytest

from diloco_local.events import Completed, Event, Exited, Exported, Interrupted
from diloco_local.run_directory import RunDir
from diloco_local.summary import summary
from diloco_testing.local.policy_run import LEARNERS, training

STATUS = {"steps": 24, "tokens": 9, "startTime": "2026-03-01T12:00:00Z", "completionTime": None}


def lines(folder, *events: Event, evaluated: int | None = None) -> list[str]:
    """Of a run that was complete before these events, in `folder`."""
    run = training()
    run.handle(Completed())
    for name in LEARNERS:
        run.exits(name, 0)
    for event in events:
        run.handle(event)
    evaluation = None if evaluated is None else {"step": evaluated, "loss": 1.5}
    return summary(RunDir(folder), run.policy, {**STATUS, "evaluation": evaluation})


def warnings(found: list[str]) -> list[str]:
    return [line for line in found if line.startswith("warning")]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Exited(name="evaluator", code=0, no_score="no GPU")], "no GPU"),
        ([Interrupted()], "interrupted"),
        ([Exited(name="evaluator", code=78)], "/logs/evaluator.log"),
    ],
)
def test_a_missing_last_score_is_named_with_its_reason_and_the_way_to_get_it(
    tmp_path, events, reason
):
    for evaluated in (None, 12):
        [line] = warnings(lines(tmp_path, Exported(), *events, evaluated=evaluated))
        assert line.startswith("warning: the final model has no validation loss (")
        assert f"{reason}); evaluate it with: diloco resume --dir {tmp_path}" in line


def test_a_last_score_that_the_syncer_or_eval_jsonl_has_is_not_missing(tmp_path):
    assert warnings(lines(tmp_path, Exported(), evaluated=24)) == []
    scores = [{"step": 0, "loss": 5.0}, {"step": 24, "loss": 4.0}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(score) + "\n" for score in scores))
    found = lines(tmp_path, Exported())
    assert warnings(found) == []
    assert "validation loss: 5.0000 at step 0, 4.0000 at step 24" in found


def test_a_model_that_was_not_exported_is_named_although_there_is_one_of_an_earlier_step(tmp_path):
    (tmp_path / "model").mkdir()
    found = lines(tmp_path, evaluated=24)
    [line] = warnings(found)
    assert line.startswith("warning: the model was not exported (see ")
    assert line.endswith(f"export it with: diloco resume --dir {tmp_path}")
    assert not any(line.startswith("model:") for line in found)
