"""What `diloco replay` refuses before it starts a process, and the tape as text."""

import json

import pytest

from diloco.errors import ConfigError
from diloco.journal import replay_files
from diloco.journal.tape_text import sentences
from diloco.spec import RunSpec
from diloco_local import replay as module
from diloco_local.replay import caveats, replay
from diloco_local.run_directory import RunDir
from diloco_testing.local.tapes import initialised, member, merge, process, start

MANIFEST = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: job}
spec:
  steps: 6
  learner: {command: [python, train.py]}
  regions: [{name: eu, learners: 1}]
"""


def lines(records):
    stamped = ({"time": f"2026-11-27T00:00:{n:02}.000+00:00", **r} for n, r in enumerate(records))
    return "".join(json.dumps(record) + "\n" for record in stamped)


@pytest.fixture
def run(tmp_path):
    """The files of a run of one learner."""
    path = tmp_path / "run"
    (path / "learners" / "eu-0").mkdir(parents=True)
    (path / "job.yaml").write_text(MANIFEST)
    (path / "spec.json").write_text(RunSpec(job="job", steps=6, fragments=2, interval=3).to_json())
    events = [start(), initialised(), merge(1, member("eu/0", 2)), merge(2, member("eu/0", 3))]
    (path / "events.jsonl").write_text(lines(events))
    tape = process("eu/0", 4, results={3: [(1, 1)]})
    (path / "learners" / "eu-0" / "tape.jsonl").write_text(lines(tape))
    return path


def test_a_run_that_is_active_is_not_replayed(run):
    with RunDir(run).hold(), pytest.raises(ConfigError, match=r"the run is active \(pid \d+\)"):
        replay(run, to=None, directory=None, show=lambda _: None)


def test_a_directory_with_files_is_not_used_for_a_replay(run, tmp_path):
    (tmp_path / "run-replay").mkdir()
    (tmp_path / "run-replay" / "notes").touch()
    with pytest.raises(
        ConfigError, match=r"run-replay: is not empty; give a new directory with --into"
    ):
        replay(run, to=None, directory=None, show=lambda _: None)
    assert [path.name for path in (tmp_path / "run-replay").iterdir()] == ["notes"]


def test_a_damaged_tape_is_refused_with_its_file(run):
    path = run / "learners" / "eu-0" / "tape.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::2]))
    with pytest.raises(ConfigError, match=r"tape.jsonl: has local step 2 after 0"):
        replay(run, to=None, directory=None, show=lambda _: None)


def test_it_states_first_how_far_it_goes_and_that_the_processor_differs(run, monkeypatch):
    plan = replay_files.plan_from(run, to=1)
    monkeypatch.setattr(module, "processor", lambda: "another")
    first, why, processor = caveats(plan)
    assert (first, why) == ("replaying global steps 1 to 1", "--to 1")
    assert processor.startswith("the run was on another processor (cpu; this is another)")
    monkeypatch.setattr(module, "processor", lambda: "cpu")
    assert len(caveats(plan)) == 2


def restart(run):
    """The syncer was started again from step 1; the learner applies the result of step 2 of both epochs."""
    events = [start(), initialised(), merge(1, member("eu/0", 2)), merge(2, member("eu/0", 3)),
              start(step=1, epoch=2), merge(2, member("eu/0", 5, base=None))]  # fmt: skip
    (run / "events.jsonl").write_text(lines(events))
    tape = process("eu/0", 6, results={3: [(1, 1)], 4: [(0, 2)], 6: [(0, 2, 2)]})
    (run / "learners" / "eu-0" / "tape.jsonl").write_text(lines(tape))


def test_it_states_first_which_restarts_of_the_syncer_it_continues_through(run, monkeypatch):
    restart(run)
    monkeypatch.setattr(module, "processor", lambda: "cpu")
    assert caveats(replay_files.plan_from(run)) == [
        "replaying global steps 1 to 2",
        "step 2 is followed by epoch 2 of the syncer, from step 1",
    ]
    assert len(caveats(replay_files.plan_from(run, to=1))) == 2  # with --to 1, that it ends there


def test_a_result_is_shown_with_its_epoch_if_its_process_began_in_another(run):
    restart(run)
    text = "\n".join(sentences(run))
    assert "local step 4, global step 4: applies fragment 0 of step 2\n" in text
    assert "local step 6, global step 6: applies fragment 0 of step 2 of epoch 2\n" in text


def test_a_tape_is_shown_in_the_order_of_time(run):
    text = [sentence[25:] for sentence in sentences(run)]
    assert text == [
        "syncer   epoch 1 begins at step 0 of 6",
        "eu/0     incarnation 1 begins at local step 0: parameters of the model, new state of the optimizers",
        "syncer   eu/0 has uploaded the initial parameters",
        "syncer   step 1: merges fragment 1 of eu/0 at 2 (from 0); clock eu/0 2",
        "syncer   step 2: merges fragment 0 of eu/0 at 3 (from 0); clock eu/0 3",
        "eu/0     local step 3, global step 3: applies fragment 1 of step 1",
        "eu/0     ends at local step 4: Complete",
    ]


def test_a_damaged_line_is_shown_as_such(run):
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time":"2026-11-27T00:00:09.000+00:00","event":"merge","step":"x"}\nno JSON\n')
    assert "syncer   damaged line: merge has step 'x'" in "\n".join(sentences(run))
