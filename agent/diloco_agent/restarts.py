"""
Restart rules that the agent of a container and the local supervisor share.

Pure: how long to back off, when a learner has crashed too often (diloco/runtime/exits.py: what a crash is), and
when its program is broken, because it ended again and again without joining the job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diloco.errors import EXIT_DONE, EXIT_TRY_AGAIN
from diloco.runtime.backoff import doubled
from diloco.runtime.exits import is_crash
from diloco.runtime.formatting import ending

EARLY_EXIT = "the job is not complete: its loop must be `while not learner.done`"
"""What is wrong with a learner that exits with 0 before the job is complete."""


def backoff_seconds(
    exits: int, *, immediate: int = 0, first_seconds: float, max_seconds: float
) -> float:
    """
    Delay before the next start; it doubles with each exit.

    Args:
        exits: in a row, without a healthy run between them; at least 1.
        immediate: number of exits that are followed by an immediate restart.
        first_seconds: the first delay after those.
        max_seconds: upper bound of the delay.
    """
    doublings = exits - 1 - immediate
    if doublings < 0:
        return 0.0
    return doubled(first_seconds, doublings, max_seconds)


def exit_cause(code: int, last_line: str) -> str:
    """
    How a process ended, with the last line of its log.

    >>> exit_cause(1, "no such file"), exit_cause(-9, "")
    ('exit code 1: no such file', 'signal 9 (SIGKILL)')
    """
    return f"{ending(code)}: {last_line}" if last_line else ending(code)


def limit_message(learner: str, *, crashes: int, limit: int | None, cause: str) -> str:
    """Why a learner is not restarted again; "" while its crashes are within the limit."""
    if limit is None or crashes <= limit:
        return ""
    times = "once" if crashes == 1 else f"{crashes} times"
    return f"learner {learner} crashed {times}, spec.runPolicy.learnerRestartLimit is {limit} ({cause})"


def counts(code: int) -> bool:
    """
    Whether an exit counts against learnerRestartLimit: a crash, but not that the syncer was unavailable.

    >>> counts(1), counts(75), counts(-9)
    (True, False, False)
    """
    return is_crash(code) and code != EXIT_TRY_AGAIN


def is_early_exit(code: int, left: str) -> bool:
    """
    Whether a learner exited with 0 although neither the job was complete nor the learner was stopped.

    Args:
        code: exit code.
        left: why it left the job, as its health file states; "": it did not.

    >>> is_early_exit(0, ""), is_early_exit(0, "Complete"), is_early_exit(1, "")
    (True, False, False)
    """
    return code == EXIT_DONE and left not in ("Complete", "SIGTERM")


def is_broken_start(code: int, left: str) -> bool:
    """
    Whether a learner that ended like this without having joined may have a program that cannot work.

    Neither a kill from outside nor a syncer that did not answer in time is evidence of that.

    >>> is_broken_start(1, ""), is_broken_start(0, ""), is_broken_start(75, ""), is_broken_start(-9, "")
    (True, True, False, False)
    """
    return is_early_exit(code, left) or counts(code)


@dataclass(slots=True)
class BrokenStarts:
    """Ends of a learner before it has joined the job (`is_broken_start`)."""

    ends: int = 0
    first: float = 0.0
    """When it ended first."""

    def count(self, learner: str, *, now: float, limit: int, seconds: float, cause: str) -> str:
        """
        Count one more; why the learner is not restarted again, or "".

        Args:
            learner: its name.
            now: on the clock of the other calls.
            limit: so many ends are needed.
            seconds: so long ago the first of them must be, so that an outage is no broken program.
            cause: of this end.
        """
        self.first = self.first if self.ends else now
        self.ends += 1
        if self.ends < limit or now - self.first < seconds:
            return ""
        return f"learner {learner} ended {self.ends} times and never joined the job ({cause})"


def refusal(learner: str, last_line: str) -> str:
    """
    Why a learner was refused, without the names that its line begins with: the reader knows them.

    >>> refusal("eu/0", "diloco: eu/0: other shape"), refusal("eu/0", "")
    ('other shape', 'it logged no reason')
    """
    text = re.sub(r"^rank \d+: ", "", last_line)
    text = text.removeprefix("diloco: ").removeprefix(f"{learner}: ")
    return text or "it logged no reason"
