"""
Disturbs the program of the container that it runs in; `pod_faults` sends its text through `kubectl exec`.

    pod_program.py UID kill
    pod_program.py UID pause SECONDS
    pod_program.py UID slow SECONDS SHARE

It signals the process that the container's first process, the agent, has started, and the helpers of that process:
its descendants, and those that have its mark. Some pods see the processes of their node, or of other containers. So
the agent has to be in our mount namespace, which every container has for itself, and to have the UID of the pod in
its environment; without exactly one such process, nothing is signalled.

What it stopped, it continues when SECONDS are over, when its standard input ends, and when it is killed: a second
process, which stops nothing, waits for that.

Prints JSON, one object a line: {"begun": number of processes}, then {"ended": true}, or {"refused": why}. Standard
library only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

MARK = b"DILOCO_PROCESS_MARK="
"""Of process_guard.py of the agent: every process that the agent starts has another one, and its helpers inherit it."""
UID = b"DILOCO_POD_UID="
SWEEPS = 100
"""At most, to find what is forked meanwhile."""
MARGIN_SECONDS = 5.0
"""After which the second process does not wait any longer for the first."""


class RefusedError(Exception):
    """Nothing is signalled."""


class Process(NamedTuple):
    """A process; its start, in ticks, distinguishes it from a later one with the same pid."""

    pid: int
    parent: int
    start: int


def process(pid: int) -> Process | None:
    """The process of this pid; None: it ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it, in brackets, may contain anything.
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return Process(pid, int(fields[1]), int(fields[19]))
    return None


def processes() -> dict[int, Process]:
    """All that can be seen."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return {found.pid: found for found in map(process, pids) if found is not None}


def strings(pid: int, file: str) -> list[bytes]:
    """Arguments or environment of a process; [] if it ended, or is not ours to read."""
    try:
        with open(f"/proc/{pid}/{file}", "rb") as found:
            return found.read().split(b"\0")
    except OSError:
        return []


def mark(pid: int) -> bytes:
    """The mark of a process; b"": it has none."""
    return next((text for text in strings(pid, "environ") if text.startswith(MARK)), b"")


def place(pid: int) -> str:
    """Its mount namespace; "" if it ended, or is not ours to read."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def is_agent(pid: int) -> bool:
    """Whether its command line is that of an agent: `python3 -m diloco_agent ROLE -- ...`."""
    arguments = strings(pid, "cmdline")
    return (b"-m", b"diloco_agent") in itertools.pairwise(arguments[:8])


def targets(uid: str) -> tuple[list[Process], set[bytes]]:
    """
    The program of this container with its helpers, and their marks; none while it does not run.

    Raises:
        RefusedError: it cannot be distinguished from other processes.
    """
    here, found = place(os.getpid()), processes()
    if not uid:
        raise RefusedError("the UID of its pod is not known")
    if not here:
        raise RefusedError("the namespaces of its processes cannot be read")
    own = f"{UID.decode()}{uid}".encode()
    agents = [
        pid
        for pid in found
        if is_agent(pid) and place(pid) == here and own in strings(pid, "environ")
    ]
    if len(agents) != 1:
        raise RefusedError(f"{len(agents)} processes look like the agent of this pod, expected 1")
    spared = {agents[0], 1, *ourselves(found)}
    children: dict[int, list[int]] = {}
    for entry in found.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    # The guard, another child of the agent, has no mark.
    roots = {pid: text for pid in children.get(agents[0], ()) if (text := mark(pid))}
    marks, chosen, left = set(roots.values()), set(roots), list(roots)
    while left:
        for pid in children.get(left.pop(), ()):
            if pid not in chosen:
                chosen.add(pid)
                left.append(pid)
    chosen |= marked(marks, found)
    return [found[pid] for pid in sorted(chosen - spared)], marks


def ourselves(found: dict[int, Process]) -> set[int]:
    """This process and those that it descends from."""
    pid, own = os.getpid(), set[int]()
    while pid in found and pid not in own:
        own.add(pid)
        pid = found[pid].parent
    return own


def marked(marks: set[bytes], found: dict[int, Process]) -> set[int]:
    """Those with one of these marks in our mount namespace; helpers whose parents ended are among them."""
    here = place(os.getpid())
    return {pid for pid in found if marks and place(pid) == here and mark(pid) in marks}


def send(target: Process, number: signal.Signals) -> None:
    """Signal a process, unless it ended."""
    now = process(target.pid)
    if now is not None and now.start == target.start:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(target.pid, number)


def report(**fields: object) -> None:
    """Report to the sender, unless its connection has ended."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(fields).encode() + b"\n")


def some(uid: str) -> tuple[list[Process], set[bytes]]:
    """As `targets`, of a program that runs."""
    found, marks = targets(uid)
    if not found:
        raise RefusedError("its program does not run")
    return found, marks


def kill(uid: str) -> None:
    """SIGKILL of the program and its helpers; its successor has another mark."""
    found, marks = some(uid)
    for target in found:
        send(target, signal.SIGKILL)
    for _ in range(SWEEPS):
        now = processes()
        forked = marked(marks, now) - ourselves(now)
        if not forked:
            break
        for pid in forked:
            send(now[pid], signal.SIGKILL)
        time.sleep(0.005)
    report(begun=len(found))


def input_ends(seconds: float) -> bool:
    """Whether standard input ends within this time."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        if not select.select([0], [], [], max(0.0, left))[0]:
            return False
        if not os.read(0, 4096):
            return True


class Stopped:
    """Processes that are stopped; the second process continues them if this one ends without it."""

    def __init__(self, seconds: float) -> None:
        source, self._pipe = os.pipe()
        self._stopped: dict[Process, None] = {}
        if os.fork() == 0:
            os.close(self._pipe)
            _watch(source, seconds + MARGIN_SECONDS)
        os.close(source)

    def stop(self, find: Callable[[], list[Process]]) -> int:
        """Stop what is found, and what it forked meanwhile; returns how many are stopped."""
        for _ in range(SWEEPS):
            more = [target for target in find() if target not in self._stopped]
            if not more:
                break
            for target in more:
                # Announced first: whenever we are killed, the second process knows it.
                os.write(self._pipe, f"{target.pid} {target.start}\n".encode())
                self._stopped[target] = None
                send(target, signal.SIGSTOP)
        return len(self._stopped)

    def resume(self) -> None:
        """Continue all of them."""
        for target in self._stopped:
            send(target, signal.SIGCONT)
        self._stopped.clear()

    def close(self) -> None:
        """Continue all of them and end the second process."""
        self.resume()
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"done\n")
        os.close(self._pipe)


def _watch(source: int, seconds: float) -> None:
    """Continue what the first process has announced, when it ends or its time is long over; never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        text, until = b"", time.monotonic() + seconds
        while select.select([source], [], [], max(0.0, until - time.monotonic()))[0]:
            data = os.read(source, 1 << 16)
            if not data:
                break
            text += data
        if not text.endswith(b"done\n"):
            for pid, start in {tuple(map(int, line.split())) for line in text.splitlines()}:
                send(Process(pid, 0, start), signal.SIGCONT)
    finally:
        os._exit(0)


@contextlib.contextmanager
def stopped(seconds: float) -> Iterator[Stopped]:
    """Processes that are stopped for as long as it lasts."""
    made = Stopped(seconds)
    try:
        yield made
    finally:
        made.close()


def pause(uid: str, seconds: float) -> None:
    """Stop the program and its helpers for so long; a successor is not stopped."""
    _, marks = some(uid)
    with stopped(seconds) as held:

        def same() -> list[Process]:
            found, now = targets(uid)
            return found if now == marks else []

        report(begun=held.stop(same))
        input_ends(seconds)
    report(ended=True)


def slow(uid: str, seconds: float, share: float) -> None:
    """Stop the program and its helpers for this part of each second."""
    count, until = len(some(uid)[0]), time.monotonic() + seconds
    with stopped(seconds) as held:
        report(begun=count)
        while (left := until - time.monotonic()) > 0:
            # Of the wall clock, so that the pods of a learner are stopped at the same time.
            phase = time.time() % 1.0  # noqa: TID251
            if phase < share:
                held.stop(lambda: targets(uid)[0])
            if input_ends(min(left, (share if phase < share else 1.0) - phase)):
                break
            held.resume()
    report(ended=True)


def main(arguments: list[str]) -> int:
    """The exit code."""

    def leave(*_: object) -> None:
        sys.exit(1)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        uid, kind, *numbers = arguments
        {"kill": kill, "pause": pause, "slow": slow}[kind](uid, *map(float, numbers))  # type: ignore[operator]
    except RefusedError as error:
        report(refused=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
