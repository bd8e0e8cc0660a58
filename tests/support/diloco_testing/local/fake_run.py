"""
A run of `diloco run` whose syncer, learners and evaluator are small scripts: no torch, no training.

The scripts read orders from files in the run directory: with `complete`, the syncer reports Complete
and all processes exit, the evaluator after its score; with `scoring`, it takes until that file is gone, and with
`no-score`, it reports the content instead. `<region>-<index>.order` contains the next exit code and log line of a
learner.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0

MANIFEST = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: fake}
spec:
  steps: 50
  learner: {command: [python, learner.py], env: [{name: USER_WORD, value: hello}]}
  regions:
  - {name: eu, learners: 1, config: {helpers: true}}
  - {name: us, learners: 1, config: {lr: 3}}
  evaluation: {everySteps: 10, command: [python, eval.py]}
"""

SYNCER = """
import argparse, json, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from diloco.errors import ConfigError
from diloco.rpc.servers import bind, server
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb, syncer_pb2_grpc

parser = argparse.ArgumentParser()
for flag in ("--spec", "--dir", "--listen", "--endpoint-file"):
    parser.add_argument(flag, required=True, type=str if flag == "--listen" else Path)
given = parser.parse_args()
spec = RunSpec.from_json(given.spec.read_text())
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())

if (given.dir / "syncer.order").exists():
    word, text = (given.dir / "syncer.order").read_text().split(" ", 1)
    print(text, file=sys.stderr)
    sys.exit(int(word))

class Service(syncer_pb2_grpc.SyncerServicer):
    def GetStatus(self, request, context):
        done = (given.dir / "complete").exists()
        if done:
            (given.dir / "model").mkdir(exist_ok=True)
            (given.dir / "model" / "model.safetensors").touch()
        scored = (given.dir / "scored").exists()
        learners = [
            pb.LearnerStatus(
                name=f"{region}/{i}", region=region, state="Training", incarnation=1, local_step=9,
                tokens=900, tokens_per_second=1234.5, loss=2.5, has_loss=True, staleness=2,
            )
            for region, count in spec.learners.items() for i in range(count)
        ]
        return pb.StatusReply(
            job=spec.job, epoch=1, step=spec.steps if done else 5, steps=spec.steps, tokens=4321,
            spec_hash=spec.hash, state="Complete" if done else "Training", merges=5, bytes_up=1 << 20,
            bytes_down=2 << 20, quorum=spec.quorum, last_members=2, seconds_since_merge=0.25,
            grace_seconds=0.012, learners=learners, model_path=str(given.dir / "model") if done else "",
            eval_step=spec.steps if scored else 0, eval_loss=1.5 if scored else 0.0,
        )

grpc_server = server(max_workers=4)
try:
    port = bind(grpc_server, given.listen, None)
except ConfigError as error:
    print(f"diloco-syncer: {error}", file=sys.stderr)
    sys.exit(2)
syncer_pb2_grpc.add_SyncerServicer_to_server(Service(), grpc_server)
grpc_server.start()
print("serving", flush=True)
temporary = given.endpoint_file.with_suffix(".tmp")
temporary.write_text(f"127.0.0.1:{port}")
os.replace(temporary, given.endpoint_file)
while not stop.is_set():
    time.sleep(0.02)
with (given.dir / "order-of-leaving").open("a") as file:
    file.write("syncer\\n")
grpc_server.stop(0).wait()
os._exit(0)
"""

LEARNER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

state = Path(os.environ["DILOCO_STATE"])
run = state.parent.parent
name = os.environ.get("DILOCO_LEARNER", "evaluator")
config = json.loads(os.environ["DILOCO_CONFIG"])
left = False

def leave(*_):
    global left
    left = not config.get("stubborn")

signal.signal(signal.SIGTERM, leave)
kept = {n: os.environ[n] for n in os.environ if n.startswith(("DILOCO_", "OMP_", "MKL_", "USER_"))}
facts = {"pid": os.getpid(), "cwd": os.getcwd(), "environment": kept, "argv": sys.argv}
helpers = []
if config.get("helpers"):
    same = subprocess.Popen(["sleep", "600"])
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    facts["helpers"] = [same.pid, apart.pid]
with (state / "starts").open("a") as file:
    file.write(json.dumps(facts) + "\\n")
order = run / f"{name.replace('/', '-')}.order"
while not left:
    if order.exists():
        code, text = order.read_text().split(" ", 1)
        print(text, file=sys.stderr)
        sys.exit(int(code))
    scores = name == "evaluator" and (run / "scoring").exists()
    if (run / "complete").exists() and not config.get("late") and not scores:
        if name == "evaluator" and (run / "no-score").exists():
            health = {"at": 0, "ready": True, "progressAt": 0, "problem": "NoScore"}
            why = (run / "no-score").read_text()
            Path(os.environ["DILOCO_HEALTH_FILE"]).write_text(json.dumps({**health, "why": why}))
        elif name == "evaluator":
            (run / "scored").touch()
        break
    time.sleep(0.02)
with (run / "order-of-leaving").open("a") as file:
    file.write(name + "\\n")
"""

DRIVER = """
import sys
from pathlib import Path
from diloco.errors import DilocoError
from diloco_local.commands import Programs
from diloco_local.events import Limits
from diloco_local.supervisor import job_limits, run
from diloco_local.manifest import load_job
import dataclasses, json

here, job_path, run_dir, limits = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
programs = Programs(
    kernels=("python", "-c", "pass"),
    syncer=("python", str(here / "syncer.py")),
    evaluator=("python", str(here / "learner.py")),
    sample=("python", "-c", "print('a sample')"),
    report=("python", "-c", "import sys, pathlib; pathlib.Path(sys.argv[2], 'report.html').touch()"),
)
try:
    job = load_job(job_path)
    changed = dataclasses.replace(job_limits(job), **json.loads(limits))
    sys.exit(run(job_path, job, run_dir, programs=programs, limits=changed))
except DilocoError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""

LIMITS = {
    "back_off_seconds": 0.1,
    "complete_learner_seconds": 60,
    "complete_evaluator_seconds": 60,
    "leave_seconds": 3,
    "early_exit_seconds": 2.0,
}


def until(found: Callable[[], Any], what: str, *, seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true result of `found()`; fails with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"after {seconds} s still no {what}")
        time.sleep(0.02)
    return value


def ended(
    supervisor: subprocess.Popen[str], *, seconds: float = DEADLINE_SECONDS
) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    out, err = supervisor.communicate(timeout=seconds)
    return supervisor.returncode, out, err


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class FakeRun:
    """The manifest directory and run directory of one job, and its supervisors."""

    def __init__(self, folder: Path, *, manifest: str) -> None:
        self.folder, self.dir = folder, folder / "run"
        self.job = folder / "job.yaml"
        self.job.write_text(manifest)
        for name, text in (("syncer", SYNCER), ("learner", LEARNER), ("driver", DRIVER)):
            (folder / f"{name}.py").write_text(text)
        self.supervisors: list[subprocess.Popen[str]] = []

    def start(
        self,
        *,
        environment: dict[str, str] | None = None,
        output: int = subprocess.PIPE,
        **limits: float,
    ) -> Any:
        """Start a supervisor; its output is text on a pipe, or goes to the file descriptor `output`."""
        arguments = [self.folder, self.job, self.dir, json.dumps(LIMITS | limits)]
        supervisor = subprocess.Popen(
            [sys.executable, self.folder / "driver.py", *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.supervisors.append(supervisor)
        return supervisor

    def close(self) -> None:
        """End every supervisor of this run; a process that remains fails the test."""
        for supervisor in self.supervisors:
            if supervisor.poll() is None:
                supervisor.send_signal(signal.SIGKILL)
            supervisor.communicate()
        try:
            until(lambda: not self._left(), "end of all children", seconds=60)
        finally:
            for pid in self._left():
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Running processes that were started for this run."""
        own, found = str(self.dir).encode(), []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                place = Path("/proc", entry)
                origin = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
                if own in origin and int(entry) != os.getpid():
                    found.append(int(entry))
        return found

    def status(self) -> dict[str, Any]:
        """Content of status.json; {} before it exists."""
        try:
            status: dict[str, Any] = json.loads((self.dir / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return status

    def process(self, name: str) -> dict[str, Any]:
        """The entry of one process in status.json; {} before it exists."""
        entries = self.status().get("processes", ())
        return next((process for process in entries if process["name"] == name), {})

    def starts(self, name: str) -> list[dict[str, Any]]:
        """What a learner or the evaluator recorded at each start."""
        place = "learners" if "/" in name else "state"
        return _lines(self.dir / place / name.replace("/", "-") / "starts")

    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl."""
        return _lines(self.dir / "events.jsonl")

    def order(self, name: str, code: int, text: str) -> None:
        """Have a process exit with this code from now on, after it logs `text`."""
        self.dir.mkdir(exist_ok=True)
        (self.dir / f"{name.replace('/', '-')}.order").write_text(f"{code} {text}")

    def complete(self) -> None:
        """Have the syncer report Complete."""
        (self.dir / "complete").touch()

    def all_training(self) -> bool:
        """Whether every learner trains."""
        learners = self.status().get("learners", {"desired": 1, "training": 0, "ready": 0})
        entries = [p for p in self.status().get("processes", ()) if p["role"] == "learner"]
        written = all(self.starts(entry["name"]) for entry in entries)
        return bool(learners["training"] == learners["desired"] == learners["ready"] and written)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
