"""
What a fault of one of eight learners costs the others: `python benchmarks/bench_liveness.py [--quick] [FAULT …]`.

Real processes: the syncer, and eight learners through `Learner.connect`, each with its own link
process, torch and a small model. Their steps mostly sleep, so that two cores are enough. The eighth
learner's connections pass through a relay (faulty_link.py). Per fault one job: merges per second
before the fault, then during it.

    mute      uploads vanish, reports and heartbeats arrive
    trickle   uploads arrive at 100 bytes a second
    stopped   SIGSTOP to trainer and link
    far       round trip of four steps, τ = 5; in how many merges is this learner itself?
    far4      the same with τ = 4, which leaves nothing for the work at both ends

Goals: at least 0.98 of the merges during mute, trickle and stopped; the far learner is in at least
0.95 of the merges, with no goal for far4. Only a run of all faults is written to results/.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _job import Syncer, children, json_lines, learner_environment, syncer, wait_for
from _timing import judge, table, write_results

from diloco.spec import Checkpoint, RunSpec

LEARNERS = 8
STEP_SECONDS = 0.25
OVERLAP = 4
FAR_OVERLAP = 5
"""A round should not take longer than the overlap: here a round trip of four steps, and the work at both ends."""
FRAGMENTS = 24
LAST = f"r/{LEARNERS - 1}"
GOALS = {"mute": 0.98, "trickle": 0.98, "stopped": 0.98, "far": 0.95, "far4": 0.0}
FAR = ("far", "far4")
FAULT_SECONDS = {"mute": 400.0, "trickle": 400.0, "stopped": 400.0, **dict.fromkeys(FAR, 150.0)}
BEFORE_SECONDS = 100.0
WARM_UP_SECONDS = 20.0
FAR_WARM_UP_SECONDS = 60.0
"""For the syncer to measure the round trip, and for results that were announced later."""
ROUND_TRIP_STEPS = 4

TRAIN = f"""
import time
import torch
from torch import nn
from diloco_worker import Learner

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range({FRAGMENTS})))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
learner = Learner.connect(model, optimizer, standalone_steps=10)
due = time.monotonic()
while not learner.done:
    x = torch.randn(4, 256)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    due = max(due + {STEP_SECONDS}, time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
    learner.step(tokens=4, loss=loss)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault."""

    before: float
    """Merges per second without it."""
    during: float
    with_last: float
    """Share of the merges during it that the eighth learner is in."""
    ejections: int


def spec(overlap: int) -> RunSpec:
    """Eight learners; a merge is due at each step."""
    return RunSpec(
        job="bench", steps=10**6, fragments=FRAGMENTS, interval=FRAGMENTS, overlap=overlap,
        learners={"r": LEARNERS}, wire_up="FP32", wire_down="FP32",
        syncer_checkpoint=Checkpoint(every_steps=200, keep=2),
    )  # fmt: skip


@contextlib.contextmanager
def relay(endpoint: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The endpoint for the eighth learner, and the process that takes commands."""
    program = [sys.executable, str(Path(__file__).with_name("faulty_link.py"))]
    with subprocess.Popen(
        [*program, endpoint.rpartition(":")[2]], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}", process
        finally:
            process.kill()


@contextlib.contextmanager
def learners(job: RunSpec, served: Syncer, far: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Eight processes; the last one goes through the relay."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(LEARNERS):
            name = f"r/{index}"
            endpoint = far if name == LAST else served.endpoint
            state = served.directory / "learners" / str(index)
            state.mkdir(parents=True)
            environment = learner_environment(job, name, endpoint, served.spec_file)
            with (state / "log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", TRAIN], stdout=log, stderr=log,
                        env={**os.environ, **environment, "DILOCO_STATE": str(state),
                             "OMP_NUM_THREADS": "1"},
                    )
                )  # fmt: skip
        yield processes
    finally:
        for process in processes:
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def send_command(process: subprocess.Popen[str], command: str) -> None:
    """Send a command to the relay."""
    assert process.stdin is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()


def watch(directory: Path, seconds: float) -> tuple[float, list[dict[str, Any]]]:
    """Merges per second, and the events, of the next seconds."""

    def events() -> list[dict[str, Any]]:
        return json_lines(directory / "events.jsonl")

    begun, known = time.monotonic(), len(events())
    time.sleep(seconds)
    found, took = events()[known:], time.monotonic() - begun
    return sum(event["event"] == "merge" for event in found) / took, found


def run(fault: str, before_seconds: float, seconds: float) -> Outcome:
    """One job with one fault."""
    job = spec(FAR_OVERLAP if fault == "far" else OVERLAP)
    with (
        tempfile.TemporaryDirectory(prefix="bench-liveness-") as folder,
        syncer(job, Path(folder) / "run") as served,
        relay(served.endpoint) as (far, link),
        learners(job, served, far) as processes,
    ):
        events = served.directory / "events.jsonl"

        def all_merged() -> bool:
            lines = json_lines(events) if events.exists() else []
            merges = [line for line in lines if line["event"] == "merge"][-2 * FRAGMENTS :]
            return len({m["learner"] for merge in merges for m in merge["members"]}) == LEARNERS

        wait_for(all_merged, "merges with all eight learners", 180.0)
        time.sleep(WARM_UP_SECONDS)
        before, _ = watch(served.directory, before_seconds)
        match fault:
            case "stopped":
                for pid in [processes[-1].pid, *children(processes[-1].pid)]:
                    os.kill(pid, signal.SIGSTOP)
            case "far" | "far4":
                send_command(link, f"delay {ROUND_TRIP_STEPS * STEP_SECONDS / 2}")
                time.sleep(FAR_WARM_UP_SECONDS)
            case _:
                send_command(link, fault)
        during, found = watch(served.directory, seconds)
        merges = [event for event in found if event["event"] == "merge"]
        with_last = sum(any(m["learner"] == LAST for m in x["members"]) for x in merges)
        return Outcome(
            before=before,
            during=during,
            with_last=with_last / max(1, len(merges)),
            ejections=sum(event["event"] == "eject" for event in found),
        )


def main() -> int:
    """Measure, write results/liveness.md, exit 1 if a goal is missed."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="short, and nothing is written")
    flags.add_argument("faults", nargs="*", metavar="FAULT", help="all of them if none is named")
    options = flags.parse_args()
    if unknown := [fault for fault in options.faults if fault not in GOALS]:
        flags.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(GOALS)}")
    quick, faults = options.quick, options.faults or list(GOALS)
    outcomes = {
        fault: run(fault, *((15.0, 30.0) if quick else (BEFORE_SECONDS, FAULT_SECONDS[fault])))
        for fault in faults
    }
    rows = [
        (fault, o.before, o.during, f"{o.during / o.before:.3f}", f"{100 * o.with_last:.0f} %",
         o.ejections)
        for fault, o in outcomes.items()
    ]  # fmt: skip
    body = table(
        ["eighth learner", "merges/s before", "during", "ratio", "in merges", "ejections"], rows
    )
    if quick:
        print(body)
        return 0
    measured = {f: (o.with_last if f in FAR else o.during / o.before) for f, o in outcomes.items()}
    if options.faults:
        print(body)
        return judge({fault: (measured[fault], GOALS[fault]) for fault in faults})
    note = (
        f"Eight learners of {STEP_SECONDS} s a step, τ = {OVERLAP} ({FAR_OVERLAP} for far), {FRAGMENTS} "
        f"fragments of 256 KiB, K = 1. {BEFORE_SECONDS:.0f} s before each fault, {FAULT_SECONDS['mute']:.0f} s of "
        f"mute, trickle and stopped, {FAULT_SECONDS['far']:.0f} s of far and far4."
    )
    write_results(
        "liveness", "One of eight learners misbehaves", f"{note}\n\n{body}",
        packages=("torch", "numpy", "grpcio"),
    )  # fmt: skip
    return judge({fault: (measured[fault], GOALS[fault]) for fault in faults})


if __name__ == "__main__":
    raise SystemExit(main())
