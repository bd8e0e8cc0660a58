"""
The training side's decisions: joining, a step of Algorithm 1, leaving. Pure.

    join(...)   again and again until `joined` or `closed`
    step(...)   once per optimizer step: count, copy out, apply results
    copied(...) the same step, after the copies: notify the link, start a checkpoint if it is due
    check(...)  between steps: leave if the job is complete or the process must end
    close(...)  leave

Each takes what happened and returns actions, to be carried out in order. An action that can turn
out in several ways has its answer named in its docstring; everything else happens as decided, or
the process ends. Host copies, counters and applied results change together, here only, so that an
upload always matches the counters in its header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.errors import EXIT_TRY_AGAIN
from diloco_worker.core.inbox import version_of
from diloco_worker.core.ledger import HostCopy, Ledger
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.core.open_blocks import Blocks
from diloco_worker.core.recovery import LocalCheckpoint, began
from diloco_worker.core.step_checks import StepChecks

PROGRESS_SECONDS = 5.0
"""Interval between messages of `join` about what it waits for."""

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class CopyModel:
    """
    Write the host copy of every fragment, and the constants.

    Without `wait`, call `model_not_copied` if the link holds a lock: it may have been stopped.
    """

    copies: Sequence[HostCopy]
    """The counters that belong to the copies, by fragment."""
    wait: bool = False
    """Whether to wait for the link's locks: only while joining, which needs the link in any case."""


@dataclass(frozen=True, slots=True)
class CopyFragment:
    """
    Write one host copy, without waiting: while the link holds its lock, nothing is copied.

    Answer: `copied` with all fragments of the step that were copied.
    """

    fragment: int
    copy: HostCopy
    """The counters that belong to the copy."""


@dataclass(frozen=True, slots=True)
class ApplyModel:
    """Overwrite the constants, and these fragments from their inboxes: the whole model."""

    fragments: Sequence[int]


@dataclass(frozen=True, slots=True)
class ApplyFragment:
    """Overwrite the fragment's parameters from its inbox."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send the state to the link, without waiting."""

    state: TrainerState


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Load the local checkpoint; answer: `checkpoint_loaded` or `checkpoint_unusable`."""


@dataclass(frozen=True, slots=True)
class LoadOptimizers:
    """
    Load the optimizers' state of the local checkpoint, whose parameters are too old.

    Answer: `optimizers_loaded` or `optimizers_unusable`.
    """


@dataclass(frozen=True, slots=True)
class LoadPeerState:
    """Load the optimizers' state that a peer sent; answer: `peer_state_loaded` or `peer_state_unusable`."""

    kept: bool
    """Whether `Learner.keep` continues with the local checkpoint."""


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """
    Start a local checkpoint, unless the previous one is still being written.

    Answer: `checkpoint_started`, and later perhaps `checkpoint_lost`; `checkpoint_skipped`;
    `checkpoints_off`; or none: the next step tries again.
    """

    local_step: int
    global_step: int
    run: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AwaitCheckpoint:
    """Wait until the checkpoint that is being written is durable, or its disk hangs."""


@dataclass(frozen=True, slots=True)
class AwaitLink:
    """There is nothing to do before the link sends its next state."""


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Show this sentence to the user who waits."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Let the link leave with this state as its last, and release everything."""

    state: TrainerState


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process with this code and sentence."""

    code: int
    text: str


Action = (
    CopyModel | CopyFragment | ApplyModel | ApplyFragment | Send | LoadCheckpoint | LoadOptimizers
    | LoadPeerState | SaveCheckpoint | AwaitCheckpoint | AwaitLink | ShowProgress | Leave | Exit
)  # fmt: skip


# ---------------------------------------------------------------- the machine


class TrainerCore:
    """
    State machine of one training process.

    Args:
        name: of the learner, for messages.
        fragments: number of fragments.
        found: the newest local checkpoint; None: there is none.
        checkpoint_every: local steps between checkpoints; None: no checkpoints.
        connect_timeout_seconds: how long `join` waits for a syncer that does not answer.
    """

    def __init__(
        self, *, name: str, fragments: int, found: LocalCheckpoint | None, checkpoint_every: int | None,
        connect_timeout_seconds: float,
    ) -> None:  # fmt: skip
        self.ledger, self.checks = Ledger(fragments), StepChecks()
        self.applied = [0] * fragments
        """Per fragment, the newest inbox generation that the parameters hold."""
        self.link_state = LinkState(text="starting the link process")
        self.joined = self.closed = False
        self.run = ""
        """Name of the run, from the last Welcome; "": not known."""
        self.blocks: Blocks | None = None
        """Of data, if the program takes some."""
        self.offers: Sequence[int] = ()
        """Of the last step."""
        self.resumed = False
        """Whether the optimizers have the state of a local checkpoint, or of a peer."""
        self.recovery: dict[str, Any] = {}
        """With which state the optimizers began."""
        self._name, self._found = name, found
        self._checkpoint_every = checkpoint_every
        self._timeout_seconds = connect_timeout_seconds
        self._stepped = False
        self._unusable = ""
        """Why the local checkpoint that was there is not used."""
        self._no_peer = ""
        """Why the state is not that of a peer; "": none was asked."""
        self._initial_copied = self._initial_before = 0
        self._start = (0, 0)
        """Local step and total tokens when this process began to train."""
        self._checkpoint_step = 0
        """Local step of the last checkpoint that was started, or of the start."""
        self._saved_step = 0
        """Global step of the last checkpoint that was started; 0: none was."""
        self._loss: float | None = None
        # Joining.
        self._join_started_at: float | None = None
        self._connected_at = self._progress_at = 0.0
        # Times of the current step.
        self._tokens = 0
        self._sync_started_at = self._sync_ended_at = self._step_ended_at = 0.0
        self._step_seconds = self._sync_seconds = self._total_sync_seconds = 0.0

    @property
    def initial_copied(self) -> int:
        """The newest request for the initial model that was answered with a copy."""
        return self._initial_copied

    @property
    def trained(self) -> bool:
        """Whether a checkpoint is of use: the model made a step, and its loss is finite."""
        return self.joined and self._stepped and self.checks.finite

    @property
    def recovered_from(self) -> str:
        """The peer with whose state the optimizers began; "": none."""
        return str(self.recovery.get("peer", ""))

    def state(self, *, offers: Sequence[int] = (), leaving: str = "") -> TrainerState:
        """What the link should know."""
        found, ledger, link_state = self._found, self.ledger, self.link_state
        problem = self.checks.problem()
        return TrainerState(
            incarnation=link_state.incarnation,
            epoch=link_state.epoch,
            starts=link_state.starts,
            checkpoint_local_step=found.local_step if found is not None else 0,
            checkpoint_step=found.global_step if found is not None else 0,
            checkpoint_start=found.start if found is not None else "",
            model_loaded=self.joined,
            stepped=self._stepped,
            local_step=ledger.local_step,
            global_step=link_state.step,
            steps=[*ledger.steps],
            tokens=[*ledger.tokens],
            offers=offers,
            applied=[*self.applied],
            versions=[*ledger.versions],
            total_tokens=ledger.total_tokens,
            start_local_step=self._start[0],
            start_total_tokens=self._start[1],
            loss=self._loss,
            step_seconds=self._step_seconds,
            sync_seconds=self._sync_seconds,
            total_sync_seconds=self._total_sync_seconds,
            saves=self._checkpoint_every is not None,
            recovery=self.recovery,
            initial_copied=self._initial_copied,
            problem=problem.kind if problem else "",
            problem_text=problem.text if problem else "",
            blocks=self.blocks.to_json() if self.blocks is not None else {},
            leaving=leaving,
        )

    # ------------------------------------------------------------ joining

    def join(self, link_state: LinkState | None, *, now: float, terminated: bool) -> list[Action]:
        """
        Bring the job's parameters into the model.

        Args:
            link_state: the newest state of the link; None: no new one.
            now: monotonic seconds.
            terminated: this process received SIGTERM.
        """
        self._observe(link_state)
        if self._join_started_at is None:
            self._join_started_at = self._connected_at = now
            self._progress_at = now + PROGRESS_SECONDS
        ending = self._refusal() or self._ending(terminated)
        if ending:
            return ending
        link_state = self.link_state
        if link_state.connected:
            self._connected_at = now
        elif now - self._connected_at > self._timeout_seconds:
            text = f"no syncer within {self._timeout_seconds:.0f} s: {link_state.text}; trying again may help"
            return [*self.close("interrupted"), Exit(EXIT_TRY_AGAIN, f"{self._name}: {text}")]
        actions: list[Action] = []
        if now >= self._progress_at:
            self._progress_at = now + PROGRESS_SECONDS
            waited = now - self._join_started_at
            actions.append(ShowProgress(f"{self._name}: {link_state.text} ({waited:.0f} s)"))
        initial = self._initial_if_requested(wait=True)
        actions += [*initial, Send(self.state())] if initial else []
        if link_state.phase is Phase.APPLY_MODEL and not link_state.peer_pending:
            actions.append(ApplyModel([fragment for fragment, _ in link_state.ready]))
            for fragment, generation in link_state.ready:
                self._received(fragment, generation)
            return [*actions, *self._optimizers(), *self._begin(now)]
        if link_state.phase is Phase.LOAD_CHECKPOINT and self._found is not None:
            # A checkpoint of an earlier release does not state its run: the syncer found it new enough.
            if self._found.run and (why := self._of_another_run(self._found)):
                return [*actions, *self.checkpoint_unusable(why)]
            return [*actions, LoadCheckpoint()]
        return [*actions, AwaitLink()]

    def checkpoint_loaded(self, facts: Mapping[str, Any], *, now: float) -> list[Action]:
        """
        The model is that of the local checkpoint, whose counters are `facts`.

        Raises:
            KeyError: `facts` is incomplete; nothing has changed.
        """
        self.ledger = Ledger.from_json(facts)
        self.resumed, found = True, self._found
        self.recovery = began("Checkpoint", self.link_state, step=found.global_step if found else 0)
        step = self.ledger.local_step
        text = f"parameters and optimizers are those of the local checkpoint of local step {step}"
        return [self._show(text), *self._begin(now)]

    def checkpoint_unusable(self, why: str) -> list[Action]:
        """The local checkpoint cannot be loaded, for this reason: the link must download the model."""
        self._found, self._unusable = None, why
        return [Send(self.state())]

    def _optimizers(self) -> list[Action]:
        """What becomes of the optimizers when the parameters are the job's."""
        found, state = self._found, self.link_state
        if state.peer:
            return [LoadPeerState(kept=found is not None and not self._of_another_run(found))]
        return self._own_optimizers(
            f"no peer has sent the optimizers' state: {why}" if (why := state.peer_problem) else ""
        )

    def _own_optimizers(self, no_peer: str) -> list[Action]:
        """The same without a peer, for this reason; "": none was asked."""
        found, self._no_peer = self._found, no_peer
        shown: list[Action] = [self._show(no_peer)] if no_peer else []
        if found is not None and not (why := self._of_another_run(found)):
            return [*shown, LoadOptimizers()]
        why = why if found is not None else self._unusable
        if why or self.link_state.local_step:
            return [*shown, *self.optimizers_unusable(why or "there is no local checkpoint")]
        # At its first start, a learner has no state to lose.
        self.recovery = began("None", self.link_state, why=no_peer)
        return shown

    def _of_another_run(self, found: LocalCheckpoint) -> str:
        """Why the checkpoint belongs to other parameters than the job's; empty: it does not."""
        if self.run and found.run == self.run:
            return ""
        which = "belongs to another run" if self.run and found.run else "may belong to another run"
        return f"the local checkpoint of local step {found.local_step} {which}"

    def optimizers_loaded(self) -> list[Action]:
        """The optimizers have the state of the local checkpoint; the parameters are the job's."""
        if self._found is None:
            raise AssertionError("there is no checkpoint that could have been loaded")
        self.resumed, found = True, self._found
        self.recovery = began(
            "OldCheckpoint", self.link_state, step=found.global_step, why=self._no_peer
        )
        text = f"local step {found.local_step}, global step {found.global_step}"
        return [self._parameters(f"the optimizers continue with the local checkpoint of {text}")]

    def peer_state_loaded(self) -> list[Action]:
        """The optimizers have the state that a peer sent; the parameters are the job's."""
        state = self.link_state
        self.resumed, self.recovery = True, began("Peer", state, step=state.peer_step)
        text = f"{state.peer} at local step {state.peer_local_step}, global step {state.peer_step}"
        return [self._parameters(f"the optimizers continue with the state of {text}")]

    def peer_state_unusable(self, why: str) -> list[Action]:
        """The state that a peer sent cannot be loaded, for this reason: this learner's own counts."""
        return self._own_optimizers(
            f"the optimizers' state of {self.link_state.peer} cannot be used: {why}"
        )

    def optimizers_unusable(self, why: str) -> list[Action]:
        """The optimizers start with new state, for this reason."""
        reasons = "; ".join(filter(None, (self._no_peer, why)))
        self.recovery = began("None", self.link_state, why=reasons)
        return [self._parameters(f"the optimizers start with new state: {why}")]

    def _parameters(self, rest: str) -> ShowProgress:
        return self._show(f"the parameters are those of global step {self.link_state.step}; {rest}")

    def _begin(self, now: float) -> list[Action]:
        self.joined = True
        ledger, link_state = self.ledger, self.link_state
        ledger.resume(local_step=link_state.local_step, total_tokens=link_state.total_tokens)
        self._start = (ledger.local_step, ledger.total_tokens)
        self._checkpoint_step = ledger.local_step
        self._sync_ended_at = self._step_ended_at = now
        return [Send(self.state())]

    # ------------------------------------------------------------ a step

    def step(
        self, tokens: int, link_state: LinkState | None, *, now: float, optimizer_steps: int | None = None
    ) -> list[Action]:  # fmt: skip
        """
        One step of Algorithm 1, after the optimizer's; `copied` must follow.

        Differs from the paper: results are applied before the metadata is sent. A fragment that was
        just overwritten has nothing to offer, and its inbox is already the base of its next delta.

        Args:
            tokens: in the step.
            link_state: the newest state of the link; None: no new one.
            now: monotonic seconds, when the optimizer's step has ended.
            optimizer_steps: that the optimizers reported since the previous call; None: not known.

        Raises:
            ValueError: `tokens` is not a whole number of 0 or more; the step is not counted.
        """
        self._observe(link_state)
        if self.closed:
            return []
        self.ledger.count(tokens)
        if self.blocks is not None:
            self.blocks.stepped(self.ledger.local_step)
        self.checks.stepped(tokens=tokens, optimizer_steps=optimizer_steps)
        self._stepped, self._tokens = True, tokens
        self._sync_started_at, self._step_seconds = now, now - self._step_ended_at
        refusal = self._refusal()
        if refusal:
            return refusal
        actions = self._initial_if_requested(wait=False)
        ready = [(p, g) for p, g in self.link_state.ready if g > self.applied[p]]
        replaced = {p for p, _ in ready}
        # Before the results: a copy has the counters of the parameters that it holds.
        actions += [
            CopyFragment(p, self._host_copy(p)) for p in self.link_state.open if p not in replaced
        ]
        for fragment, generation in ready:
            actions.append(ApplyFragment(fragment))
            self._received(fragment, generation)
        return actions

    def model_not_copied(self) -> None:
        """The link held a lock, so the copy that `step` asked for was not made: the next step tries again."""
        self._initial_copied = self._initial_before

    def copied(
        self, fragments: Sequence[int], *, loss: float | None, finite: bool | None = True
    ) -> list[Action]:
        """
        Of the host copies that `step` asked for, these were taken.

        Args:
            fragments: what to offer, in the order of `step`.
            loss: the newest that is known and finite.
            finite: whether the one that was read in this step is; None: none was.
        """
        if self.closed:
            return []
        self._loss = loss
        if finite is not None:
            self.checks.loss_read(finite=finite)
        self.offers = fragments
        actions: list[Action] = [Send(self.state(offers=fragments))]
        every = self._checkpoint_every
        due = every is not None and self.ledger.local_step - self._checkpoint_step >= every
        # A peer waits for one that has seen this step.
        wanted = every is not None and self._saved_step < self.link_state.checkpoint_wanted
        due = due or (wanted and self.link_state.checkpoint_wanted <= self.link_state.step)
        if due and self.checks.finite:  # a restart must not load what has diverged
            actions.append(self.save())
        return actions

    def line(
        self, *, now: float, queued_seconds: float, copy_wait_seconds: float | None = None
    ) -> dict[str, object]:
        """
        The step's line in steps.jsonl.

        Args:
            now: when the actions were carried out; their time counts as synchronization.
            queued_seconds: the part of that time for which there was no core.
            copy_wait_seconds: how long the optimizers waited for the copy of a checkpoint; None: no
                such copy was made in the step.
        """
        # A line cannot contain the time to write itself: that is part of the next step.
        line_seconds = max(0.0, self._step_ended_at - self._sync_ended_at)
        self._sync_seconds = now - self._sync_started_at + line_seconds
        self._total_sync_seconds += self._sync_seconds
        self._sync_ended_at = now
        return {
            "incarnation": self.link_state.incarnation,
            "localStep": self.ledger.local_step,
            "globalStep": self.link_state.step,
            "tokens": self._tokens,
            "loss": self._loss,
            "seconds": round(self._step_seconds, 6),
            "syncSeconds": round(self._sync_seconds, 6),
            # Part of syncSeconds: ready to run, but without a core.
            "queuedSeconds": round(queued_seconds, 6),
            # Part of seconds, in a step beside which a checkpoint was copied.
            **({"copyWaitSeconds": round(copy_wait_seconds, 6)} if copy_wait_seconds is not None else {}),
        }  # fmt: skip

    def ended(self, *, now: float) -> None:
        """The training loop continues."""
        self._step_ended_at = now

    # ------------------------------------------------------------ checkpoints

    def checkpoint_started(self, local_step: int) -> None:
        """The state of this step is copied and is being written."""
        self._checkpoint_step, self._saved_step = local_step, self.link_state.step

    def checkpoint_skipped(self, local_step: int) -> None:
        """An object of the program has no state to save now: the next checkpoint is due in its turn."""
        self._checkpoint_step = local_step

    def checkpoint_lost(self) -> None:
        """A checkpoint that was started is discarded: the next is due at once."""
        if self._checkpoint_every is not None:
            self._checkpoint_step = self.ledger.local_step - self._checkpoint_every

    def checkpoints_off(self) -> None:
        """The state cannot be saved: there are no further checkpoints."""
        self._checkpoint_every = None

    def save(self) -> SaveCheckpoint:
        """A checkpoint of the present state."""
        step, t_m = self.link_state.step, self.ledger.local_step
        return SaveCheckpoint(local_step=t_m, global_step=step, run=self.run, facts=self.facts())

    def facts(self) -> dict[str, Any]:
        """The counters for a checkpoint, and the start of the syncer that their versions are of; both or neither."""
        starts = self.link_state.starts
        of_start = {"start": starts[-1]} if starts else {"versions": [None for _ in self.applied]}
        return {**self.ledger.to_json(), **of_start}

    # ------------------------------------------------------------ leaving

    def check(self, link_state: LinkState | None, *, terminated: bool) -> list[Action]:
        """Leave at a step boundary if the job is complete or this process received SIGTERM."""
        self._observe(link_state)
        return self._refusal() or self._ending(terminated)

    def close(self, reason: str) -> list[Action]:
        """Leave the job, for this reason."""
        if self.closed:
            return []
        self.closed = True
        return [Leave(self.state(leaving=reason))]

    def _ending(self, terminated: bool) -> list[Action]:
        if self.closed or not (terminated or self.link_state.complete):
            return []
        saving: list[Action] = []
        if self._checkpoint_every is not None and self.trained:
            # A step boundary of a trained model is worth a checkpoint.
            saving = [AwaitCheckpoint(), self.save()]
        return [*saving, *self.close("SIGTERM" if terminated else "Complete")]

    def _refusal(self) -> list[Action]:
        if self.closed or not self.link_state.refused_exit:
            return []
        text = f"{self._name}: {self.link_state.text}"
        return [*self.close("Refused"), Exit(self.link_state.refused_exit, text)]

    # ------------------------------------------------------------ common

    def _show(self, sentence: str) -> ShowProgress:
        return ShowProgress(f"{self._name}: {sentence}")

    def _observe(self, link_state: LinkState | None) -> None:
        if link_state is not None and not self.closed:
            self.link_state = link_state
            # A new link process does not know it before its first Welcome.
            self.run = link_state.run or self.run
            if self.blocks is not None and link_state.leases is not None:
                self.blocks.leased(link_state.leases)

    def _initial_if_requested(self, *, wait: bool) -> list[Action]:
        """Θ^(0), or the current model for a syncer that has lost everything."""
        if self.link_state.initial_requested <= self._initial_copied:
            return []
        self._initial_before = self._initial_copied
        self._initial_copied = self.link_state.initial_requested
        return [CopyModel([self._host_copy(p) for p in range(len(self.applied))], wait)]

    def _host_copy(self, fragment: int) -> HostCopy:
        return self.ledger.host_copy(fragment, base=self.applied[fragment])

    def _received(self, fragment: int, generation: int) -> None:
        versions = self.link_state.versions
        version = versions[fragment] if fragment < len(versions) else None
        self.ledger.received(fragment, version=version_of(version))
        self.applied[fragment] = generation
