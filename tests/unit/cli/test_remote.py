"""Fetching a job's files through kubectl; a stand-in runs the commands of the pods on this machine."""

import dataclasses
import hashlib
import json
import os
import re
import sys
import time
import tracemalloc

import numpy as np
import pytest

from diloco.errors import ConfigError, StorageError, UnavailableError
from diloco.journal import reader
from diloco_cli import pod_files, remote
from diloco_cli.pod_files import Retries
from diloco_cli.remote import RemoteJob, fetch_run
from diloco_local.report.run_files import load
from diloco_local.run_directory import RunDir
from diloco_testing.kubernetes.kubectl import JOB, START, diloco, make_kubectl, make_state

pytestmark = pytest.mark.slow  # each command of the made-up kubectl is a process


@pytest.fixture
def state(tmp_path):
    """Content of the syncer's volume."""
    return make_state(tmp_path)


@pytest.fixture
def kubectl(tmp_path, state):
    return make_kubectl(tmp_path)


def test_files_come_from_the_syncers_pod_and_missing_ones_are_skipped(tmp_path, kubectl):
    job = RemoteJob(name="a", namespace="team", context="eu", kubectl=kubectl)
    job.fetch(remote.LOGS, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["events.jsonl"]
    assert (tmp_path / "run/events.jsonl").read_text() == START
    log = (tmp_path / "kubectl.log").read_text()
    assert "--context=eu --namespace=team exec deployment/a-syncer -c main" in log


def test_a_permanent_error_of_kubectl_is_reported_without_a_retry(tmp_path, kubectl):
    with pytest.raises(UnavailableError, match=r"cannot fetch files of job gone: .*NotFound"):
        RemoteJob(name="gone", kubectl=kubectl).fetch(remote.MODEL, tmp_path)
    assert len((tmp_path / "kubectl.log").read_text().split("gone-syncer")) == 2


QUICK = Retries(attempts=3, first_seconds=0.01, max_seconds=0.01, stall_seconds=30)
TENSORS = np.arange(1 << 20, dtype=np.uint32).tobytes()
"""Four chunks, all different."""


def breaking(kubectl, tmp_path, *after_bytes):
    """A job whose next streams end after so many bytes."""
    (tmp_path / "cluster/breaks").write_text(" ".join(map(str, after_bytes)))
    return RemoteJob(name="a", kubectl=kubectl, retries=QUICK)


def test_a_fetch_resumes_after_streams_that_break_off(tmp_path, kubectl, state):
    (state / "model/model.safetensors").write_bytes(TENSORS)
    job = breaking(kubectl, tmp_path, 1_500_000, 0, 10, 2_500_000)
    job.fetch(remote.MODEL, tmp_path / "run")
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == TENSORS
    assert json.loads((tmp_path / "run/model/model.json").read_text())["step"] == 5
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]
    # Chunks that arrived are not sent again.
    requests = re.findall(
        r'"model/model.safetensors": \[\d+, (\d+), (\d+)\]', (tmp_path / "kubectl.log").read_text()
    )
    assert requests == [("4194304", received) for received in ("1048576",) * 3 + ("3145728",)]


def test_a_file_that_grows_or_is_replaced_between_streams_is_consistent(tmp_path, kubectl, state):
    (state / "model/model.safetensors").write_bytes(TENSORS)
    partial = tmp_path / "partial"
    partial.mkdir()
    copy = pod_files._Copy(
        wanted=("model/model.safetensors",), to=tmp_path / "run", partial=partial,
        caps=pod_files.DEFAULT_CAPS,
    )  # fmt: skip

    def attempt(after_bytes=None):
        (tmp_path / "cluster/breaks").write_text(str(after_bytes or ""))
        command = [kubectl, "exec", "deployment/a-syncer", "--"]
        return copy.attempt(command, remote.STATE, dataclasses.replace(QUICK, stall_seconds=5))

    assert attempt(1_500_000) == "the stream ended early"
    with (state / "model/model.safetensors").open("ab") as file:
        file.write(b"more")
    assert attempt(1_500_000) == "the stream ended early"
    (state / "new").write_bytes(TENSORS[::-1])
    (state / "new").rename(state / "model/model.safetensors")
    assert attempt() == ""
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == TENSORS[::-1]


def test_streams_that_always_break_off_name_what_is_missing(tmp_path, kubectl, state):
    (state / "model/model.safetensors").write_bytes(TENSORS)
    job = breaking(kubectl, tmp_path, 1_500_000, *[100] * 9)
    expected = (
        r"cannot fetch files of job a: model/model\.safetensors \(1\.00 MiB of 4\.00 MiB received\): "
        "the stream ended early; run the command again"
    )
    with pytest.raises(UnavailableError, match=expected):
        job.fetch(remote.MODEL, tmp_path / "run")
    kept = [path.name for path in (tmp_path / "run").rglob("*")]
    assert kept == ["model", "model.json"], "no partial file remains"


def test_a_fetch_shows_each_attempt_that_brought_nothing(tmp_path, kubectl, state):
    (state / "model/model.safetensors").write_bytes(TENSORS)
    shown: list[str] = []
    job = dataclasses.replace(breaking(kubectl, tmp_path, 1_500_000, 0), announce=shown.append)
    job.fetch(remote.MODEL, tmp_path / "run")
    lacks = "model/model.safetensors (1.00 MiB of 4.00 MiB received)"
    assert shown == [f"{lacks}: the stream ended early; trying again"]


def test_a_damaged_chunk_is_requested_again(tmp_path, kubectl):
    with open(kubectl) as program:
        text = program.read()
    flip = (
        "once = os.path.join(os.path.dirname(breaks), 'once')\n"
        "    if not os.path.exists(once):\n"
        "        open(once, 'w').close()\n"
        "        done.stdout = done.stdout.replace(b'tensors', b'tensorz')\n    "
    )
    with open(kubectl, "w") as program:
        program.write(text.replace("if left:", flip + "if left:"))
    RemoteJob(name="a", kubectl=kubectl, retries=QUICK).fetch(remote.MODEL, tmp_path / "run")
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == b"tensors" * 1000


@pytest.mark.slow
def test_a_stalled_stream_counts_as_broken(tmp_path, kubectl):
    with open(kubectl, "w") as program:
        program.write("#!/bin/sh\nexec sleep 60\n")
    job = RemoteJob(
        name="a", kubectl=kubectl, retries=dataclasses.replace(QUICK, attempts=1, stall_seconds=1)
    )
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="no data for 1 s"):
        job.fetch(remote.MODEL, tmp_path / "run")
    assert time.monotonic() - started < 20


CHUNKS = """#!{python} -IS
import hashlib, json, sys, time
def send(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
send(json.dumps({{"file": "events.jsonl", "inode": 1, "size": 60, "offset": 0}}).encode() + b"\\n")
for number in range(6):
    data = bytes([65 + number]) * 10
    head = {{"bytes": 10, "sha256": hashlib.sha256(data).hexdigest()}}
    send(json.dumps(head).encode() + b"\\n")
    for byte in data:
        time.sleep({pause})
        send(bytes([byte]))
send(b'{{"end": true}}\\n')
"""
"""A container that sends six chunks of ten bytes, each byte after a pause."""


def slow(tmp_path, pause):
    """A job whose container is slow, and whose chunks may take 4 s."""
    program = tmp_path / "kubectl"
    program.write_text(CHUNKS.format(python=sys.executable, pause=pause))
    program.chmod(0o755)
    retries = dataclasses.replace(QUICK, stall_seconds=60, chunk_seconds=4)
    return RemoteJob(name="a", kubectl=str(program), retries=retries)


@pytest.mark.slow
def test_a_fetch_may_take_long_while_its_chunks_arrive(tmp_path):
    started = time.monotonic()
    slow(tmp_path, 0.1).fetch(remote.LOGS, tmp_path / "run")
    assert time.monotonic() - started > 4
    assert (tmp_path / "run/events.jsonl").stat().st_size == 60


@pytest.mark.slow
def test_a_fetch_whose_next_chunk_takes_too_long_fails_with_that_reason(tmp_path):
    """Each byte arrives in time, and there is no end to them."""
    expected = (
        r"events\.jsonl \(0 B of 60 B received\): no complete chunk for 4 s; run the command again"
    )
    with pytest.raises(UnavailableError, match=expected):
        slow(tmp_path, 0.9).fetch(remote.LOGS, tmp_path / "run")


@pytest.mark.slow
def test_empty_files_do_not_keep_a_fetch_going(tmp_path):
    job = sending(tmp_path)
    (tmp_path / "kubectl").write_text(
        "#!/bin/sh\nwhile :; do for i in 1 2; do "
        """echo '{"file": "events.jsonl", "inode": '$i', "size": 0, "offset": 0}'; done; done\n"""
    )
    job = dataclasses.replace(job, retries=dataclasses.replace(QUICK, chunk_seconds=2))
    with pytest.raises(UnavailableError, match="no complete chunk for 2 s"):
        job.fetch(remote.LOGS, tmp_path / "run")


def sending(tmp_path, *headers):
    """A job whose pod answers every request with these bytes."""
    (tmp_path / "stream").write_bytes(
        b"".join(json.dumps(header).encode() + b"\n" for header in headers)
    )
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\nexec cat '{tmp_path}/stream'\n")
    program.chmod(0o755)
    return RemoteJob(name="a", kubectl=str(program), retries=QUICK)


def header(name, size=4):
    return {"file": name, "inode": 1, "size": size, "offset": 0}


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "/etc/evil", "other", "", "model", "model/", "model/..", "model/../../evil"),
        *("model/\0", "model/\ud800", "model/\x1b[2J", "model/other", "model/model.json/evil"),
        *("events./../../evil.jsonl", "./events.jsonl", "events.jsonl/evil", "model//model.json"),
    ],
)
def test_b02_a_container_cannot_write_files_that_were_not_requested(tmp_path, name):
    job = sending(tmp_path, header(name, size=0), {"end": True})
    with pytest.raises(UnavailableError, match="which was not requested"):
        job.fetch((*remote.MODEL, *remote.LOGS), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("size", [1001, 1 << 62, -1])
def test_a_file_larger_than_the_cap_is_refused_before_its_first_byte(tmp_path, size):
    job = sending(tmp_path, header("events.jsonl", size))
    with pytest.raises(StorageError, match=r"events\.jsonl: .* at most 1000 B are copied"):
        job.fetch(remote.LOGS, tmp_path / "run", caps=pod_files.Caps(file_bytes=1000))
    assert list((tmp_path / "run").iterdir()) == []


def test_files_larger_than_the_cap_together_or_too_many_are_refused(tmp_path):
    headers = [header(f"events.{n}.jsonl", 400) for n in range(1, 4)]
    with pytest.raises(StorageError, match="all files together: 1200 bytes"):
        sending(tmp_path, *headers).fetch(
            remote.LOGS, tmp_path / "run", caps=pod_files.Caps(total_bytes=1000)
        )
    with pytest.raises(StorageError, match="more than 2 files"):
        sending(tmp_path, *headers).fetch(
            remote.LOGS, tmp_path / "run", caps=pod_files.Caps(files=2)
        )


def test_a_file_that_is_sent_over_and_over_again_is_refused(tmp_path):
    data = b"x" * 400
    chunk = {"bytes": 400, "sha256": hashlib.sha256(data).hexdigest()}
    job = sending(tmp_path)
    (tmp_path / "stream").write_bytes(
        b"".join(
            json.dumps({**header("events.jsonl", 400), "inode": inode}).encode()
            + b"\n"
            + json.dumps(chunk).encode()
            + b"\n"
            + data
            for inode in range(9)
        )
    )
    with pytest.raises(StorageError, match="what was sent so far"):
        job.fetch(remote.LOGS, tmp_path / "run", caps=pod_files.Caps(total_bytes=1000))


def test_a_model_larger_than_the_free_space_is_refused(tmp_path):
    job = sending(tmp_path, header("model/model.safetensors", 1 << 43))
    with pytest.raises(StorageError, match=r"model\.safetensors: 8796093022208 bytes"):
        job.fetch(remote.MODEL, tmp_path / "run", caps=remote.MODEL_CAPS)


def test_of_what_a_container_writes_to_standard_error_only_the_end_is_kept(tmp_path):
    job = sending(tmp_path)
    (tmp_path / "kubectl").write_text(
        "#!/bin/sh\nhead -c 64000000 /dev/zero | tr '\\0' x >&2\necho Forbidden >&2\nexit 1\n"
    )
    tracemalloc.start()
    try:
        with pytest.raises(UnavailableError, match=r"x+Forbidden$"):
            job.fetch(remote.LOGS, tmp_path / "run")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


def test_links_pipes_and_devices_of_a_container_are_not_sent_as_such(tmp_path, kubectl, state):
    """A link is followed there, as for a mounted ConfigMap; a copy is always a regular file."""
    (state / "events.1.jsonl").symlink_to("events.jsonl")
    os.mkfifo(state / "events.2.jsonl")
    (state / "events.3.jsonl").mkdir()
    (state / "eval.jsonl").symlink_to("/dev/zero")
    RemoteJob(name="a", kubectl=kubectl).fetch(remote.LOGS, tmp_path / "run")
    found = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in found] == ["events.1.jsonl", "events.jsonl"]
    assert all(path.is_file() and not path.is_symlink() for path in found)


def test_all_parts_of_the_journal_are_fetched(tmp_path, kubectl, state):
    (state / "events.12.jsonl").write_text(START)
    (state / "events.jsonl").write_text('{"event":"rotate","part":13}\n')
    (state / "eval.1.jsonl").write_text('{"step":0,"loss":5.0}\n')
    (state / "eval.jsonl").write_text('{"step":9,"loss":4.0}\n')
    RemoteJob(name="a", kubectl=kubectl).fetch(remote.LOGS, tmp_path / "run")
    assert [row["step"] for row in reader.read(tmp_path / "run/eval.jsonl")] == [0, 9]
    rows = list(reader.read(tmp_path / "run/events.jsonl"))
    assert [row["event"] for row in rows] == ["start", "rotate"]


def test_a_request_is_repeated_when_the_api_server_fails_for_a_moment(tmp_path, kubectl):
    with open(kubectl) as program:
        text = program.read()
    once = str(tmp_path / "once")
    failure = (
        f"if not os.path.exists({once!r}):\n    open({once!r}, 'w').close()\n"
        "    sys.exit('Unable to connect to the server: net/http: TLS handshake timeout')\n"
    )
    with open(kubectl, "w") as program:
        program.write(text.replace('if "gone"', failure + 'if "gone"', 1))
    shown: list[str] = []
    job = RemoteJob(name="a", kubectl=kubectl, retries=QUICK, announce=shown.append)
    assert job.manifest().decode() == JOB
    problem = "Unable to connect to the server: net/http: TLS handshake timeout"
    assert shown == [f"{problem}; trying again"]


def test_a_missing_kubectl_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="program not found; install kubectl"):
        RemoteJob(name="a", kubectl="no-kubectl-here").fetch(remote.MODEL, tmp_path)


def test_export_takes_the_model_of_a_job_in_a_cluster(tmp_path, kubectl, state):
    done = diloco(kubectl, "export", "--job", "a", "--to", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    exported = (tmp_path / "out/model.safetensors").read_bytes()
    assert exported == (state / "model/model.safetensors").read_bytes()


def test_what_logs_fetches_is_private(tmp_path, kubectl):
    before = os.umask(0)
    try:
        diloco(kubectl, "logs", "a", "--to", tmp_path / "run")
    finally:
        os.umask(before)
    run = tmp_path / "run"
    files = {path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()}
    assert files == {0o600}
    folders = [path.stat().st_mode & 0o777 for path in (run, run / "learners" / "eu-0")]
    assert folders == [0o700, 0o700]


def test_logs_make_a_run_directory(tmp_path, kubectl):
    run = tmp_path / "run"
    done = diloco(kubectl, "logs", "a", "--to", run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "no running pod in this cluster, so steps.jsonl is not fetched: eu/1, us/0",
        "eu/2: no steps.jsonl: cannot fetch files of job a: error: cannot exec in a stopped container",
        f"{run}: fetched; verify every merge with: diloco audit --dir {run}",
    ]
    assert (run / "job.yaml").read_text() == JOB
    assert json.loads((run / "spec.json").read_text()) == {"job": "a", "steps": 9}
    assert not (run / "spec.json").is_symlink()
    status = json.loads((run / "status.json").read_text())
    assert (status["job"], status["step"], status["startTime"]) == ("a", 5, "2026-01-02T03:04:05Z")
    kept = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert kept == {
        "job.yaml", "spec.json", "status.json", "events.jsonl", "learners/eu-0/steps.jsonl",
    }  # fmt: skip
    assert json.loads((run / "learners/eu-0/steps.jsonl").read_text())["tokens"] == 100


def test_logs_fetch_a_job_again_and_refuse_the_directory_of_another(tmp_path, kubectl, state):
    job, run = tmp_path / "cluster/job.yaml", tmp_path / "run"
    job.write_text(JOB.replace("name: a\n", "name: a\n  uid: first\n"))
    for _ in range(2):
        assert diloco(kubectl, "logs", "a", "--to", run).returncode == 0
    (state / "events.jsonl").write_text(START.replace('"epoch": 1', '"epoch": 9'))
    for text in (JOB.replace("name: a\n", "name: a\n  uid: second\n"), JOB):
        job.write_text(text)
        done = diloco(kubectl, "logs", "a", "--to", run)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{run}: holds another job, or one that was deleted and created again" in done.stderr
    assert (run / "events.jsonl").read_text() == START


def test_logs_refuse_the_directory_of_a_run_on_this_machine(tmp_path, kubectl):
    local = RunDir(tmp_path / "local")
    with local.hold():
        local.manifest.write_text(JOB)
        local.events.write_text("{}\n")
    done = diloco(kubectl, "logs", "a", "--to", local.path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"{local.path}: holds a run of this machine; give another directory with --to"
        in done.stderr
    )
    assert (local.manifest.read_text(), local.events.read_text()) == (JOB, "{}\n")


@pytest.mark.slow
def test_what_logs_fetched_can_be_reported_and_audited(tmp_path, kubectl):
    run = tmp_path / "run"
    diloco(kubectl, "logs", "a", "--to", run)
    audited = diloco(kubectl, "audit", "--dir", run)
    assert (audited.returncode, audited.stderr) == (0, "")
    reported = load(run)
    assert (reported.name, reported.state, reported.step, reported.steps) == ("a", "Training", 5, 9)
    assert [(learner.name, learner.tokens) for learner in reported.learners] == [("eu/0", 100.0)]
    assert diloco(kubectl, "report", "--dir", run).returncode == 0
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_the_status_of_a_fetched_run_refers_to_the_cluster(tmp_path, kubectl):
    diloco(kubectl, "logs", "a", "--to", tmp_path / "run")
    asked = diloco(kubectl, "status", "--dir", tmp_path / "run")
    assert asked.returncode == 2
    assert "was fetched from a cluster" in asked.stderr


def test_without_a_list_of_pods_the_rest_is_fetched(tmp_path, kubectl):
    forbidden = 'if "pods" in arguments:\n    sys.exit("pods is forbidden")\n'
    with open(kubectl) as program:
        text = program.read()
    with open(kubectl, "w") as program:
        program.write(text.replace('if "gone"', forbidden + 'if "gone"'))
    missing = fetch_run(RemoteJob(name="a", kubectl=kubectl), tmp_path / "run")
    assert missing == ["no steps.jsonl of any learner: cannot read job a: pods is forbidden"]
    assert (tmp_path / "run/spec.json").exists()


def test_many_missing_learners_are_one_line(tmp_path, kubectl):
    job = tmp_path / "cluster/job.yaml"
    job.write_text(JOB.replace("learners: 1", "learners: 500"))
    missing = fetch_run(RemoteJob(name="a", kubectl=kubectl), tmp_path / "run")
    assert missing[0].endswith(": eu/1, us/0, us/1, us/2, us/3, us/4, us/5, us/6 and 493 more")


def test_headers_nested_without_end_are_refused_in_one_sentence(tmp_path):
    nested = [sys.executable, "-IS", "-c", "print('[' * 60_000)"]
    with pytest.raises(UnavailableError, match="does not contain files"):
        pod_files.copy_files(nested, "/x", ("a",), tmp_path, Retries(attempts=1))
