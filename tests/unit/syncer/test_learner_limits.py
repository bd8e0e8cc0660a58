"""The numbers of learners change while the syncer runs: who may join, who has to leave."""

import dataclasses
import json

import pytest

from diloco.errors import ConfigError, UnavailableError
from diloco.model.fragments import Tensor
from diloco.spec import RunSpec
from diloco_job.types import Region
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Admitted, Applicant, Refused
from diloco_syncer.core.learner_limits import MAX_LEARNERS_PER_REGION, beyond, parse
from diloco_testing.syncers.engine_job import Job, logs, of, pulls

SPEC = RunSpec(
    job="j", steps=10, fragments=2, interval=2, overlap=1, quorum=2, learners={"eu": 2, "us": 1}
)
NAMES = ("eu/0", "eu/1", "eu/2")


def document(learners, **changes):
    return dataclasses.replace(SPEC, learners=learners, **changes).to_json()


def limited(job, **learners):
    return job(ev.LimitsChanged(learners=learners))


# ---------------------------------------------------------------- the document


@pytest.mark.parametrize(
    "learners",
    [
        {"eu": 3, "us": 1},
        {"eu": 2},
        {"eu": 0, "us": 2},
        {"asia": 9},
        {"eu": MAX_LEARNERS_PER_REGION},
    ],
)
def test_other_numbers_and_other_regions_are_taken_over(learners):
    assert parse(document(learners), SPEC) == learners


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        (document({"eu": 3})[:-20], "not JSON"),
        ("[]", "holds a list"),
        (document({"eu": 3}).replace('"steps":10', '"steps":11'), "more than the numbers"),
        (document({"eu": 3}, seed=7), "more than the numbers"),
        (document({"eu": 3}, quorum=3), "more than the numbers"),
        (document({"eu": 3}, job="k"), "more than the numbers"),
        (document({"eu": -1, "us": 9}), "learners of region eu is -1"),
        (document({"eu": True, "us": 9}), "learners of region eu is True"),
        (document({"eu": "9"}), "learners of region eu is '9'"),
        (document({"eu": 2.0}), "learners of region eu is 2.0"),
        (document({"eu": MAX_LEARNERS_PER_REGION + 1}), "from 0 to 1000"),
        (document({"eu": 1}), "1 learners cannot form the quorum of 2"),
        (document({}), "0 learners cannot form the quorum of 2"),
        (json.dumps({"job": "j", "steps": 10, "learners": [1]}), "learners is [1]"),
    ],
)
def test_a_document_that_cannot_be_meant_is_refused_with_the_reason(text, message):
    with pytest.raises(ConfigError, match="spec document") as seen:
        parse(text, SPEC)
    assert message in str(seen.value)


def test_the_largest_number_is_that_of_the_manifest():
    [bound] = [m.le for m in Region.model_fields["learners"].metadata if hasattr(m, "le")]
    assert bound == MAX_LEARNERS_PER_REGION


@pytest.mark.parametrize(
    ("learner", "text"),
    [
        ("eu/0", ""),
        ("eu/1", ""),
        ("eu/2", "beyond the 2 learners of region eu"),
        ("us/1", "beyond the 1 learners of region us"),
        ("asia/0", "belongs to region asia, but this syncer's spec has eu, us"),
    ],
)
def test_a_learner_is_beyond_the_limits_by_its_region_or_its_index(learner, text):
    found = beyond(learner, SPEC.learners)
    assert text in found
    assert bool(found) == bool(text)


# ---------------------------------------------------------------- admission


def test_admission_goes_by_the_numbers_in_force_and_not_by_those_of_the_start():
    tensors = (
        Tensor(name="a", shape=(4, 100), dtype="float32"),
        Tensor(name="b", shape=(3, 100), dtype="float32"),
    )
    admission = Admission(SPEC)

    def decide(learner, limits):
        applicant = Applicant(
            job="j", learner=learner, region=learner.partition("/")[0], spec_hash=SPEC.hash,
            tensors=tensors,
        )  # fmt: skip
        return admission.handle(applicant, layout_fixed=False, limits=limits)

    more = {"eu": 3, "asia": 1}
    assert isinstance(decide("eu/2", more), Admitted)
    assert isinstance(decide("asia/0", more), Admitted)
    for learner in ("eu/3", "us/0", "asia/1"):
        decision = decide(learner, more)
        assert isinstance(decision, Refused)
        assert type(decision.error) is UnavailableError, "it may be raised again"
    assert isinstance(decide("us/0", None), Admitted)


# ---------------------------------------------------------------- the engine


def test_new_limits_are_recorded_and_touch_no_learner_within_them():
    job = Job(NAMES).meet()
    out = limited(job, eu=9, us=1)
    assert logs("limits", out) == [{"learners": {"eu": 9, "us": 1}, "step": 0}]
    assert of(ev.Close, out) == logs("leave", out) == []
    assert job.engine.limits == {"eu": 9, "us": 1}


def test_equal_limits_are_nothing_new():
    job = Job(NAMES).meet()
    assert logs("limits", limited(job, eu=9)) == []
    limited(job, eu=4)
    assert logs("limits", limited(job, eu=4)) == []
    assert len(logs("limits", limited(job, eu=9))) == 1


def test_learners_beyond_new_limits_leave_with_the_reason_and_no_others():
    job = Job(NAMES).meet()
    out = limited(job, eu=1)
    assert [(d.session, d.reason) for d in of(ev.Close, out)] == [
        (2, "Unavailable"), (3, "Unavailable"),
    ]  # fmt: skip
    assert "eu/1 is beyond the 1 learners of region eu" in of(ev.Close, out)[0].detail
    assert [(line["learner"], line["reason"]) for line in logs("leave", out)] == [
        ("eu/1", "Removed"), ("eu/2", "Removed"),
    ]  # fmt: skip
    assert [record.name for record in job.engine.learners.connected()] == ["eu/0"]
    assert isinstance(out[0], ev.Log), "the line of the limits comes before the leaves"


def test_a_region_that_is_gone_takes_its_learners_along():
    job = Job(NAMES).meet()
    assert len(logs("leave", limited(job, us=3))) == 3


def test_a_round_continues_without_a_member_that_was_removed():
    job = Job(NAMES, quorum=2, overlap=1).meet()
    job.report_all(1)
    job.contribute("eu/0")
    job.contribute("eu/1")
    out = limited(job, eu=2)
    assert [[c.learner for c in d.contributions] for d in of(ev.BeginMerge, out)] == [
        ["eu/0", "eu/1"]
    ]


def test_a_merge_with_a_removed_member_is_aborted_and_repeated_with_the_others():
    job = Job(NAMES, quorum=2, overlap=1).meet()
    job.report_all(1)
    for name in NAMES:
        job.contribute(name)
    out = limited(job, eu=2)
    assert [d.reason for d in of(ev.AbortMerge, out)] == ["Removed"]
    assert pulls(out) == [(1, 2, ("eu/0", "eu/1"))]


def test_a_learner_that_was_admitted_before_the_limits_changed_does_not_join():
    """Admission and Hello are two calls: the limits may change in between."""
    job = Job(NAMES[:2])
    limited(job, eu=1)
    out = job.hello("eu/1", session=9, incarnation=9)
    assert [(d.session, d.reason) for d in of(ev.Close, out)] == [(9, "Unavailable")]
    assert [line["learner"] for line in logs("refuse", out)] == ["eu/1"]
    assert of(ev.Admit, out) == logs("join", out) == []
    limited(job, eu=2)
    assert len(logs("join", job.hello("eu/1", session=10, incarnation=10))) == 1


def test_the_removed_initialiser_is_replaced_by_the_next_learner():
    job = Job(("eu/1", "eu/0"), initialised=False)
    assert job.engine.initialiser == "eu/1"
    out = limited(job, eu=1)
    assert [d.learner for d in of(ev.RequestInitial, out)] == ["eu/0"]


def test_a_document_that_is_refused_is_named_by_its_source():
    for text in ("", document({"eu": 3}, seed=7), document({"eu": -1}), document({"eu": 1})):
        with pytest.raises(ConfigError, match=r"^spec\.json: "):
            parse(text, SPEC, source="spec.json")
    assert "beyond" in beyond("eu/x", SPEC.learners), "no index at all"
    assert "region eu/x," in beyond("eu/x/0", SPEC.learners), "no other region's index"


def test_a_document_without_a_name_of_its_own_is_called_the_spec_document():
    with pytest.raises(ConfigError, match=r"^spec document: "):
        parse("{", SPEC)
