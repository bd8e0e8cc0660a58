"""
Carries out one fault in the pods of a job, with the user's kubectl.

Each pod gets a `kubectl exec` of its own, which runs `pod_program` there for as long as the fault lasts. Nothing here
blocks: `poll` reads what has arrived. Whatever happens to kubectl or to us, the standard input of the program ends,
or its time, and it continues what it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO

from diloco.errors import UnavailableError
from diloco.runtime.formatting import shorten
from diloco_cli import pod_program
from diloco_cli.fetch_pod import MAIN
from diloco_cli.job_view import Pod
from diloco_cli.kubectl import Kubectl
from diloco_local.faults import KILLS, Fault, Kind

BOOT = """\
import os, sys
left, text = int(sys.argv.pop(1)), b""
while left > len(text):
    data = os.read(0, left - len(text))
    if not data: sys.exit("the program did not arrive")
    text += data
exec(compile(text, "diloco-chaos", "exec"))
"""
"""The program comes through standard input: arguments of `exec` are part of a URL, whose length proxies limit."""

BEGIN_SECONDS = 30.0
"""For a fault to begin, in all pods of a learner."""
END_SECONDS = 15.0
"""For the reply that it is undone; kubectl is ended then, and the program ends with its standard input."""
MAX_BYTES = 1 << 16
"""Of what a pod may send."""
_MAX_REASON = 300


class Stage(StrEnum):
    """Of a fault, or of its part in one pod."""

    BEGINNING = "beginning"
    ACTIVE = "active"
    OVER = "over"
    FAILED = "failed"


class Disturbance:
    """One fault while it is carried out in all pods of its target."""

    def __init__(self, kubectl: Kubectl, fault: Fault, pods: Sequence[Pod], seconds: float) -> None:
        """
        Begin it.

        Args:
            kubectl: of the job's namespace.
            fault: the fault.
            pods: of its target.
            seconds: that it lasts, counted in the pod.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: it cannot be started.
        """
        self.fault = fault
        self.reason = ""
        """Why it failed."""
        self.confirmed = True
        """Whether each pod replied that nothing is left to undo; known when it is over."""
        self._begun_by = time.monotonic() + BEGIN_SECONDS
        self._ended_by = self._begun_by + seconds + END_SECONDS
        self._active = False
        self._parts = list[_Part]()
        try:
            if fault.kind is Kind.DELETE:
                names = [pod.name for pod in pods]
                command = kubectl.command("delete", "pods", *names, "--wait=false")
                self._parts.append(_Part(command, b"", replies=False))
                return
            text = Path(pod_program.__file__).read_bytes()
            for pod in pods:
                program = ("python3", "-I", "-S", "-c", BOOT, str(len(text)))
                command = kubectl.command(
                    "exec", "-i", f"pod/{pod.name}", "-c", MAIN, "--",
                    *program, *_arguments(fault, pod, seconds),
                )  # fmt: skip
                self._parts.append(_Part(command, text, replies=True))
        except OSError as error:
            self.abort()
            raise UnavailableError(f"kubectl cannot be started: {error.strerror}") from None
        except BaseException:
            self.abort()
            raise

    def poll(self) -> Stage:
        """Read what has arrived; where it stands."""
        now = time.monotonic()
        stages = [part.poll() for part in self._parts]
        if not self._active:
            if now > self._begun_by and Stage.BEGINNING in stages:
                self._fail(f"no reply from the pod within {BEGIN_SECONDS:g} s")
            for part in self._parts:
                if part.stage is Stage.FAILED:
                    self._fail(part.reason)
            if self.reason:
                return Stage.FAILED
            if Stage.BEGINNING in stages:
                return Stage.BEGINNING
            self._active = True
        if now > self._ended_by:
            self.abort()
        if any(stage is Stage.ACTIVE for stage in stages) and now <= self._ended_by:
            return Stage.ACTIVE
        self.confirmed = all(part.confirmed or self.fault.kind in KILLS for part in self._parts)
        return Stage.OVER

    def release(self) -> None:
        """Undo it; `poll` reports when that is done."""
        self._ended_by = min(self._ended_by, time.monotonic() + END_SECONDS)
        for part in self._parts:
            part.release()

    def abort(self) -> None:
        """End kubectl at once, and with it the standard input of the programs; may be called again."""
        for part in self._parts:
            part.abort()

    def _fail(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self.abort()


def _arguments(fault: Fault, pod: Pod, seconds: float) -> tuple[str, ...]:
    match fault.kind:
        case Kind.PAUSE:
            return pod.uid, "pause", f"{seconds:.3f}"
        case Kind.SLOW:
            return pod.uid, "slow", f"{seconds:.3f}", f"{fault.amount:.3f}"
    return pod.uid, "kill"


class _Part:
    """One kubectl."""

    def __init__(self, command: Sequence[str], text: bytes, *, replies: bool) -> None:
        """`replies`: whether it replies as `pod_program` does; else, exit status 0 is its reply."""
        self.stage, self.reason, self.confirmed = Stage.BEGINNING, "", False
        self._replies, self._unsent = replies, text
        self._output, self._errors = bytearray(), bytearray()
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for us: kubectl still has to bring the reply that all is undone
        )  # fmt: skip
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        self._send()

    def poll(self) -> Stage:
        if self._process.returncode is None:
            # First: what it wrote before it exited is in the pipe then.
            code = self._process.poll()
            self._send()
            self._read()
            if code is not None:
                self._exited(code)
                self._close()
        return self.stage

    def release(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def abort(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _send(self) -> None:
        """As much of the program as the pipe takes: all of it, unless pipes are small here."""
        pipe = self._process.stdin
        while self._unsent and pipe is not None and not pipe.closed:
            try:
                self._unsent = self._unsent[os.write(pipe.fileno(), self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # kubectl ended: its exit is the reason
                self._unsent = b""

    def _read(self) -> None:
        _drain(self._process.stdout, self._output)
        _drain(self._process.stderr, self._errors)
        while b"\n" in self._output:
            line, _, rest = self._output.partition(b"\n")
            self._output[:] = rest
            self._reply(bytes(line))
        if len(self._output) > MAX_BYTES or len(self._errors) > MAX_BYTES:
            self._fail("it sends more than a reply")
            self.abort()

    def _reply(self, line: bytes) -> None:
        if not self._replies:
            return
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        match found:
            case {"begun": int()} if self.stage is Stage.BEGINNING:
                self.stage = Stage.ACTIVE
            case {"ended": True} if self.stage is Stage.ACTIVE:
                self.confirmed = True
            case {"refused": str(why)}:
                self.confirmed = True
                self._fail(why)
            case _:
                self._fail("its reply is not understood")

    def _exited(self, code: int) -> None:
        if self.stage is Stage.BEGINNING and not self._replies and not code:
            self.stage = Stage.ACTIVE
        if self.stage is Stage.BEGINNING:
            text = self._errors.decode(errors="replace").strip().splitlines()
            # What kubectl adds to what the container wrote is no reason.
            text = [line for line in text if not line.startswith("command terminated with")]
            self._fail(text[-1] if text else f"kubectl exited with {code} and no reply")
        elif self.stage is Stage.ACTIVE:
            self.stage = Stage.OVER

    def _fail(self, reason: str) -> None:
        if self.stage is Stage.BEGINNING:
            self.stage, self.reason = Stage.FAILED, shorten(reason, _MAX_REASON)

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _drain(pipe: IO[bytes] | None, into: bytearray) -> None:
    """Read what is there, up to a little more than the limit."""
    while pipe is not None and not pipe.closed and len(into) <= MAX_BYTES:
        try:
            data = os.read(pipe.fileno(), 1 << 14)
        except BlockingIOError:
            return
        if not data:
            return
        into += data
