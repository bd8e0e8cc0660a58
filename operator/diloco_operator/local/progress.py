"""
Progress of a run: a live table on a terminal, plain lines otherwise.

Shows the content of status.json and nothing else; the arithmetic (rate, time left) is pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_operator.local import words

Status = Mapping[str, Any]

PLAIN_SECONDS = 5.0
"""Between two plain lines when nothing happens."""

RATE_SECONDS = 60.0
"""The rate of steps is that of this long."""

MOST_ROWS = 32
"""Learners in the live table; a terminal has an end."""

STYLES = {
    "Training": "green",
    "Complete": "green",
    "Joining": "yellow",
    "Starting": "yellow",
    "Degraded": "yellow",
    "BackOff": "red",
    "Refused": "red",
    "Failed": "red",
}


class Progress(Protocol):
    """Where a run shows itself."""

    def show(self, status: Status, now: float) -> None:
        """The run is like this now (monotonic seconds)."""

    def note(self, text: str) -> None:
        """Something happened that people want to know."""

    def close(self) -> None:
        """Leave the terminal as it was; notes may still follow."""


def progress_on(console: Console) -> Progress:
    """The live table when `console` is a terminal that can redraw, else plain lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console)
    return PlainProgress(console)


class Rate:
    """Steps per second over the last minute; a jump back (a restored snapshot) starts it anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def seen(self, status: Status, now: float) -> None:
        """The run is like this now."""
        step = status["step"]
        if not status["epoch"]:
            return  # the syncer has not said yet where it stands
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, step))
        while self._seen[0][0] < now - RATE_SECONDS:
            self._seen.popleft()

    def steps_per_second(self) -> float | None:
        """None until steps were made."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if last > first else None

    def seconds_left(self, status: Status) -> float | None:
        """Until the final step, at this rate; None when it is not known."""
        rate = self.steps_per_second()
        return (status["steps"] - status["step"]) / rate if rate else None


class PlainProgress:
    """One line now and then, and one for each thing that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate = Rate()
        self._said_at: float | None = None

    def show(self, status: Status, now: float) -> None:
        """Say a line when the last one is old enough."""
        self._rate.seen(status, now)
        if self._said_at is None:
            self._said_at = now
        if now - self._said_at >= PLAIN_SECONDS:
            self._said_at = now
            self.note(line(status, self._rate))

    def note(self, text: str) -> None:
        """Say it."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Nothing is held."""


class LiveProgress:
    """A table that is drawn again in place; notes scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._rate = Rate()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, status: Status, now: float) -> None:
        """Draw it."""
        self._rate.seen(status, now)
        self._live.update(view(status, self._rate), refresh=True)

    def note(self, text: str) -> None:
        """Say it above the table."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the last table where it is."""
        self._live.stop()


def line(status: Status, rate: Rate) -> str:
    """The run in one line."""
    sync, learners = status["sync"], status["learners"]
    speed = sum(one["tokensPerSecond"] for one in _learners(status))
    parts = [
        f"step {status['progress']}",
        *([f"{words.duration(left)} left"] if (left := rate.seconds_left(status)) else []),
        f"{learners['summary']} training",
        f"{words.count(speed)} tokens/s",
        *([f"loss {loss:.4f}"] if (loss := mean_loss(status)) is not None else []),
        *([f"validation {_validation(status)}"] if status["evaluation"] else []),
        f"{sync['merges']} merges",
        f"up {words.size(sync['bytesUp'])}",
        f"down {words.size(sync['bytesDown'])}",
        *([f"waiting: {sync['waitingFor']}"] if sync["waitingFor"] else []),
    ]
    return f"{status['state'].lower()}: " + ", ".join(parts)


def view(status: Status, rate: Rate) -> RenderableType:
    """The run as the live display shows it."""
    head = Table.grid(padding=(0, 1))
    left = rate.seconds_left(status)
    head.add_row(
        Text(status["job"], style="bold"),
        Text(status["state"], style=STYLES.get(status["state"], "")),
        ProgressBar(total=status["steps"], completed=status["step"], width=30),
        Text(f"step {status['progress']}"),
        Text(f"{words.duration(left)} left" if left else "", style="dim"),
    )
    shown = [Text(_facts(status), style="dim")]
    if waiting := status["sync"]["waitingFor"]:
        shown.append(Text(waiting, style="yellow"))
    return Group(head, *shown, _table(status))


def mean_loss(status: Status) -> float | None:
    """Mean training loss of the learners that train; None when nobody does."""
    losses = [
        one["loss"]
        for one in _learners(status)
        if one["loss"] is not None and one["state"] == "Training"
    ]
    return sum(losses) / len(losses) if losses else None


def _facts(status: Status) -> str:
    sync, loss = status["sync"], mean_loss(status)
    first = [
        f"training loss {loss:.4f}" if loss is not None else "training loss -",
        f"validation {_validation(status)}",
        f"{words.count(status['tokens'])} tokens",
    ]
    second = [
        f"merges {sync['merges']} (last of {sync['lastMembers']})",
        f"quorum {sync['quorum']} in {1e3 * sync['quorumSeconds']:.0f} ms",
        f"grace {1e3 * sync['graceSeconds']:.0f} ms",
        f"sync {1e3 * sync['syncSeconds']:.0f} ms",
        f"up {words.size(sync['bytesUp'])}",
        f"down {words.size(sync['bytesDown'])}",
    ]
    return "   ".join(first) + "\n" + "   ".join(second)


def _table(status: Status) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("learner")
    table.add_column("state", min_width=8)
    for name in ("step", "tokens/s", "loss", "staleness", "restarts"):
        table.add_column(name, justify="right")
    learners = _learners(status)
    others = [one for one in status["processes"] if one["role"] != "learner"]
    for one in learners[:MOST_ROWS]:
        table.add_row(
            one["name"],
            _coloured(one["state"]),
            str(one["step"]),
            words.count(one["tokensPerSecond"]),
            "" if one["loss"] is None else f"{one['loss']:.4f}",
            str(one["staleness"]),
            _restarts(one),
        )
    if len(learners) > MOST_ROWS:
        table.add_row(f"and {len(learners) - MOST_ROWS} more")
    for one in others:
        table.add_row(
            Text(one["name"], style="dim"), _coloured(one["state"]), *[""] * 4, _restarts(one)
        )
    return table


def _coloured(state: str) -> Text:
    return Text(state, style=STYLES.get(state, "dim"))


def _restarts(process: Status) -> Text:
    return Text(str(process["restarts"]), style="yellow" if process["restarts"] else "dim")


def _validation(status: Status) -> str:
    found = status["evaluation"]
    return f"{found['loss']:.4f} at step {found['step']}" if found else "-"


def _learners(status: Status) -> list[Status]:
    return [one for one in status["processes"] if one["role"] == "learner"]
