"""The status of a run, and how it is shown."""

import contextlib
import io
import os
import pty
import select
import tempfile
import threading
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from diloco.runtime import formatting
from diloco.v1 import syncer_pb2 as pb
from diloco_job.plan import plan
from diloco_local import display
from diloco_local.display import (
    LiveDisplay,
    PlainDisplay,
    Rate,
    console_on,
    display_on,
    line,
    status_table,
)
from diloco_local.events import Completed, Exited, Interrupted, Limits, Served, Tick
from diloco_local.policy import Policy
from diloco_local.problems import Problem
from diloco_local.status import RunFacts, build, is_complete
from diloco_testing.manifests.files import load_job

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
NAMES = tuple(learner.name for learner in PLAN.learners)


def training_policy():
    policy = Policy(learners=NAMES, evaluator=True, limits=Limits())
    policy.handle(Tick(), 0.0)
    policy.handle(Exited(name="kernels", code=0), 1.0)
    policy.handle(Served(), 2.0)
    return policy


def learner_status(name, state="Training", **more):
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
    return pb.StatusReply(
        **(facts | more), learners=learners or [learner_status(name) for name in NAMES]
    )


def status(
    policy=None, answer=None, previous=None, *, reply_age_seconds=0.5, now=NOW, problems=None
):
    policy = policy or training_policy()
    running = {name: 10 + i for i, name in enumerate(policy.processes) if name != "kernels"}
    facts = RunFacts(
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
        reply_age_seconds=reply_age_seconds,
        started="then",
        completed=None,
        now=now,
        problems=problems or {},
    )
    return build(facts, previous)


def condition(found, kind):
    return next(entry for entry in found["conditions"] if entry["type"] == kind)


def entry(found, name):
    return next(process for process in found["processes"] if process["name"] == name)


# ---------------------------------------------------------------------------------- states


def test_the_state_follows_the_policy_and_the_reply():
    policy = Policy(learners=NAMES, evaluator=True, limits=Limits())
    policy.handle(Tick(), 0.0)
    assert status(policy)["state"] == "Pending"
    policy.handle(Exited(name="kernels", code=0), 1.0)
    assert status(policy)["state"] == "Starting"
    policy.handle(Served(), 2.0)
    joining = [learner_status(name, "Joining") for name in NAMES]
    assert status(policy, reply(*joining, merges=0))["state"] == "Starting"
    assert status(policy, reply())["state"] == "Training"
    assert status(policy, reply(learner_status("eu/0")))["state"] == "Degraded"
    assert status(policy, reply(), reply_age_seconds=6.0)["state"] == "Degraded"
    policy.handle(Interrupted(), 3.0)
    assert status(policy, reply())["state"] == "Suspended"


def test_an_ejected_learner_is_shown_with_its_reason():
    why = "AnswerLate; next probe in 12 s"
    ejected = learner_status("eu/1", "Ejected", detail=why)
    found = status(None, reply(learner_status("eu/0"), ejected, learner_status("us/0")))
    assert (entry(found, "eu/1")["state"], entry(found, "eu/1")["detail"]) == ("Ejected", why)
    assert entry(found, "eu/0")["detail"] == ""
    assert found["state"] == "Degraded"
    assert found["learners"]["summary"] == "2/3"
    assert condition(found, "LearnersReady")["message"] == (
        "2 of 3 learners are training; ejected, because they do not deliver: eu/1"
    )
    assert line(found, Rate()).endswith(f"ejected eu/1: {why}")
    console = Console(file=io.StringIO(), width=120)
    console.print(status_table(found, Rate()))
    shown = console.file.getvalue()
    assert f"ejected eu/1: {why}" in shown


def test_with_which_state_a_learner_began_is_shown():
    peer = pb.Recovery(source="Peer", peer="us/0", step=90, age=2, bytes=3 << 20, seconds=0.5)
    new = pb.Recovery(source="None", problem="us/0: busy")
    recent = pb.Recovery(source="Checkpoint", step=98, age=2)
    learners = zip(NAMES, (peer, new, recent), strict=False)
    answer = reply(*(learner_status(name, recovery=found) for name, found in learners))
    found = status(None, answer)
    assert entry(found, NAMES[0])["recovery"] == {
        "source": "Peer", "peer": "us/0", "step": 90, "age": 2, "bytes": 3 << 20, "seconds": 0.5, "problem": "",
    }  # fmt: skip
    assert entry(status(), NAMES[0])["recovery"] is None
    shown = text_of(status_table(found, Rate()), width=120)
    assert f"{NAMES[0]} began with the optimizers' state of us/0: 3.00 MiB in 0.5 s" in shown
    assert f"{NAMES[1]} began with new optimizers' state (us/0: busy)" in shown
    assert "recent checkpoint" not in shown


def problem(kind, text="the loss was NaN"):
    return Problem(kind=kind, text=text, since=1.0)


def test_a_learner_whose_loss_is_nan_is_shown_with_its_problem_and_does_not_count_as_training():
    why = "NotFinite; next probe in 12 s"
    ejected = learner_status("eu/1", "Ejected", detail=why)
    answer = reply(learner_status("eu/0"), ejected, learner_status("us/0"), merges=0)
    sick = {"eu/0": problem("NotFinite"), "eu/1": problem("NotFinite")}
    found = status(None, answer, problems=sick)
    assert entry(found, "eu/0")["state"] == "NotFinite"
    assert entry(found, "eu/1")["detail"] == f"the loss was NaN; ejected: {why}"
    assert (found["state"], found["learners"]["summary"]) == ("Degraded", "1/3")
    assert "NotFinite eu/0: the loss was NaN" in line(found, Rate())
    assert "NotFinite eu/0: the loss was NaN" in text_of(status_table(found, Rate()), width=120)


def test_an_evaluator_without_a_score_is_shown_and_training_is_not_degraded():
    found = status(None, reply(), problems={"evaluator": problem("NoScore", "no module")})
    assert entry(found, "evaluator")["state"] == "NoScore"
    assert found["state"] == "Training"
    assert "NoScore evaluator: no module" in line(found, Rate())


def test_the_number_of_problems_that_are_shown_is_limited():
    found = status(None, reply())
    found["processes"] = [
        {**entry(found, "eu/0"), "name": f"eu/{i}", "detail": "no tokens", "state": "NoTokens"}
        for i in range(20)
    ]
    shown = line(found, Rate())
    assert shown.count("NoTokens") == 8
    assert shown.endswith("and 12 more")


def test_a_learner_in_back_off_is_not_training_even_if_the_syncer_still_lists_it():
    policy = training_policy()
    policy.handle(Exited(name="eu/1", code=-9), 5.0)
    found = status(policy, reply())
    assert entry(found, "eu/1")["state"] == "BackOff"
    assert entry(found, "eu/1")["pid"] is None
    assert entry(found, "eu/1")["restarts"] == 1
    assert found["learners"] == {"desired": 3, "ready": 2, "training": 2, "summary": "2/3"}
    assert found["regions"][0] == {
        "name": "eu",
        "desired": 2,
        "ready": 1,
        "training": 1,
        "restarts": 1,
        "lastSeenTime": "2026-11-21T07:59:59.000+00:00",
    }


def test_a_learner_that_has_not_joined_yet_is_starting():
    found = status(answer=reply(learner_status("eu/0"), learner_status("eu/1", "Gone")))
    states = {p["name"]: p["state"] for p in found["processes"] if p["role"] == "learner"}
    assert states == {"eu/0": "Training", "eu/1": "Starting", "us/0": "Starting"}


def test_a_loss_that_was_never_reported_is_not_zero():
    learner = learner_status("eu/0")
    learner.has_loss = False
    assert entry(status(answer=reply(learner)), "eu/0")["loss"] is None


def test_the_last_merge_does_not_move_while_the_syncer_is_silent():
    first = status(answer=reply(), reply_age_seconds=1.0)
    later = status(answer=reply(), reply_age_seconds=8.0, now=NOW + timedelta(seconds=7))
    assert first["syncer"]["lastMergeTime"] == "2026-11-21T07:59:57.000+00:00"
    assert later["syncer"]["lastMergeTime"] == first["syncer"]["lastMergeTime"]


def test_before_the_first_reply_unknown_values_are_empty():
    found = status()
    assert (found["step"], found["progress"], found["epoch"]) == (0, "0/200", 0)
    assert found["syncer"]["lastMergeTime"] is None
    assert found["lastSyncTime"] is None
    assert found["evaluation"] is None
    assert found["model"] is None


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


def test_all_conditions_are_present_from_the_start():
    assert [entry["type"] for entry in status()["conditions"]] == [
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
    found = status(answer=reply(*[learner_status(name) for name in NAMES[:training]]))
    assert condition(found, "QuorumMet")["status"] == value


def test_a_condition_keeps_its_time_until_its_status_changes():
    first = status(answer=reply())
    same = status(answer=reply(), previous=first, now=NOW + timedelta(seconds=9))
    turned = status(
        answer=reply(learner_status("eu/0")), previous=same, now=NOW + timedelta(seconds=20)
    )
    began = condition(first, "QuorumMet")["lastTransitionTime"]
    assert condition(same, "QuorumMet")["lastTransitionTime"] == began
    assert condition(turned, "QuorumMet")["lastTransitionTime"] == "2026-11-21T08:00:20.000+00:00"


def test_exactly_one_final_condition_is_true_and_has_the_reason():
    policy = training_policy()
    policy.handle(Completed(), 5.0)
    found = status(policy, reply())
    ends = {kind: condition(found, kind)["status"] for kind in ("Suspended", "Complete", "Failed")}
    assert ends == {"Suspended": "False", "Complete": "True", "Failed": "False"}
    assert condition(found, "Complete")["message"] == "the final step is complete"


def test_another_spec_hash_makes_the_spec_inconsistent():
    found = status(answer=reply(spec_hash="0123"))
    assert condition(found, "SpecConsistent")["status"] == "False"


# ---------------------------------------------------------------------------------- progress


def text_of(shown, *, width=120):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(shown)
    return console.file.getvalue()


def at_step(step, **more):
    return status(answer=reply(step=step, **more))


def test_the_rate_covers_the_last_minute():
    rate = Rate()
    rate.update(at_step(0), 0.0)
    assert rate.steps_per_second() is None
    for second in range(1, 200):
        step = second if second < 100 else 100 + 3 * (second - 100)
        rate.update(at_step(min(step, 200)), float(second))
    rate = Rate()
    rate.update(at_step(40), 0.0)
    rate.update(at_step(100), 30.0)
    assert rate.steps_per_second() == pytest.approx(2.0)
    assert rate.seconds_left(at_step(100)) == pytest.approx(50.0)
    rate.update(at_step(130), 90.0)
    assert rate.steps_per_second() == pytest.approx(0.5)


def test_there_is_no_time_left_to_show_while_no_learner_trains():
    rate = Rate()
    for second in (0, 10):
        rate.update(at_step(second), second)
    sick = at_step(11)
    sick["learners"]["training"] = 0
    assert rate.seconds_left(at_step(11)) is not None
    assert rate.seconds_left(sick) is None


def test_a_resumed_run_does_not_count_its_old_steps_as_speed():
    rate = Rate()
    rate.update(status(), 0.0)  # the syncer has not replied yet
    rate.update(at_step(150), 1.0)
    rate.update(at_step(152), 3.0)
    assert rate.steps_per_second() == pytest.approx(1.0)


def test_a_restored_snapshot_does_not_make_the_rate_negative():
    rate = Rate()
    rate.update(at_step(150), 1.0)
    rate.update(at_step(100), 2.0)
    assert rate.steps_per_second() is None
    rate.update(at_step(101), 3.0)
    assert rate.steps_per_second() == pytest.approx(1.0)


def test_the_line_shows_step_learners_loss_and_traffic():
    shown = line(at_step(100, eval_step=90, eval_loss=1.75), Rate())
    assert shown == (
        "training: step 100/200, 3/3 learners training, 4500 tokens/s, loss 2.2500, "
        "validation 1.7500 at step 90, 90 merges, up 3.00 MiB, down 5.00 MiB"
    )


def test_the_line_shows_what_the_syncer_waits_for():
    shown = line(at_step(100, waiting_for="a quorum of 2 (learners training: 1)"), Rate())
    assert shown.endswith("waiting for a quorum of 2 (learners training: 1)")


def test_the_table_shows_every_learner_with_its_numbers():
    policy = training_policy()
    policy.handle(Exited(name="eu/1", code=1), 5.0)
    shown = text_of(status_table(status(policy, reply()), Rate()))
    rows = [line.split() for line in shown.splitlines()]
    assert ["eu/0", "Training", "120", "1500", "2.2500", "3", "0"] in rows
    assert ["eu/1", "BackOff", "120", "0", "2.2500", "3", "1"] in rows
    assert "step 100/200" in shown
    assert "90 merges (last: 3 learners)" in shown
    assert "quorum 2 after 0 ms" in shown
    assert "grace window 12 ms" in shown
    assert "up 3.00 MiB   down 5.00 MiB" in shown


def test_no_fact_is_broken_in_two_on_a_terminal_of_80_columns():
    sync = {"merges": 100_000, "lastMembers": 1000, "quorum": 1000, "quorumSeconds": 99.9,
            "graceSeconds": 99.9, "syncSeconds": 99.9}  # fmt: skip
    made = status(answer=reply())
    made["sync"].update(sync)
    shown = text_of(status_table(made, Rate()), width=80).splitlines()
    assert any(
        "quorum 1000 after 99900 ms   grace window 99900 ms   sync 99900 ms" in row for row in shown
    )
    assert any(
        "100000 merges (last: 1000 learners)   up 3.00 MiB   down 5.00 MiB" in row for row in shown
    )


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_still_shows_every_learner(width):
    shown = text_of(status_table(status(answer=reply()), Rate()), width=width)
    assert all(name in shown for name in NAMES)


def test_a_pipe_gets_lines_and_a_terminal_a_table(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display_on(Console(file=io.StringIO())), PlainDisplay)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    live = display_on(terminal)
    live.close()
    assert isinstance(live, LiveDisplay)


@pytest.mark.parametrize(
    ("place", "term", "kind"),
    [
        (os.pipe, "", PlainDisplay),
        (pty.openpty, "dumb", PlainDisplay),
        (pty.openpty, "xterm", LiveDisplay),
    ],
)
def test_a_display_whose_terminal_or_pipe_is_closed_shows_nothing_more(
    place, term, kind, monkeypatch
):
    monkeypatch.setenv("TERM", term)
    reader, writer = place()
    with open(writer, "w", encoding="utf-8") as stream:
        shown = display_on(console_on(stream))
        assert isinstance(shown, kind)
        shown.note("started syncer")
        seen = b""
        while b"started syncer" not in seen:
            seen += os.read(reader, 4096)
        os.close(reader)
        for second in range(0, 20, 5):
            shown.show(at_step(second), float(second))
            shown.note("started eu/0")
        shown.close()
        shown.note("suspended at step 5/50")


@pytest.fixture
def full():
    """The ends of a pipe that does not block writers, and that is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    with open(reader, "rb") as read, open(writer, "w", encoding="utf-8") as write:
        yield read, write


def test_a_display_waits_for_a_slow_reader_of_a_pipe_that_does_not_block(full, monkeypatch):
    reader, writer = full
    waits, drained, wait = threading.Event(), [], select.select
    monkeypatch.setattr(display, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(select, "select", lambda *args: waits.set() or wait(*args))
    thread = threading.Thread(target=lambda: waits.wait() and drained.extend(reader))
    thread.start()
    shown, lines = display_on(console_on(writer)), [f"restart {n} of eu/0" for n in range(1000)]
    for text in lines:
        shown.note(text)
    writer.close()
    waits.set()
    thread.join()
    assert b"".join(drained).lstrip(b"x").decode().splitlines() == lines


def test_a_display_drops_what_a_full_pipe_does_not_take_in_time_and_continues(full, monkeypatch):
    waits = []
    monkeypatch.setattr(select, "select", lambda *args: waits.append(args[3]) or ([], [], []))
    reader, writer = full
    shown = display_on(console_on(writer))
    for _ in range(3):
        shown.note("dropped")
    assert waits == [1.0], "a reader that has stopped delays the run once"
    os.set_blocking(reader.fileno(), False)
    assert set(reader.read()) == {ord("x")}
    shown.note("shown")
    assert reader.read() == b"shown\n"


def test_a_display_on_a_disk_that_is_full_continues_when_there_is_room():
    with open("/dev/full", "w", encoding="utf-8") as stream, tempfile.TemporaryFile() as room:
        shown = display_on(console_on(stream))
        shown.note("dropped")
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == "/dev/full"
        os.dup2(room.fileno(), stream.fileno())
        shown.note("shown")
        room.seek(0)
        assert room.read() == b"shown\n"


def test_a_display_without_standard_output_shows_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    shown = display_on(console_on(None))
    shown.note("started syncer")
    shown.close()


def test_plain_lines_come_every_five_seconds_and_notes_at_once():
    console = Console(file=io.StringIO(), width=40)
    progress = PlainDisplay(console)
    for tenth in range(101):
        progress.show(at_step(tenth), tenth / 10)
    progress.note("eu/0 exited (signal 9 (SIGKILL)); restarts in 0.5 s, restart 1")
    lines = console.file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "training: step 50/200",
        "training: step 100/200",
        "eu/0 exited (signal 9 (SIGKILL)); restarts in 0.5 s",
    ]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.count(0), "0"),
        (formatting.count(9999), "9999"),
        (formatting.count(10_000), "10.0 k"),
        (formatting.count(123_456), "123 k"),
        (formatting.count(999_400), "999 k"),
        (formatting.count(999_600), "1.00 M"),
        (formatting.count(999_960_000), "1.00 G"),
        (formatting.count(2_097_152), "2.10 M"),
        (formatting.size(0), "0 B"),
        (formatting.size(1023), "1023 B"),
        (formatting.size(1536), "1.50 KiB"),
        (formatting.size(1000 << 10), "1000 KiB"),
        (formatting.size((1 << 20) - 600), "1023 KiB"),
        (formatting.size((1 << 20) - 1), "1.00 MiB"),
        (formatting.size(300 << 20), "300 MiB"),
        (formatting.duration(4.26), "4.3 s"),
        (formatting.duration(59.96), "1 min 00 s"),
        (formatting.duration(3599.7), "1 h 00 min"),
        (formatting.duration(7322), "2 h 02 min"),
        (formatting.ending(75), "exit code 75"),
        (formatting.ending(-9), "signal 9 (SIGKILL)"),
        (formatting.ending(-99), "signal 99"),
    ],
)
def test_numbers_are_rounded_for_display(shown, expected):
    assert shown == expected


def test_b03_what_a_peer_sent_cannot_control_the_terminal():
    found = status()
    evil = "eu/0\x1b[2J\x9b\u202e[bold]"
    found["processes"][0]["name"] = found["state"] = found["job"] = evil
    found["sync"]["waitingFor"] = evil
    shown = text_of(status_table(found, Rate()), width=400)
    assert not any(control in shown for control in "\x1b\x9b\u202e")
    assert "[bold]" in shown
    output = io.StringIO()
    PlainDisplay(Console(file=output, width=400)).note(evil)
    assert not any(control in output.getvalue() for control in "\x1b\x9b\u202e")
