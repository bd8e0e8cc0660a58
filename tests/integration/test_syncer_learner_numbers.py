"""The numbers of learners in the spec document change while a real syncer runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import UnavailableError
from diloco.runtime import files
from diloco_testing.learners.scripted import ScriptedLearner, good_round, random_delta
from diloco_testing.syncers.process import RealSyncer, make_spec, until

pytestmark = pytest.mark.slow


@pytest.fixture
def syncer(tmp_path) -> Iterator[RealSyncer]:
    with RealSyncer(tmp_path, make_spec(learners={"eu": 1})) as running:
        yield running
        running.assert_audit()


@pytest.fixture
def learner(syncer) -> Iterator[ScriptedLearner]:
    """The one learner of the job; it trains from before the change until after it."""
    with ScriptedLearner(syncer, "eu/0") as first:
        first.join()
        first.initialise([random_delta(f, f.index, size=1.0) for f in first.layout.fragments])
        first.expect("ready")
        good_round(first)
        yield first


def document(syncer: RealSyncer) -> Path:
    return syncer.spec_file


def write(syncer: RealSyncer, **learners: int) -> None:
    """As the kubelet does: the document is replaced as a whole."""
    files.replace(document(syncer), replace(syncer.spec, learners=learners).to_json())


def changed(syncer: RealSyncer, **learners: int) -> None:
    """Replace the document, and wait until the syncer has seen it."""
    write(syncer, **learners)
    until(
        lambda: [line["learners"] for line in syncer.events("limits")][-1:] == [learners],
        expected="the syncer has the new numbers",
    )


def one_start(syncer: RealSyncer, pid: int) -> bool:
    """The process is the one that was started first."""
    assert syncer.process is not None
    return (syncer.process.pid, syncer.process.poll(), len(syncer.events("start"))) == (
        pid,
        None,
        1,
    )


def test_a_learner_more_joins_without_a_restart_and_one_beyond_the_number_is_refused(
    syncer, learner
):
    pid = syncer.process.pid
    with (
        ScriptedLearner(syncer, "eu/1") as early,
        pytest.raises(UnavailableError, match="eu/1 is beyond the 1 learners of region eu"),
    ):
        early.join()
    changed(syncer, eu=2, us=1)
    with ScriptedLearner(syncer, "eu/1") as second, ScriptedLearner(syncer, "us/0") as other:
        second.join()
        other.join()
        with (
            ScriptedLearner(syncer, "eu/2") as third,
            pytest.raises(UnavailableError, match="eu/2 is beyond the 2 learners of region eu"),
        ):
            third.join()
    good_round(learner)
    assert one_start(syncer, pid)


def test_a_learner_beyond_the_new_number_leaves_and_the_others_continue(syncer, learner):
    pid = syncer.process.pid
    changed(syncer, eu=2)
    with ScriptedLearner(syncer, "eu/1") as second:
        second.join()
        changed(syncer, eu=1)
        with pytest.raises(UnavailableError, match="eu/1 is beyond the 1 learners of region eu"):
            second.expect("complete", seconds=60)
        with (
            ScriptedLearner(syncer, "eu/1") as again,
            pytest.raises(UnavailableError, match="beyond the 1 learners"),
        ):
            again.join()
    assert [(x["learner"], x["reason"]) for x in syncer.events("leave")] == [("eu/1", "Removed")]
    good_round(learner)
    assert one_start(syncer, pid)


@pytest.mark.parametrize("damage", ["torn", "missing", "below the quorum", "another seed"])
def test_a_document_that_cannot_be_used_is_recorded_and_changes_nothing(syncer, learner, damage):
    pid, path, spec = syncer.process.pid, document(syncer), syncer.spec
    match damage:
        case "torn":
            path.write_text(replace(spec, learners={"eu": 9}).to_json()[:100])
        case "missing":
            path.unlink()
        case "below the quorum":
            write(syncer, eu=0)
        case "another seed":
            files.replace(path, replace(spec, learners={"eu": 9}, seed=7).to_json())
    [line] = until(lambda: syncer.events("refuse"), expected="the refusal is recorded")
    assert (line["learner"], line["reason"]) == ("", "Config")
    until(
        lambda: "keeping the current numbers of learners" in syncer.output(),
        expected="the refusal is in the log",
    )
    with (
        ScriptedLearner(syncer, "eu/1") as second,
        pytest.raises(UnavailableError, match="beyond the 1 learners"),
    ):
        second.join()
    good_round(learner)
    assert syncer.events("limits") == []
    changed(syncer, eu=2)
    with ScriptedLearner(syncer, "eu/1") as second:
        second.join()
    assert one_start(syncer, pid)
