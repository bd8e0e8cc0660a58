"""
Progress of a run: a live table on a terminal, plain lines elsewhere.

Shows the content of status.json and nothing else; rate and time left are computed by pure code.
"""

from __future__ import annotations

import errno
import io
import os
import select
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.journal.recoveries import MEANINGS
from diloco.runtime import formatting

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Status = Mapping[str, Any]

PLAIN_SECONDS = 5.0
"""Between two plain progress lines."""

RATE_SECONDS = 60.0
"""Window over which the rate of steps is averaged."""

WAIT_SECONDS = 1.0
"""For a reader of the output that is slow."""

MAX_ROWS = 32
"""Learners in the live table; terminals have a limited height."""

MAX_DETAILS = 8
"""Processes whose problems are shown, such as why a learner is ejected."""

STYLES = {
    "Training": "green",
    "Complete": "green",
    "Joining": "yellow",
    "Starting": "yellow",
    "Degraded": "yellow",
    "Ejected": "yellow",
    "RepeatedSteps": "yellow",
    "OtherModel": "yellow",
    "Unchanged": "yellow",
    "NoScore": "yellow",
    "NoFirstStep": "yellow",
    "NotFinite": "red",
    "NoTokens": "red",
    "NoSteps": "red",
    "BackOff": "red",
    "Refused": "red",
    "Failed": "red",
}


class Display(Protocol):
    """Display of a run."""

    def show(self, status: Status, now: float) -> None:
        """Show the status as of `now` (monotonic seconds)."""

    def note(self, text: str) -> None:
        """Show one event as a line."""

    def close(self) -> None:
        """Restore the terminal; notes may still follow."""


def console_on(stream: TextIO | None) -> Console:
    """A console on the file of `stream`; a run outlives the terminal or the pipe that it writes to."""
    if stream is None:  # closed before the start: Console has a null device of its own
        return Console()
    file = _Output(stream.fileno(), "w", closefd=False)
    return Console(file=io.TextIOWrapper(io.BufferedWriter(file), stream.encoding, stream.errors))


class _Output(io.FileIO):
    """
    A file that becomes the null device when it is closed at the other end.

    What it cannot take for another reason, such as a full disk, is dropped.
    """

    _dropped = False
    """The last write was dropped: a reader that has stopped delays one write only."""

    def write(self, data: ReadableBuffer, /) -> int:
        written = self._try(data)
        if written is None and not self._dropped and select.select([], [self], [], WAIT_SECONDS)[1]:
            written = self._try(data)
        self._dropped = written is None
        return memoryview(data).nbytes if written is None else written

    def _try(self, data: ReadableBuffer) -> int | None:
        """Bytes that were written; None: there is no room now."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
                null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(null, self.fileno())
                os.close(null)
            return None


def display_on(console: Console) -> Display:
    """The live table if `console` is a terminal that can redraw, else plain lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class Rate:
    """Steps per second over the last minute; a restored snapshot resets it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, status: Status, now: float) -> None:
        """Add a status as of `now`."""
        step = status["step"]
        if not status["epoch"]:
            return  # the syncer has not reported its step yet
        if self._samples and step < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, step))
        while self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def steps_per_second(self) -> float | None:
        """None before the first progress."""
        if len(self._samples) < 2:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if last > first else None

    def seconds_left(self, status: Status) -> float | None:
        """Until the final step at this rate; None if unknown, or while no learner trains."""
        rate = self.steps_per_second() if status["learners"]["training"] else None
        return (status["steps"] - status["step"]) / rate if rate else None


class PlainDisplay:
    """One line every few seconds, and one for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate = Rate()
        self._shown_at: float | None = None

    def show(self, status: Status, now: float) -> None:
        """Print a line if the previous one is old enough."""
        self._rate.update(status, now)
        if self._shown_at is None:
            self._shown_at = now
        if now - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = now
            self.note(line(status, self._rate))

    def note(self, text: str) -> None:
        """Print it."""
        self._console.print(_text(text), soft_wrap=True)

    def close(self) -> None:
        """Nothing to restore."""


class LiveDisplay:
    """A table that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._rate = Rate()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, status: Status, now: float) -> None:
        """Redraw the table."""
        self._rate.update(status, now)
        self._live.update(status_table(status, self._rate), refresh=True)

    def note(self, text: str) -> None:
        """Print it above the table."""
        self._console.print(_text(text), soft_wrap=True)

    def close(self) -> None:
        """Keep the last table on screen."""
        self._live.stop()


def line(status: Status, rate: Rate) -> str:
    """The run in one line."""
    sync, learners = status["sync"], status["learners"]
    speed = sum(learner["tokensPerSecond"] for learner in _learners(status))
    parts = [
        f"step {status['progress']}",
        *([f"{formatting.duration(left)} left"] if (left := rate.seconds_left(status)) else []),
        f"{learners['summary']} learners training",
        f"{formatting.count(speed)} tokens/s",
        *([f"loss {loss:.4f}"] if (loss := mean_loss(status)) is not None else []),
        *([f"validation {_validation(status)}"] if status["evaluation"] else []),
        f"{sync['merges']} merges",
        f"up {formatting.size(sync['bytesUp'])}",
        f"down {formatting.size(sync['bytesDown'])}",
        *([f"waiting for {sync['waitingFor']}"] if sync["waitingFor"] else []),
        *([problem] if (problem := _not_copied(status)) else []),
        *_details(status),
    ]
    return f"{status['state'].lower()}: " + ", ".join(parts)


def status_table(status: Status, rate: Rate) -> RenderableType:
    """The run as the live display shows it."""
    head = Table.grid(padding=(0, 1))
    left = rate.seconds_left(status)
    head.add_row(
        _text(status["job"], style="bold"),
        _text(status["state"], style=STYLES.get(status["state"], "")),
        ProgressBar(total=status["steps"], completed=status["step"], width=30),
        _text(f"step {status['progress']}"),
        _text(f"{formatting.duration(left)} left" if left else "", style="dim"),
    )
    shown = [_text(_facts(status), style="dim")]
    if waiting := status["sync"]["waitingFor"]:
        shown.append(_text(f"waiting for {formatting.printable(waiting)}", style="yellow"))
    if problem := _not_copied(status):
        shown.append(_text(formatting.printable(problem), style="yellow"))
    shown += [_text(text, style="yellow") for text in _details(status)]
    shown += [_text(text, style="dim") for text in _recoveries(status)]
    return Group(head, *shown, _table(status))


def _not_copied(status: Status) -> str:
    """Why snapshots are not copied; "": they are, or nowhere."""
    copies = status["sync"].get("copies")  # None in a status of an earlier version
    return str(copies["problem"]) if copies else ""


def mean_loss(status: Status) -> float | None:
    """Mean training loss of the learners that train; None when none does."""
    losses = [
        learner["loss"]
        for learner in _learners(status)
        if learner["loss"] is not None and learner["state"] == "Training"
    ]
    return sum(losses) / len(losses) if losses else None


def _details(status: Status) -> list[str]:
    """One phrase per process that does not work as it should; a terminal has a limited height."""
    found = [process for process in status["processes"] if process.get("detail")]
    more = [f"and {len(found) - MAX_DETAILS} more"] if len(found) > MAX_DETAILS else []
    return [
        f"{_word(process['state'])} {process['name']}: {formatting.printable(process['detail'])}"
        for process in found[:MAX_DETAILS]
    ] + more


def _recoveries(status: Status) -> list[str]:
    """One phrase per learner whose process has no recent checkpoint of its own; a terminal has a limited height."""
    found = [
        (learner["name"], recovery)
        for learner in _learners(status)
        # None in a status of an earlier version.
        if (recovery := learner.get("recovery")) and recovery["source"] != "Checkpoint"
    ]
    more = [f"and {len(found) - MAX_DETAILS} more"] if len(found) > MAX_DETAILS else []
    return [
        f"{name} began with {_state_of(recovery)}" for name, recovery in found[:MAX_DETAILS]
    ] + more


def _state_of(recovery: Status) -> str:
    if recovery["source"] != "Peer":
        why = f" ({formatting.printable(recovery['problem'])})" if recovery["problem"] else ""
        return f"{MEANINGS.get(recovery['source'], recovery['source'])}{why}"
    amount = f"{formatting.size(recovery['bytes'])} in {formatting.duration(recovery['seconds'])}"
    return f"the optimizers' state of {formatting.printable(recovery['peer'])}: {amount}"


def _word(state: str) -> str:
    return "ejected" if state == "Ejected" else state


def _facts(status: Status) -> str:
    sync, loss = status["sync"], mean_loss(status)
    first = [
        f"training loss {loss:.4f}" if loss is not None else "training loss -",
        f"validation {_validation(status)}",
        f"{formatting.count(status['tokens'])} tokens",
    ]
    second = [
        f"{sync['merges']} merges (last: {sync['lastMembers']} learners)",
        f"up {formatting.size(sync['bytesUp'])}",
        f"down {formatting.size(sync['bytesDown'])}",
    ]
    third = [
        f"quorum {sync['quorum']} after {1e3 * sync['quorumSeconds']:.0f} ms",
        f"grace window {1e3 * sync['graceSeconds']:.0f} ms",
        f"sync {1e3 * sync['syncSeconds']:.0f} ms",
    ]
    # Each line fits a terminal of 80 columns.
    return "\n".join("   ".join(line) for line in (first, second, third))


def _table(status: Status) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("learner")
    table.add_column("state", min_width=8)
    for name in ("step", "tokens/s", "loss", "staleness", "restarts"):
        table.add_column(name, justify="right")
    learners = _learners(status)
    others = [process for process in status["processes"] if process["role"] != "learner"]
    for learner in learners[:MAX_ROWS]:
        table.add_row(
            _text(learner["name"]),
            _colored(learner["state"]),
            str(learner["step"]),
            formatting.count(learner["tokensPerSecond"]),
            "" if learner["loss"] is None else f"{learner['loss']:.4f}",
            str(learner["staleness"]),
            _restarts(learner),
        )
    if len(learners) > MAX_ROWS:
        table.add_row(f"and {len(learners) - MAX_ROWS} more")
    for process in others:
        label = _text(process["name"], style="dim")
        table.add_row(label, _colored(process["state"]), *[""] * 4, _restarts(process))
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(formatting.printable(text, lines=True), style=style)


def _colored(state: str) -> Text:
    return _text(state, style=STYLES.get(state, "dim"))


def _restarts(process: Status) -> Text:
    return _text(str(process["restarts"]), style="yellow" if process["restarts"] else "dim")


def _validation(status: Status) -> str:
    found = status["evaluation"]
    return f"{found['loss']:.4f} at step {found['step']}" if found else "-"


def _learners(status: Status) -> list[Status]:
    return [process for process in status["processes"] if process["role"] == "learner"]
