"""An engine driven event by event, and what is asked of its decisions."""

from __future__ import annotations

from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.engine import Engine


class Job:
    """An engine with learners a, b, c, … whose sessions and incarnations are 1, 2, 3, …; Θ exists."""

    def __init__(self, names="ab", *, initialised=True, now=0.0, **changes):
        values = {
            "job": "t", "steps": 100, "fragments": 4, "interval": 4, "overlap": 2, "quorum": 1,
            "learners": {"eu": 9}, "syncer_checkpoint": Checkpoint(every_steps=1000, keep=2),
        }  # fmt: skip
        self.engine = Engine(spec=RunSpec(**{**values, **changes}), epoch=1)
        self.names, self.now = names, now
        for name in names:
            self.hello(name)
        if initialised:
            self(ev.Initialised(learner="a"))
            self(ev.SnapshotDone(step=0))

    def __call__(self, event, *, at=None):
        self.now = self.now if at is None else at
        return self.engine.handle(event, self.now)

    def session(self, name):
        return self.names.index(name) + 1

    def __getitem__(self, name):
        return self.engine.learners.by_name[name]

    @property
    def rounds(self):
        return self.engine.scheduler.in_flight

    def hello(self, name, *, session=None, incarnation=None, fresh=True, checkpoint=0, **rest):
        mine = self.session(name)
        return self(
            ev.Hello(
                session=session or mine, learner=name, region="eu", incarnation=incarnation or mine,
                fresh=fresh, local_step=0, checkpoint_step=checkpoint,
            ),
            **rest,
        )  # fmt: skip

    def left(self, name, **rest):
        return self(ev.Left(session=self.session(name), learner=name, reason="Gone"), **rest)

    def report(self, name, local_step, *, at=None, **changes):
        values = {
            "session": self.session(name), "learner": name, "local_step": local_step,
            "steps": (1,) * 4, "tokens": (10,) * 4, "offers": frozenset(range(4)), "total_tokens": 10 * local_step,
            "global_step": 0, "step_seconds": 1.0, "sync_seconds": 0.0, "loss": None,
        }  # fmt: skip
        return self(ev.Reported(**{**values, **changes}), at=at)

    def meet(self):
        """All learners train, and none offers anything yet: round 1 waits for the first to do so."""
        for name in self.names:
            self.report(name, 0, offers=frozenset())
        return self

    def report_all(self, local_step):
        return [d for name in self.names for d in self.report(name, local_step)]

    def heartbeats(self, *, at):
        return [
            d
            for n in self.names
            for d in self(ev.Heartbeat(session=self.session(n), learner=n), at=at)
        ]

    def wait(self, until):
        """Heartbeats and ticks every second; returns what was decided meanwhile."""
        out = []
        while self.now < until:
            out += self.heartbeats(at=min(until, self.now + 1.0))
            out += self(ev.Tick())
        return out

    def contribute(self, name, *, round=1, attempt=1, local_step=1, steps=1, tokens=10, at=None):  # noqa: A002
        return self(
            Contribution(
                learner=name, incarnation=self.session(name), round=round, attempt=attempt,
                local_step=local_step, steps=steps, tokens=tokens, base=(1, 0), format=1, norms=(),
            ),
            at=at,
        )  # fmt: skip

    def merged(self, *, round=1, attempt=1, at=None):  # noqa: A002
        return self(
            ev.Merged(round=round, attempt=attempt, delta_norm=1.0, bytes_up=7, bytes_result=5),
            at=at,
        )

    def merge(self, *names, round, local_step, attempt=1):  # noqa: A002
        for name in names:
            self.contribute(name, round=round, attempt=attempt, local_step=local_step)
        return self.merged(round=round, attempt=attempt)

    def dropped(self, name, *, round=1, attempt=1, reason="Damaged"):  # noqa: A002
        return self(
            ev.Dropped(learner=name, round=round, attempt=attempt, reason=reason, detail="x")
        )


def of(kind, decisions):
    return [d for d in decisions if isinstance(d, kind)]


def pulls(decisions):
    return [(d.round, d.attempt, d.learners) for d in of(ev.Pull, decisions)]


def logs(event, decisions):
    return [d.fields for d in of(ev.Log, decisions) if d.event == event]


def wake(decisions):
    [it] = of(ev.WakeAt, decisions)
    return it.seconds
