"""
The product's processes as benchmarks use them: the real syncer, and a real link with a trainer that
does not train.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.journal import reader
from diloco.model.fragments import Layout
from diloco.spec import RunSpec
from diloco_worker.core.ledger import Ledger
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.ipc.link_process import LinkProcess
from diloco_worker.ipc.shared_memory import HostCopy, SharedMemory

F32 = npt.NDArray[np.float32]

NO_CONSTANTS = b"\2\0\0\0\0\0\0\0{}"
"""An empty safetensors file."""

START_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncer:
    """A syncer that serves."""

    pid: int
    endpoint: str
    spec_file: Path
    directory: Path


@contextmanager
def syncer(
    spec: RunSpec, directory: Path, *, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[Syncer]:
    """
    `python -m diloco_syncer` on a free port, ended by SIGTERM.

    Args:
        spec: the job.
        directory: run directory, made if needed; the log is there as well.
        host: where it listens.
        prefix: arguments before the command.
    """
    directory.mkdir(parents=True, exist_ok=True)
    spec_file, place, log = (directory / name for name in ("spec.json", "endpoint", "syncer.log"))
    spec_file.write_text(spec.to_json())
    program = [*prefix, sys.executable, "-m", "diloco_syncer", "--listen", f"{host}:0"]
    files = ["--spec", str(spec_file), "--dir", str(directory), "--endpoint-file", str(place)]
    with log.open("wb") as out:
        process = subprocess.Popen([*program, *files], stderr=out)
    try:
        wait_for(lambda: place.exists() or process.poll() is not None, f"syncer, see {log}")
        if not place.exists():
            raise RuntimeError(f"the syncer ended:\n{log.read_text()}")
        yield Syncer(
            pid=process.pid,
            endpoint=place.read_text().strip(),
            spec_file=spec_file,
            directory=directory,
        )
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def learner_environment(
    spec: RunSpec, learner: str, endpoint: str, spec_file: Path
) -> dict[str, str]:
    """What a learner or its link must find in its environment."""
    return {
        "DILOCO_JOB": spec.job,
        "DILOCO_LEARNER": learner,
        "DILOCO_SYNCER": endpoint,
        "DILOCO_SPEC": str(spec_file),
    }


class Trainer:
    """
    The training side of one learner without a model: shared memory, and the real link beside it.

    Returns once the model is in its inbox; Θ^(0) is zeros.
    """

    def __init__(
        self, layout: Layout, spec: RunSpec, learner: str, *, endpoint: str, spec_file: Path
    ) -> None:
        # The link reads its environment once, at its start.
        os.environ.update(learner_environment(spec, learner, endpoint, spec_file))
        rows = len(layout.fragments)
        self.shared = SharedMemory.create(layout, constants_bytes=len(NO_CONSTANTS))
        self.shared.constants[:] = np.frombuffer(NO_CONSTANTS, np.uint8)
        self._ledger = Ledger(rows)
        self._applied = [0] * rows
        self._initial = 0
        self._in_place = False
        self._link_state = LinkState()
        self._link = LinkProcess(self.shared)
        self._link.ensure(self._state(()), now=time.monotonic())
        self._until(self._joined, "the model")
        self._in_place = True
        self._apply()
        self._link.offer(self._state(()))

    def take(self, fragment: int, delta_N: F32) -> None:
        """Make the host copy of a fragment what training would have left: base − delta."""
        with self.shared.lock(fragment):
            np.subtract(self.shared.inbox(fragment), delta_N, out=self.shared.host(fragment))

    def step(self, *, tokens: int, offers: Sequence[int]) -> None:
        """Count one step and report it, offering host copies that `take` has made."""
        self._ledger.count(tokens)
        for fragment in offers:
            with self.shared.lock(fragment):
                copy = HostCopy(
                    local_step=self._ledger.local_step,
                    steps=self._ledger.steps[fragment],
                    tokens=self._ledger.tokens[fragment],
                    base=self._applied[fragment],
                )
                self.shared.set_host_copy(fragment, copy)
        self._link.offer(self._state(offers))

    def receive(self, fragment: int) -> None:
        """Wait until a new version of the fragment lies in the inbox, and take it."""
        before = self._applied[fragment]

        def here() -> bool:
            return any(p == fragment and g > before for p, g in self._link_state.ready)

        self._until(here, f"fragment {fragment}")
        self._apply()

    def close(self) -> None:
        """Leave the job."""
        self._link.leave(self._state((), leaving="Closed"))
        self.shared.close()

    def _joined(self) -> bool:
        if self._link_state.initial_requested > self._initial:
            for fragment in self.shared.layout.fragments:
                with self.shared.lock(fragment.index):
                    self.shared.host(fragment.index)[:] = 0
            self._initial = self._link_state.initial_requested
            self._link.offer(self._state(()))
        return self._link_state.phase is Phase.APPLY_MODEL

    def _apply(self) -> None:
        for fragment, generation in self._link_state.ready:
            if generation > self._applied[fragment]:
                self._applied[fragment] = generation
                self._ledger.received(fragment)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not done():
            now = time.monotonic()
            if now > deadline or self._link_state.refused_exit:
                raise RuntimeError(f"waited for {what}; the link reports {self._link_state.text!r}")
            self._link.wait(0.2)
            self._link_state = self._link.newest(now=now) or self._link_state

    def _state(self, offers: Sequence[int], *, leaving: str = "") -> TrainerState:
        return TrainerState(
            incarnation=self._link_state.incarnation,
            epoch=self._link_state.epoch,
            model_loaded=self._in_place,
            stepped=self._ledger.local_step > 0,
            local_step=self._ledger.local_step,
            global_step=self._link_state.step,
            steps=self._ledger.steps,
            tokens=self._ledger.tokens,
            offers=offers,
            applied=self._applied,
            total_tokens=self._ledger.total_tokens,
            initial_copied=self._initial,
            leaving=leaving,
        )


def wait_for(done: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Poll until true; RuntimeError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


def memory_bytes(pid: int, what: str = "VmHWM") -> int:
    """VmHWM (peak) or VmRSS of a process; 0 when it has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(what)), 0)


def minor_faults(pid: int) -> int:
    """Minor page faults of a process so far."""
    # The command's name may hold spaces and brackets; the fields follow the last bracket.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def children(pid: int) -> list[int]:
    """Direct children of all threads of a process; empty when it has exited."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue
    return found


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal in all its parts, the oldest first."""
    return list(reader.read(path))
