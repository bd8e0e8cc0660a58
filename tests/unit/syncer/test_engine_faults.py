"""The engine while learners and the syncer itself misbehave without dying, in virtual time."""

import contextlib
import itertools
import json
import random

import pytest

from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.ejection import MAX_BACKOFF_SECONDS, backoff_seconds
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.initialisation import STALL_SECONDS
from diloco_testing.syncers.virtual_job import VirtualJob


def spec_of(**changes):
    values = {
        "job": "t", "steps": 100_000, "fragments": 24, "interval": 24, "overlap": 2,
        "quorum": 1, "learners": {"eu": 8},
    }  # fmt: skip
    return RunSpec(**{**values, **changes})


class FaultyJob(VirtualJob):
    """Some learners stop delivering at a time; their reports and heartbeats continue."""

    def __init__(
        self, spec, learners, *, mute=(), trickle=(), nan=(), since=20.0, until=1e9, **rest
    ):
        super().__init__(spec, learners, **rest)
        self.mute, self.trickle, self.nan = set(mute), set(trickle), set(nan)
        self.since, self.until = since, until

    def _faulty(self):
        return self.since < self.now < self.until

    def _pulled(self, learner, pull):
        if learner.name in self.nan and self._faulty():
            dropped = ev.Dropped(
                learner=learner.name, round=pull.round, attempt=pull.attempt, reason="NotFinite",
                detail="NaN",
            )  # fmt: skip
            self.at(self.now + 0.01, lambda: self.post(dropped))
        elif not (learner.name in self.mute and self._faulty()):
            super()._pulled(learner, pull)

    def _probed(self, learner, probe):
        if not (learner.name in self.mute | self.trickle | self.nan and self._faulty()):
            super()._probed(learner, probe)

    def _merging(self, begin):
        slow = [c for c in begin.contributions if c.learner in self.trickle]
        if not slow or not self._faulty():
            super()._merging(begin)
            return
        for contribution in begin.contributions:
            mine = {"learner": contribution.learner, "round": begin.round, "attempt": begin.attempt}
            if contribution not in slow:
                self.post(ev.Progress(**mine, received_bytes=1 << 20, done=True))
                continue
            for number in range(1, 40):  # a few bytes a second
                trickle = ev.Progress(**mine, received_bytes=10 * number)
                self.at(self.now + number, lambda event=trickle: self.post(event))


def job_of(job=FaultyJob, *, count=8, speeds=None, **changes):
    faults = {
        k: changes.pop(k)
        for k in ("mute", "trickle", "nan", "since", "until", "delay")
        if k in changes
    }
    seconds = speeds or [1.0 + 0.02 * i for i in range(count)]
    learners = {f"eu/{i}": s for i, s in enumerate(seconds)}
    world = job(spec_of(**changes), learners, **faults)
    for name in learners:
        world.join(name)
    return world


def logged(world, event):
    return [line for line in map(json.loads, world.lines) if line["event"] == event]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["mute", "trickle", "nan"])
def test_one_of_eight_that_does_not_deliver_costs_the_others_less_than_2_percent_of_their_merges(
    fault,
):
    healthy = job_of()
    healthy.run(620, most_events=10**6)
    faulty = job_of(**{fault: ["eu/3"]})
    faulty.run(620, most_events=10**6)
    count = {
        name: len([m for m in w.merges() if m["time"] > 20])
        for name, w in (("h", healthy), ("f", faulty))
    }
    assert count["f"] >= 0.98 * count["h"]
    late = [m for m in faulty.merges() if m["time"] > 60]
    assert all("eu/3" not in {x["learner"] for x in m["members"]} for m in late)
    assert logged(faulty, "eject")[0]["learner"] == "eu/3"


@pytest.mark.slow
def test_a_learner_that_delivers_again_is_readmitted_after_a_probe():
    world = job_of(mute=["eu/3"], since=20.0, until=60.0)
    world.run(300, most_events=10**6)
    [readmitted] = logged(world, "readmit")
    assert readmitted["learner"] == "eu/3"
    assert 60.0 <= readmitted["time"] < 120.0
    late = [m for m in world.merges() if m["time"] > readmitted["time"] + 10]
    assert late
    assert sum("eu/3" in {x["learner"] for x in m["members"]} for m in late) / len(late) > 0.9


def test_the_back_off_between_probes_grows_up_to_its_maximum():
    pauses = [backoff_seconds(n) for n in range(1, 40)]
    assert all(a <= b for a, b in itertools.pairwise(pauses))
    assert pauses[-1] == MAX_BACKOFF_SECONDS


@pytest.mark.slow
def test_a_mute_learner_is_probed_less_and_less_often():
    world = job_of(mute=["eu/3"])
    world.run(1500, most_events=10**7)
    probes = [when for when, d in world.decisions if isinstance(d, ev.ProbeLearner)]
    assert len(probes) <= 9
    pauses = [b - a for a, b in itertools.pairwise(probes)]
    assert all(b > a for a, b in itertools.pairwise(pauses[:-1]))


def test_an_ejected_learner_does_not_set_the_pace():
    world = job_of(speeds=[0.2, 1.0, 1.0], mute=["eu/0"], steps=400)
    world.run(220, most_events=10**6)
    late = [m for m in world.merges() if m["time"] > 100]
    assert len(late) == pytest.approx(120, rel=0.05)


def test_a_learner_without_which_there_is_no_quorum_is_not_ejected_and_the_status_names_it():
    world = job_of(count=4, quorum=4, fragments=4, interval=4, nan=["eu/3"], since=10.0)
    world.run(300, most_events=10**6)
    assert not logged(world, "eject")
    text = world.engine.waiting_for()
    assert "eu/3: NotFinite" in text
    assert "a merge of fragment" in text


class Far(FaultyJob):
    """Everything to and from eu/3 takes 2 s, two of its steps."""

    def _announced(self, learner, decision):
        with self.distance(learner):
            super()._announced(learner, decision)

    def _pulled(self, learner, pull):
        with self.distance(learner):
            super()._pulled(learner, pull)

    def _send(self, event, learner, what):
        with self.distance(learner):
            super()._send(event, learner, what)

    @contextlib.contextmanager
    def distance(self, learner):
        self.delay = lambda what: 2.0 if learner.name == "eu/3" else 0.0
        yield
        self.delay = lambda what: 0.0


@pytest.mark.slow
def test_20_a_far_learner_is_in_nearly_all_merges_at_a_round_trip_of_four_steps():
    world = job_of(Far, speeds=[1.0, 1.01, 1.02, 1.0], overlap=4)
    world.run(500, most_events=10**6)
    late = [m for m in world.merges() if m["time"] > 60]
    share = [any(x["learner"] == "eu/3" for x in m["members"]) for m in late]
    assert sum(share) / len(share) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("overlap", [4, 5])
def test_20_a_far_learner_is_in_nearly_all_merges_whatever_the_phase_of_its_steps(overlap, seed):
    """Its uploads are of steps that its reports reach a round trip later; those count as fresh."""
    world = job_of(Far, speeds=[1.0, 1.01, 1.02, 0.99], overlap=overlap)
    seconds = {name: learner.step_seconds for name, learner in world.learners.items()}
    jitter = random.Random(seed)

    def train(learner):
        learner.step_seconds = seconds[learner.name] * (1 + 0.03 * jitter.gauss(0, 1))

    world.train = train
    world.run(400, most_events=10**6)
    late = [m for m in world.merges() if m["time"] > 60]
    share = [any(x["learner"] == "eu/3" for x in m["members"]) for m in late]
    assert sum(share) / len(share) >= 0.95
    assert len(late) >= 0.98 * 340, "and no learner waits for it"


def test_near_learners_are_announced_no_more_fragments_than_before():
    world = job_of(count=2)
    world.run(100)
    wide = [d for t, d in world.decisions if t > 20 and isinstance(d, ev.AnnounceFragments)]
    assert max(len(d.fragments) for d in wide) <= world.spec.overlap + 1


# ------------------------------------------------------------ single events


class Driven:
    """An engine driven event by event; collects what it decides."""

    def __init__(self, names=("eu/0", "eu/1"), **changes):
        values = {"fragments": 4, "interval": 4, "learners": {"eu": len(names)}}
        self.engine = Engine(spec=spec_of(**{**values, **changes}), epoch=1)
        self.names, self.now, self.out = list(names), 0.0, []
        for session, name in enumerate(names, 1):
            self.hello(name, session)

    def handle(self, event):
        decisions = self.engine.handle(event, self.now)
        self.out += decisions
        return decisions

    def hello(self, name, session, *, fresh=True, incarnation=None):
        return self.handle(
            ev.Hello(
                session=session, learner=name, region="eu", incarnation=incarnation or session,
                fresh=fresh, local_step=0, checkpoint_step=0,
            )
        )  # fmt: skip

    def initialised(self):
        self.handle(ev.Initialised(learner=self.names[0]))
        return self

    def report(self, name, local_step, **changes):
        values = {
            "session": self.names.index(name) + 1, "learner": name, "local_step": local_step,
            "steps": (1,) * 4, "tokens": (10,) * 4, "offers": frozenset(range(4)),
            "total_tokens": 10 * local_step, "global_step": self.engine.step, "step_seconds": 1.0,
            "sync_seconds": 0.0, "loss": None,
        }  # fmt: skip
        return self.handle(ev.Reported(**{**values, **changes}))

    def contribute(self, name, round_, local_step, *, attempt=None, steps=1, tokens=10):
        if attempt is None:
            attempt = self.last(ev.Pull, round=round_).attempt
        return self.handle(
            Contribution(
                learner=name, incarnation=self.names.index(name) + 1, round=round_, attempt=attempt,
                local_step=local_step, steps=steps, tokens=tokens, base=(1, 0), format=1, norms=(),
            )
        )  # fmt: skip

    def merged(self, round_):
        attempt = self.last(ev.Pull, round=round_).attempt
        return self.handle(
            ev.Merged(round=round_, attempt=attempt, delta_norm=1.0, bytes_up=0, bytes_result=0)
        )

    def wait(self, seconds):
        """Let time pass while all learners send heartbeats."""
        out = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for session, name in enumerate(self.names, 1):
                out += self.handle(ev.Heartbeat(session=session, learner=name))
            out += self.handle(ev.Tick())
        return out

    def last(self, kind, **match):
        for decision in reversed(self.out):
            if isinstance(decision, kind) and all(
                getattr(decision, k) == v for k, v in match.items()
            ):
                return decision
        raise AssertionError(f"no {kind.__name__} {match}")

    def kinds(self, kind):
        return [d for d in self.out if isinstance(d, kind)]

    def logs(self, event):
        return [d.fields for d in self.out if isinstance(d, ev.Log) and d.event == event]


def test_a_report_that_a_newer_round_has_used_is_not_given_back_by_an_older_round_that_fails():
    job = Driven(quorum=1).initialised()
    for name in job.names:
        job.report(name, 1)
    assert job.last(ev.Pull).round == 1
    job.now = 1.0
    for name in job.names:
        job.report(name, 2)
    assert job.last(ev.Pull).round == 2
    for name in job.names:
        job.contribute(name, 2, 2)
    job.merged(2)
    job.contribute("eu/1", 1, 1)
    job.wait(40)  # eu/0 never answers round 1
    assert job.engine.learners.by_name["eu/0"].used_reports.newest == 2
    pulls = [d for d in job.kinds(ev.Pull) if d.round > 2 and "eu/0" in d.learners]
    assert not pulls, "its report of step 2 is part of round 2"


def test_a_report_is_not_merged_into_two_fragments():
    job = Driven(names=("eu/0",)).initialised()
    job.report("eu/0", 1)
    job.now = 1.0
    job.report("eu/0", 2)
    assert [d.round for d in job.kinds(ev.Pull)] == [1, 2]
    job.contribute("eu/0", 1, 2)  # encoded late: the copy is already of step 2
    job.merged(1)
    job.contribute("eu/0", 2, 2)
    assert [d.round for d in job.kinds(ev.BeginMerge)] == [1]
    job.now = 2.0
    job.report("eu/0", 3)
    job.wait(1)
    job.contribute("eu/0", 2, 3)
    assert [d.round for d in job.kinds(ev.BeginMerge)] == [1, 2]


def test_two_rounds_of_one_fragment_are_never_in_flight():
    job = Driven(names=("eu/0",), fragments=1, interval=3, overlap=1)
    job.engine.scheduler.pace.step = 0
    object.__setattr__(job.engine.spec, "overlap", 2)  # as a spec of an earlier version may have it
    job.initialised()
    for step in range(1, 12):
        job.now += 1.0
        job.report("eu/0", step)
    assert [r.step for r in job.engine.scheduler.in_flight] == [3]


def test_overlap_above_the_number_of_fragments_is_refused():
    with pytest.raises(Exception, match=r"overlap: 2 is not in 1\.\.1"):
        spec_of(fragments=1, interval=3, overlap=2)


def test_a_snapshot_holds_the_state_of_its_step_although_rounds_begin_in_the_same_event():
    job = Driven(names=("eu/0",), syncer_checkpoint=Checkpoint(every_steps=1, keep=2)).initialised()
    job.handle(ev.SnapshotDone(step=0))
    job.report("eu/0", 1)
    job.contribute("eu/0", 1, 1)
    job.now = 1.0
    job.report("eu/0", 2)
    job.merged(1)
    taken = job.last(ev.TakeSnapshot)
    assert taken.step == taken.engine["step"] == 1
    reports = taken.engine["members"]["eu/0"]["reports"]
    assert reports["merged"] == [1], "the report of round 2, in flight, is not merged"


def test_a_learner_that_comes_back_after_a_long_cut_does_not_outweigh_the_others():
    job = Driven().initialised()
    for name in job.names:
        job.report(name, 1, offers=frozenset(), tokens=(100,) * 4, total_tokens=100)
    job.now = 1000.0
    job.report("eu/0", 5, steps=(4,) * 4, tokens=(400,) * 4, total_tokens=500)
    job.report("eu/1", 601, steps=(600,) * 4, tokens=(60_000,) * 4, total_tokens=60_100)
    assert job.last(ev.Pull).learners == ("eu/0", "eu/1")
    job.contribute("eu/0", 1, 5, steps=4, tokens=400)
    job.contribute("eu/1", 1, 601, steps=600, tokens=60_000)
    begin = job.last(ev.BeginMerge)
    weights = {c.learner: c.weight for c in begin.contributions}
    assert weights["eu/1"] / weights["eu/0"] <= 3.0
    returned = begin.contributions[1]
    assert returned.tokens / returned.steps == 100


def test_a_pause_of_the_syncer_itself_makes_no_learner_late():
    job = Driven().initialised()
    for name in job.names:
        job.report(name, 1)
    job.contribute("eu/0", 1, 1)
    job.now += 120.0
    out = job.handle(ev.Tick())
    assert not [d for d in out if isinstance(d, ev.Close | ev.AbortMerge)]
    assert job.logs("pause") == [{"seconds": 120.0}]
    assert all(r.session is not None for r in job.engine.learners)
    job.contribute("eu/1", 1, 1)
    assert job.kinds(ev.BeginMerge)


def test_an_initialiser_that_hangs_is_replaced_by_the_next_learner():
    job = Driven()
    assert job.last(ev.RequestInitial).learner == "eu/0"
    job.wait(STALL_SECONDS - 1)
    progress = ev.Progress(learner="eu/0", round=0, attempt=0, received_bytes=1 << 30)
    job.handle(progress)
    job.wait(STALL_SECONDS - 1)
    assert len(job.kinds(ev.RequestInitial)) == 1, "it makes progress"
    job.wait(2)
    assert job.last(ev.RequestInitial).learner == "eu/1"
    assert [line["reason"] for line in job.logs("refuse")] == ["InitialLate"]


def test_an_initialiser_that_uploads_again_and_again_and_never_ends_is_replaced():
    job = Driven()
    parts = 3 * (4 + 1)
    for _ in range(parts + 70):
        job.now += 1.0
        for received in (1 << 24, 1 << 27):
            job.handle(ev.Progress(learner="eu/0", round=0, attempt=0, received_bytes=received))
        for name in ("eu/0", "eu/1"):
            job.handle(ev.Heartbeat(session=job.names.index(name) + 1, learner=name))
    job.handle(ev.Tick())
    asked = [d.learner for d in job.out if isinstance(d, ev.RequestInitial)]
    assert asked == ["eu/0", "eu/1"]


def test_an_initialiser_that_trickles_is_replaced_by_the_next_learner():
    job = Driven()
    for received in range(1, 200):
        job.wait(1)
        job.handle(ev.Progress(learner="eu/0", round=0, attempt=0, received_bytes=received))
    assert job.kinds(ev.RequestInitial)[1].learner == "eu/1"


def test_an_ejected_learner_is_probed_soon_when_the_quorum_is_short():
    world = job_of(count=3, quorum=2, fragments=4, interval=4, mute=["eu/2"], until=200.0)
    world.at(205.0, lambda: world.die("eu/1"))
    world.run(260, most_events=10**6)
    assert max(m["time"] for m in world.merges()) > 250, (
        "eu/2 is back although its back-off was long"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "quorum"), [(2, 1), (3, 2)])
def test_an_ejected_learner_is_probed_soon_when_a_learner_that_the_quorum_needs_hangs(
    count, quorum
):
    world = job_of(count=count, quorum=quorum, mute=[f"eu/{count - 1}"], until=200.0)
    hangs = world.learners[f"eu/{count - 2}"]

    def tick():  # as the runner does, however many reports arrive
        world.post(ev.Heartbeat(session=hangs.session, learner=hangs.name))
        world.post(ev.Tick())

    def hang():
        hangs.generation += 1  # no further step; heartbeats continue
        for second in range(60):
            world.at(world.now + second, tick)

    world.at(205.0, hang)
    world.run(265, most_events=10**6)
    times = [m["time"] for m in world.merges() if m["time"] > 200.0]
    assert max(b - a for a, b in itertools.pairwise([*times, 265.0])) < 20.0
    assert len(logged(world, "eject")) == 1


def test_an_ejected_learner_is_probed_soon_when_a_learner_that_the_quorum_needs_offers_nothing():
    world = job_of(count=3, quorum=2, mute=["eu/2"], until=600.0)
    announced = world._announced
    world._announced = lambda learner, decision: (
        announced(learner, decision) if learner.name != "eu/1" else None
    )
    world.run(640, most_events=10**6)
    # The probe that began before 600 s ends first.
    assert any(m["time"] > 600.0 for m in world.merges())
    assert [line["learner"] for line in logged(world, "eject")] == ["eu/2"]


def test_a_learner_whose_initial_model_is_not_finite_is_refused_for_good():
    job = Driven()
    out = job.handle(
        ev.InitialFailed(learner="eu/0", reason="NotFinite", detail="layer.weight holds NaN")
    )
    assert [(d.session, d.reason) for d in out if isinstance(d, ev.Close)] == [(1, "NotFinite")]
    assert job.last(ev.RequestInitial).learner == "eu/1"


def test_a_merge_that_cannot_begin_is_tried_again():
    job = Driven(names=("eu/0",)).initialised()
    job.report("eu/0", 1)
    [begin] = [d for d in job.contribute("eu/0", 1, 1) if isinstance(d, ev.BeginMerge)]
    out = job.handle(ev.Failed(decision=begin, reason="MemoryError"))
    assert [type(d) for d in out if isinstance(d, ev.AbortMerge)] == [ev.AbortMerge]
    out = job.wait(6)
    assert job.last(ev.Pull).attempt > begin.attempt


def test_a_failure_after_which_the_state_cannot_be_trusted_is_raised():
    job = Driven(names=("eu/0",)).initialised()
    commit = ev.Commit(round=1, attempt=1, fragment=0, changed=True)
    with pytest.raises(RuntimeError, match="Commit failed: boom"):
        job.handle(ev.Failed(decision=commit, reason="boom"))


def test_the_job_is_complete_only_when_snapshot_and_model_are_written():
    job = Driven(names=("eu/0",), steps=1).initialised()
    job.handle(ev.SnapshotDone(step=0))
    job.report("eu/0", 1)
    job.contribute("eu/0", 1, 1)
    job.merged(1)
    assert job.last(ev.TakeSnapshot).step == 1
    job.handle(ev.SnapshotDone(step=None, reason="no space left on device"))
    assert "last snapshot" in job.engine.waiting_for()
    assert "no space left" in job.engine.waiting_for()
    assert not job.kinds(ev.Finish)
    taken = len(job.kinds(ev.TakeSnapshot))
    job.wait(6)
    assert len(job.kinds(ev.TakeSnapshot)) == taken + 1
    job.handle(ev.SnapshotDone(step=1))
    assert len(job.kinds(ev.Finish)) == 1
    job.handle(ev.ExportFailed(reason="no space left on device"))
    assert "the model to be exported" in job.engine.waiting_for()
    job.wait(30)
    assert len(job.kinds(ev.Finish)) == 2
    assert not job.kinds(ev.AnnounceComplete)
    assert not job.engine.complete
    job.handle(ev.Exported(step=1))
    assert job.engine.complete
    assert [d.learner for d in job.kinds(ev.AnnounceComplete)] == ["eu/0"]
    assert job.logs("complete")


def test_a_job_whose_learners_stop_stepping_is_reported_as_stuck():
    job = Driven().initialised()
    assert job.engine.waiting_for() == "a quorum of 1 (learners training: 0)"
    for name in job.names:
        job.report(name, 1)
        job.contribute(name, 1, 1)
    job.merged(1)
    assert job.engine.waiting_for() == ""
    job.wait(300)
    assert job.engine.waiting_for() != ""


def test_engine_time_per_event_does_not_grow_with_the_square_of_the_learners():
    """Counts decisions, not seconds: every announcement and pull of a step is one decision."""
    job = Driven(names=tuple(f"eu/{i}" for i in range(300)), grace_max_steps=0.0).initialised()
    before = len(job.out)
    for name in job.names:
        job.report(name, 1)
    assert len(job.out) - before <= 6 * len(job.names)


def test_theta_that_would_grow_implausibly_stops_the_job_before_it_is_merged():
    job = Driven().initialised()
    for name in job.names:
        job.report(name, 1)
    for name in job.names:
        job.contribute(name, 1, 1)
    attempt = job.last(ev.Pull, round=1).attempt
    job.handle(
        ev.Merged(
            round=1, attempt=attempt, delta_norm=1e9, bytes_up=0, bytes_result=0, sizes=(0.5, 1e6)
        )
    )
    assert job.logs("halt")[0]["fragment"] == 1
    aborted = job.last(ev.AbortMerge)
    assert (aborted.round, aborted.attempt) == (1, attempt)
    assert aborted.reason in job.engine.waiting_for()
    assert not job.kinds(ev.Commit)
    assert "manual action" in job.engine.waiting_for()
    assert "from a root mean square of 0.5 to 1e+06" in job.engine.waiting_for()
    pulls = len(job.kinds(ev.Pull))
    job.now = 5.0
    for name in job.names:
        job.report(name, 2)
    job.wait(5)
    assert len(job.kinds(ev.Pull)) == pulls
    assert job.engine.step == 0
    waiting = job.engine.waiting_for()
    job.engine = Engine.resume(job.engine.spec, epoch=2, state=job.engine.to_json())
    assert job.engine.waiting_for() == waiting, "a restart is no decision"
