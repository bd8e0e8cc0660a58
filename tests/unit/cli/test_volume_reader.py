"""Fetching the files of a job whose syncer does not run; a stand-in for kubectl has the cluster in files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from diloco.errors import UnavailableError
from diloco_cli import fetch_pod
from diloco_cli.fetch_pod import Placement, place
from diloco_cli.pod_files import Retries
from diloco_cli.remote import RemoteJob, fetch_model, fetch_run
from diloco_cli.volume_reader import Patience

pytestmark = pytest.mark.slow  # each command of the made-up kubectl is a process

# -IS: importing site-packages would take longer than what the commands do.
KUBECTL = """#!{python} -IS
import json, os, subprocess, sys, time
here, arguments = {folder!r}, [a for a in sys.argv[1:] if not a.startswith("--context")]
def path(name):
    return os.path.join(here, name.replace("/", "_"))
def stored(name):
    return open(path(name)).read() if os.path.exists(path(name)) else ""
print(*arguments, file=open(path("log"), "a"))
if arguments[0] == "create":
    if stored("refusal"):
        sys.exit(stored("refusal"))
    open(path("created"), "w").write(sys.stdin.read())
elif arguments[0] == "delete":
    if os.path.exists(path("created")):
        os.rename(path("created"), path("deleted"))
elif arguments[0] == "exec":
    command = [a.replace("/var/lib/diloco", path("volume")) for a in arguments[arguments.index("--") + 2 :]]
    command = [a.replace("/etc/diloco/spec", path("spec")) for a in command]
    if stored("slow"):
        open(path("executing"), "w").close()
        time.sleep(60)
    sys.exit(subprocess.run([sys.executable, "-IS", *command]).returncode)
elif arguments[1] in ("pods", "events"):
    print(stored(arguments[1]) or '{{"items": []}}')
elif arguments[1].startswith("pod/"):
    states = json.loads(stored("states"))
    if len(states) > 1:
        open(path("states"), "w").write(json.dumps(states[1:]))
    if stored("created"):
        print(json.dumps({{**json.loads(stored("created")), "status": states[0]}}))
else:
    print(stored(arguments[1]), end="")
"""

IMAGE = "registry.example.com/syncer:1"
JOB = {
    "metadata": {"name": "a", "uid": "u-1"},
    "spec": {"regions": [{"name": "eu", "learners": 1}]},
    "status": {"state": "Failed"},
}
USERS = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTIONS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
TEMPLATE = {
    "serviceAccountName": "a", "securityContext": USERS, "nodeSelector": {"disk": "fast"},
    "imagePullSecrets": [{"name": "registry"}], "priorityClassName": "high", "hostNetwork": True,
    "containers": [
        {"name": "proxy", "image": "other"},
        {"name": "main", "image": IMAGE, "securityContext": RESTRICTIONS, "env": [{"name": "A"}]},
    ],
    "volumes": [
        {"name": "spec", "configMap": {"name": "a-spec-1"}},
        {"name": "tls", "secret": {"secretName": "a-tls"}},
        {"name": "state", "persistentVolumeClaim": {"claimName": "a-syncer"}},
    ],
}  # fmt: skip
DEPLOYMENT = {"spec": {"replicas": 0, "template": {"spec": TEMPLATE}}}
RUNNING = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
START = json.dumps({"event": "start", "epoch": 1, "fragments": 2, "interval": 2}) + "\n"


def waiting(reason, message=""):
    wait = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "main", "state": wait}]}


def holder(name="a-syncer-x", node="", *, status=None, claim="a-syncer", **metadata):
    """A pod that mounts the claim."""
    volumes = [{"name": "state", "persistentVolumeClaim": {"claimName": claim}}]
    labels = {"diloco.dev/role": "syncer"}
    return {
        "metadata": {"name": name, "labels": labels, **metadata},
        "spec": {"volumes": volumes, **({"nodeName": node} if node else {})},
        "status": status or {"phase": "Pending"},
    }


@pytest.fixture
def cluster(tmp_path):
    """The cluster's objects as files, with a failed job whose volume has all its files."""
    folder = tmp_path / "cluster"
    (folder / "volume").mkdir(parents=True)
    (folder / "spec").mkdir()
    (folder / "dilocojobs.diloco.dev_a").write_text(json.dumps(JOB))
    (folder / "deployment_a-syncer").write_text(json.dumps(DEPLOYMENT))
    (folder / "persistentvolumeclaim_a-syncer").write_text("{}")
    (folder / "states").write_text(json.dumps([waiting("ContainerCreating"), RUNNING]))
    (folder / "volume/events.jsonl").write_text(START)
    (folder / "spec/spec.json").write_text('{"job": "a"}')
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    return folder


@pytest.fixture
def announced():
    """What a person was shown."""
    return []


@pytest.fixture
def job(cluster, tmp_path, announced):
    return RemoteJob(
        name="a", kubectl=str(tmp_path / "bin/kubectl"), announce=announced.append,
        retries=Retries(attempts=2, first_seconds=0.01, max_seconds=0.01, stall_seconds=10),
        patience=Patience(start_seconds=60, poll_seconds=0.01),
    )  # fmt: skip


@pytest.fixture
def hasty(job):
    """The same for a person who does not wait."""
    return replace(job, patience=Patience(start_seconds=0.5, poll_seconds=0.01))


def log(cluster):
    return (cluster / "log").read_text()


def created(cluster):
    """The fetch pod; it is deleted by now."""
    assert not (cluster / "created").exists(), "the pod is still there"
    return json.loads((cluster / "deleted").read_text())


def test_logs_of_a_failed_job_come_through_one_pod_that_is_deleted_at_the_end(
    cluster, job, announced, tmp_path
):
    missing = fetch_run(job, tmp_path / "run")
    assert missing == ["no running pod in this cluster, so steps.jsonl is not fetched: eu/0"]
    assert (tmp_path / "run/events.jsonl").read_text() == START
    assert json.loads((tmp_path / "run/spec.json").read_text()) == {"job": "a"}
    name = created(cluster)["metadata"]["name"]
    assert re.fullmatch("a-fetch-[0-9a-f]{8}", name)
    assert log(cluster).count("create -f -") == 1
    assert log(cluster).count(f"exec pod/{name} -c main -- python3") == 2
    assert announced == [f"the syncer does not run: starting pod {name} to read its volume"]


def test_a_model_comes_the_same_way_and_only_requested_regular_files_do(cluster, job, tmp_path):
    (cluster / "volume/model").mkdir()
    (cluster / "volume/model/model.json").write_text("{}")
    (cluster / "volume/model/model.safetensors").write_bytes(b"tensors")
    (cluster / "volume/model/other").write_bytes(b"not asked for")
    fetch_model(job, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {"model.json", "model.safetensors"}
    created(cluster)


def test_the_pod_is_the_syncers_but_reads_only_ends_by_itself_and_belongs_to_the_job():
    pod = fetch_pod.fetch_pod(JOB, DEPLOYMENT, name="a-fetch-1", node="", seconds=7200)
    owner = pod["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("DiLoCoJob", "a", "u-1")
    assert "blockOwnerDeletion" not in owner, "which would need the right to update finalizers"
    assert not any("diloco.dev" in label for label in pod["metadata"]["labels"])
    spec = pod["spec"]
    assert spec["activeDeadlineSeconds"] == 7200
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    for field in ("securityContext", "serviceAccountName", "imagePullSecrets", "nodeSelector"):
        assert spec[field] == TEMPLATE[field]
    assert not {"hostNetwork", "priorityClassName"} & set(spec)
    (main,) = spec["containers"]
    assert (main["image"], main["securityContext"]) == (IMAGE, RESTRICTIONS)
    assert set(main["resources"]["limits"]) == set(main["resources"]["requests"])
    assert all(mount["readOnly"] for mount in main["volumeMounts"])
    assert {volume["name"] for volume in spec["volumes"]} == {"state", "spec"}


def test_the_pod_runs_beside_a_pod_that_has_the_volume():
    pod = fetch_pod.fetch_pod(JOB, DEPLOYMENT, name="a-fetch-1", node="n-7", seconds=9)
    term = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (match,) = term["nodeSelectorTerms"][0]["matchFields"]
    assert (match["key"], match["values"]) == ("metadata.name", ["n-7"])
    assert "nodeSelector" not in pod["spec"]


SUSPENDED = {"spec": {"replicas": 0}}
WANTED = {"spec": {"replicas": 1}}


def test_a_volume_that_no_pod_mounts_can_be_read_on_any_node():
    ended = holder(node="n-1", status={"phase": "Failed"})
    other = holder("b-syncer-x", "n-2", claim="b-syncer")
    assert place("a", SUSPENDED, [ended, other]) == Placement()


@pytest.mark.parametrize(
    "pod",
    [
        holder(node="n-1", status=waiting("CrashLoopBackOff")),
        holder(node="n-1", status=RUNNING, deletionTimestamp="2026-01-02T03:04:05Z"),
        holder("backup", "n-1", status=RUNNING),
    ],
    ids=["a syncer that crashes", "a syncer that ends", "a pod of the user"],
)
def test_a_volume_that_a_pod_mounts_is_read_on_its_node(pod):
    assert place("a", WANTED, [pod]) == Placement(node="n-1")


def test_a_syncer_that_has_no_node_yet_is_not_kept_from_starting():
    assert place("a", WANTED, []).wait == "the syncer should run, but its Deployment has no pod"
    entry = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}
    pending = holder(status={"phase": "Pending", "conditions": [entry]})
    assert place("a", WANTED, [pending]).wait == (
        "pod a-syncer-x, which mounts the volume, is not scheduled yet: Unschedulable: 0/3"
    )


def test_a_syncer_that_should_run_is_waited_for_and_then_asked_itself(
    cluster, job, announced, tmp_path
):
    (cluster / "deployment_a-syncer").write_text(
        json.dumps({**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replicas": 1}})
    )
    running = json.dumps({"items": [holder(node="n-1", status=RUNNING)]})

    def appears(text):
        announced.append(text)
        (cluster / "pods").write_text(running)

    with replace(job, announce=appears).syncer_files() as source:
        job.fetch(("events.jsonl",), tmp_path / "run", source=source)
    assert source == "deployment/a-syncer"
    assert (tmp_path / "run/events.jsonl").read_text() == START
    assert announced == ["waiting: the syncer should run, but its Deployment has no pod"]
    assert "create" not in log(cluster)


def fails(job, match):
    with pytest.raises(UnavailableError, match=match), job.syncer_files():
        raise AssertionError("there is something to read")


def test_a_syncer_that_never_comes_is_an_error_in_time(cluster, hasty):
    (cluster / "pods").write_text(json.dumps({"items": [holder()]}))
    fails(hasty, "is not scheduled yet; run the command again when it runs, or suspend the job")
    assert "create" not in log(cluster)


def test_a_volume_that_is_gone_is_named(cluster, job):
    (cluster / "persistentvolumeclaim_a-syncer").unlink()
    fails(
        job,
        r"job a: the volume \(PersistentVolumeClaim a-syncer\) no longer exists: .*cleanupPolicy All",
    )
    assert "create" not in log(cluster)


def test_a_syncer_of_another_cluster_is_named(cluster, job):
    (cluster / "persistentvolumeclaim_a-syncer").unlink()
    there = {
        "type": "SyncerReady", "reason": "OtherRegion", "message": "the syncer runs in region us",
    }  # fmt: skip
    (cluster / "dilocojobs.diloco.dev_a").write_text(
        json.dumps({**JOB, "status": {"conditions": [there]}})
    )
    fails(job, "the syncer runs in region us: run the command with that cluster's --context")


def test_a_job_or_a_deployment_that_is_not_there_is_named(cluster, job):
    (cluster / "deployment_a-syncer").unlink()
    fails(job, "Deployment a-syncer is not in this cluster, so the image")
    (cluster / "dilocojobs.diloco.dev_a").unlink()
    fails(job, "there is no DiLoCoJob a in this namespace")


QUOTA = 'Error from server (Forbidden): pods "a-fetch-1" is forbidden: exceeded quota: team'


def test_a_quota_is_reported_with_the_servers_message(cluster, job):
    (cluster / "refusal").write_text(QUOTA)
    fails(
        job, r"cannot create pod a-fetch-[0-9a-f]+, which reads the volume: .*exceeded quota: team"
    )
    assert log(cluster).count("create -f -") == 1, "a retry cannot help"
    assert "delete" not in log(cluster), "there is nothing to delete"


def test_a_pod_that_may_have_been_created_is_deleted(cluster, job):
    (cluster / "refusal").write_text("Unable to connect to the server: EOF")
    fails(job, "cannot create pod a-fetch-.*EOF")
    assert log(cluster).count("create -f -") == 2
    assert "delete pod/a-fetch-" in log(cluster)


def test_a_create_whose_first_answer_was_lost_has_worked(cluster, job):
    (cluster / "refusal").write_text('Error from server (AlreadyExists): pods "a-fetch-1" already')
    (cluster / "created").write_text('{"metadata": {}}')
    with job.syncer_files() as source:
        assert source.startswith("pod/a-fetch-")
    created(cluster)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "x"'),
            'Off: Back-off pulling image "x"',
        ),
        (waiting("CreateContainerConfigError", "no user"), "CreateContainerConfigError: no user"),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "cannot run: Evicted: disk"),
    ],
)
def test_a_pod_that_cannot_run_is_an_error_at_once_and_is_deleted(cluster, job, state, message):
    (cluster / "states").write_text(json.dumps([state]))
    fails(job, f"pod a-fetch-[0-9a-f]+ .*{message}")
    created(cluster)


@pytest.mark.slow
def test_a_volume_that_is_attached_elsewhere_is_reported_after_the_timeout(cluster, job, announced):
    (cluster / "states").write_text(json.dumps([waiting("ContainerCreating")]))
    text = "Multi-Attach error for volume: it is already used on another node"
    event = {"type": "Warning", "reason": "FailedAttachVolume", "message": text}
    older = {"type": "Warning", "reason": "Older", "lastTimestamp": "2026-01-02T03:04:05Z"}
    newer = {**event, "lastTimestamp": "2026-01-02T03:04:06Z"}
    normal = {"type": "Normal", "reason": "Scheduled", "lastTimestamp": "2026-01-02T03:04:07Z"}
    (cluster / "events").write_text(json.dumps({"items": [newer, older, normal]}))
    # Long enough for a busy machine to read the events once before.
    waits = replace(job, patience=Patience(start_seconds=5.0, poll_seconds=0.01))
    fails(waits, rf"did not start within 5 s: FailedAttachVolume: {text}")
    created(cluster)
    assert len([line for line in announced if text in line]) == 1


def test_a_pod_without_a_node_reports_the_schedulers_message(cluster, hasty):
    entry = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}
    (cluster / "states").write_text(json.dumps([{"phase": "Pending", "conditions": [entry]}]))
    fails(hasty, r"did not start within 0\.5 s: Unschedulable: 0/3")
    created(cluster)


def test_a_pod_that_is_deleted_meanwhile_is_an_error(cluster, job):
    (cluster / "refusal").write_text("Error from server (AlreadyExists): pods already exists")
    fails(job, "was deleted before it started")


def test_the_pod_is_deleted_when_the_files_cannot_be_read(cluster, job):
    def read():
        with job.syncer_files():
            raise UnavailableError("the stream ended early")

    with pytest.raises(UnavailableError, match=r"^the stream ended early$"):
        read()
    created(cluster)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_deletes_the_pod_and_what_was_not_complete(cluster, tmp_path, number):
    (cluster / "slow").write_text("yes")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "diloco_cli", "logs", "a", "--to", str(tmp_path / "run")]
    with subprocess.Popen(
        command, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert b"starting pod a-fetch-" in process.stderr.readline()
        _until(lambda: (cluster / "executing").exists())
        # A terminal sends it to the command and to its kubectl.
        os.killpg(process.pid, number)
        process.communicate(timeout=280)
    assert process.returncode > 0
    created(cluster)
    assert not list((tmp_path / "run").glob(".fetch-*"))


def _until(what, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)
