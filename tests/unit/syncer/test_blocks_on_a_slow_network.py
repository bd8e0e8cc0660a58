"""The ledger of the syncer and the blocks of learners, with messages that are late, lost with a session, or cross."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.core.blocks import IDLE_SECONDS, BlockLedger
from diloco_syncer.core.events import BlocksStated, Decision, LeaseBlocks, Log, TrainedBlock
from diloco_worker.core.open_blocks import Blocks, Data


@dataclass
class Learner:
    """Takes one block after the other, with a step for each."""

    data: Data
    blocks: Blocks = field(init=False)
    up: deque[dict] = field(default_factory=deque)
    down: deque[tuple[int, ...]] = field(default_factory=deque)
    sent: dict = field(default_factory=dict)
    connected: bool = False
    session: int = 0
    step: int = 0
    done: list[int] = field(default_factory=list)
    """Serials that it took and stepped on."""
    using: int | None = None

    def __post_init__(self) -> None:
        self.blocks = Blocks(data=self.data)

    def state(self) -> None:
        stated = self.blocks.to_json()
        if self.connected and stated != self.sent:
            self.sent = stated
            self.up.append(stated)

    def train(self) -> None:
        if self.using is not None:
            self.step += 1
            self.blocks.stepped(self.step)
            self.done.append(self.using)
        self.using = self.blocks.take(self.step)
        if self.using is None:
            self.blocks.asked += 1
        self.state()


class SlowJob:
    """Learners and a syncer."""

    def __init__(self, blocks: int, learners: int) -> None:
        self.ledger, self.now, self.sessions = BlockLedger(), 0.0, 0
        data = Data(items=blocks, size=1, ahead=1)
        self.learners = {f"eu/{n}": Learner(data) for n in range(learners)}
        self.trained: dict[int, str] = {}
        self.refused: list[dict] = []

    def took(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case LeaseBlocks() if self.learners[decision.learner].connected:
                    self.learners[decision.learner].down.append(decision.serials)
                case Log(event="trained"):
                    for block in decision.fields["blocks"]:
                        assert block["block"] not in self.trained
                        self.trained[block["block"]] = decision.fields["learner"]
                case Log(event="refuse"):
                    self.refused.append(decision.fields)

    def advance(self) -> None:
        self.took(self.ledger.advance(self.now))

    def act(self, action: str, name: str) -> None:
        learner = self.learners[name]
        self.now += 0.05
        if action == "train":
            learner.train()
        elif action == "up" and learner.up:
            stated = learner.up.popleft()
            event = BlocksStated(
                session=learner.session, learner=name, items=stated["items"], size=stated["size"],
                wanted=stated["wanted"], open=tuple(stated["open"]),
                trained=tuple(TrainedBlock(serial=s, begin=b, end=e) for s, b, e in stated["trained"]),
            )  # fmt: skip
            self.took(self.ledger.stated(event, incarnation=1, now=self.now))
        elif action == "down" and learner.down:
            learner.blocks.leased(learner.down.popleft())
            learner.state()
        elif action == "cut" and learner.connected:
            learner.connected = False
            learner.up.clear()
            learner.down.clear()
            self.took(self.ledger.left(name, "StreamEnded", self.now))
        elif action == "connect" and not learner.connected:
            self.sessions += 1
            learner.connected, learner.session, learner.sent = True, self.sessions, {}
            self.took(self.ledger.joined(name, 1))
            learner.state()
        elif action == "long":
            self.now += IDLE_SECONDS
        self.advance()


ACTIONS = ("train",) * 8 + ("up",) * 8 + ("down",) * 8 + ("cut", "connect", "connect")
NAMES = ("eu/0", "eu/1", "eu/2")


def histories(*more: str) -> st.SearchStrategy[list[tuple[str, str]]]:
    """Long ones: a list of hypothesis seldom reaches what takes ten messages in a row."""

    def drawn(seed: int) -> list[tuple[str, str]]:
        random = Random(seed)
        began = [(action, name) for action in ("connect", "train", "up") for name in NAMES]
        actions = random.choices([*ACTIONS, *more], k=random.randrange(300))
        return began + [(action, random.choice(NAMES)) for action in actions]

    return st.integers(0, 1 << 32).map(drawn)


@given(st.integers(1, 12), histories())
def test_short_cuts_and_late_messages_accuse_no_learner_and_every_block_counts_for_who_trained_on_it(
    blocks, history
):
    job = SlowJob(blocks, len(NAMES))
    for action, name in history:
        job.act(action, name)
    for name, learner in job.learners.items():
        job.act("connect", name)
        while learner.up or learner.down:
            job.act("up", name)
            job.act("down", name)
    assert not job.refused
    for name, learner in job.learners.items():
        assert len(set(learner.done)) == len(learner.done)
        ended = set(learner.done) - {learner.using}
        assert {serial for serial, who in job.trained.items() if who == name} >= ended - {
            serial for serial, _ in learner.blocks._begun
        }


@given(st.integers(1, 12), histories("long"))
def test_after_any_history_the_learners_that_remain_train_on_everything(blocks, history):
    job = SlowJob(blocks, len(NAMES))
    for action, name in history:
        job.act(action, name)
    # eu/0 stops, connected or not; the others continue.
    target = max([2 * blocks, *(serial + 1 for serial in job.trained)])
    for _ in range(40 * target):
        for name in NAMES[1:]:
            for action in ("connect", "up", "down", "train"):
                job.act(action, name)
        job.now += 20
        if job.ledger.oldest >= target:
            break
    assert set(range(target)) <= set(job.trained)
