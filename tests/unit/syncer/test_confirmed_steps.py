"""How many steps one merged upload confirms, whatever sessions and steps its learner states after it."""

import pytest

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import CONFIRMED_INTERVALS, CONFIRMED_STEPS
from diloco_testing.syncers.virtual_job import VirtualJob

INTERVAL = 50
CONFIRMED = CONFIRMED_INTERVALS * INTERVAL + CONFIRMED_STEPS


class Misbehaving:
    """A learner of which a merged upload confirmed the speed; from then on it only reports, 20 times as often."""

    def __init__(self, world, name):
        self.world, self.me = world, world.learners[name]
        self.me.generation += 1  # its trainer is paused
        self.newest = self.me.local_step

    def connect(self, local_step):
        self.me.session = next(self.world._sessions)
        self.world.post(
            ev.Hello(
                session=self.me.session, learner=self.me.name, region="eu",
                incarnation=self.me.incarnation, fresh=False, local_step=local_step, checkpoint_step=0,
            )
        )  # fmt: skip

    def report(self, local_step):
        self.world.post(
            ev.Reported(
                session=self.me.session, learner=self.me.name, local_step=local_step, steps=(1,),
                tokens=(10,), offers=frozenset(), total_tokens=self.me.total_tokens,
                global_step=self.world.engine.step, step_seconds=1.0, sync_seconds=0.0, loss=None,
            )
        )  # fmt: skip

    def repeat_in_sessions(self, count):
        """The same steps, from the first one on, in each of its sessions."""
        position = count % self.newest
        if position == 0:
            self.connect(0)
        self.report(1 + position)

    def reconnect_often(self, count):
        """Ever new steps, in sessions of 100 each that begin at the last one."""
        if count % 100 == 0:
            self.connect(self.newest + count)
        self.report(self.newest + count + 1)

    def reconnect_always(self, count):
        """Each step in a session of its own."""
        self.connect(self.newest + count)
        self.report(self.newest + count + 1)


@pytest.mark.parametrize("learners", [2, 3])
@pytest.mark.parametrize(
    "lie",
    [Misbehaving.repeat_in_sessions, Misbehaving.reconnect_often, Misbehaving.reconnect_always],
)
def test_a07_another_session_does_not_prolong_what_an_upload_confirms(lie, learners):
    names = {f"eu/{i}": 1.0 for i in range(learners)}
    spec = RunSpec(
        job="t", steps=100_000, fragments=1, interval=INTERVAL, overlap=1, learners={"eu": learners}
    )
    world = VirtualJob(spec, names)
    for name in names:
        world.join(name)
    world.run(INTERVAL + 30.0)
    misbehaving = Misbehaving(world, f"eu/{learners - 1}")
    assert world.engine.learners.by_name[misbehaving.me.name].confirmed, "it was merged honestly"
    before, seconds = world.engine.step, 200

    def lie_again(count):
        lie(misbehaving, count)
        world.at(world.now + 0.05, lambda: lie_again(count + 1))

    lie_again(0)
    world.run(world.now + seconds, most_events=100_000)
    assert not world.engine.learners.by_name[misbehaving.me.name].confirmed
    assert seconds - 2 <= world.engine.step - before <= seconds + CONFIRMED
