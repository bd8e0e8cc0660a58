"""
How the ranks of a learner find each other when they connect: through the store of torch.distributed.

No collective is needed, so a rank that is missing is named instead of waited for without end.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from diloco.errors import ConfigError, DilocoError, StorageError, UnavailableError
from diloco_worker.ipc import relay
from diloco_worker.trainer.rank_processes import RankProcess, named

log = logging.getLogger(__name__)

T = TypeVar("T")

ALONE_SECONDS = 10.0
"""How long rank 0 waits for another rank where it may be the only one that connects."""

FIRST_POLL_SECONDS, POLL_SECONDS = 0.001, 0.05

SHOWN_SECONDS = 1.0
"""After waiting this long for another rank to connect, rank 0 states so."""

SLOW_SECONDS = 10.0
"""After waiting this long for a rank that has connected, a line names it."""

MOST_MACHINES = 64

TEMPORARY: dict[str, type[DilocoError]] = {
    error.__name__: error for error in (StorageError, UnavailableError)
}
"""Errors after which all ranks may try again; others are permanent."""

_calls = itertools.count()
"""Each `connect` of the program has keys of its own; all ranks call it equally often."""


class RankGroup:
    """
    The ranks of one learner, in one call of `Learner.connect`.

    Args:
        learner: its name, for messages.
        store: of torch.distributed.
        rank: of this process.
        size: number of ranks.
        timeout_seconds: how long to wait for a rank.
        call: number of this call of `connect`.
    """

    def __init__(
        self, learner: str, store: dist.distributed_c10d.Store, *, rank: int, size: int,
        timeout_seconds: float, call: int = 0,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, size
        self.learner, self._timeout_seconds = learner, timeout_seconds
        self._store, self._prefix = store, f"diloco/{call}"
        self._exchanges = itertools.count()
        self.processes: Mapping[int, RankProcess] = {}
        """By rank, of this machine; empty until `find_machines`."""
        self.hosts: Mapping[int, str] = {}
        """By rank, names of the other machines; likewise."""
        self.machines: Sequence[Sequence[int]] = (range(size),)
        """Ranks by machine; the first has rank 0."""
        self._set(f"here/{self.rank}", "")

    @classmethod
    def of_process(cls, learner: str, *, timeout_seconds: float) -> RankGroup:
        """The ranks of the default process group."""
        return cls(
            learner, dist.distributed_c10d._get_default_store(), rank=dist.get_rank(),
            size=dist.get_world_size(), timeout_seconds=timeout_seconds, call=next(_calls),
        )  # fmt: skip

    def alone(self, *, may_be: bool, seconds: float | None = None) -> bool:
        """
        Whether rank 0 connects without the others, which then copy its parameters.

        Args:
            may_be: rank 0: whether the program may mean that; the others take its answer.
            seconds: how long rank 0 waits for another; None: ALONE_SECONDS.

        Raises:
            UnavailableError: another rank: rank 0 does not connect, or has connected alone.
        """
        if self.rank == 0:
            seconds = ALONE_SECONDS if seconds is None else seconds
            others = [f"here/{rank}" for rank in range(1, self.size)]
            found = self.size == 1 or not may_be or self._any(others, seconds)
            self._set("mode", "all" if found else "alone")
            if not found:
                log.warning(
                    "no other of the %d ranks has called Learner.connect within %.0f s, so rank 0 connects alone; if "
                    "it is to, pass every_rank=False", self.size, seconds,
                )  # fmt: skip
            return not found
        if self._get("mode", "rank 0 has not called Learner.connect") == "all":
            return False
        raise UnavailableError(
            f"learner {self.learner}: rank 0 connected alone, because no other rank had called Learner.connect in "
            f"time, and rank {self.rank} has now; pass every_rank=True in all ranks to let rank 0 wait"
        )

    def wait_for_all(self) -> None:
        """
        Return when every rank has connected.

        Raises:
            UnavailableError: one has not within the timeout.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while missing := [r for r in range(self.size) if not self._has(f"here/{r}")]:
            if time.monotonic() > deadline:
                raise UnavailableError(self._absent(missing))
            time.sleep(POLL_SECONDS)

    def exchange(self, text: str) -> list[str]:
        """
        What every rank passes to this call, by rank.

        Raises:
            UnavailableError: a rank does not come this far within the timeout.
        """
        number = next(self._exchanges)
        self._set(f"{number}/{self.rank}", text)
        return [self._continued(f"{number}/{rank}", rank) for rank in range(self.size)]

    def agree(self, text: str, error: DilocoError | None) -> list[str]:
        """
        As `exchange`; an error of one rank is raised in all of them.

        Raises:
            DilocoError: the error, of the first rank that has one; a ConfigError unless it is temporary.
        """
        found = [
            json.loads(reply) for reply in self.exchange(json.dumps([text, *_described(error)]))
        ]
        for rank, (_, kind, sentence) in enumerate(found):
            if kind:
                text = sentence if rank == self.rank else f"rank {rank}: {sentence}"
                raise TEMPORARY.get(kind, ConfigError)(text)
        return [reply for reply, _, _ in found]

    @property
    def machine(self) -> int:
        """Number of this rank's machine in `machines`."""
        return next(number for number, ranks in enumerate(self.machines) if self.rank in ranks)

    @property
    def leader(self) -> int:
        """The first rank of this rank's machine: it creates the memory that the ranks there share."""
        return self.machines[self.machine][0]

    def named(self, ranks: Iterable[int]) -> str:
        """Ranks with their processes or machines."""
        return named(ranks, self.processes, self.hosts)

    def report(self, topic: str, text: str) -> None:
        """
        Leave a text of this rank for the others, in place of the one before, at any time and from any thread.

        Raises:
            UnavailableError: the store does not answer.
        """
        self._set(f"report/{topic}/{self.rank}", text)

    def reported(self, topic: str, rank: int) -> str:
        """
        The newest text that a rank left; empty: none.

        Raises:
            UnavailableError: the store does not answer.
        """
        key = f"report/{topic}/{rank}"
        if not self._has(key):
            return ""
        return bytes(self._ask(lambda: self._store.get(f"{self._prefix}/{key}"))).decode()

    def find_machines(self, name: str = "") -> None:
        """
        Find out which ranks can share memory; from now on, one of them that ends is noticed.

        Args:
            name: of this machine; ranks with different ones share no memory.

        Raises:
            ConfigError: there are too many machines, or the ranks run different versions.
        """
        own = RankProcess.own()
        host, *place = _machine()
        facts = [relay.VERSION, [*place, name], name or host, own.pid, own.started]
        ranks = [json.loads(text) for text in self.exchange(json.dumps(facts))]
        machines: dict[str, list[int]] = {}
        for rank, (version, key, *_) in enumerate(ranks):
            if version != ranks[0][0]:
                raise ConfigError(
                    f"learner {self.learner}: rank {rank} has version {version} of the messages between machines, rank "
                    f"0 has {ranks[0][0]}; install the same version of this package on all machines"
                )
            machines.setdefault(json.dumps(key), []).append(rank)
        if len(machines) > MOST_MACHINES:
            raise ConfigError(
                f"learner {self.learner}: its ranks are on {len(machines)} machines or in as many containers, at most "
                f"{MOST_MACHINES} are supported, because rank 0 sends the results to each of them; split them "
                "into several learners"
            )
        self.machines = tuple(machines.values())
        here = self.machines[self.machine]
        self.processes = {
            rank: RankProcess(pid=ranks[rank][3], started=ranks[rank][4]) for rank in here
        }
        self.hosts = {rank: facts[2] for rank, facts in enumerate(ranks) if rank not in here}

    def _any(self, keys: Sequence[str], seconds: float) -> bool:
        shown, deadline = time.monotonic() + SHOWN_SECONDS, time.monotonic() + seconds
        while not (found := any(self._has(key) for key in keys)) and time.monotonic() < deadline:
            if time.monotonic() > shown:
                shown = deadline
                print(
                    f"diloco: {self.learner}: waiting up to {seconds:.0f} s for another of {self.size} ranks to call "
                    "Learner.connect; pass every_rank=False if rank 0 connects alone",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            time.sleep(POLL_SECONDS)
        return found

    def _absent(self, ranks: Sequence[int]) -> str:
        names = ", ".join(str(rank) for rank in ranks[:16]) + (", …" if len(ranks) > 16 else "")
        noun, verb = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
        return (
            f"learner {self.learner}: {noun} {names} of {self.size} {verb} not called Learner.connect within "
            f"{self._timeout_seconds:.0f} s; expected every rank to call it, or rank 0 alone with every_rank=False"
        )

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(f"{self._prefix}/{key}", text))

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([f"{self._prefix}/{key}"])))

    def _get(self, key: str, absent: str, watch: Callable[[], None] = lambda: None) -> str:
        """The text of a key; `watch` is called while it is not there."""
        deadline, pause = time.monotonic() + self._timeout_seconds, FIRST_POLL_SECONDS
        while not self._has(key):
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"learner {self.learner}: {absent} within {self._timeout_seconds:.0f} s"
                )
            watch()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        return bytes(self._ask(lambda: self._store.get(f"{self._prefix}/{key}"))).decode()

    def _continued(self, key: str, rank: int) -> str:
        """What a rank that has connected set; one that ended before is noticed."""
        name, shown = self.named([rank]), time.monotonic() + SLOW_SECONDS

        def watch() -> None:
            nonlocal shown
            if rank in self.processes and self.processes[rank].ended and not self._has(key):
                raise UnavailableError(
                    f"learner {self.learner}: {name} has ended while the others connect; its own output has the reason"
                )
            if time.monotonic() > shown:
                shown = float("inf")
                self._show(
                    rank, f"waiting for {name}, which has called Learner.connect, to continue"
                )

        return self._get(key, f"{name} has called Learner.connect, but did not continue", watch)

    def _show(self, rank: int, text: str) -> None:
        """Show in one rank that another is waited for."""
        if self.rank == (1 if rank == 0 else 0):
            print(f"diloco: {self.learner}: {text}", file=sys.stderr, flush=True)

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except dist.DistError as error:
            raise UnavailableError(
                f"learner {self.learner}: the store of torch.distributed, in most programs in rank 0, does not answer "
                f"rank {self.rank} ({str(error).splitlines()[0]})"
            ) from None


def _described(error: DilocoError | None) -> tuple[str, str]:
    return ("", "") if error is None else (type(error).__name__, str(error))


def _machine() -> tuple[str, str, int]:
    """Name and boot of this machine, and namespace of its PIDs: containers of one machine have the same boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = platform.node()
    return platform.node(), boot, os.stat("/proc/self/ns/pid").st_ino
