"""The evaluator: its schedule, the user's command, and an unavailable syncer."""

import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco.errors import ConfigError, DamagedError, ProtocolError, UnavailableError
from diloco.rpc import status_codes
from diloco.runtime import health
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.rpc import telemetry
from diloco_worker import evaluator
from diloco_worker.evaluator import CommandScorer, Evaluator, NoScoreError

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int64)}


@pytest.mark.parametrize(
    ("step", "last", "complete", "due"),
    [
        (0, None, False, True),
        (17, None, False, True),
        (0, 0, False, False),
        (49, 0, False, False),
        (50, 0, False, True),
        (99, 53, False, False),
        (103, 53, False, True),
        (199, 150, True, True),
        (199, 199, True, False),
        (200, 200, True, False),
    ],
)
def test_the_first_the_last_and_one_step_of_each_interval_are_due(step, last, complete, due):
    assert evaluator.is_due(step=step, last=last, every=50, complete=complete) is due


# ---------------------------------------------------------------- the user's command


def command(tmp_path, body):
    path = tmp_path / "eval.py"
    path.write_text(textwrap.dedent(body))
    return CommandScorer(command=("python", str(path), "--fast"))


def test_the_command_gets_the_weights_as_its_last_argument(tmp_path):
    score = command(
        tmp_path,
        f"""
        import json, shutil, sys
        shutil.copy(sys.argv[-1], {str(tmp_path / "seen")!r})
        print("loading")
        print(json.dumps({{"loss": 9}}))
        print(json.dumps({{"loss": 1.5, "accuracy": 0.25, "flag": sys.argv[1]}}))
        print("done")
        """,
    )(WEIGHTS)
    assert score == {"loss": 1.5, "accuracy": 0.25, "flag": "--fast"}
    seen = load_file(tmp_path / "seen")
    assert {n: (a.dtype, a.tolist()) for n, a in seen.items()} == {
        n: (a.dtype, a.tolist()) for n, a in WEIGHTS.items()
    }


def test_the_weights_file_is_deleted_afterwards(tmp_path):
    score = command(
        tmp_path, 'import json, sys; print(json.dumps({"loss": 1, "path": sys.argv[-1]}))'
    )(WEIGHTS)
    assert not Path(score["path"]).exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import sys; sys.exit('the data is not here')", "ended with 1.*the data is not here"),
        ("raise KeyError('oops')", "ended with 1.*KeyError: 'oops'"),
        (
            "print('loss: 3'); import sys; print('why', file=sys.stderr)",
            "no line with.*loss: 3.*why",
        ),
        ("pass", "no line with a JSON object"),
        ("print('[1, 2]')", "no line with a JSON object"),
        ("print('{\"accuracy\": 1}')", 'expected a number under "loss"'),
        ('print(\'{"loss": "low"}\')', 'expected a number under "loss"'),
        ("print('{\"loss\": true}')", 'expected a number under "loss"'),
        ("print('{\"loss\": 1' + 400 * '0' + '}')", 'expected a number under "loss"'),
        ("print('[' * 9000)", "no line with a JSON object"),
    ],
)
def test_the_error_of_a_command_without_a_score_contains_its_output(tmp_path, body, message):
    with pytest.raises(NoScoreError, match=r"(?s)" + message):
        command(tmp_path, body)(WEIGHTS)


def test_a_missing_command_gives_no_score():
    with pytest.raises(NoScoreError, match=r"evaluation\.command: .*no-such-program"):
        CommandScorer(command=("/no-such-program",))(WEIGHTS)


def test_a_disk_that_does_not_take_the_model_gives_no_score(monkeypatch, tmp_path):
    scorer = CommandScorer(command=("true",))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(NoScoreError, match="File too large"):
            scorer({"w": np.zeros(10_000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(NoScoreError, match="No such file"):
        scorer(WEIGHTS)


# ---------------------------------------------------------------- a run


class Syncer:
    """A syncer that advances by `stride` steps per status call, and can be unavailable."""

    def __init__(self, *, steps, stride, unavailable=()):
        self.steps, self.stride = steps, stride
        self.unavailable = list(unavailable)
        """Numbers of the calls (of any kind) that fail."""
        self.step, self.calls, self.scores = -stride, 0, []
        self.model_sha256 = "a"
        """Of its final model."""
        self.unfinished = 0
        """Number of status calls at the last step until the job is complete."""
        self.initialising = 0
        """Number of status calls until Θ exists."""

    def call(self):
        self.calls += 1
        if self.calls in self.unavailable:
            raise UnavailableError("connection refused")

    def status(self):
        self.call()
        if self.initialising:
            self.initialising -= 1
            return pb.StatusReply(state="Initialising", tensors=[pb.TensorInfo(name="w")])
        self.step = min(self.steps, self.step + self.stride)
        state = "Complete" if self.step == self.steps else "Training"
        if state == "Complete" and self.unfinished:
            self.unfinished, state = self.unfinished - 1, "Training"
        return pb.StatusReply(
            state=state,
            step=self.step,
            steps=self.steps,
            model_sha256=self.model_sha256 if state == "Complete" else "",
            tokens=77,
            tensors=[pb.TensorInfo(name="w")],
        )

    def fetch(self, status):
        self.call()
        return {"w": np.array([self.step], np.float32)}

    def submit(self, evaluation):
        self.call()
        self.scores.append((evaluation.step, evaluation.loss))


class SleptError(Exception):
    """The evaluator slept more often than the test allows."""


def evaluator_of(syncer, *, scorer=None, state_file=None, every=50, most_sleeps=500):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) > most_sleeps:
            raise SleptError

    return Evaluator(
        spec=RunSpec(job="j", steps=syncer.steps, evaluation_every_steps=every),
        status=syncer.status,
        fetch=syncer.fetch,
        submit=syncer.submit,
        scorer=scorer or (lambda weights: {"loss": float(weights["w"][0]) + 0.5}),
        state_file=state_file,
        sleep=sleep,
    )


def test_a_run_scores_the_start_each_interval_and_the_end():
    syncer = Syncer(steps=210, stride=20)
    evaluator_of(syncer).run()
    assert syncer.scores == [(s, s + 0.5) for s in (0, 60, 100, 160, 200, 210)]


def test_a_model_that_merges_change_while_it_is_downloaded_has_the_step_before():
    syncer = Syncer(steps=60, stride=20)
    fetch = syncer.fetch

    def last_merge_during_the_download(status):
        weights = fetch(status)
        if status.step < syncer.steps:
            weights["w"][:] = syncer.step = syncer.steps  # one fragment is new, another one old
        return weights

    evaluation = evaluator_of(syncer)
    evaluation.fetch = last_merge_during_the_download
    evaluation.run()
    assert syncer.scores == [(0, 60.5), (60, 60.5)], "the complete model is scored in any case"


def test_initial_weights_are_scored_as_step_0_without_a_download():
    syncer = Syncer(steps=40, stride=20)
    evaluator_of(syncer).run(initial={"w": np.array([-8], np.float32)})
    assert syncer.scores == [(0, -7.5), (40, 40.5)]


def test_nothing_is_downloaded_before_there_is_a_model():
    syncer = Syncer(steps=40, stride=40)
    syncer.initialising = 3
    evaluator_of(syncer).run()
    assert syncer.scores == [(0, 0.5), (40, 40.5)]


def test_an_unavailable_syncer_delays_scores_and_loses_none():
    # Calls 1 to 5 get the status; the others are a download and three submissions.
    syncer = Syncer(steps=210, stride=20, unavailable=[1, 2, 3, 4, 5, 7, 9, 10, 11])
    evaluator_of(syncer).run()
    steps = [step for step, _ in syncer.scores]
    assert set(syncer.unavailable) <= set(range(syncer.calls + 1))
    assert steps == sorted(set(steps))
    assert {step // 50 for step in steps} == {0, 1, 2, 3, 4}
    assert steps[-1] == 210


class Gone(grpc.RpcError):
    """As a channel without a server raises it: without a status code."""


@pytest.mark.parametrize("error", [Gone(), DamagedError("chunk 3"), UnavailableError("later")])
def test_no_error_of_a_download_ends_the_evaluator(error):
    syncer = Syncer(steps=40, stride=20)
    fetch, errors = syncer.fetch, [error]
    evaluation = evaluator_of(syncer)
    evaluation.fetch = lambda status: fetch(status) if not errors else raise_(errors.pop())
    evaluation.run()
    assert not errors
    assert syncer.scores[-1] == (40, 40.5)


def raise_(error):
    raise error


def test_a_model_without_a_score_is_logged_and_the_next_model_is_scored(caplog):
    syncer = Syncer(steps=100, stride=50)
    answers = iter([NoScoreError("the data is not here"), {"loss": float("nan")}, {"loss": 2.0}])

    def scorer(weights):
        answer = next(answers)
        return raise_(answer) if isinstance(answer, Exception) else answer

    evaluator_of(syncer, scorer=scorer).run()
    assert syncer.scores == [(100, 2.0)]
    assert "the data is not here" in caplog.text
    assert "the loss is nan, expected a finite number" in caplog.text


def test_a_command_that_fails_is_in_the_health_file_until_a_model_has_a_score(tmp_path):
    syncer, path, seen = Syncer(steps=100, stride=50), tmp_path / "health.json", []
    trace = "Traceback (most recent call last):\n  File x\n" + "  y\n" * 99 + "KeyError: 'w'\n"
    text = f"evaluation.command ended with 1, expected 0; its standard error ends with: {trace}"
    answers = iter([NoScoreError(text), {"loss": 2.0}])

    def scorer(weights):
        seen.append(health.read(path))
        answer = next(answers, {"loss": 2.0})
        return raise_(answer) if isinstance(answer, Exception) else answer

    made = evaluator_of(syncer, scorer=scorer)
    made.health = health.HealthFile(path)
    made.run()
    assert seen[:2] == [None, dataclasses.replace(seen[1], problem="NoScore")]
    assert seen[1].why == (
        "the model of step 0 has no score: evaluation.command ended with 1, expected 0: KeyError: 'w'"
    )
    assert health.read(path).problem == ""


def test_a_restarted_evaluator_continues_after_its_last_score(tmp_path):
    state_file = tmp_path / "state" / "evaluator.json"
    first = Syncer(steps=210, stride=20)
    with pytest.raises(SleptError):
        evaluator_of(first, state_file=state_file, most_sleeps=5).run(
            initial=WEIGHTS | {"w": np.zeros(1)}
        )
    assert [s for s, _ in first.scores] == [0, 60, 100]
    second = Syncer(steps=210, stride=20)
    second.step = 100
    evaluator_of(second, state_file=state_file).run(initial=WEIGHTS | {"w": np.zeros(1)})
    assert [s for s, _ in second.scores] == [160, 200, 210]


def test_a_job_that_was_rolled_back_gets_scores_of_its_new_parameters(tmp_path):
    state_file = tmp_path / "evaluator.json"
    evaluator_of(Syncer(steps=100, stride=20), state_file=state_file).run()
    again = Syncer(steps=100, stride=20)
    again.step = 30
    evaluator_of(again, state_file=state_file).run()
    assert [step for step, _ in again.scores] == [100]


@pytest.mark.parametrize("unfinished", [0, 3])
def test_the_final_model_after_a_roll_back_that_an_evaluator_did_not_see_gets_its_score(
    tmp_path, unfinished
):
    state_file = tmp_path / "evaluator.json"
    first = Syncer(steps=100, stride=20)
    first.unfinished = unfinished
    evaluator_of(first, state_file=state_file).run()
    assert [step for step, _ in first.scores] == [0, 60, 100]
    for model, expected in (("a", []), ("b", [100]), ("b", [])):
        again = Syncer(steps=100, stride=20)
        again.step, again.model_sha256 = 100, model  # it is complete
        evaluator_of(again, state_file=state_file).run(initial=WEIGHTS)
        assert [step for step, _ in again.scores] == expected


def test_the_final_model_after_more_steps_is_scored_once(tmp_path):
    state_file = tmp_path / "evaluator.json"
    evaluator_of(Syncer(steps=100, stride=50), state_file=state_file).run()
    more = Syncer(steps=200, stride=50)
    more.step, more.model_sha256, more.unfinished = 100, "of step 200", 2
    evaluator_of(more, state_file=state_file).run()
    assert [step for step, _ in more.scores].count(200) == 1


def test_a_final_model_without_a_score_is_tried_again_by_the_next_evaluator(tmp_path):
    state_file = tmp_path / "evaluator.json"

    def fails(weights):
        raise NoScoreError("the data is not here")

    for model, scorer, expected in (
        ("a", fails, []), ("a", None, [40]), ("b", fails, []), ("b", None, [40]), ("b", fails, []),
    ):  # fmt: skip
        syncer = Syncer(steps=40, stride=40)
        syncer.step, syncer.model_sha256 = 40, model  # it is complete
        evaluator_of(syncer, scorer=scorer, state_file=state_file).run()
        assert [step for step, _ in syncer.scores] == expected


@pytest.mark.parametrize(
    ("steps", "expected"), [(210, [0, 60, 110, 150, 210]), (100, [0, 60, 100])]
)
def test_the_score_of_a_model_that_a_roll_back_undid_is_not_submitted(steps, expected, caplog):
    syncer, lost = Syncer(steps=steps, stride=20), []
    submit = syncer.submit

    def rolled_back(evaluation):
        if evaluation.step == 100 and not lost:
            lost.append(evaluation.loss)
            syncer.step = 10
            raise UnavailableError("connection refused")
        submit(evaluation)

    evaluation = evaluator_of(syncer)
    evaluation.submit = rolled_back
    evaluation.run()
    assert lost == [100.5]
    assert ([step for step, _ in syncer.scores], syncer.step) == (expected, steps)
    assert "the score of step 100 is not submitted: the job is at step 30" in caplog.text


def test_b02_the_state_of_an_evaluator_is_private_and_no_link_is_followed(tmp_path):
    state_file, victim = tmp_path / "state" / "evaluator.json", tmp_path / "victim"
    before = os.umask(0)
    try:
        evaluator_of(Syncer(steps=1, stride=1), state_file=state_file).run()
    finally:
        os.umask(before)
    assert state_file.stat().st_mode & 0o777 == 0o600
    assert state_file.parent.stat().st_mode & 0o777 == 0o700
    state_file.unlink()
    victim.write_text('{"step": 1}')
    state_file.symlink_to(victim)
    again = Syncer(steps=1, stride=1)
    evaluator_of(again, state_file=state_file).run()
    assert [step for step, _ in again.scores] == [0, 1], "what the link names counts for nothing"
    assert victim.read_text() == '{"step": 1}'
    assert not state_file.is_symlink()


def test_other_values_of_a_score_are_submitted_as_detail():
    syncer = Syncer(steps=1, stride=1)
    seen = []
    evaluation = evaluator_of(syncer, scorer=lambda weights: {"loss": 1, "accuracy": 0.5})
    evaluation.submit = seen.append
    evaluation.run()
    detail = json.loads(seen[0].detail)
    assert detail.pop("seconds") >= 0
    assert detail == {"accuracy": 0.5, "tokens": 77}


def submitted(score, caplog):
    """The detail of a score as the syncer keeps it, without `seconds` and `tokens`, and what was logged."""
    syncer, kept = Syncer(steps=1, stride=1), []
    made = evaluator_of(syncer, scorer=lambda weights: score)
    made.submit = lambda evaluation: kept.append(telemetry.score(evaluation, steps=1))
    made.run()
    first, _ = kept
    assert first.detail.pop("tokens") == 77
    assert first.detail.pop("seconds") >= 0
    return first.loss, first.detail, caplog.text


@pytest.mark.parametrize(
    "other",
    [math.inf, -math.inf, math.nan, "x" * 257, [1.0, math.inf], {"deep": math.nan}],
    ids=lambda value: str(value)[:9],
)
def test_a_value_that_the_syncer_would_refuse_is_left_out_of_the_score_and_named(other, caplog):
    score = {"loss": 900.0, "perplexity": other, "accuracy": 0.5, "other": "x" * 256}
    loss, detail, logged = submitted(score, caplog)
    assert (loss, detail) == (900.0, {"accuracy": 0.5, "other": "x" * 256})
    assert logged.count("perplexity") == 2  # of two models


def test_a_score_that_is_too_long_for_the_syncer_loses_its_last_values(caplog):
    bounds = telemetry.DETAIL_BYTES, telemetry.MAX_DETAIL
    assert bounds == (evaluator.DETAIL_BYTES, evaluator.MAX_TEXT)
    score = {"loss": 2.0} | {f"metric-{number:04}-ä": number / 3 for number in range(1000)}
    loss, detail, logged = submitted(score, caplog)
    assert loss == 2.0
    assert list(detail) == list(score)[1 : 1 + telemetry.MAX_DETAILS - 2]
    assert "metric-0999" not in logged  # shortened
    assert "metric-0450" in logged
    assert len(logged) < 3000


def test_a_score_that_the_syncer_refuses_for_good_is_no_score_and_the_next_model_is_scored(
    tmp_path, caplog
):
    syncer, path, tried, seen = Syncer(steps=100, stride=50), tmp_path / "health.json", [], []

    def submit(evaluation):
        tried.append(evaluation.step)
        if evaluation.step == 50:
            raise ProtocolError("evaluation: the detail is not JSON")
        seen.append(health.read(path))
        syncer.submit(evaluation)

    made = evaluator_of(syncer, most_sleeps=20)
    made.health, made.submit = health.HealthFile(path), submit
    made.run()
    assert [step for step, _ in syncer.scores] == [0, 100]
    assert tried == [0, 50, 100]
    assert seen[0] is None
    assert (seen[1].problem, seen[1].why) == (
        "NoScore",
        "the model of step 50 has no score: the syncer refused it: evaluation: the detail is not JSON",
    )
    assert "the syncer refused it" in caplog.text
    assert (health.read(path).problem, health.read(path).why) == ("", "scored")


class Ended(grpc.RpcError, grpc.Call):
    """A call that ended with this status and these trailers."""

    def __init__(self, code, details, reason=""):
        self.code, self.details = lambda: code, lambda: details
        self.trailing_metadata = lambda: ((status_codes.REASON_KEY, reason),) if reason else ()

    initial_metadata = is_active = time_remaining = cancel = add_callback = None


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.PERMISSION_DENIED, "RBAC: access denied"),
    ],
)
def test_an_error_of_a_proxy_delays_the_final_score_and_does_not_lose_it(code, details):
    syncer, errors = Syncer(steps=50, stride=50), [Ended(code, details)] * 10
    made = evaluator_of(syncer)
    made.submit = lambda score: (
        raise_(errors.pop()) if score.step and errors else syncer.submit(score)
    )
    made.run()
    assert not errors
    assert syncer.scores == [(0, 0.5), (50, 50.5)]


def test_only_a_reason_of_the_syncer_refuses_a_score(caplog):
    syncer, code = Syncer(steps=50, stride=50), grpc.StatusCode.INVALID_ARGUMENT
    errors = [Ended(code, "step 51", ProtocolError.reason), Ended(code, "bad header")]
    made = evaluator_of(syncer)
    made.submit = lambda score: raise_(errors.pop()) if errors else syncer.submit(score)
    made.run()
    assert syncer.scores == [(50, 50.5)]
    assert "retrying: INVALID_ARGUMENT: bad header" in caplog.text
    assert "no score: the syncer refused it: step 51" in caplog.text


def test_a_job_that_is_complete_ends_its_evaluator_though_its_last_score_is_refused(tmp_path):
    syncer, state_file = Syncer(steps=50, stride=50), tmp_path / "evaluator.json"
    made = evaluator_of(syncer, state_file=state_file, most_sleeps=20)
    made.submit = lambda evaluation: raise_(ProtocolError("no")) if evaluation.step else None
    made.run()
    assert json.loads(state_file.read_text())["step"] == 0


# ---------------------------------------------------------------- the program


def test_a_job_without_recipe_and_command_is_refused_with_a_message():
    with pytest.raises(ConfigError, match=r"spec\.evaluation\.command: not set"):
        evaluator.make_scorer(RunSpec(job="j", steps=1), {})


@pytest.mark.slow
def test_the_evaluator_outside_a_job_exits_with_a_message_and_no_retry():
    done = subprocess.run(
        [sys.executable, "-m", "diloco_worker.evaluator"],
        capture_output=True,
        text=True,
        timeout=280,
        env={},
        check=False,
    )
    assert done.returncode == 78
    assert done.stderr.strip().splitlines() == [
        "DILOCO_SYNCER is not set; the evaluator runs inside a job (`diloco run`)"
    ]
