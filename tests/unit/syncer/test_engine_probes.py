"""The engine event by event: probes of ejected learners."""

from diloco_syncer.core import events as ev
from diloco_testing.syncers.engine_job import Job, logs, of


def probed():
    """A job of three, of which c is ejected and probed at second 5."""
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    [probe] = of(ev.ProbeLearner, job.wait(5.0))
    return job, {"learner": "c", "round": probe.round, "attempt": probe.attempt}


def test_a_probe_that_is_delivered_brings_the_learner_back():
    job, mine = probed()
    assert logs("readmit", job(ev.Progress(**mine, received_bytes=5))) == []
    out = job(ev.Progress(**mine, received_bytes=9, done=True))
    assert logs("readmit", out) == [{"learner": "c"}]
    assert job["c"].ejection is None
    assert job.rounds[0].members.keys() == {"a", "b"}, "its round had begun"


def test_a_probe_that_is_dropped_is_repeated_after_twice_the_time():
    job, mine = probed()
    out = job(ev.Dropped(**mine, reason="Damaged", detail="x"))
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [
        (mine["round"], mine["attempt"])
    ]
    assert job["c"].ejection.probe_at == 5.0 + 10.0
    assert logs("refuse", out) == []


def test_the_probe_of_a_learner_that_leaves_or_joins_again_is_aborted():
    job, mine = probed()
    attempt = (mine["round"], mine["attempt"])
    assert attempt in [(d.round, d.attempt) for d in of(ev.AbortMerge, job.left("c"))]
    job, mine = probed()
    out = job.hello("c", session=9, fresh=False)
    assert (mine["round"], mine["attempt"]) in [
        (d.round, d.attempt) for d in of(ev.AbortMerge, out)
    ]


def test_a_probe_whose_connection_broke_is_no_failure_of_the_learner():
    job, mine = probed()
    out = job(ev.Dropped(**mine, reason=ev.STREAM_BROKEN, detail="x"))
    assert len(of(ev.AbortMerge, out)) == 1
    assert (job["c"].ejections, job["c"].ejection.unproven) == (1, 1)
    job, mine = probed()
    job(ev.Dropped(**mine, reason="Damaged", detail="x"))
    assert (job["c"].ejections, job["c"].ejection.unproven) == (2, 0)
