"""What is told about a run, and how it is shown."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from diloco.v1 import syncer_pb2 as pb
from diloco_operator.local import words
from diloco_operator.local.events import Completed, Exited, Interrupted, Limits, Served, Tick
from diloco_operator.local.policy import Policy
from diloco_operator.local.progress import (
    LiveProgress,
    PlainProgress,
    Rate,
    line,
    progress_on,
    view,
)
from diloco_operator.local.status import Facts, build, is_complete
from diloco_operator.manifest import load_job
from diloco_operator.plan import plan

NOW = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)
JOB = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: small}
spec:
  steps: 200
  sync: {quorum: 2}
  learner: {command: [python, train.py]}
  regions: [{name: eu, learners: 2}, {name: us, learners: 1}]
  evaluation: {everySteps: 10, command: [python, eval.py]}
"""
PLAN = plan(load_job(JOB))
NAMES = tuple(one.name for one in PLAN.learners)


def training_policy():
    policy = Policy(learners=NAMES, evaluator=True, limits=Limits())
    policy.handle(Tick(), 0.0)
    policy.handle(Exited(name="kernels", code=0), 1.0)
    policy.handle(Served(), 2.0)
    return policy


def heard(name, state="Training", **more):
    return pb.LearnerStatus(
        name=name,
        region=name.split("/")[0],
        state=state,
        incarnation=4,
        local_step=120,
        tokens=5000,
        tokens_per_second=1500.0,
        loss=2.25,
        has_loss=True,
        staleness=3,
        seconds_since_heard=0.5,
        **more,
    )


def reply(*learners, **more):
    facts = {
        "epoch": 2,
        "step": 100,
        "steps": 200,
        "tokens": 123456,
        "spec_hash": PLAN.spec.hash,
        "state": "Training",
        "merges": 90,
        "seconds_since_merge": 2.0,
        "quorum": 2,
        "last_members": 3,
        "grace_seconds": 0.012,
        "bytes_up": 3 << 20,
        "bytes_down": 5 << 20,
    }
    return pb.StatusReply(**(facts | more), learners=learners or [heard(name) for name in NAMES])


def status(policy=None, answer=None, previous=None, *, silence_seconds=0.5, now=NOW):
    policy = policy or training_policy()
    running = {name: 10 + i for i, name in enumerate(policy.processes) if name != "kernels"}
    facts = Facts(
        plan=PLAN,
        policy=policy,
        pids={
            name: pid
            for name, pid in running.items()
            if policy.processes[name].state.value == "Running"
        },
        supervisor_pid=9,
        endpoint="127.0.0.1:7",
        reply=answer,
        silence_seconds=silence_seconds,
        started="then",
        completed=None,
        now=now,
    )
    return build(facts, previous)


def condition(said, kind):
    return next(one for one in said["conditions"] if one["type"] == kind)


def entry(said, name):
    return next(one for one in said["processes"] if one["name"] == name)


# ---------------------------------------------------------------------------------- states


def test_states_follow_what_is_known():
    policy = Policy(learners=NAMES, evaluator=True, limits=Limits())
    policy.handle(Tick(), 0.0)
    assert status(policy)["state"] == "Pending"
    policy.handle(Exited(name="kernels", code=0), 1.0)
    assert status(policy)["state"] == "Starting"
    policy.handle(Served(), 2.0)
    joining = [heard(name, "Joining") for name in NAMES]
    assert status(policy, reply(*joining, merges=0))["state"] == "Starting"
    assert status(policy, reply())["state"] == "Training"
    assert status(policy, reply(heard("eu/0")))["state"] == "Degraded"
    assert status(policy, reply(), silence_seconds=6.0)["state"] == "Degraded"
    policy.handle(Interrupted(), 3.0)
    assert status(policy, reply())["state"] == "Suspended"


def test_a_learner_in_its_pause_is_not_training_whatever_the_syncer_still_believes():
    policy = training_policy()
    policy.handle(Exited(name="eu/1", code=-9), 5.0)
    said = status(policy, reply())
    assert entry(said, "eu/1")["state"] == "BackOff"
    assert entry(said, "eu/1")["pid"] is None
    assert entry(said, "eu/1")["restarts"] == 1
    assert said["learners"] == {"desired": 3, "ready": 2, "training": 2, "summary": "2/3"}
    assert said["regions"][0] == {
        "name": "eu",
        "desired": 2,
        "ready": 1,
        "training": 1,
        "restarts": 1,
        "lastSeenTime": "2026-11-21T07:59:59.000+00:00",
    }


def test_a_learner_that_the_syncer_has_not_met_yet_is_starting():
    said = status(answer=reply(heard("eu/0"), heard("eu/1", "Gone")))
    states = {one["name"]: one["state"] for one in said["processes"] if one["role"] == "learner"}
    assert states == {"eu/0": "Training", "eu/1": "Starting", "us/0": "Starting"}


def test_a_loss_that_was_never_reported_is_not_zero():
    one = heard("eu/0")
    one.has_loss = False
    assert entry(status(answer=reply(one)), "eu/0")["loss"] is None


def test_the_last_merge_does_not_move_while_the_syncer_is_silent():
    first = status(answer=reply(), silence_seconds=1.0)
    later = status(answer=reply(), silence_seconds=8.0, now=NOW + timedelta(seconds=7))
    assert first["syncer"]["lastMergeTime"] == "2026-11-21T07:59:57.000+00:00"
    assert later["syncer"]["lastMergeTime"] == first["syncer"]["lastMergeTime"]


def test_before_the_first_answer_nothing_is_invented():
    said = status()
    assert (said["step"], said["progress"], said["epoch"]) == (0, "0/200", 0)
    assert said["syncer"]["lastMergeTime"] is None
    assert said["lastSyncTime"] is None
    assert said["evaluation"] is None
    assert said["model"] is None


def test_a_score_of_step_zero_is_a_score():
    assert status(answer=reply(eval_loss=5.5))["evaluation"] == {"step": 0, "loss": 5.5}


@pytest.mark.parametrize(
    ("answer", "complete"),
    [
        (pb.StatusReply(), False),
        (pb.StatusReply(step=9, steps=10, state="Training"), False),
        (pb.StatusReply(step=10, steps=10, state="Training"), True),
        (pb.StatusReply(step=10, steps=10, state="Complete"), True),
    ],
)
def test_complete_is_known_before_the_model_is_on_disk(answer, complete):
    assert is_complete(answer) is complete


# ---------------------------------------------------------------------------------- conditions


def test_all_conditions_are_there_from_the_first_visit():
    assert [one["type"] for one in status()["conditions"]] == [
        "Accepted",
        "SyncerReady",
        "SyncerReachable",
        "LearnersReady",
        "QuorumMet",
        "SpecConsistent",
        "Suspended",
        "Complete",
        "Failed",
    ]


@pytest.mark.parametrize(("training", "value"), [(1, "False"), (2, "True"), (3, "True")])
def test_quorum_is_met_by_enough_training_learners(training, value):
    said = status(answer=reply(*[heard(name) for name in NAMES[:training]]))
    assert condition(said, "QuorumMet")["status"] == value


def test_a_condition_keeps_its_time_until_it_turns():
    first = status(answer=reply())
    same = status(answer=reply(), previous=first, now=NOW + timedelta(seconds=9))
    turned = status(answer=reply(heard("eu/0")), previous=same, now=NOW + timedelta(seconds=20))
    began = condition(first, "QuorumMet")["lastTransitionTime"]
    assert condition(same, "QuorumMet")["lastTransitionTime"] == began
    assert condition(turned, "QuorumMet")["lastTransitionTime"] == "2026-11-21T08:00:20.000+00:00"


def test_the_end_is_one_of_three_and_says_why():
    policy = training_policy()
    policy.handle(Completed(), 5.0)
    said = status(policy, reply())
    ends = {kind: condition(said, kind)["status"] for kind in ("Suspended", "Complete", "Failed")}
    assert ends == {"Suspended": "False", "Complete": "True", "Failed": "False"}
    assert condition(said, "Complete")["message"] == "the final step is done"


def test_another_spec_hash_is_seen():
    said = status(answer=reply(spec_hash="0123"))
    assert condition(said, "SpecConsistent")["status"] == "False"


# ---------------------------------------------------------------------------------- progress


def text_of(shown, *, width=120):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(shown)
    return console.file.getvalue()


def at_step(step, **more):
    return status(answer=reply(step=step, **more))


def test_the_rate_is_that_of_the_last_minute():
    rate = Rate()
    rate.seen(at_step(0), 0.0)
    assert rate.steps_per_second() is None
    for second in range(1, 200):
        step = second if second < 100 else 100 + 3 * (second - 100)
        rate.seen(at_step(min(step, 200)), float(second))
    rate = Rate()
    rate.seen(at_step(40), 0.0)
    rate.seen(at_step(100), 30.0)
    assert rate.steps_per_second() == pytest.approx(2.0)
    assert rate.seconds_left(at_step(100)) == pytest.approx(50.0)
    rate.seen(at_step(130), 90.0)
    assert rate.steps_per_second() == pytest.approx(0.5)


def test_a_resumed_run_does_not_count_its_old_steps_as_speed():
    rate = Rate()
    rate.seen(status(), 0.0)  # the syncer has not answered yet
    rate.seen(at_step(150), 1.0)
    rate.seen(at_step(152), 3.0)
    assert rate.steps_per_second() == pytest.approx(1.0)


def test_a_restored_snapshot_does_not_make_the_rate_negative():
    rate = Rate()
    rate.seen(at_step(150), 1.0)
    rate.seen(at_step(100), 2.0)
    assert rate.steps_per_second() is None
    rate.seen(at_step(101), 3.0)
    assert rate.steps_per_second() == pytest.approx(1.0)


def test_the_line_says_what_a_person_asks():
    said = line(at_step(100, eval_step=90, eval_loss=1.75), Rate())
    assert said == (
        "training: step 100/200, 3/3 training, 4500 tokens/s, loss 2.2500, "
        "validation 1.7500 at step 90, 90 merges, up 3.00 MiB, down 5.00 MiB"
    )


def test_the_line_says_what_is_waited_for():
    said = line(at_step(100, waiting_for="1 of 2 learners for a quorum"), Rate())
    assert said.endswith("waiting: 1 of 2 learners for a quorum")


def test_the_table_shows_every_learner_with_its_numbers():
    policy = training_policy()
    policy.handle(Exited(name="eu/1", code=1), 5.0)
    shown = text_of(view(status(policy, reply()), Rate()))
    rows = [line.split() for line in shown.splitlines()]
    assert ["eu/0", "Training", "120", "1500", "2.2500", "3", "0"] in rows
    assert ["eu/1", "BackOff", "120", "0", "2.2500", "3", "1"] in rows
    assert "step 100/200" in shown
    assert "merges 90 (last of 3)" in shown
    assert "quorum 2 in 0 ms" in shown
    assert "grace 12 ms" in shown
    assert "up 3.00 MiB   down 5.00 MiB" in shown


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_no_learner_away(width):
    shown = text_of(view(status(answer=reply()), Rate()), width=width)
    assert all(name in shown for name in NAMES)


def test_a_pipe_gets_lines_and_a_terminal_a_table():
    assert isinstance(progress_on(Console(file=io.StringIO())), PlainProgress)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    live = progress_on(terminal)
    live.close()
    assert isinstance(live, LiveProgress)


def test_plain_lines_come_every_five_seconds_and_notes_at_once():
    console = Console(file=io.StringIO(), width=40)
    progress = PlainProgress(console)
    for tenth in range(101):
        progress.show(at_step(tenth), tenth / 10)
    progress.note("eu/0 ended (signal 9 (SIGKILL)); starts again in 0.5 s, restart 1")
    lines = console.file.getvalue().splitlines()
    assert [one.split(",")[0] for one in lines] == [
        "training: step 50/200",
        "training: step 100/200",
        "eu/0 ended (signal 9 (SIGKILL)); starts again in 0.5 s",
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.count(0), "0"),
        (words.count(9999), "9999"),
        (words.count(10_000), "10.0 k"),
        (words.count(123_456), "123 k"),
        (words.count(2_097_152), "2.10 M"),
        (words.size(0), "0 B"),
        (words.size(1023), "1023 B"),
        (words.size(1536), "1.50 KiB"),
        (words.size(300 << 20), "300 MiB"),
        (words.duration(4.26), "4.3 s"),
        (words.duration(59.96), "1 min 00 s"),
        (words.duration(3599.7), "1 h 00 min"),
        (words.duration(7322), "2 h 02 min"),
        (words.ending(75), "exit code 75"),
        (words.ending(-9), "signal 9 (SIGKILL)"),
        (words.ending(-99), "signal 99"),
    ],
)
def test_numbers_read_well(said, expected):
    assert said == expected
