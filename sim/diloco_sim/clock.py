"""
Virtual time: an event queue, and processes that can pause, slow down, crash and see their clocks jump.

    at(when, call, *args) ─► heap of (when, number, timer) ─► run(until): one event after the other

Events at the same time run in the order in which they were scheduled, so a run is a function of its seed.
`digest` covers the time and order of all events: runs with equal digests did the same.

The loop is what limits the simulator: an event costs a tuple, a `Timer` and one call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

Call = Callable[..., object]


class OverrunError(Exception):
    """More events than allowed: the world is busy without end."""


class Timer:
    """A scheduled call; `cancel` it with `Clock.cancel`."""

    __slots__ = ("args", "call", "life", "local", "number", "process", "work")

    def __init__(
        self, number: int, call: Call, args: tuple[Any, ...], process: Process | None,
        local: float | None, work: bool,
    ) -> None:  # fmt: skip
        self.number = number
        """In the order of scheduling; -1: cancelled or done."""
        self.call, self.args, self.process = call, args, process
        self.life = 0 if process is None else process.life
        self.local = local
        """Deadline on the clock of its process; None: a virtual time."""
        self.work = work
        """The end of a computation, which a pause delays."""

    @property
    def pending(self) -> bool:
        """It has not run and was not cancelled (its process may have crashed)."""
        return self.number >= 0


class Clock:
    """Virtual time in seconds from 0, and what happens in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """How many have run."""
        self.digest = 0
        self.processes: dict[str, Process] = {}
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._ready: deque[Timer] = deque()
        self._stopped = False

    def process(self, name: str) -> Process:
        """
        Add a process, which runs from now on.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self.processes:
            raise ValueError(f"there is a process {name} already")
        process = self.processes[name] = Process(self, name)
        return process

    def at(self, when: float, call: Call, *args: Any, process: Process | None = None) -> Timer:
        """
        Schedule `call(*args)` at this virtual time, or now if that has passed.

        Args:
            when: virtual seconds.
            call: what to do.
            args: for it.
            process: what makes the call: not while it is paused, and never once it has crashed. None: the
                world itself.
        """
        return self._push(when, call, args, process)

    def cancel(self, timer: Timer) -> None:
        """Do not make this call; nothing if it was made."""
        timer.number = -1
        timer.call, timer.args = _nothing, ()  # it keeps nothing alive until its time has come

    def stop(self) -> None:
        """End `run` after the event that is running."""
        self._stopped = True

    def run(self, until: float, most_events: int = 1 << 62) -> int:
        """
        Let everything up to a time happen; `now` is that time afterwards, unless `stop` was called.

        Returns:
            How many events ran.

        Raises:
            OverrunError: more than `most_events`. Any error of a call.
        """
        heap, ready, first = self._heap, self._ready, self.events
        last = first + most_events
        self._stopped = False
        while not self._stopped:
            if ready:
                timer = ready.popleft()
                number = timer.number
                if number < 0:
                    continue
            else:
                if not heap or heap[0][0] > until:
                    self.now = max(self.now, until)
                    break
                when, number, timer = heappop(heap)
                if timer.number < 0:
                    continue
                self.now = when
            process = timer.process
            if process is not None:
                if process.life != timer.life or not process.alive:
                    continue
                if process.waiting is not None:
                    process.waiting.append(timer)
                    continue
            if self.events >= last:
                raise OverrunError(f"{most_events} events by {self.now:.3f} s, expected fewer")
            self.events += 1
            timer.number = -1
            self.digest = hash((self.digest, self.now, number))
            call, args = timer.call, timer.args
            timer.call, timer.args = _nothing, ()  # keeping the timer keeps nothing else alive
            call(*args)
        return self.events - first

    def _push(
        self, when: float, call: Call, args: tuple[Any, ...], process: Process | None = None,
        local: float | None = None, work: bool = False,
    ) -> Timer:  # fmt: skip
        self._number = number = self._number + 1
        timer = Timer(number, call, args, process, local, work)
        heappush(self._heap, (when if when > self.now else self.now, number, timer))
        return timer

    def _resume(self, waiting: deque[Timer]) -> None:
        """What waited for a process happens now, in its order, before anything else."""
        self._ready.extendleft(reversed(waiting))

    def _jumped(self, process: Process) -> None:
        """The clock of a process jumped: its deadlines are at other virtual times now."""
        for i, (_, number, timer) in enumerate(self._heap):
            if timer.process is process and timer.local is not None:
                moved = max(self.now, process._virtual(timer.local))
                self._heap[i] = (moved, number, timer)
        heapify(self._heap)

    def _delay_work(self, process: Process, seconds: float) -> None:
        """A process computes nothing for so long: what it computes is done that much later."""
        for i, (when, number, timer) in enumerate(self._heap):
            if timer.process is process and timer.work:
                self._heap[i] = (when + seconds, number, timer)
        heapify(self._heap)


def _nothing() -> None:
    """The call of a cancelled timer."""


class Observer(Protocol):
    """Something outside a process that notices what becomes of it: the network, a disk."""

    def crashed(self, process: Process, *, power: bool) -> None:
        """It ended; power: the whole machine did, without a word to its peers."""

    def paused(self, process: Process) -> None:
        """It no longer executes anything."""

    def resumed(self, process: Process) -> None:
        """It continues."""


class Process:
    """
    A program with a clock of its own; made by `Clock.process`.

    While it is paused nothing of it runs: its events wait and run in their order when it resumes
    (SIGSTOP). A crash drops what it had scheduled.
    """

    __slots__ = (
        "_resume", "alive", "clock", "life", "name", "observers", "offset", "paused_seconds",
        "paused_until", "power_lost", "slowness", "waiting", "wall_offset",
    )  # fmt: skip

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive = True
        self.power_lost = False
        """It is down with its machine: connecting to it is not refused but unanswered."""
        self.life = 1
        """Changes with each crash and start; an event of an earlier life never runs."""
        self.paused_until = 0.0
        """Paused until this virtual time, if that is later than now."""
        self.slowness = 1.0
        """How many times as long the work takes that it begins from now on."""
        self.paused_seconds = 0.0
        """All its pauses so far, what is left of the present one included."""
        self.offset = 0.0
        self.wall_offset = 0.0
        self.waiting: deque[Timer] | None = None
        """Events that wait because it is paused; None: it is not."""
        self.observers: list[Observer] = []
        self._resume: Timer | None = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def now(self) -> float:
        """Its monotonic clock, seconds."""
        return self.clock.now + self.offset

    @property
    def wall(self) -> float:
        """Its clock of the day, seconds since an arbitrary date; it may jump back."""
        return self.clock.now + self.wall_offset

    @property
    def running(self) -> bool:
        """Alive and not paused."""
        return self.alive and self.waiting is None

    def at(self, when: float, call: Call, *args: Any) -> Timer:
        """Schedule a call at a time of its own monotonic clock; it moves if that clock jumps."""
        return self.clock._push(self._virtual(when), call, args, self, when)

    def after(self, seconds: float, call: Call, *args: Any) -> Timer:
        """Schedule a call after a time on its own clock."""
        return self.at(self.clock.now + self.offset + seconds, call, *args)

    def work(self, seconds: float, call: Call, *args: Any) -> Timer:
        """Compute for so long at full speed, then call; a slow process takes longer."""
        clock = self.clock
        return clock._push(clock.now + seconds * self.slowness, call, args, self, None, True)

    def thread(self) -> Thread:
        """A thread of it, which does one thing at a time."""
        return Thread(self)

    # ------------------------------------------------------------ faults

    def pause(self, until: float) -> None:
        """Execute nothing until this virtual time; of two pauses the longer counts."""
        longer = until - max(self.clock.now, self.paused_until)
        if not self.alive or longer <= 0:
            return
        self.paused_until = until
        self.paused_seconds += longer
        self.clock._delay_work(self, longer)
        if self.waiting is None:
            self.waiting = deque()
            for observer in self.observers:
                observer.paused(self)
        if self._resume is not None:
            self.clock.cancel(self._resume)
        self._resume = self.clock.at(until, self._continue)

    def jump(self, seconds: float) -> None:
        """
        Let its monotonic clock, and that of the day, jump forward: the machine was suspended.

        Raises:
            ValueError: backward; a monotonic clock never does that.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot jump by {seconds} s")
        self.offset += seconds
        self.wall_offset += seconds
        self.clock._jumped(self)

    def set_wall(self, seconds: float) -> None:
        """Let its clock of the day jump by this, either way, as when a person sets it."""
        self.wall_offset += seconds

    def crash(self, *, power: bool = False) -> None:
        """
        End it; nothing that it scheduled happens.

        Args:
            power: the machine ends with it: connections are not closed, the page cache is lost.
        """
        if not self.alive:
            return
        self.alive, self.power_lost = False, power
        self.life += 1
        self.waiting, self.paused_until = None, 0.0
        if self._resume is not None:
            self.clock.cancel(self._resume)
            self._resume = None
        for observer in self.observers:
            observer.crashed(self, power=power)

    def start(self) -> None:
        """Start it again; its program schedules what follows."""
        if self.alive:
            raise ValueError(f"{self.name} runs already")
        self.alive, self.power_lost = True, False
        self.life += 1

    def _virtual(self, when: float) -> float:
        """The virtual time of a time of its clock: rounded up, no timer fires before its deadline."""
        virtual = when - self.offset
        while virtual + self.offset < when:
            virtual = math.nextafter(virtual, math.inf)
        return virtual

    def _continue(self) -> None:
        waiting, self.waiting, self._resume = self.waiting, None, None
        for observer in self.observers:
            observer.resumed(self)
        if waiting:
            self.clock._resume(waiting)


class Thread:
    """Does one piece of work after the other, at the speed of its process."""

    __slots__ = ("_free_at", "_life", "_paused", "_process")

    def __init__(self, process: Process) -> None:
        self._process, self._life, self._free_at = process, process.life, 0.0
        self._paused = process.paused_seconds

    def work(self, seconds: float, call: Call, *args: Any) -> Timer:
        """Compute for so long at full speed after all earlier work, then call."""
        process = self._process
        clock = process.clock
        self._free_at = done = max(self._free(), clock.now) + seconds * process.slowness
        return clock._push(done, call, args, process, None, True)

    def _free(self) -> float:
        process = self._process
        if self._life != process.life:
            self._life, self._free_at = process.life, 0.0
        elif self._paused != process.paused_seconds:
            self._free_at += process.paused_seconds - self._paused
        self._paused = process.paused_seconds
        return self._free_at
