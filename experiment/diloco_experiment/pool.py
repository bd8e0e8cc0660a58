"""
Runs the cells of a study that have no result yet, several at a time, and keeps the tables up to date.

Each process trains with one thread: for models of this size, two processes do more than two threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from diloco.errors import ConfigError, DilocoError
from diloco.runtime import files
from diloco_experiment import cells as cell_runner
from diloco_experiment import models, page, summary
from diloco_experiment.results import Folder, Result, Status, csv_of
from diloco_experiment.study import Cell, Study
from diloco_experiment.tasks import Task
from diloco_sim.pool import end_with_parent

Show = Callable[[str], object]
"""Prints a line."""

MAX_DETAIL = 10_000
"""Characters that a result keeps of why its cell is not ok."""


class BusyError(DilocoError):
    """Another process runs a study in this directory."""

    reason = "Busy"


class EndedProcessError(DilocoError):
    """A process ended without a result."""

    reason = "ProcessEnded"


def run(study: Study, cells: Sequence[Cell], folder: Folder, *, jobs: int, show: Show) -> int:
    """
    Run what is missing, and write tables and page.

    Args:
        study: what was asked for.
        cells: of it.
        folder: where results are.
        jobs: processes; 1: this one.
        show: takes a line for each cell that ends.

    Returns:
        How many tasks failed; they run again next time. That a cell diverged is a result.

    Raises:
        ConfigError: a cell cannot run; nothing was started, or all results so far are kept.
        BusyError: another process runs a study in this directory.
        EndedProcessError: a process ended; all results so far are kept.
    """
    tasks = {cell.digest: cell for cell in reversed(cells)}
    tasks = {digest: tasks[digest] for digest in dict.fromkeys(cell.digest for cell in cells)}
    models.forget_data()
    check(list(tasks.values()))
    folder.expected.update({digest: models.made_by(cell.task) for digest, cell in tasks.items()})
    with _alone(folder):
        missing = [cell for digest, cell in tasks.items() if _failed(folder.read(digest))]
        done = len(tasks) - len(missing)
        show(
            f"{study.name}: {len(cells)} cells, {len(tasks)} different"
            + (f", {done} are there already" if done else "")
        )
        progress = _Progress(missing, number=len(tasks), show=show)
        try:
            for cell, result in _results(missing, jobs):
                folder.write(cell.digest, result)
                progress.ended(cell, result)
                write_tables(study, cells, folder)
        finally:
            write_tables(study, cells, folder)
            page.write(study, cells, folder)
    return sum(_failed(folder.read(digest)) for digest in tasks)


def check(cells: Sequence[Cell]) -> None:
    """
    Raises:
        ConfigError: the recipe refuses the config of a cell; names the first one.
    """
    for cell in cells:
        try:
            models.check(cell.task)
        except ConfigError as error:
            raise ConfigError(f"{cell.label}: {error}") from None


@contextlib.contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """
    Hold the lock of a directory.

    Raises:
        BusyError: another process has it.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    directory = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{folder.path}: another process runs a study there; wait for its end, or give another --dir"
            ) from None
        yield
    finally:
        os.close(directory)


def write_tables(study: Study, cells: Sequence[Cell], folder: Folder) -> None:
    """Write results.csv and summary.csv."""
    results = found(cells, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    table = summary.table(study, cells, results)
    files.replace(folder.path / "results.csv", csv_of(table))
    table = summary.summary(study, summary.groups(cells, results))
    files.replace(folder.path / "summary.csv", csv_of(table))


def found(cells: Sequence[Cell], folder: Folder) -> dict[str, Result]:
    """The results that are there."""
    pairs = ((cell.digest, folder.read(cell.digest)) for cell in cells)
    return {digest: result for digest, result in pairs if result is not None}


def one_thread() -> None:
    """This process trains with one thread, leaves Ctrl-C to the one that started it, and ends with it."""
    torch.set_num_threads(1)
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent()


def _results(cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, Result]]:
    """Each cell with its result, as they end."""
    jobs = min(jobs, len(cells))
    if jobs <= 1:
        for cell in cells:
            yield cell, _run(cell.task)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=one_thread)
    waiting = list(reversed(cells))
    running: dict[Future[Result], Cell] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop()
                running[pool.submit(_run, cell.task)] = cell
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(ended, key=lambda f: running[f].digest):
                result = future.result()  # before pop: the message names all that ran
                yield running.pop(future), result
    except BrokenProcessPool:
        names = "; ".join(cell.label for cell in running.values())
        raise EndedProcessError(
            f"a process ended without a result, perhaps because memory ran out; it trained one of: {names}. "
            "Results so far are kept: run the command again, with --jobs 1 if it repeats"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _run(task: Task) -> Result:
    try:
        result = cell_runner.run(task)
    except ConfigError:
        raise
    except Exception as error:  # a defect of one cell must not cost the others
        result = Result(status=Status.FAILED, detail=f"{type(error).__name__}: {error}")
    return replace(result, detail=result.detail[:MAX_DETAIL], made_by=models.made_by(task))


def _failed(result: Result | None) -> bool:
    return result is None or result.status is Status.FAILED


class _Progress:
    """
    A line for each cell that ends, with the time that the others may take.

    Args:
        cells: that will run.
        number: of all, those with a result included.
        show: takes the lines.
    """

    def __init__(self, cells: Sequence[Cell], *, number: int, show: Show) -> None:
        self._number, self._show = number, show
        self._ended, self._cost = number - len(cells), 0.0
        self._all = sum(map(_cost, cells))
        self._began = time.monotonic()

    def ended(self, cell: Cell, result: Result) -> None:
        """A cell has ended."""
        self._ended += 1
        self._cost += _cost(cell)
        seconds = time.monotonic() - self._began
        left = seconds * (self._all - self._cost) / self._cost
        what = f"loss {result.loss:.4f}" if result.status is Status.OK else result.status
        detail = f" ({result.detail[:120]})" if result.detail else ""
        rest = f", about {_duration(left)} left" if self._ended < self._number else ""
        self._show(f"[{self._ended}/{self._number}] {cell.label}: {what}{detail}{rest}")


def _cost(cell: Cell) -> float:
    """Of a cell, in steps of a learner."""
    return float(cell.task.spec.steps * len(cell.task.names))


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
