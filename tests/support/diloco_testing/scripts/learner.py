"""
Commands that drive the learner's real cores, trainer and link, in virtual time (docs/testing.md, "Golden scripts").

The two exchange their states at once. What the syncer sends, and what becomes of downloads, a script commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diloco_testing.scripts.golden import split
from diloco_worker.core import events as ev
from diloco_worker.core import trainer
from diloco_worker.core.inbox import Slot, Staged
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.messages import LinkState

TOKENS = 10
"""Tokens of a step."""


class LearnerScript:
    """Carries out the commands of one script."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shown: list[str] = []
        self.core: trainer.TrainerCore
        self.link: LinkProtocol
        self.downloads: list[ev.Download] = []
        self.tickets = 0
        self._newest: LinkState | None = None

    def __call__(self, words: Sequence[str]) -> list[str]:
        name, *rest = words
        plain, options = split(rest)
        self.shown = []
        command: Callable[..., None] = getattr(self, f"_{name.replace('-', '_')}")
        command(*plain, **options)
        return self.shown

    def show(self, text: str) -> None:
        """One line of output."""
        self.shown.append(f"t={round(self.now, 1):g} {text}")

    # ------------------------------------------------------------ the link

    def handle(self, event: ev.Event) -> None:
        """Let the link decide, and the trainer follow where it does not wait for a step."""
        for decision in self.link.handle(event, self.now):
            self._carry_out(decision)
        while not (self.core.joined or self.core.closed) and self._newest is not None:
            self._act(self.core.join(self._take(), now=self.now, terminated=False))

    def _take(self) -> LinkState | None:
        newest, self._newest = self._newest, None
        return newest

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.NotifyTrainer():
                self._newest = self.link.link_state
            case ev.Place():
                self.handle(ev.Placed(fragment=decision.staged.fragment))
            case ev.Download():
                self.downloads.append(decision)
                what = f"of step {decision.round}" if decision.round else "as it is now"
                later = f", in {decision.delay_seconds:g} s" if decision.delay_seconds else ""
                self.show(f"download fragment {decision.fragment} {what}{later}")
            case ev.SendReport():
                state = decision.state
                offers = " ".join(map(str, state.offers)) or "none"
                self.show(
                    f"report local step {state.local_step}, c_steps {[*state.steps]}, offers {offers}"
                )
            case ev.Upload():
                pull = decision.pull
                whole = "" if pull.versions else ", whole"
                self.show(f"upload fragment {pull.fragment} for step {pull.round}{whole}")
            case ev.CancelTransfers():
                self.downloads.clear()
                self.show("cancel all transfers")
            case ev.Discard():
                self.show(
                    f"discard fragment {decision.staged.fragment} of step {decision.staged.version[1]}"
                )
            case ev.Connect():
                self.show("open a session")
            case ev.UploadInitial():
                self.show("upload the initial model")
            case ev.SendHeartbeat():
                self.show("heartbeat")

    # ------------------------------------------------------------ the trainer

    def _act(self, actions: Sequence[trainer.Action]) -> list[int]:
        copied = []
        for action in actions:
            match action:
                case trainer.CopyFragment(fragment, _):
                    copied.append(fragment)
                case trainer.ApplyFragment(fragment):
                    self.show(f"the trainer applies fragment {fragment}")
                case trainer.ApplyModel():
                    self.show("the trainer applies the whole model")
                case trainer.Send(state):
                    self.handle(ev.TrainerUpdate(state=state))
                case trainer.Leave():
                    self.show("the trainer leaves")
                case trainer.Exit(code, text):
                    self.show(f"the process exits with {code}: {text}")
        return copied

    # ------------------------------------------------------------ the commands

    def _learner(self, fragments: str = "4") -> None:
        count = int(fragments)
        self.core = trainer.TrainerCore(
            name="eu/0", fragments=count, found=None, checkpoint_every=None,
            connect_timeout_seconds=600.0,
        )  # fmt: skip
        self.link = LinkProtocol(
            slots=[Slot(fragment=p) for p in range(count)], has_constants=False,
            next_delay=lambda: 1.0, reset_delay=lambda: None, syncer="syncer:7070",
        )  # fmt: skip
        self.handle(ev.TrainerUpdate(state=self.core.state()))

    def _welcome(
        self, step: str = "0", epoch: str = "1", local_step: str = "0", start: str = "", follows: str = ""
    ) -> None:  # fmt: skip
        self.handle(
            ev.Welcomed(
                epoch=int(epoch), incarnation=1, step=int(step), steps=1000,
                local_step=int(local_step), total_tokens=0, heartbeat_seconds=2.0,
                use_checkpoint=False, start_id=start, snapshot_start_id=follows,
            )
        )  # fmt: skip

    def _ready(self, *steps: str, epoch: str = "1") -> None:
        """The model exists; the version of each fragment is of these global steps."""
        self.handle(ev.ModelReady(versions=tuple((int(epoch), int(step)) for step in steps)))

    def _open(self, *fragments: str, step: str) -> None:
        opened = tuple(int(p) for p in fragments)
        self.handle(ev.Opened(step=int(step), steps=1000, fragments=opened))

    def _pull(self, fragment: str, step: str) -> None:
        self.handle(
            ev.Pulled(round=int(step), attempt=1, fragment=int(fragment), versions=((1, 0),))
        )

    def _result(self, fragment: str, step: str) -> None:
        """The syncer merges a fragment, and announces where its result will be."""
        self.handle(ev.ResultAnnounced(round=int(step), attempt=1, fragment=int(fragment)))

    def _committed(self, fragment: str, step: str, epoch: str = "1") -> None:
        self.handle(ev.Committed(fragment=int(fragment), version=(int(epoch), int(step))))

    def _request(self, fragment: str) -> ev.Download:
        request = next(d for d in self.downloads if d.fragment == int(fragment))
        self.downloads.remove(request)
        return request

    def _arrived(self, fragment: str, step: str, epoch: str = "1") -> None:
        """A download ends with this version, committed."""
        self.tickets += 1
        staged = Staged(
            fragment=int(fragment), version=(int(epoch), int(step)), ticket=self.tickets
        )
        self.handle(ev.Downloaded(request=self._request(fragment), staged=staged))

    def _aborted(self, fragment: str) -> None:
        self.handle(ev.Downloaded(request=self._request(fragment), aborted=True))

    def _undecided(self, fragment: str) -> None:
        self.handle(ev.Downloaded(request=self._request(fragment)))

    def _failed(self, fragment: str, *error: str) -> None:
        self.handle(ev.Downloaded(request=self._request(fragment), error=" ".join(error)))

    def _lost(self, *text: str) -> None:
        self.handle(ev.SessionLost(text=" ".join(text)))

    def _step(self, count: str = "1") -> None:
        """So many steps of the optimizer."""
        for _ in range(int(count)):
            copied = self._act(self.core.step(TOKENS, self._take(), now=self.now))
            self._act(self.core.copied(copied, loss=None))
            self.now += 1.0

    def _wait(self, seconds: str) -> None:
        until = self.now + float(seconds)
        while self.link.wake_at is not None and self.link.wake_at <= until:
            self.now = max(self.now, self.link.wake_at)
            self.handle(ev.Tick())
        self.now = until

    def _status(self) -> None:
        state = self._newest or self.link.link_state
        self.show(f"{state.phase}: {state.text}" if state.text else f"{state.phase}")
        self.show(f"local step {self.core.ledger.local_step}, c_steps {self.core.ledger.steps}")
        self.show(f"may be pulled for fragments {' '.join(map(str, state.open)) or 'none'}")
