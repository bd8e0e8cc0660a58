"""Refusals: the first of a minute in full, the others as a count."""

from diloco.errors import ProtocolError, UnauthorisedError, UnavailableError
from diloco_syncer.core.refusals import FULL_REFUSALS, WINDOW_SECONDS
from diloco_syncer.refusals import MAX_DETAIL, MAX_LEARNER, RefusalLog


class Journal:
    """Lines as the runner would record them, and a clock that the test moves."""

    def __init__(self):
        self.now = 100.0
        self.lines = []
        self.refusals = RefusalLog(self.record, clock=lambda: self.now)

    def record(self, event, **fields):
        self.lines.append({"event": event, **fields})

    def refuse(self, times, error=None):
        for _ in range(times):
            self.refusals.refuse("a session", "eu/0", error or ProtocolError("not now"))


def test_a_flood_is_written_as_its_beginning_and_a_count():
    journal = Journal()
    journal.refuse(10_000)
    assert len(journal.lines) == FULL_REFUSALS
    assert journal.lines[0] == {
        "event": "refuse", "learner": "eu/0", "reason": "Protocol", "detail": "not now",
    }  # fmt: skip
    journal.now += WINDOW_SECONDS
    journal.refusals.flush()
    assert len(journal.lines) == FULL_REFUSALS + 1
    assert journal.lines[-1]["count"] == 10_000 - FULL_REFUSALS
    journal.now += WINDOW_SECONDS
    journal.refusals.flush()
    assert len(journal.lines) == FULL_REFUSALS + 1, "a count is written once"


def test_another_reason_is_still_written_during_a_flood():
    journal = Journal()
    journal.refuse(100)
    journal.refuse(1, UnauthorisedError("another region"))
    assert journal.lines[-1]["reason"] == "Unauthorised"


def test_the_next_minute_is_written_in_full_again():
    journal = Journal()
    journal.refuse(FULL_REFUSALS)
    journal.now += WINDOW_SECONDS
    journal.refuse(1)
    assert len(journal.lines) == FULL_REFUSALS + 1, "nothing was left out, so there is no count"
    assert "count" not in journal.lines[-1]


def test_a_defect_that_a_peer_triggers_again_and_again_is_logged_as_rarely_as_its_refusals(caplog):
    journal, defect = Journal(), ZeroDivisionError("here")
    for _ in range(1000):
        journal.refusals.refuse("a message", "eu/0", UnavailableError("see the log"), cause=defect)
    assert len(journal.lines) == FULL_REFUSALS
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in errors] == [
        "a message of eu/0 cannot be processed: ZeroDivisionError('here')"
    ] * FULL_REFUSALS


def test_what_a_peer_chose_is_shortened_and_printable():
    journal = Journal()
    journal.refusals.refuse("a session", "y\x1b" * 10**6, ProtocolError("z\n" * 10**6))
    [line] = journal.lines
    assert len(line["learner"]) == MAX_LEARNER
    assert len(line["detail"]) == MAX_DETAIL
    assert line["learner"].isprintable()
    assert line["detail"].isprintable()
