"""Real supervisors with real processes: what they start, what survives, what remains."""

import json
import os
import pty
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.runtime.health import Health, HealthFile
from diloco_local import run_control
from diloco_local.run_directory import RunDir
from diloco_testing.local.fake_run import MANIFEST, FakeRun, alive, ended, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def fake(tmp_path):
    run = FakeRun(tmp_path, manifest=MANIFEST)
    yield run
    run.close()


def children(fake):
    """The pids of all processes of the run, helpers included."""
    learners = [start for name in ("eu/0", "us/0") for start in fake.starts(name)]
    helpers = [pid for start in learners for pid in start.get("helpers", ())]
    until(lambda: fake.starts("evaluator"), "evaluator")
    learners += fake.starts("evaluator")
    return [fake.process("syncer")["pid"], *(start["pid"] for start in learners), *helpers]


# ---------------------------------------------------------------------------------- a whole run


def test_a_complete_run_leaves_all_of_its_files(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    fake.complete()
    code, out, err = ended(supervisor)
    assert (code, err) == (0, "")
    status = fake.status()
    assert (status["state"], status["progress"], status["tokens"]) == ("Complete", "50/50", 4321)
    assert status["completionTime"] > status["startTime"]
    assert {process["state"] for process in status["processes"]} == {"Done"}
    assert {process["pid"] for process in status["processes"]} == {None}
    assert "step 50: validation loss 1.5000" in out
    assert "complete: 50 steps, 4321 tokens in " in out
    assert (fake.dir / "job.yaml").read_text() == MANIFEST
    assert json.loads((fake.dir / "spec.json").read_text())["hash"] == status["specHash"]
    order = (fake.dir / "order-of-leaving").read_text().split()
    assert sorted(order[:3]) == ["eu/0", "evaluator", "us/0"]
    assert order[3:] == ["syncer"]
    assert fake.events() == []


def test_a_learner_gets_the_environment_of_the_manifest(fake):
    fake.start()
    until(fake.all_training, "training")
    eu, us = fake.starts("eu/0")[0], fake.starts("us/0")[0]
    assert us["cwd"] == str(fake.folder)
    environment = us["environment"]
    endpoint = fake.status()["syncer"]["endpoint"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", endpoint)
    assert environment["DILOCO_SYNCER"] == endpoint
    assert (environment["DILOCO_JOB"], environment["DILOCO_LEARNER"]) == ("fake", "us/0")
    assert json.loads(environment["DILOCO_CONFIG"]) == {"lr": 3}
    assert environment["DILOCO_STATE"] == str(fake.dir / "learners" / "us-0")
    assert environment["DILOCO_SPEC"] == str(fake.dir / "spec.json")
    assert environment["USER_WORD"] == "hello"
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == (threads, threads)
    assert fake.process("us/0")["pid"] == us["pid"]
    assert eu["pid"] != us["pid"]


def test_the_users_threads_are_kept_and_old_contract_variables_are_not(fake):
    old = {"DILOCO_TLS": "/old", "RANK": "3", "DILOCO_HEALTH_FILE": "/old", "DILOCO_RESTARTS": "9"}
    fake.start(environment={"OMP_NUM_THREADS": "7", **old})
    until(fake.all_training, "training")
    environment = fake.starts("eu/0")[0]["environment"]
    assert environment["OMP_NUM_THREADS"] == "7"
    assert "DILOCO_TLS" not in environment
    health_file = fake.dir / "state" / "eu-0.health.json"
    assert environment["DILOCO_HEALTH_FILE"] == str(health_file)
    assert environment["DILOCO_RESTARTS"] == "0"


def test_status_lists_what_the_syncer_reports_for_each_learner(fake):
    fake.start()
    until(fake.all_training, "training")
    entry = fake.process("us/0")
    expected = {
        "name": "us/0",
        "role": "learner",
        "state": "Training",
        "region": "us",
        "incarnation": 1,
        "step": 9,
        "tokens": 900,
        "tokensPerSecond": 1234.5,
        "loss": 2.5,
        "staleness": 2,
        "restarts": 0,
    }
    assert {key: entry[key] for key in expected} == expected
    assert fake.status()["learners"] == {
        "desired": 2,
        "ready": 2,
        "training": 2,
        "summary": "2/2",
    }


# ---------------------------------------------------------------------------------- kills


def test_a_killed_learner_restarts_and_the_event_log_has_it(fake):
    fake.start()
    until(fake.all_training, "training")
    os.kill(fake.starts("us/0")[0]["pid"], signal.SIGKILL)
    until(lambda: len(fake.starts("us/0")) == 2, "second start")
    assert fake.starts("us/0")[1]["environment"]["DILOCO_RESTARTS"] == "1"
    [event] = fake.events()
    assert (event["event"], event["process"], event["signal"]) == ("restart", "us/0", 9)
    assert (event["restarts"], event["epoch"]) == (1, 1)
    until(lambda: fake.process("us/0").get("restarts") == 1, "restart in status.json")
    assert len(fake.starts("eu/0")) == 1


def test_helpers_are_killed_with_their_learner_in_any_session(fake):
    fake.start()
    until(fake.all_training, "training")
    start = fake.starts("eu/0")[0]
    assert all(map(alive, start["helpers"]))
    os.kill(start["pid"], signal.SIGKILL)
    until(lambda: not any(map(alive, start["helpers"])), "end of the helpers")


def test_a_killed_syncer_serves_again_on_its_port_and_learners_keep_running(fake):
    fake.start()
    until(fake.all_training, "training")
    endpoint, pid = fake.status()["syncer"]["endpoint"], fake.process("syncer")["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: fake.process("syncer")["pid"] not in (None, pid), "second syncer")
    with_answer = fake.status()["lastSyncTime"]
    until(lambda: fake.status()["lastSyncTime"] > with_answer, "answer of the second syncer")
    assert fake.status()["syncer"]["endpoint"] == endpoint
    assert len(fake.starts("eu/0")) == len(fake.starts("us/0")) == 1


def test_a_syncer_whose_port_is_taken_retries_until_it_is_free(fake):
    supervisor = fake.start(syncer_starts=50)
    until(fake.all_training, "training")
    port, pid = (
        int(fake.status()["syncer"]["endpoint"].split(":")[1]),
        fake.process("syncer")["pid"],
    )
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(pid, signal.SIGKILL)
        # Well before the next syncer, which first has to import what it needs.
        until(lambda: _bound(thief, port), "hold of the port")
        thief.listen()
        until(lambda: fake.process("syncer")["restarts"] >= 2, "refused start")
    until(lambda: fake.process("syncer")["pid"], "new syncer")
    fake.complete()
    assert ended(supervisor)[0] == 0


def _bound(thief, port):
    try:
        thief.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_a_syncer_that_cannot_start_fails_the_job_with_its_last_line(fake):
    fake.order("syncer", 2, "diloco-syncer: 127.0.0.1:7: the port is in use")
    (fake.dir / "job.yaml").write_text(MANIFEST)
    code, out, _ = ended(fake.start())
    assert code == 1
    assert "the syncer was started once and did not serve" in out
    assert "the port is in use" in out
    assert fake.starts("eu/0") == []


def test_a_refused_learner_fails_the_job_and_never_restarts(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    fake.order("us/0", 78, "parameter head.weight has shape [4] instead of [8]")
    code, out, _ = ended(supervisor)
    sentence = "learner us/0 was refused: parameter head.weight has shape [4] instead of [8]"
    assert code == 1
    assert sentence in out
    assert (fake.status()["state"], fake.status()["message"]) == ("Failed", sentence)
    assert fake.process("us/0")["state"] == "Refused"
    assert len(fake.starts("us/0")) == 1
    assert (fake.dir / "order-of-leaving").read_text().split()[-1] == "syncer"


def test_a_learner_that_never_joins_fails_the_job_with_the_cause(fake):
    supervisor = fake.start(early_exit_seconds=0.05, never_joined_seconds=0)
    until(lambda: fake.starts("us/0"), "start")
    fake.order("us/0", 0, "there is nothing to do")
    code, out, _ = ended(supervisor)
    assert code == 1
    assert "us/0 exited (exit code 0: the job is not complete: its loop must be `while not" in out
    assert fake.status()["message"] == (
        "learner us/0 ended 5 times and never joined the job (exit code 0: the job is not complete: its "
        "loop must be `while not learner.done`)"
    )
    assert len(fake.starts("us/0")) == 5


def test_a_problem_of_a_learner_is_shown_as_its_state_and_fails_no_run_with_another_learner(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    health = Health(
        at=1.0, ready=True, why="the loss was NaN", progress_at=1.0, problem="NotFinite"
    )
    HealthFile(fake.dir / "state" / "us-0.health.json").write(health)
    until(lambda: fake.process("us/0").get("state") == "NotFinite", "problem")
    assert fake.process("us/0")["detail"] == "the loss was NaN"
    assert fake.status()["state"] == "Degraded"
    fake.complete()
    code, out, _ = ended(supervisor)
    assert code == 0
    assert "warning: us/0: NotFinite: the loss was NaN" in out


def test_a_learner_that_crashes_too_often_fails_the_job(tmp_path):
    fake = FakeRun(tmp_path, manifest=MANIFEST + "  runPolicy: {learnerRestartLimit: 2}\n")
    try:
        fake.order("us/0", 1, "RuntimeError: boom")
        (fake.dir / "job.yaml").write_text(fake.job.read_text())
        code, out, _ = ended(fake.start())
        assert code == 1
        assert "learnerRestartLimit is 2 (exit code 1: RuntimeError: boom)" in out
        assert len(fake.starts("us/0")) == 3
    finally:
        fake.close()


def test_no_process_and_no_helper_outlives_a_killed_supervisor(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    pids = children(fake)
    assert len(pids) == 6
    assert all(map(alive, pids))
    supervisor.kill()
    until(lambda: not any(map(alive, pids)), "end of all children", seconds=60)


def test_processes_are_killed_even_if_the_guard_is_killed_with_the_supervisor(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    pids = [fake.process(name)["pid"] for name in ("syncer", "eu/0", "us/0", "evaluator")]
    os.kill(_guard_of(supervisor.pid), signal.SIGKILL)
    supervisor.kill()
    until(lambda: not any(map(alive, pids)), "end of the children", seconds=60)
    for pid in fake.starts("eu/0")[0]["helpers"]:
        os.kill(pid, signal.SIGKILL)  # the guard that does this was killed


def _guard_of(supervisor):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        arguments = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        if b"guard" in arguments and run_control._parent(int(pid)) == supervisor:
            return int(pid)
    raise AssertionError("the supervisor has no guard")


# ---------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_suspends_in_order_and_the_run_can_be_resumed(fake, number):
    first = fake.start()
    until(fake.all_training, "training")
    first.send_signal(number)
    code, out, err = ended(first)
    assert (code, err) == (75, "")
    assert "press Ctrl-C again to stop immediately" in out
    assert "suspended at step 5/50; resume it with: diloco resume --dir" in out
    assert fake.status()["state"] == "Suspended"
    order = (fake.dir / "order-of-leaving").read_text().split()
    assert (sorted(order[:2]), order[2:]) == (["eu/0", "us/0"], ["evaluator", "syncer"])
    began = fake.status()["startTime"]

    second = fake.start()
    until(lambda: len(fake.starts("us/0")) == 2, "second start")
    fake.complete()
    assert ended(second)[0] == 0
    assert fake.status()["startTime"] == began


@pytest.mark.parametrize(
    ("place", "term"), [(os.pipe, ""), (pty.openpty, "dumb"), (pty.openpty, "xterm")]
)
def test_a_run_whose_terminal_or_pipe_is_closed_continues_until_it_is_complete(fake, place, term):
    reader, writer = place()
    supervisor = fake.start(output=writer, environment={"TERM": term})
    os.close(writer)
    until(fake.all_training, "training")
    os.close(reader)
    fake.order("us/0", 1, "a crash after the terminal was closed")
    until(lambda: fake.process("us/0")["restarts"] >= 1, "a note that cannot be shown")
    (fake.dir / "us-0.order").unlink()
    until(fake.all_training, "training again")
    fake.complete()
    code, _, err = ended(supervisor)
    assert (code, err) == (0, "")
    assert fake.status()["state"] == "Complete"
    assert (fake.dir / "report.html").exists()


def test_a_hang_up_that_the_shell_and_the_kernel_report_suspends_in_order(fake):
    reader, writer = pty.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    try:
        supervisor = fake.start(output=writer, environment={"TERM": "xterm"})
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(writer)
    until(fake.all_training, "training")
    os.close(reader)
    supervisor.send_signal(signal.SIGHUP)
    until(lambda: fake.status()["state"] == "Suspended", "the first signal")
    supervisor.send_signal(signal.SIGHUP)
    code, _, err = ended(supervisor)
    assert (code, err) == (75, "")
    assert fake.status()["state"] == "Suspended"
    order = (fake.dir / "order-of-leaving").read_text().split()
    assert (sorted(order[:2]), order[2:]) == (["eu/0", "us/0"], ["evaluator", "syncer"])


def test_a_run_that_was_started_with_nohup_continues_after_a_hang_up(fake):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervisor = fake.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    until(fake.all_training, "training")
    supervisor.send_signal(signal.SIGHUP)
    fake.complete()
    assert ended(supervisor)[0] == 0
    assert fake.status()["state"] == "Complete"


def test_an_interrupt_after_completion_is_acknowledged_and_the_run_stays_complete(tmp_path):
    fake = FakeRun(tmp_path, manifest=MANIFEST.replace("{lr: 3}", "{late: true}"))
    try:
        supervisor = fake.start(leave_seconds=60)
        until(fake.all_training, "training")
        fake.complete()
        until(lambda: fake.process("eu/0")["state"] == "Done", "exit of the other learner")
        assert fake.process("us/0")["state"] != "Done"
        supervisor.send_signal(signal.SIGINT)
        code, out, err = ended(supervisor)
        assert (code, err) == (0, "")
        waiting, noted = (
            out.index(text)
            for text in (
                "waiting for the learners, the last evaluation and the model",
                "no longer waiting for the learners and the last evaluation, only for the model; press Ctrl-C again",
            )
        )
        assert waiting < noted < out.index("complete: 50 steps")
        assert fake.status()["state"] == "Complete"
    finally:
        fake.close()


def test_a_second_interrupt_stops_immediately(tmp_path):
    fake = FakeRun(tmp_path, manifest=MANIFEST.replace("{lr: 3}", "{stubborn: true}"))
    try:
        supervisor = fake.start(leave_seconds=60)
        until(fake.all_training, "training")
        pids = children(fake)
        supervisor.send_signal(signal.SIGINT)
        until(lambda: fake.process("eu/0")["state"] == "Done", "exit of the other learner")
        supervisor.send_signal(signal.SIGINT)
        code, out, _ = ended(supervisor, seconds=60)
        assert code == 130
        assert "stopped at step 5/50" in out
        assert not any(map(alive, pids))
    finally:
        fake.close()


def test_a_stubborn_learner_is_killed_after_its_time(tmp_path):
    fake = FakeRun(tmp_path, manifest=MANIFEST.replace("{lr: 3}", "{stubborn: true}"))
    try:
        supervisor = fake.start(leave_seconds=1)
        until(fake.all_training, "training")
        supervisor.send_signal(signal.SIGINT)
        assert ended(supervisor)[0] == 75
        assert fake.process("us/0")["state"] == "Stopped"
    finally:
        fake.close()


# ---------------------------------------------------------------------------------- directory, control


def test_a_second_supervisor_on_the_same_directory_is_refused_with_the_pid(fake):
    first = fake.start()
    until(fake.all_training, "training")
    code, _, err = ended(fake.start())
    assert code == 2
    assert f"in use by the supervisor with pid {first.pid}" in err
    assert fake.all_training()


def test_the_directory_of_a_killed_supervisor_is_free_again(fake):
    first = fake.start()
    until(fake.all_training, "training")
    first.kill()
    first.wait()
    assert RunDir(fake.dir).status()["state"] == "Suspended"
    assert f"(pid {first.pid}) no longer runs" in RunDir(fake.dir).status()["message"]
    second = fake.start()
    until(lambda: len(fake.starts("us/0")) == 2, "second start")
    counted = [start["environment"]["DILOCO_RESTARTS"] for start in fake.starts("us/0")]
    assert counted == ["0", "1"], "the same number would give both the same seed"
    fake.complete()
    assert ended(second)[0] == 0


def test_kill_ends_a_learner_and_its_helpers_and_the_supervisor_restarts_it(fake):
    fake.start()
    until(fake.all_training, "training")
    start = fake.starts("eu/0")[0]
    assert run_control.kill(fake.dir, "eu/0") == start["pid"]
    until(lambda: len(fake.starts("eu/0")) == 2, "second start")
    assert not any(map(alive, start["helpers"]))


def test_kill_refuses_a_pid_that_is_not_the_supervisors_child(fake):
    fake.start()
    until(fake.all_training, "training")
    status = fake.status()
    bystander = os.getpid()
    for process in status["processes"]:
        process["pid"] = bystander if process["name"] == "eu/0" else process["pid"]

    class Stale(RunDir):
        def status(self):
            return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_control, "RunDir", Stale)
        with pytest.raises(ConfigError, match=f"pid {bystander} has just exited"):
            run_control.kill(fake.dir, "eu/0")


def test_kill_lists_the_learners_of_the_run(fake):
    fake.start()
    until(fake.all_training, "training")
    with pytest.raises(ConfigError, match=r'no learner "eu/7"; the learners are eu/0, us/0'):
        run_control.kill(fake.dir, "eu/7")


def test_suspend_returns_when_the_supervisor_has_exited(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    run_control.suspend(fake.dir)
    assert RunDir(fake.dir).supervisor_pid() is None
    assert ended(supervisor)[0] == 75
    assert fake.status()["state"] == "Suspended"


def test_control_of_a_directory_without_an_active_run_is_refused(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    run_control.suspend(fake.dir)
    ended(supervisor)
    with pytest.raises(ConfigError, match="no run is active here"):
        run_control.suspend(fake.dir)
    with pytest.raises(ConfigError, match="eu/0 is not running"):
        run_control.kill(fake.dir, "eu/0")


def test_resume_starts_commands_in_the_directory_of_the_first_manifest(fake):
    supervisor = fake.start()
    until(fake.all_training, "training")
    run_control.suspend(fake.dir)
    ended(supervisor)
    fake.job = fake.dir / "job.yaml"  # what `resume` runs
    fake.start()
    until(lambda: len(fake.starts("us/0")) == 2, "second start")
    assert fake.starts("us/0")[1]["cwd"] == str(fake.folder)


def test_a_missing_program_is_refused_before_anything_starts(tmp_path):
    fake = FakeRun(tmp_path, manifest=MANIFEST.replace("[python, learner.py]", "[trian, x]"))
    try:
        code, _, err = ended(fake.start())
        assert code == 2
        assert "spec.learner.command: program trian not found" in err
        assert not (fake.dir / "status.json").exists()
    finally:
        fake.close()


def test_a_status_that_cannot_be_written_does_not_stop_the_run(fake):
    """In place of a full disk: a directory is in the way of the temporary file."""
    fake.dir.mkdir()
    (fake.dir / "job.yaml").write_text(MANIFEST)
    (fake.dir / "status.json.tmp").mkdir()
    supervisor = fake.start()
    until(lambda: fake.starts("eu/0") and fake.starts("us/0"), "learners")
    fake.complete()
    code, out, _ = ended(supervisor)
    assert code == 0
    assert out.count("the run continues") == 1


def test_a_finished_job_with_more_steps_continues(fake):
    first = fake.start()
    until(fake.all_training, "training")
    fake.complete()
    assert ended(first)[0] == 0
    (fake.dir / "complete").unlink()
    (fake.dir / "scored").unlink()
    fake.job.write_text(MANIFEST.replace("steps: 50", "steps: 60"))
    second = fake.start()
    until(lambda: len(fake.starts("us/0")) == 2, "second start")
    fake.complete()
    assert ended(second)[0] == 0
    assert fake.status()["progress"] == "60/60"


def test_a_finished_job_started_again_ends_immediately(fake):
    first = fake.start()
    until(fake.all_training, "training")
    fake.complete()
    assert ended(first)[0] == 0
    began = time.monotonic()
    assert ended(fake.start())[0] == 0
    assert time.monotonic() - began < 20
    assert len(fake.starts("us/0")) == 1
