"""
What a learner's process sees of the link while it executes its tape. Pure.

The trainer's core stays as it is: it copies what `LinkState.open` names and applies what `LinkState.ready` has.
A replay shows it these two, the global step and the end as the tape has them, once the real link is as far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diloco.journal.replay import Life
from diloco.journal.replay_epochs import Version, version_of
from diloco_worker.core.messages import LinkState


class Replay:
    """
    Args:
        life: what this process must do.
    """

    def __init__(self, life: Life) -> None:
        self.life = life
        self._state = LinkState()
        """The newest of the link."""

    def observe(self, state: LinkState | None) -> None:
        """The link has sent a new state; None: it has not."""
        self._state = state or self._state

    @property
    def refused(self) -> bool:
        """The syncer does not accept this process."""
        return self._state.refused_exit != 0

    def joining(self) -> LinkState:
        """What `TrainerCore.join` may see."""
        return self._shown(self.life.process.begin.step)

    def began_otherwise(self, source: str, optimizers: str, state: LinkState) -> str:
        """Why the process did not begin as on the tape, for people; "": it did."""
        begin = self.life.process.begin
        peer_step = state.peer_local_step if state.peer == optimizers else None
        found = (source, optimizers, peer_step)
        if found == (begin.source, begin.optimizers, begin.peer_step):
            return ""
        return (
            f"the parameters are those of the {source} and the optimizers' state is {_state(optimizers, peer_step)}; "
            f"on the tape {begin.source} and {_state(begin.optimizers, begin.peer_step)}: the replay cannot continue"
        )

    def between(self, local_step: int) -> LinkState:
        """What the program may see after this local step and before the next."""
        process, last = self.life.process, self.life.last
        if local_step < last:
            return self._shown(process.steps[local_step + 1].seen)
        known = process.steps.get(local_step)
        step = known.step if known else process.begin.step
        return self._shown(step, complete=not self.life.killed)

    def boundary(self, local_step: int) -> LinkState | None:
        """What `TrainerCore.step` may see at the end of this local step; None: the link is not so far."""
        state, life = self._state, self.life
        if local_step > life.last:
            return self.between(life.last)  # a loop that has not read that the job is complete
        copies = life.copies.get(local_step, ())
        # An earlier copy stays in memory until it is merged.
        if any(self._position < copy.after for copy in copies):
            return None
        step, ready = life.process.steps[local_step], []
        generations = {pair[0]: pair[1] for pair in state.ready}
        for held in step.results or ():
            generation, version = generations.get(held.fragment), state.versions[held.fragment]
            if generation is None or version is None:
                return None
            if (version[0], version[1]) != version_of(held, life.process):
                return None
            ready.append((held.fragment, generation))
        return self._shown(step.step, ready=ready, copied=[copy.fragment for copy in copies])

    def waits(self, local_step: int) -> str:
        """What `boundary` waits for, for people."""
        life = self.life
        for copy in life.copies.get(local_step, ()):
            if self._position < copy.after:
                epoch, step = copy.after
                return (
                    f"local step {local_step} waits for the merge of step {step} of epoch {epoch}"
                )
        results = life.process.steps[local_step].results or ()
        names = ", ".join(f"{held.fragment} of step {held.step}" for held in results)
        return f"local step {local_step} waits for fragment {names}"

    @property
    def merged(self) -> bool:
        """Whether everything that was merged of this process is."""
        return self._position >= self.life.final

    @property
    def _position(self) -> Version:
        """Up to here, the syncer has merged: a later epoch begins when all merges of the one before it are done."""
        return self._state.epoch, self._state.step

    def _shown(
        self, step: int, *, ready: Sequence[Sequence[int]] = (), copied: Sequence[int] = (),
        complete: bool = False,
    ) -> LinkState:  # fmt: skip
        state = self._state
        # While the model is downloaded, `ready` is what has arrived.
        joining = state.phase.value == "apply-model"
        return dataclasses.replace(
            state, step=step, open=copied, ready=state.ready if joining else ready, complete=complete,
            checkpoint_wanted=0,
        )  # fmt: skip


def _state(optimizers: str, peer_step: int | None) -> str:
    return optimizers if peer_step is None else f"that of local step {peer_step} of {optimizers}"
