"""Runs worlds in several processes; the outcomes are those of one process, in the same order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import connection

from diloco_sim import report
from diloco_sim.world import Outcome

AHEAD = 4
"""Worlds that are given to each process ahead of the one that is reported next."""


def outcomes(seeds: Iterable[int], *, steps: int, jobs: int) -> Iterator[Outcome]:
    """
    Run a world for each seed, several at a time.

    Args:
        seeds: of the worlds; may have no end.
        steps: global steps of each.
        jobs: processes; 1: this one.

    Returns:
        Outcomes in the order of the seeds.
    """
    run = partial(_outcome, steps=steps)
    if jobs == 1:
        gc.freeze()
        try:
            yield from map(run, seeds)
        finally:
            gc.unfreeze()
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin)
    running: deque[Future[Outcome]] = deque()
    try:
        for seed in seeds:
            running.append(pool.submit(run, seed))
            if len(running) >= AHEAD * jobs:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """
    Let this process of a pool end when the one that started it has ended; in another, it does nothing.

    The queue of the pool does not tell: each process that reads it holds its other end, too.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _begin() -> None:
    end_with_parent()
    gc.freeze()


def _outcome(seed: int, *, steps: int) -> Outcome:
    """Run a world; its garbage, which is little, is collected once, when the world itself is garbage."""
    gc.disable()
    try:
        return report.outcome(seed, steps=steps)
    finally:
        gc.enable()
        gc.collect(1)  # the oldest generation is what outlives all worlds
