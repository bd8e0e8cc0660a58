"""The agent of a container: real processes, real signals, real probes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from diloco_testing.local.container import CHILD, Pod
from diloco_testing.local.fake_run import alive, until

pytestmark = pytest.mark.slow


def test_a_process_killed_five_times_in_a_row_restarts_after_its_back_off(tmp_path):
    with Pod(tmp_path) as pod:
        for number, pause in enumerate((0, 0.25, 0.5, 1, 2)):
            pid = pod.pid(number)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            pod.pid(number + 1)
            # How much longer it takes is up to the machine; the agent's own delays: unit/agent/test_policy.py.
            assert time.monotonic() - killed >= pause
        assert [restarts for _, restarts in pod.starts] == [0, 1, 2, 3, 4, 5]
        assert pod.process.poll() is None


def test_a_killed_agent_takes_its_process_and_helpers_with_it(tmp_path):
    helper = (
        "import subprocess; print('helper', subprocess.Popen(['sleep', '600']).pid, flush=True)"
    )
    with Pod(tmp_path, helper + CHILD) as pod:
        child = pod.pid(0)
        helper = int(pod.output.partition("helper ")[2].split()[0])
        pod.process.kill()
        until(lambda: not alive(child) and not alive(helper), "end of child and helper")


def test_a_new_container_of_the_pod_continues_the_restart_count(tmp_path):
    with Pod(tmp_path) as pod:
        pod.pid(0)
        pod.process.kill()
        pod.wait()
        pod.process.stdout.close()
        pod.start()
        pod.pid(1)
        assert pod.starts[1][1] == 1


def test_a_new_pod_on_the_volume_of_the_last_one_counts_crashes_from_0(tmp_path):
    for uid in ("uid-1", "uid-2"):
        given = {"DILOCO_POD_UID": uid, "DILOCO_RESTART_LIMIT": "1"}
        with Pod(tmp_path, "print('begins'); 1 / 0", environment=given) as pod:
            assert pod.wait() == 1
            assert pod.output.splitlines().count("begins") == 2, "one restart within the limit"
            assert pod.termination_message["reason"] == "RestartLimit"
    assert json.loads((tmp_path / "state/lives.json").read_text())["lives"] == 4


def test_containers_that_are_killed_with_their_agent_count_against_the_limit(tmp_path):
    """As by the OOM killer; and the message is that of the limit."""
    given = {"DILOCO_POD_UID": "uid-1", "DILOCO_RESTART_LIMIT": "1"}
    with Pod(tmp_path, environment=given) as pod:
        for life in range(2):
            pod.pid(life)
            pod.process.kill()
            pod.wait()
            pod.process.stdout.close()
            pod.start()
        assert pod.wait() == 1
        assert pod.termination_message["reason"] == "RestartLimit"
        assert "crashed 2 times" in pod.termination_message["message"]


def test_a_container_that_is_stopped_does_not_count_against_the_limit(tmp_path):
    given = {"DILOCO_POD_UID": "uid-1", "DILOCO_RESTART_LIMIT": "0"}
    with Pod(tmp_path, environment=given) as pod:
        for life in range(2):
            pod.pid(life)
            assert pod.stop() == 0
            pod.process.stdout.close()
            pod.start()
        pod.pid(2)


def test_a_container_that_is_stopped_while_its_disk_is_full_does_not_count_either(tmp_path):
    given = {"DILOCO_POD_UID": "uid-1", "DILOCO_RESTART_LIMIT": "0"}
    with Pod(tmp_path, environment=given) as pod:
        pod.pid(0)
        unwritable = tmp_path / "state/lives.json.tmp"
        unwritable.mkdir()  # as on a full disk, there is no new content
        assert pod.stop() == 0
        assert "lives.json" in pod.output, "the counts were not written"
        unwritable.rmdir()
        pod.process.stdout.close()
        pod.start()
        pod.pid(1)


def test_sigterm_reaches_the_process_and_the_container_exits_with_0(tmp_path):
    with Pod(tmp_path) as pod:
        child = pod.pid(0)
        assert pod.stop() == 0
        assert "left" in pod.output.splitlines()
        assert not alive(child)
        assert not pod.termination_log.exists()


def test_a_process_that_ignores_sigterm_is_killed_before_the_grace_period_ends(tmp_path):
    stubborn = CHILD.replace("signal.signal(signal.SIGTERM, leave)", "signal.signal(15, 1)")
    stubborn = stubborn.replace("signal.signal(15, 1)", "signal.signal(15, signal.SIG_IGN)")
    with Pod(tmp_path, stubborn, environment={"DILOCO_GRACE_SECONDS": "5.5"}) as pod:
        child = pod.pid(0)
        began = time.monotonic()
        assert pod.stop() == 0
        assert 0.5 <= time.monotonic() - began < 5
        assert not alive(child)


def test_a_refused_process_exits_the_container_with_78_and_its_last_line(tmp_path):
    code = "import sys; print('diloco: eu/0: 9 is not 8', file=sys.stderr); sys.exit(78)"
    with Pod(tmp_path, code) as pod:
        assert pod.wait() == 78
        assert pod.termination_message == {
            "reason": "Refused",
            "message": "9 is not 8",
        }


def test_a_learner_that_is_refused_under_torchrun_exits_the_container_with_78(tmp_path):
    """torchrun itself ends with 1."""
    code = """if True:
        print("diloco: eu/0: 9 is not 8")
        print("W1123 13:00:06 71 api.py:908] Sending SIGTERM")
        print("E1123 13:00:07 71 api.py:882] failed (exitcode: 78) local_rank: 0 (pid: 74)")
        print("Traceback (most recent call last):")
        print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
        print("Root Cause (first observed failure):")
        print("  rank      : 0 (local_rank: 0)")
        print("  exitcode  : 78 (pid: 74)", flush=True)
        raise SystemExit(1)
        """
    with Pod(tmp_path, code) as pod:
        assert pod.wait() == 78
        message = pod.termination_message
        assert (message["reason"], message["message"]) == ("Refused", "9 is not 8")


def test_the_message_of_a_json_line_is_the_termination_message(tmp_path):
    code = """print('{"level": "error", "message": "no"}', flush=True); raise SystemExit(78)"""
    with Pod(tmp_path, code) as pod:
        pod.wait()
        assert pod.termination_message["message"] == "no"


def test_a_process_whose_work_is_done_leaves_an_idle_container(tmp_path):
    code = """
import os
from pathlib import Path
from diloco.runtime.health import Health, HealthFile
print("start", 1, 0, flush=True)
last = Health(at=0.0, ready=False, why="has left the job", progress_at=0.0, left="Complete")
HealthFile(Path(os.environ["DILOCO_HEALTH_FILE"])).write(last)
"""
    with Pod(tmp_path, code) as pod:
        until(lambda: pod.ask("/readyz") == (503, "done"), "idle container")
        assert pod.ask("/startz")[0] == 200
        assert pod.ask("/livez")[0] == 200
        assert len(pod.starts) == 1
        assert pod.stop() == 0


def test_a_learner_that_exits_with_0_before_the_job_is_complete_is_restarted_with_advice(tmp_path):
    with Pod(tmp_path, "print('start', 1, 0, flush=True)") as pod:
        until(lambda: "`while not learner.done`" in pod.ask("/readyz")[1], "advice")
        until(lambda: len(pod.starts) > 2, "restarts")
        assert pod.stop() == 0


def test_a_syncer_that_was_signalled_directly_restarts_immediately(tmp_path):
    with Pod(tmp_path, role="syncer") as pod:
        os.kill(pod.pid(0), signal.SIGTERM)
        pod.pid(1)


def test_too_many_crashes_exit_the_container_with_the_reason(tmp_path):
    code = "print('boom'); raise SystemExit(3)"
    with Pod(tmp_path, code, environment={"DILOCO_RESTART_LIMIT": "1"}) as pod:
        assert pod.wait() == 1
        assert pod.termination_message["reason"] == "RestartLimit"
        assert "learner eu/0 crashed 2 times" in pod.termination_message["message"]
        assert "exit code 3: boom" in pod.termination_message["message"]


def test_readiness_names_a_missing_program(tmp_path):
    with Pod(tmp_path, ("no-such-program",)) as pod:
        until(lambda: "no-such-program: No such file" in pod.ask("/readyz")[1], "reason")


def test_probes_follow_the_health_reports_of_the_process(tmp_path):
    slow = CHILD.replace("while True:", "sys.stdin = open(os.environ['GATE'])\nwhile True:")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Pod(tmp_path, slow, environment={"GATE": str(gate)}) as pod:
        child = pod.pid(0)
        assert pod.ask("/startz") == (503, "started, no health report yet")
        assert pod.ask("/readyz") == (503, "started, no health report yet")
        assert pod.ask("/livez") == (200, "alive")
        assert pod.ask("/metrics")[0] == 404
        with gate.open("w"):
            until(lambda: pod.ask("/readyz") == (200, "working"), "readiness")
        assert pod.ask("/startz") == (200, "working")
        os.kill(child, signal.SIGKILL)
        pod.pid(1)
        # Reports of an earlier start do not count.
        until(lambda: pod.ask("/readyz") == (503, "started, no health report yet"), "unready")
        assert pod.ask("/startz")[0] == 200


def test_a_stuck_process_fails_liveness(tmp_path):
    stuck = CHILD.replace("progress_at=now", "progress_at=now - 8")
    with Pod(tmp_path, stuck, environment={"DILOCO_STUCK_SECONDS": "7"}) as pod:
        until(lambda: pod.ask("/livez")[0] == 503, "failing liveness")
        assert re.search(r"no progress for \d+ s: working", pod.ask("/livez")[1])


def test_malformed_requests_are_answered_too(tmp_path):
    with Pod(tmp_path) as pod:
        pod.pid(0)
        for request in (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n", b"GET\r\n\r\n"):
            with (
                socket.create_connection(("localhost", pod.port), timeout=10) as connection,
                connection.makefile("rb") as answer,
            ):
                connection.sendall(request)
                assert answer.readline().startswith(b"HTTP/1.0 ")
        assert pod.ask("/livez")[0] == 200


def test_kernels_of_the_image_are_copied_with_their_times_into_an_empty_cache(tmp_path):
    image, cache = tmp_path / "image", tmp_path / "cache"
    (image / "diloco_1").mkdir(parents=True)
    (image / "diloco_1" / "k.nbi").write_text("index")
    os.utime(image / "diloco_1" / "k.nbi", (1_000_000, 1_000_000))
    environment = {"DILOCO_KERNELS": str(image), "NUMBA_CACHE_DIR": str(cache)}
    with Pod(tmp_path, environment=environment) as pod:
        pod.pid(0)
        copied = cache / "diloco_1" / "k.nbi"
        assert (copied.read_text(), copied.stat().st_mtime) == ("index", 1_000_000)
        copied.write_text("newer")
        assert pod.stop() == 0
        pod.process.stdout.close()
        pod.start()
        pod.pid(1)
        assert copied.read_text() == "newer"


def test_reparented_orphans_are_reaped(tmp_path):
    orphan = "import os\nfor _ in range(3):\n  if os.fork() == 0:\n    os.fork() or os._exit(0)\n    os._exit(0)\n"
    subreaper = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with Pod(tmp_path, orphan + CHILD, wrapped=(sys.executable, "-c", subreaper)) as pod:
        os.kill(pod.pid(0), signal.SIGKILL)
        pod.pid(1)

        def zombies() -> list[str]:
            pids = Path(f"/proc/{pod.process.pid}/task/{pod.process.pid}/children").read_text()
            return [pid for pid in pids.split() if not alive(int(pid))]

        until(lambda: not zombies(), "end of the zombies")
        assert pod.process.poll() is None


def test_it_uses_less_than_30_mib(tmp_path):
    with Pod(tmp_path) as pod:
        pod.pid(0)
        until(lambda: pod.ask("/readyz")[0] == 200, "readiness")
        status = Path(f"/proc/{pod.process.pid}/status").read_text()
        resident_kib = int(status.partition("VmRSS:")[2].split()[0])
        assert resident_kib < 30 * 1024


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Pod(tmp_path, environment={"DILOCO_HEALTH_PORT": port}) as pod:
            assert pod.wait() == 2
            assert f"port {port}: Address already in use" in pod.output
            assert pod.termination_message["reason"] == "Config"
