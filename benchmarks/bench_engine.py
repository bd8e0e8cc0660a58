"""
Engine time per step of a learner, by number of learners: `python benchmarks/bench_engine.py [--quick]`.

The engine decides on one thread, so its time per step that it sees bounds how many learners one
syncer serves. M learners step at the same pace, spread over a step; every learner reports each
step, and answers each pull at once. No gRPC, no merge arithmetic, no disk. CPU time is measured, so
other work on the machine hardly matters. Goals: at most 1 ms at M = 1000, and at most 10 times the
time of M = 8, since a merge of M contributions must cost each of them the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

from _timing import judge, table, write_results

from diloco.codec.formats import INT8
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.engine import Engine

LEARNERS = (8, 64, 256, 1000)
FRAGMENTS = 24
ROUNDS = 5
GOAL_MS = 1.0
GOAL_GROWTH = 10.0
ALL = frozenset(range(FRAGMENTS))


class Job:
    """One engine and M learners that deliver at once."""

    def __init__(self, learners: int) -> None:
        spec = RunSpec(
            job="bench", steps=10**6, fragments=FRAGMENTS, interval=FRAGMENTS, overlap=2,
            learners={"eu": learners},
        )  # fmt: skip
        self.engine = Engine(spec=spec, epoch=1)
        self.names = [f"eu/{i}" for i in range(learners)]
        self.incarnations = {name: number for number, name in enumerate(self.names, start=1)}
        self.reported = dict.fromkeys(self.names, 0)
        self.steps = 0
        self._todo: deque[ev.Event] = deque()
        for session, name in enumerate(self.names):
            hello = ev.Hello(
                session=session, learner=name, region="eu", incarnation=self.incarnations[name],
                fresh=True, local_step=0, checkpoint_step=0,
            )  # fmt: skip
            self.engine.handle(hello, 0.0)
        self.engine.handle(ev.Initialised(learner=self.names[0]), 0.0)

    def step(self) -> None:
        """Every learner reports one step."""
        self.steps += 1
        counters = (min(self.steps, FRAGMENTS),) * FRAGMENTS
        for session, name in enumerate(self.names):
            self.reported[name] = self.steps
            report = ev.Reported(
                session=session, learner=name, local_step=self.steps, steps=counters,
                tokens=counters, offers=ALL, total_tokens=self.steps,
                global_step=self.engine.step, step_seconds=1.0, sync_seconds=0.0, loss=None,
            )  # fmt: skip
            self._post(report, self.steps + session / len(self.names))

    def _post(self, event: ev.Event, now: float) -> None:
        self._todo.append(event)
        while self._todo:
            for decision in self.engine.handle(self._todo.popleft(), now):
                self._carry_out(decision)

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Pull():
                self._todo.extend(self._contribution(decision, n) for n in decision.learners)
            case ev.BeginMerge():
                ids = {"round": decision.round, "attempt": decision.attempt}
                self._todo.extend(
                    ev.Progress(learner=c.learner, received_bytes=1, done=True, **ids)
                    for c in decision.contributions
                )
                self._todo.append(ev.Merged(**ids, delta_norm=1.0, bytes_up=0, bytes_result=0))
            case ev.TakeSnapshot():
                self._todo.append(ev.SnapshotDone(step=decision.step))

    def _contribution(self, pull: ev.Pull, name: str) -> Contribution:
        step = self.reported[name]
        count = min(step, FRAGMENTS)
        return Contribution(
            learner=name, incarnation=self.incarnations[name], round=pull.round,
            attempt=pull.attempt, local_step=step, steps=count, tokens=count, base=(1, 0),
            format=INT8, norms=(1.0,),
        )  # fmt: skip


def milliseconds(learners: int, steps: int) -> tuple[float, int]:
    """CPU time of the engine per step of one learner, and merges per step of the job."""
    job = Job(learners)
    for _ in range(FRAGMENTS):
        job.step()
    before, begun = job.engine.step, time.process_time()
    for _ in range(steps):
        job.step()
    spent = time.process_time() - begun
    return spent * 1e3 / (steps * learners), job.engine.step - before


def main() -> int:
    """Print and write the results."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    quick = flags.parse_args().quick
    found: dict[int, list[float]] = {learners: [] for learners in LEARNERS}
    merges = {}
    for _ in range(1 if quick else ROUNDS):
        for learners in LEARNERS:
            steps = max(FRAGMENTS, 4000 // learners)
            spent, merged = milliseconds(learners, steps)
            found[learners].append(spent)
            merges[learners] = merged / steps
    medians = {learners: statistics.median(times) for learners, times in found.items()}
    growth = statistics.median(m / s for m, s in zip(found[1000], found[8], strict=True))
    rows = [
        (m, f"{medians[m] * 1e3:.0f} µs", f"{min(found[m]) * 1e3:.0f} … {max(found[m]) * 1e3:.0f}",
         f"{medians[m] / medians[8]:.2f}", f"{merges[m]:.2f}")
        for m in LEARNERS
    ]  # fmt: skip
    body = table(["learners", "per learner step", "rounds", "to 8 learners", "merges a step"], rows)
    if not quick:
        write_results("engine", "Engine time per step of a learner", body)
    else:
        print(body)
    return judge(
        {
            "ms at 1000 learners": (medians[1000], GOAL_MS),
            "1000 to 8 learners": (growth, GOAL_GROWTH),
        },
        at_most=frozenset({"ms at 1000 learners", "1000 to 8 learners"}),
    )


if __name__ == "__main__":
    raise SystemExit(main())
