"""A program `kubectl` that runs the commands of the pods of a small cluster on this machine."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

# -IS: importing site-packages would take longer than what the commands do.
KUBECTL = """#!{python} -IS
import os, subprocess, sys
arguments = sys.argv[1:]
print(*arguments, file=open({log!r}, "a"))
if "gone" in " ".join(arguments):
    sys.exit("Error from server (NotFound): deployments.apps \\"gone-syncer\\" not found")
if os.path.exists(os.path.join({folder!r}, "down")) and "exec" not in arguments:
    sys.exit("Unable to connect to the server: connection refused")
if "create" in arguments:
    review = sys.stdin.read()
    print('{{"status": {{"allowed": %s}}}}' % str(not any(
        '"subresource": "%s"' % name in review
        for name in os.environ.get("FORBIDDEN", "none").split(",")
    )).lower())
elif "delete" in arguments:
    pass
elif "json" in arguments and "pods" not in arguments:
    print(open(os.path.join({folder!r}, "job.json")).read())
elif "get" in arguments:
    print(open(os.path.join({folder!r}, "pods.json" if "pods" in arguments else "job.yaml")).read(), end="")
else:
    here = arguments[arguments.index("--") + 1 :]
    pod = next(a for a in arguments if a.startswith(("pod/", "deployment/"))).replace("/", "-")
    here = [part.replace("/var/lib/diloco", os.path.join({folder!r}, pod)) for part in here]
    here = [part.replace("/etc/diloco/spec", os.path.join({folder!r}, "spec")) for part in here]
    if not os.path.isdir(os.path.join({folder!r}, pod)):
        sys.exit("error: cannot exec in a stopped container")
    if "-i" in arguments:
        os.execv(sys.executable, [sys.executable, *here[1:]])
    own = dict(os.environ, TMPDIR=os.path.join({folder!r}, pod))
    done = subprocess.run([sys.executable, "-IS", *here[1:]], stdout=subprocess.PIPE, env=own)
    breaks = os.path.join({folder!r}, "breaks")
    left = open(breaks).read().split() if os.path.exists(breaks) else []
    if left:
        # The stream ends in the middle, and kubectl exits with 0.
        open(breaks, "w").write(" ".join(left[1:]))
        sys.stdout.buffer.write(done.stdout[: int(left[0])])
        sys.exit(0)
    sys.stdout.buffer.write(done.stdout)
    sys.exit(done.returncode)
"""


START = json.dumps({"event": "start", "epoch": 1, "fragments": 2, "interval": 2}) + "\n"
JOB = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata:
  name: a
spec:
  learner:
    podsPerLearner: 2
  regions:
  - name: eu
    learners: 3
  - name: us
    learners: 1
  steps: 9
status:
  specHash: "123"
  startTime: "2026-01-02T03:04:05Z"
  state: Training
  step: 5
  tokens: 700
  progress: 5/9
  learners: {desired: 4, ready: 4, training: 3, summary: 3/4}
  regions:
  - {name: eu, desired: 3, ready: 3, training: 3, restarts: 2, lastSeenTime: "2026-01-02T03:04:06Z"}
  - {name: us, desired: 1}
  conditions:
  - {type: LearnersReady, status: "False", reason: SomeNotTraining, message: "3 of 4 learners train"}
"""


def pod(name, region="eu", phase="Running", role="learner"):
    labels = {"diloco.dev/region": region, "diloco.dev/role": role}
    main = {"name": "main", "state": {"running": {}}}
    status = {"phase": phase, "containerStatuses": [main]}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def line(tokens):
    return json.dumps(
        {"time": "2026-01-02T03:04:06.000+00:00", "localStep": 1, "tokens": tokens, "loss": 2.5}
    )


def make_state(folder: Path) -> Path:
    """Content of the syncer's volume."""
    path = folder / "cluster/deployment-a-syncer"
    (path / "model").mkdir(parents=True)
    (path / "events.jsonl").write_text(START)
    (path / "model/model.safetensors").write_bytes(b"tensors" * 1000)
    digest = hashlib.sha256(b"tensors" * 1000).hexdigest()
    (path / "model/model.json").write_text(json.dumps({"step": 5, "sha256": digest}))
    return path


def make_kubectl(folder: Path) -> str:
    """Path of the program; its cluster is a folder, and it logs its arguments."""
    cluster = folder / "cluster"
    (cluster / "job.yaml").write_text(JOB)
    (cluster / "job.json").write_text(json.dumps(yaml.safe_load(JOB)))
    # As the kubelet mounts a ConfigMap.
    (cluster / "spec/..data").mkdir(parents=True)
    (cluster / "spec/..data/spec.json").write_text('{"job": "a", "steps": 9}')
    (cluster / "spec/spec.json").symlink_to("..data/spec.json")
    # Learner 0 trains, 1 is pending, 2 exits after the listing; us is in another cluster.
    for ordinal in range(2):
        kept = cluster / f"pod-a-eu-{ordinal}"
        kept.mkdir()
        (kept / "steps.jsonl").write_text(line(100 + ordinal) + "\n")
    pods = [*(pod(f"a-eu-{n}") for n in (0, 1, 4, 5)), pod("a-eu-2", phase="Pending")]
    (cluster / "pods.json").write_text(
        json.dumps({"items": [*pods, pod("a-eu-b-0"), pod("a-syncer-x", role="syncer")]})
    )
    program = folder / "bin/kubectl"
    program.parent.mkdir()
    log = str(folder / "kubectl.log")
    program.write_text(KUBECTL.format(python=sys.executable, log=log, folder=str(cluster)))
    program.chmod(0o755)
    return str(program)


def diloco(kubectl, *arguments):
    """Run our own command with this kubectl."""
    path = f"{os.path.dirname(kubectl)}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "diloco_cli", *map(str, arguments)],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
