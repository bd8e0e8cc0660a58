"""Whose model counts until the initial parameters exist: of learners that differ, and that do not deliver."""

import dataclasses

import pytest

from diloco.errors import ConfigError, DilocoError, MismatchError, UnavailableError
from diloco.model.fragments import Tensor
from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.coordinator import ParametersReceived
from diloco_syncer.core import admission as limits
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Admitted, Applicant, Refused
from diloco_syncer.core.initialisation import (
    MAX_UPLOADS,
    STALL_SECONDS,
    WAITING_SECONDS,
    Initialisation,
)
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND
from diloco_testing.learners.scripted import thetas_of
from diloco_testing.syncers.driven import DrivenLearner, DrivenSyncer, DrivenUpload, driven_spec
from diloco_testing.syncers.engine_job import Job as EngineJob
from diloco_testing.syncers.engine_job import logs, of

OURS = tuple(Tensor(name=f"t{i}", shape=(300,), dtype="float32") for i in range(4))
FOREIGN = tuple(Tensor(name=f"x{i}", shape=(2,), dtype="float32") for i in range(2))


class Job:
    """A fresh job in virtual time. Learners beat, and retry each second while they must."""

    def __init__(self, **changes):
        self.syncer = DrivenSyncer(driven_spec(**changes))
        self.connected, self.retrying, self.refused, self.asked = {}, {}, {}, []

    def join(self, name, tensors):
        """Whether it has joined; else it retries."""
        try:
            self.connected[name] = DrivenLearner(self.syncer, name, tensors)
        except DilocoError as error:
            self.refused[name] = error
            if isinstance(error, UnavailableError):
                self.retrying[name] = tensors
            return False
        self.retrying.pop(name, None)
        self._read()
        return True

    def wait(self, seconds, *, retry=True):
        for _ in range(int(seconds)):
            self.syncer.now += 1.0
            for name, learner in self.connected.items():
                self.syncer.run(ev.Heartbeat(session=learner.session.number, learner=name))
            self.syncer.run(ev.Tick())
            self._read()
            for name, tensors in list(self.retrying.items()) if retry else []:
                self.join(name, tensors)
        return self

    def _read(self):
        for name, learner in list(self.connected.items()):
            for message in learner.received():
                if isinstance(message, pb.SyncerMessage):
                    if message.WhichOneof("kind") == "initialise":
                        self.asked.append(name)
                    continue
                self.refused[name] = message
                self.syncer.sessions.close(learner.session)
                del self.connected[name]
                self.retrying[name] = learner.layout.tensors

    def leave(self, name):
        learner = self.connected.pop(name)
        self.syncer.sessions.close(learner.session)
        self.syncer.run(ev.Left(session=learner.session.number, learner=name, reason="StreamEnded"))

    def deliver(self, name):
        self.connected[name].initialise(thetas_of(self.connected[name]))

    @property
    def model(self):
        return self.syncer.state.admission.layout.tensors


def test_a_learner_with_another_model_than_the_one_that_is_to_initialise_is_asked_to_retry():
    job = Job()
    assert job.join("eu/1", FOREIGN)
    assert not job.join("eu/0", OURS)
    assert type(job.refused["eu/0"]) is UnavailableError
    text = str(job.refused["eu/0"])
    assert (
        "eu/0 trains a different model than eu/1, which is to upload the initial parameters" in text
    )
    assert "parameter x0 is missing" in text
    assert "tries again" in text
    assert job.syncer.state.engine.waiting_for() == (
        "eu/1 to upload the initial model; with another model: eu/0"
    )


def test_once_the_initial_parameters_exist_another_model_is_refused_for_good():
    job = Job()
    job.join("eu/1", FOREIGN)
    job.join("eu/0", OURS)
    job.deliver("eu/1")
    assert not job.join("eu/0", OURS)
    assert type(job.refused["eu/0"]) is MismatchError
    assert "eu/1" not in job.syncer.state.engine.waiting_for()


def test_when_the_initialiser_does_not_deliver_the_model_of_a_learner_that_waits_counts():
    job = Job()
    job.join("eu/1", FOREIGN)
    job.join("eu/0", OURS)
    job.join("eu/2", OURS)
    job.wait(STALL_SECONDS + 3)
    assert set(job.connected) == {"eu/0", "eu/2"}
    assert "the model of eu/0" in str(job.refused["eu/1"]) or "eu/1 trains a different" in str(
        job.refused["eu/1"]
    )
    assert job.model == OURS
    job.deliver("eu/0")
    job.wait(2)
    assert type(job.refused["eu/1"]) is MismatchError
    reasons = [line["reason"] for line in job.syncer.lines if line["event"] in ("refuse", "leave")]
    assert reasons == ["InitialLate", "OtherModel"]


def test_while_a_learner_with_the_same_model_has_not_had_its_turn_its_sessions_stay():
    job = Job()
    job.join("eu/0", OURS)
    job.join("eu/1", OURS)
    job.join("eu/2", FOREIGN)
    job.wait(STALL_SECONDS + 3)
    assert job.asked == ["eu/0", "eu/1"]
    assert set(job.connected) == {"eu/0", "eu/1"}
    job.deliver("eu/1")
    assert job.model == OURS


def test_a_learner_that_failed_to_deliver_does_not_define_the_model_again_before_the_others():
    job = Job()
    job.join("eu/0", FOREIGN)
    job.join("eu/1", OURS)
    job.wait(STALL_SECONDS - 2)
    job.wait(2, retry=False)
    assert job.connected == {}, "closed, so that eu/1 can define the model"
    assert not job.join("eu/0", FOREIGN), "it is faster than eu/1"
    assert "eu/1" in str(job.refused["eu/0"])
    assert "comes first" in str(job.refused["eu/0"])
    assert not job.join("eu/0", OURS), "with whatever model"
    assert job.join("eu/1", OURS)
    assert job.join("eu/0", OURS)


def test_all_learners_of_a_region_that_hold_a_model_they_never_deliver_delay_the_others_by_their_turns():
    job = Job(learners={"eu": 4, "us": 1})
    for name in ("eu/1", "eu/2", "eu/3"):
        job.join(name, FOREIGN)
    job.join("eu/0", OURS)
    job.wait(3 * STALL_SECONDS + 5)
    assert job.asked[:3] == ["eu/1", "eu/2", "eu/3"]
    assert set(job.connected) == {"eu/0"}
    job.deliver("eu/0")


def test_who_no_longer_retries_no_longer_comes_first():
    job = Job()
    job.join("eu/0", FOREIGN)
    job.join("eu/1", OURS)
    del job.retrying["eu/1"]
    job.wait(STALL_SECONDS)
    assert job.asked == ["eu/0", "eu/0"], "no other learner is left to ask"
    assert job.syncer.state.engine.waiting_for() == "eu/0 to upload the initial model"


def test_the_model_of_a_learner_that_left_does_not_count():
    job = Job()
    job.join("eu/1", FOREIGN)
    job.join("eu/0", OURS)
    job.leave("eu/1")
    assert job.join("eu/0", OURS)
    assert job.model == OURS


def test_parts_of_a_model_that_no_longer_counts_are_not_mixed_with_those_of_the_next():
    job = Job()
    job.join("eu/1", FOREIGN)
    before = job.connected["eu/1"]
    assert _send_part(before, 0).replies[-1].done
    job.leave("eu/1")
    job.join("eu/1", OURS)
    again = job.connected["eu/1"]
    again.incarnation = before.incarnation
    job.syncer.sessions.make_current(
        "eu/1", incarnation=before.incarnation, number=again.session.number
    )
    assert _send_part(again, 1).replies[-1].done
    _send_constants(again)
    whole = [event for event in job.syncer.queue if isinstance(event, ParametersReceived)]
    assert whole == [], "fragment 0 is missing: the one that came is of the other model"
    _send_part(again, 0)
    job.syncer.run()
    assert {t.shape for t in job.syncer.facts.parameters.layout.tensors} == {(300,)}


def test_parameters_of_a_model_that_no_longer_counts_come_too_late():
    job = Job()
    job.join("eu/1", FOREIGN)
    learner = job.connected["eu/1"]
    for fragment in learner.layout.fragments:
        _send_part(learner, fragment.index)
    constants = _send_constants(learner)
    late = job.syncer.queue.pop()
    assert isinstance(late, ParametersReceived)
    job.leave("eu/1")
    job.join("eu/0", OURS)
    job.syncer.run(late)
    assert job.syncer.facts.parameters is None
    assert constants.receiver.waiting.until(0) is True
    assert constants.resume().receiver.done, "its sender does not wait forever"
    job.deliver("eu/0")


def _send_part(learner, fragment):
    theta_N = thetas_of(learner)[fragment]
    pull = pb.Pull(fragment=fragment)
    return learner.upload(pull, theta_N, content=bulk.INITIAL, base=None, norms=[]).send_all()


def _send_constants(learner):
    header = learner.header(
        pb.Pull(), content=bulk.CONSTANTS, format=bulk.RAW, elements=0, chunks=0
    )
    return DrivenUpload(learner, header, []).send_all()


# ---------------------------------------------------------------- turns


def test_a_session_that_begins_anew_brings_an_initialiser_no_new_time():
    it = Initialisation()
    it.request(["a"], 0.0)
    for second in range(1, int(STALL_SECONDS)):
        it.withdraw("a")
        it.expire(["a"], second)
        it.request(["a"], second)
        assert it.deadline == STALL_SECONDS
    it.withdraw("a")
    it.expire(["a"], STALL_SECONDS)
    assert it.failures == {"a": 1}
    it.request(["a", "b"], STALL_SECONDS)
    assert it.learner == "b"


def test_a_session_that_begins_anew_begins_no_new_count_of_uploads():
    it = Initialisation(parts=1)
    it.request(["a"], 0.0)
    for begun in range(2, 10):
        it.progressed("a", 1 << 30, 0.0)
        it.progressed("a", 0, 0.0)
        assert it.begun_parts == begun
        it.withdraw("a")
        it.request(["a"], 0.0)


def test_uploads_of_the_initial_model_that_begin_too_often_earn_no_more_time():
    it = Initialisation(parts=1)
    it.request(["a"], 0.0)
    begun = 1
    while begun <= MAX_UPLOADS:
        before = it.deadline
        for at_bytes in (1 << 30, 1 << 30, 0):
            it.progressed("a", at_bytes, 10.0 * begun)
        assert it.deadline == 10.0 * begun + STALL_SECONDS > before, (
            "bytes that repeat begin nothing"
        )
        begun += 1
    it.progressed("a", 1 << 30, 10.0 * begun)
    assert it.deadline == 10.0 * MAX_UPLOADS + STALL_SECONDS


def test_bytes_of_the_initial_model_earn_time_once():
    it = Initialisation()
    it.request(["a"], 0.0)
    for seconds, earned in ((10, 10), (10, 10), (15, 15), (5, 20)):  # the last: of the next part
        it.progressed("a", seconds * MIN_BYTES_PER_SECOND, 30.0)
        assert it.deadline == STALL_SECONDS + earned


def test_what_one_learner_uploaded_is_no_progress_of_the_next():
    it = Initialisation()
    it.request(["a"], 0.0)
    it.progressed("a", 1 << 20, 0.0)
    it.fail("a", "Damaged", "x")
    it.request(["a", "b"], 0.0)
    assert it.learner == "b"
    for at_bytes in (0, 1):
        it.progressed("b", at_bytes, 0.0)
        assert (it.received_bytes, it.begun_parts) == (at_bytes, 1)


def test_each_failure_of_the_learner_that_is_asked_is_recorded_and_counted():
    it = Initialisation()
    line = ev.Log(event="refuse", fields={"learner": "a", "reason": "Damaged", "detail": "x"})
    for count in (1, 2):
        it.request(["a"], 0.0)
        assert it.fail("b", "Damaged", "x") == []
        assert it.fail("a", "Damaged", "x") == [line]
        assert it.failures == {"a": count}
    it.request(["a"], 0.0)
    assert it.tick(STALL_SECONDS - 0.1) == []
    [late] = it.tick(STALL_SECONDS)
    assert (late.fields["learner"], late.fields["reason"], it.learner) == ("a", "InitialLate", None)


def test_a_learner_that_waits_precedes_those_that_have_all_failed_more_often():
    it = Initialisation(failures={"a": 1, "b": 2})
    assert it.preceding(["a"]) == "", "none waits"
    it.wait("w", 0.0)
    found = {names: it.preceding(names.split()) for names in ("a", "a b", "a c", "c", "")}
    assert found == {"a": "w", "a b": "w", "a c": "", "c": "", "": ""}
    it.joined("w")
    it.wait("b", 0.0)
    assert it.preceding(["a"]) == it.preceding(["b"]) == ""
    it.wait("w", 0.0)
    assert it.preceding(["a"]) == "w"
    it.request(["a"], 0.0)
    assert it.preceding(["a"]) == "", "a learner is asked"


def test_a_pause_of_the_syncer_costs_neither_the_one_that_is_asked_nor_those_that_wait():
    it = Initialisation()
    it.request(["a"], 0.0)
    it.wait("b", 0.0)
    it.shift(100.0)
    assert it.tick(100.0 + WAITING_SECONDS) == []
    assert it.waiting == {"b": 100.0}
    it.withdraw("a")
    it.shift(100.0)
    it.request(["a"], 200.0)
    assert it.deadline == 200.0 + STALL_SECONDS


# ---------------------------------------------------------------- memory

SPEC = RunSpec(job="j", steps=10, fragments=2, interval=2, overlap=1, learners={"eu": 2})
APPLICANT = Applicant(job="j", learner="eu/0", region="eu", spec_hash=SPEC.hash, tensors=OURS)
NEEDED = limits.VALUE_BYTES * 1200 * 3 // 2


def test_a_model_that_just_fits_into_the_memory_of_the_syncer_is_admitted():
    fitting = Admission(SPEC, memory_bytes=NEEDED)
    assert isinstance(fitting.handle(APPLICANT, layout_fixed=False), Admitted)


@pytest.mark.parametrize("holder", ["", "eu/1"])
def test_a_model_that_the_syncer_cannot_hold_is_refused_with_what_it_needs(holder):
    huge = dataclasses.replace(
        APPLICANT, tensors=(*OURS, Tensor(name="z", shape=(1 << 38,), dtype="float32"))
    )
    admission = Admission(SPEC, memory_bytes=24 << 30)
    if holder:
        admission.handle(APPLICANT, layout_fixed=False)
    refused = admission.handle(huge, layout_fixed=False, holder=holder)
    assert isinstance(refused, Refused)
    assert type(refused.error) is ConfigError
    text = str(refused.error)
    assert f"the model has {(1 << 38) + 1200} values: " in text
    assert "need at least 3072.0 GiB, and this syncer has 24.0 GiB" in text
    assert "give the syncer more memory (6144.0 GiB are advised)" in text
    assert not refused.waits, "it can never be held: no reason to wait for its turn"


def test_constants_count_as_what_they_need_at_least():
    """A frozen model of 70 x 10^9 values with small trained parts: it is held once, in its own dtype."""
    frozen = dataclasses.replace(
        APPLICANT, constants=(Tensor(name="z", shape=(1 << 30,), dtype="bfloat16"),)
    )
    admits = Admission(SPEC, memory_bytes=NEEDED + (1 << 30)).handle(frozen, layout_fixed=False)
    assert isinstance(admits, Admitted)
    refuses = Admission(SPEC, memory_bytes=NEEDED + (1 << 30) - 1)
    assert "1073741824 of constants" in str(refuses.handle(frozen, layout_fixed=False).error)


def test_the_model_of_a_job_that_was_resumed_is_admitted_whatever_the_memory():
    layout = Admission(SPEC).handle(APPLICANT, layout_fixed=False).layout
    resumed = Admission(SPEC, layout=layout, memory_bytes=1)
    assert isinstance(resumed.handle(APPLICANT, layout_fixed=True), Admitted)


def test_sessions_that_make_room_for_another_model_are_closed_so_that_their_learners_try_again():
    job = EngineJob("a", initialised=False)
    job.wait(STALL_SECONDS - 1.0)
    job.engine.waits("x")
    out = job.wait(STALL_SECONDS)
    assert [(close.session, close.reason) for close in of(ev.Close, out)] == [(1, "Unavailable")]
    assert [line["reason"] for line in logs("leave", out)] == ["OtherModel"]


def test_a_learner_that_waited_and_joined_is_not_named_as_waiting():
    job = EngineJob("ab", initialised=False)
    job.engine.waits("x")
    assert job.engine.waiting_for().endswith("; with another model: x")
    hello = ev.Hello(
        session=9, learner="x", region="eu", incarnation=9, fresh=True, local_step=0, checkpoint_step=0
    )  # fmt: skip
    assert of(ev.Admit, job(hello))
    assert job.engine.waiting_for() == "a to upload the initial model"


@pytest.mark.parametrize(
    ("waiting", "named", "more"), [(8, 8, ""), (9, 8, " and 1 more"), (12, 8, " and 4 more")]
)
def test_of_many_learners_with_another_model_a_few_are_named(waiting, named, more):
    it = Initialisation()
    for number in range(waiting):
        it.wait(f"x{number:02}", 0.0)
    names = ", ".join(f"x{number:02}" for number in range(named))
    assert it.waiting_for() == (
        f"the first learner to upload the initial model; with another model: {names}{more}"
    )


def test_the_initial_model_has_a_part_for_each_fragment_and_one_for_the_constants():
    """A learner may begin each of them a few times before its progress no longer counts."""
    job = EngineJob("a", initialised=False, fragments=4)
    assert job.engine.initialisation.parts == 5
