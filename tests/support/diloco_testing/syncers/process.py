"""The syncer as a real process, and what a test observes from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from diloco.errors import DilocoError
from diloco.journal.audit import audit
from diloco.rpc.channels import channel
from diloco.rpc.status_codes import error_of
from diloco.rpc.tls import Tls
from diloco.spec import Checkpoint, RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub

START_SECONDS = 180.0


def make_spec(**changes: Any) -> RunSpec:
    """P = H = 2, so that every global step has a round; no grace, momentum on, fp32 both ways."""
    fields: dict[str, Any] = {
        "job": "j", "steps": 10**6, "fragments": 2, "interval": 2, "overlap": 1, "grace_max_steps": 0.0,
        "wire_up": "FP32", "wire_down": "FP32", "learners": {"eu": 4, "us": 1},
        "syncer_checkpoint": Checkpoint(every_steps=10**6, keep=3), **changes,
    }  # fmt: skip
    return RunSpec(**fields)


def until(what: Callable[[], Any], *, expected: str, seconds: float = 100.0) -> Any:
    """Poll until true; its value."""
    deadline = time.monotonic() + seconds
    while not (seen := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{expected}: not within {seconds} s")
        time.sleep(0.01)
    return seen


def ask_status(endpoint: str, *, tls: Tls | None = None, seconds: float = 10.0) -> pb.StatusReply:
    """The reply of GetStatus; raises the DilocoError of a refusal."""
    with channel(endpoint, tls=tls, purpose="control") as wire:
        try:
            return SyncerStub(wire).GetStatus(pb.StatusRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None


class RealSyncer:
    """`python -m diloco_syncer` on its own directory; a context manager."""

    def __init__(self, folder: Path, spec: RunSpec, *flags: str, tls: Path | None = None) -> None:
        self.dir, self.spec, self.flags, self.tls = folder / "run", spec, flags, tls
        self.log = folder / "syncer.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.spec_file = folder / "spec.json"
        self.spec_file.write_text(spec.to_json())
        self._endpoint_file = folder / "endpoint"
        self.port = 0
        self.program = ["-m", "diloco_syncer"]
        """What Python runs; a test may inject a fault into it."""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RealSyncer:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    # ------------------------------------------------------------ start and end

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, on its previous port; do not wait."""
        self._endpoint_file.unlink(missing_ok=True)
        command = [
            sys.executable, *self.program, "--spec", str(self.spec_file), "--dir", str(self.dir),
            "--listen", f"127.0.0.1:{self.port}", "--endpoint-file", str(self._endpoint_file), *self.flags,
        ]  # fmt: skip
        if self.tls is not None:
            command += ["--tls", str(self.tls)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        return self.process

    def start(self) -> RealSyncer:
        """Start it and wait until it serves."""
        process = self.launch()
        until(
            lambda: self._endpoint_file.exists() or process.poll() is not None,
            expected="the syncer serves", seconds=START_SECONDS,
        )  # fmt: skip
        assert process.poll() is None, self.output()
        self.port = int(self._endpoint_file.read_text().rpartition(":")[2])
        return self

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def output(self) -> str:
        """Everything it printed."""
        return self.log.read_text(errors="replace")

    # ------------------------------------------------------------ facts

    @property
    def endpoint(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def status(self, *, tls: Tls | None = None, seconds: float = 10.0) -> pb.StatusReply:
        """The reply of GetStatus; raises the DilocoError of a refusal."""
        return ask_status(self.endpoint, tls=tls, seconds=seconds)

    def refuses(self, *, tls: Tls | None = None) -> bool:
        """Whether a client like this gets nothing."""
        try:
            self.status(tls=tls, seconds=3.0)
        except DilocoError:
            return True
        return False

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """Whole lines of events.jsonl so far, of one kind."""
        path = self.dir / "events.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if event in ("", line["event"])]

    def assert_audit(self) -> None:
        """The promises of events.jsonl are kept so far."""
        verdict = audit((self.dir / "events.jsonl").read_text().splitlines())
        assert verdict.ok, verdict.violations
