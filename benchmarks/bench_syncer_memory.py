"""
Peak memory of the syncer for a model of 100 M parameters with 2, 4 and 8 learners:
`python benchmarks/bench_syncer_memory.py [--quick]`.

The real syncer process; the learners are scripted and live in one process on one shared memory, but
speak through the product's own session, uploader and download. All are members of every round, and
each reports again as soon as it is pulled, so that τ rounds are in flight all the time: as many
merges as the machine can do, far more than learners of that size would ask for. While a snapshot is
written, what is merged meanwhile exists twice; so one more row has learners that take STEP_SECONDS
for a step. Goal: the peak with 8 learners is at most 1.10 of that with 2.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from _job import NO_CONSTANTS, Syncer, json_lines, memory_bytes, minor_faults, syncer, wait_for
from _timing import judge, table, write_results

from diloco.codec import formats
from diloco.errors import DilocoError
from diloco.model.fragments import Layout, Tensor, cut
from diloco.rpc.channels import channel
from diloco.runtime.interpreter import tune_interpreter
from diloco.runtime.malloc import tune_malloc
from diloco.spec import RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco_worker.core import events as ev
from diloco_worker.core.messages import TrainerState
from diloco_worker.ipc.shared_memory import HostCopy, SharedMemory
from diloco_worker.link import download, session
from diloco_worker.link.buffers import BufferPool, most_idle_bytes
from diloco_worker.link.encoder import Encoder
from diloco_worker.link.placement import Placement
from diloco_worker.link.transfer import CancelToken, Identity
from diloco_worker.link.upload import Uploader
from diloco_worker.settings import LearnerSettings

E = TypeVar("E")

GOAL = 1.10
ROUNDS = 60
LEARNERS = (2, 4, 8)
STEP_SECONDS = 1.0
"""A step of a learner, in the row that is not hurried."""


def layout_of(width: int, layers: int, vocabulary: int) -> Layout:
    """A transformer's matrices: one big embedding and six per layer."""
    tensors = [Tensor(name="embedding", shape=(vocabulary, width), dtype="float32", embedding=True)]
    for layer in range(layers):
        shapes = dict.fromkeys(("q", "k", "v", "o"), (width, width))
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
        tensors += [
            Tensor(name=f"layers.{layer:02d}.{name}", shape=shape, dtype="float32")
            for name, shape in shapes.items()
        ]
    return cut(tensors, num_fragments=24)


class Learner:
    """
    One scripted learner: uploads when pulled, downloads every result, reports at every pull.

    As for the link, a transfer that fails is no trouble: its attempt is over if another member was late,
    for example. The next pull and the next result follow.
    """

    def __init__(
        self, number: int, spec: RunSpec, syncer: Syncer, shared: SharedMemory, step_seconds: float
    ) -> None:
        self._step_seconds = step_seconds
        self._spec, self._shared, self._keeper = spec, shared, number == 0
        settings = LearnerSettings(
            job=spec.job, learner=f"r/{number}", syncer=syncer.endpoint, spec=syncer.spec_file
        )
        self._channels = [
            channel(syncer.endpoint, tls=None, purpose="control"),
            *(channel(syncer.endpoint, tls=None, purpose="bulk") for _ in range(2)),
        ]
        self._identity = Identity(learner=settings.learner, epoch=0, incarnation=0)
        self._buffers = BufferPool(most_idle_bytes=most_idle_bytes(shared.layout, spec))
        self._placement = Placement(shared, spec, self._buffers)
        encoder = Encoder(shared, spec, self._buffers)
        self._uploader = Uploader(lambda: self._channels[1], encoder)
        self._uploads: queue.SimpleQueue[ev.Pulled | ev.InitialRequested | None] = (
            queue.SimpleQueue()
        )
        self._downloads: queue.SimpleQueue[ev.ResultAnnounced | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._transfers, args=args, daemon=True)
            for args in ((self._uploads, self._upload), (self._downloads, self._download))
        ]
        hello = session.hello(settings, spec, shared.layout, TrainerState(), {})
        self.leaving, self.trouble = False, ""
        for thread in self._threads:
            thread.start()
        self._session = session.Session(self._channels[0], hello, self._on_event)

    def close(self) -> None:
        """Leave."""
        time.sleep(self._step_seconds)  # for the last report
        self._session.close()
        self._uploads.put(None)
        self._downloads.put(None)
        for thread in self._threads:
            thread.join(10)
        for bulk in self._channels:
            bulk.close()

    def beat(self) -> None:
        """Send a heartbeat."""
        self._session.send(pb.LearnerMessage(heartbeat=pb.Heartbeat()))

    def _on_event(self, event: ev.Event) -> None:
        match event:
            case ev.Welcomed():
                self._identity = Identity(
                    learner=self._identity.learner, epoch=event.epoch, incarnation=event.incarnation
                )
            case ev.InitialRequested():
                self._uploads.put(event)
            case ev.ModelReady():
                self._report(1)
            case ev.Pulled():
                threading.Timer(self._step_seconds, self._report, (event.round + 1,)).start()
                self._uploads.put(event)
            case ev.ResultAnnounced():
                self._downloads.put(event)
            case ev.SessionLost():
                self.trouble = event.text

    def _report(self, local_step: int) -> None:
        rows = len(self._shared.layout.fragments)
        message = pb.Report(
            local_step=local_step, steps=[24] * rows, tokens=[2400] * rows, offers=range(rows),
            total_tokens=100 * local_step, step_seconds=0.1,
        )  # fmt: skip
        self._session.report(message)

    def _transfers(
        self, events: queue.SimpleQueue[E | None], transfer: Callable[[E], None]
    ) -> None:
        while (event := events.get()) is not None:
            try:
                transfer(event)
            except DilocoError as error:
                if isinstance(event, ev.InitialRequested):
                    self.trouble = str(error)
                elif not self.leaving:
                    print(f"{self._identity.learner}: {error}", flush=True)

    def _upload(self, event: ev.Pulled | ev.InitialRequested) -> None:
        if isinstance(event, ev.InitialRequested):
            self._uploader.initial(self._identity, CancelToken())
            return
        index = event.fragment
        with self._shared.lock(index):
            base = self._shared.inbox_state(index).generation
            # Equal for all members of a round, so any of them may write it.
            copy = HostCopy(local_step=event.round, steps=24, tokens=2400, base=base)
            self._shared.set_host_copy(index, copy)
        self._uploader.pull(event, self._identity, CancelToken())

    def _download(self, event: ev.ResultAnnounced) -> None:
        request = ev.Download(fragment=event.fragment, round=event.round, attempt=event.attempt)
        assembly = self._placement.begin(request, self._identity)
        payloads = download.fetch(self._channels[2], assembly, CancelToken())
        if payloads is None:
            return
        staged = self._placement.stage(request, payloads)
        if self._keeper:
            before = self._shared.inbox_state(event.fragment).generation
            self._placement.place(ev.Place(staged=staged, generation=before + 1))
        else:
            self._placement.discard(staged)


def measure(layout: Layout, learners: int, rounds: int, step_seconds: float) -> dict[str, float]:
    """One job; facts about its syncer."""
    spec = RunSpec(job="bench", steps=10**9, quorum=learners, learners={"r": learners})
    shared = SharedMemory.create(layout, constants_bytes=len(NO_CONSTANTS))
    shared.constants[:] = np.frombuffer(NO_CONSTANTS, np.uint8)
    for fragment in layout.fragments:
        values, host_N = np.random.default_rng(fragment.index), shared.host(fragment.index)
        values.standard_normal(dtype=np.float32, out=host_N)
        # Not equal: uploads of zeros confirm no steps, and the syncer would wait for more of them.
        shared.inbox(fragment.index)[:] = 1.01 * host_N
        shared.publish(fragment.index, 1, (1, 0))
    with (
        tempfile.TemporaryDirectory(prefix="bench-memory-") as folder,
        syncer(spec, Path(folder)) as process,
    ):
        idle = memory_bytes(process.pid, "VmRSS")
        members = [Learner(n, spec, process, shared, step_seconds) for n in range(learners)]
        events = process.directory / "events.jsonl"
        merges: list[dict[str, object]] = []

        def merged() -> bool:
            for member in members:
                member.beat()
                if member.trouble:
                    raise RuntimeError(f"a learner's trouble: {member.trouble}")
            time.sleep(0.5)
            merges[:] = [line for line in json_lines(events) if line["event"] == "merge"]
            return len(merges) >= rounds

        wait_for(lambda: merged() or len(merges) >= 4, "the first merges", 120)
        start, count, faults = time.monotonic(), len(merges), minor_faults(process.pid)
        wait_for(merged, f"{rounds} merges", 240)
        seconds, count = time.monotonic() - start, len(merges) - count
        facts = {
            "learners": learners,
            "merges": len(merges),
            "members": min(len(m["members"]) for m in merges),  # type: ignore[arg-type]
            "idle": idle,
            "peak": memory_bytes(process.pid),
            "now": memory_bytes(process.pid, "VmRSS"),
            "faults": (minor_faults(process.pid) - faults) / max(1, count),
            "rate": count / seconds,
        }
        for member in members:
            member.leaving = True  # the first that leaves ends the attempts of all
        for member in members:
            member.close()
    shared.close()
    return facts


def main() -> int:
    """Measure, write results/syncer_memory.md, exit 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, no results, no goals")
    arguments = parser.parse_args()
    tune_malloc()
    tune_interpreter()
    formats.warm_up()
    layout = layout_of(512, 26, 32768)
    counts: tuple[int, ...] = LEARNERS
    rounds = ROUNDS
    if arguments.quick:
        layout, counts, rounds = layout_of(128, 6, 4096), (2, 4), 24
    model_bytes = 4 * layout.elements
    facts = [measure(layout, learners, rounds, 0.0) for learners in counts]
    calm = measure(layout, counts[0], rounds, STEP_SECONDS)
    body = table(
        ["learners", "merges", "peak MB", "× N", "peak / peak with 2", "RSS at the end MB",
         "without a model MB", "minor faults per merge", "merges/s"],
        [
            [f["learners"], f["merges"], f"{f['peak'] / 1e6:.0f}", f["peak"] / model_bytes,
             f["peak"] / facts[0]["peak"], f"{f['now'] / 1e6:.0f}", f"{f['idle'] / 1e6:.0f}",
             f"{f['faults']:.0f}", f["rate"]]
            for f in (*facts, calm)
        ],
    )  # fmt: skip
    largest = max(f.elements for f in layout.fragments)
    note = (
        f"{layout.elements / 1e6:.1f} M parameters in {len(layout.fragments)} fragments, N = "
        f"{model_bytes / 1e6:.0f} MB in fp32, the largest fragment (the embedding) "
        f"{4 * largest / 1e6:.0f} MB; bf16 both ways, Radial, τ = 2, a snapshot every 48 steps. "
        f"Every learner is a member of every merge; in the last row a step takes {STEP_SECONDS} s. "
        "Peak: VmHWM. It holds Θ and momentum (2 N), the rounds in flight, old versions of a few "
        "fragments, and while a snapshot is written the fragments that are replaced meanwhile."
    )
    if any(f["members"] != f["learners"] for f in (*facts, calm)):
        print("MISSED a merge had fewer members than there are learners")
        return 1
    if arguments.quick:
        print(f"{note}\n\n{body}")
        return 0
    write_results(
        "syncer_memory", "Peak memory of the syncer", f"{note}\n\n{body}",
        packages=("numpy", "numba", "grpcio"),
    )  # fmt: skip
    ratio = facts[-1]["peak"] / facts[0]["peak"]
    goals = {f"peak with {counts[-1]} learners against {counts[0]}": (ratio, GOAL)}
    return judge(goals, at_most=frozenset(goals))


if __name__ == "__main__":
    raise SystemExit(main())
