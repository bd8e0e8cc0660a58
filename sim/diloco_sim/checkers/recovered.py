"""
A learner trains with a state of the optimizers that some learner had, and events.jsonl states whose and of which step.

    what a peer sends is used whole and unchanged, and is of the step that was asked for or of a later one
    the line `recovery` states where the state comes from, whatever a peer states
    a learner waits for its peers no longer than H global steps and a minute each; a peer trains on meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Asked, Began, LearnerMoment, Moment, Saved
from diloco_syncer.core.peers import MOST

WAIT_SECONDS = 60.0
"""What a peer has at least, and longest time without a global step for which a learner waits (docs/adr/0033)."""

LATE_SECONDS = 30.0
"""What heartbeats, connections and the moments of this checker may add to a bound."""


@dataclass(frozen=True, slots=True)
class _State:
    """Who had it, and when."""

    learner: str
    global_step: int


class Recovered:
    """
    Its own book of all local checkpoints, by the state of the optimizers, which no two have by chance.

    Args:
        interval: H.
        step_seconds: the longest step of a learner.
        healthy_since: since when a learner and the syncer have had no fault; None: they have one.
    """

    observes = (dict, Saved, Asked, Began, Moment)

    def __init__(
        self, interval: int, step_seconds: float, healthy_since: Callable[[str, float], float | None]
    ) -> None:  # fmt: skip
        self._interval, self._healthy_since = interval, healthy_since
        self._served_seconds = LATE_SECONDS + 3 * step_seconds
        self._had: dict[bytes, set[_State]] = {}
        self._asked: dict[str, dict[str, int]] = {}
        """Learner → peer that its present link has asked, and for which step."""
        self._last: dict[str, tuple[float, int]] = {}
        """When it asked last, and for which step."""
        self._overtaken: dict[str, float] = {}
        """Since when H steps have passed since then."""
        self._began: dict[tuple[str, int], list[Began]] = {}
        """By learner and incarnation."""
        self._trained: dict[str, tuple[int, float]] = {}
        """Of learners that answer others: local step, and since when it has been that."""
        self._step, self._step_at = 0, 0.0
        """The newest global step, and when it was first seen."""
        self.recovered = 0
        """Processes that began with the state of a peer."""

    def observe(self, event: dict[str, Any] | Saved | Asked | Began | Moment, now: float) -> None:
        """See `Checker`."""
        match event:
            case Saved():
                state = _State(event.learner, event.global_step)
                self._had.setdefault(event.moments, set()).add(state)
            case Asked():
                self._ask(event, now)
            case Began():
                self._begin(event, now)
            case Moment():
                self._judge(event, now)
            case {"event": "recovery"}:
                self._compare(event, now)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _ask(self, event: Asked, now: float) -> None:
        asked = self._asked.setdefault(event.learner, {})
        if event.number == 1:
            asked.clear()
        if event.peer == event.learner or event.peer in asked or len(asked) >= MOST:
            self._fail(f"{event.learner} asks {event.peer} after {sorted(asked)}", now)
        asked[event.peer] = event.step
        self._last[event.learner] = now, event.step
        self._overtaken.pop(event.learner, None)

    # ------------------------------------------------------------ states

    def _begin(self, event: Began, now: float) -> None:
        self._began.setdefault((event.learner, event.incarnation), []).append(event)
        states = self._states(event)
        if not states:
            self._fail(f"{event.learner} trains with a state that no learner had", now)
        if "" in states or event.learner in states:
            return
        self.recovered += 1
        asked = self._asked.get(event.learner, {})
        if not any(
            asked.get(peer, step + 1) <= step for peer, steps in states.items() for step in steps
        ):
            self._fail(
                f"{event.learner} trains with a state of {states}, it asked for {asked}", now
            )

    def _states(self, event: Began) -> Mapping[str, set[int]]:
        """Learners that had the state, and the global steps of their checkpoints; "": it is a new one."""
        if not any(event.moments):
            return {"": {0}}
        found: dict[str, set[int]] = {}
        for state in self._had.get(event.moments, ()):
            found.setdefault(state.learner, set()).add(state.global_step)
        return found

    def _compare(self, line: Mapping[str, Any], now: float) -> None:
        learner, source, step = line["learner"], line["source"], line["stateStep"]
        whose = {"None": "", "Peer": line["peer"]}.get(source, learner)
        begun = self._began.get((learner, line["incarnation"]), [])
        true = [self._states(event) for event in begun]
        if not any(step in states.get(whose, ()) for states in true):
            self._fail(
                f"the line `recovery` of {learner} states {source} {line['peer']} of step {step}, true is {true}",
                now,
            )

    # ------------------------------------------------------------ bounds

    def _judge(self, moment: Moment, now: float) -> None:
        if moment.step != self._step:
            self._step, self._step_at = moment.step, now
        for name, learner in moment.learners.items():
            healthy = self._healthy_since(name, now)
            if learner.asks and healthy is not None:
                self._judge_wait(name, healthy, now)
            self._judge_service(name, learner, healthy, now)

    def _judge_wait(self, name: str, healthy: float, now: float) -> None:
        at, step = self._last[name]
        since, bound = max(healthy, at), WAIT_SECONDS + LATE_SECONDS
        if self._step - step > self._interval:
            self._overtaken.setdefault(name, now)
        overtaken = now - self._overtaken.get(name, now) > LATE_SECONDS
        stands_still = now > max(since, self._step_at) + bound
        if now > since + bound and (overtaken or stands_still):
            peers = ", ".join(self._asked[name])
            self._fail(
                f"{name} still waits for the last of {peers}, after {now - since:.0f} s and {self._step - step} steps",
                now,
            )

    def _judge_service(
        self, name: str, learner: LearnerMoment, healthy: float | None, now: float
    ) -> None:
        step, (before, since) = learner.local_step, self._trained.get(name, (-1, now))
        waits = learner.waits_since is not None or learner.done
        if step is None or healthy is None or not learner.serves or waits:
            self._trained.pop(name, None)
        elif step != before:
            self._trained[name] = step, now
        elif now > since + self._served_seconds:
            self._fail(
                f"{name} answers another learner and makes no step in {now - since:.0f} s", now
            )

    def _fail(self, sentence: str, now: float) -> None:
        raise Violation("recovered", sentence, step=self._step, now=now)
