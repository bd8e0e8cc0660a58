"""The requests of one process to its peers: exactly when each begins and ends."""

from __future__ import annotations

from diloco_worker.core import events as ev
from diloco_worker.core.peer_recovery import LEAST_SECONDS, PeerRecovery

H = 4
A, B, C = (ev.PeerAddress(name, "h:1") for name in ("eu/0", "eu/1", "us/0"))
STATE = ev.PeerState(learner="eu/0", local_step=7, global_step=11)


def begun(*peers, step=10, now=100.0):
    recovery = PeerRecovery(interval=H)
    recovery.offered(peers)
    return recovery, recovery.begin(step=step, run="r", now=now)


def test_before_it_begins_none_is_asked_and_nothing_is_known():
    recovery = PeerRecovery(interval=H)
    assert (recovery.pending, recovery.asked, recovery.why, recovery.source) == (
        False,
        "",
        "",
        None,
    )
    assert recovery.stop() == []
    assert recovery.proceed(step=1, run="r", now=1e6) == []
    assert recovery.answered(ev.PeerAnswered(number=0, state=STATE), step=1, run="r", now=0.0) == []
    assert (recovery.source, recovery.seconds) == (None, 0.0)


def test_a_session_without_peers_does_not_forget_those_of_an_earlier_one():
    recovery = PeerRecovery(interval=H)
    recovery.offered([A, B])
    recovery.offered([])
    [asked] = recovery.begin(step=10, run="r", now=0.0)
    assert asked == ev.AskPeer(number=1, peer=A, step=10, run="r")
    assert (recovery.pending, recovery.asked) == (True, "eu/0")


def test_what_is_offered_after_it_began_does_not_count():
    recovery, _ = begun(A)
    recovery.offered([B, C])
    assert recovery.answered(ev.PeerAnswered(number=1, error="x"), step=10, run="r", now=0.0) == []
    assert not recovery.pending


def test_that_there_is_no_peer_to_ask_is_stated_once_the_job_has_made_a_step():
    assert begun(step=0)[0].why == ""
    assert begun(step=1)[0].why == "the syncer named no learner to ask"


def test_it_begins_once():
    recovery, [asked] = begun(A, B)
    assert recovery.begin(step=12, run="r", now=101.0) == []
    recovery.stop()
    assert recovery.begin(step=12, run="r", now=102.0) == []
    assert asked.number == 1
    without, out = begun()
    assert out == []
    without.offered([A])
    assert without.begin(step=10, run="r", now=0.0) == []


def test_the_next_peer_is_asked_with_the_step_of_now_and_the_reason_is_kept_until_one_answers():
    recovery, _ = begun(A, B)
    [asked] = recovery.answered(
        ev.PeerAnswered(number=1, error="busy"), step=13, run="s", now=105.0
    )
    assert asked == ev.AskPeer(number=2, peer=B, step=13, run="s")
    assert recovery.why == "eu/0: busy"
    assert (
        recovery.answered(ev.PeerAnswered(number=2, state=STATE), step=13, run="s", now=106.0) == []
    )
    assert (recovery.source, recovery.why, recovery.pending) == (STATE, "", False)


def test_after_the_last_peer_the_trainer_waits_no_longer_and_the_reason_stays():
    recovery, _ = begun(A)
    assert (
        recovery.answered(ev.PeerAnswered(number=1, error="busy"), step=13, run="r", now=1.0) == []
    )
    assert (recovery.pending, recovery.asked, recovery.why) == (False, "", "eu/0: busy")


def test_a_request_is_abandoned_after_more_than_h_steps_and_more_than_a_minute():
    recovery, _ = begun(A, B)
    # So many steps, but a minute or less.
    assert recovery.proceed(step=10 + H + 5, run="r", now=100.0 + LEAST_SECONDS) == []
    recovery, _ = begun(A, B)
    # A minute, but H steps or fewer, the last of them lately.
    assert recovery.proceed(step=10 + H, run="r", now=130.0) == []
    assert recovery.proceed(step=10 + H, run="r", now=100.0 + LEAST_SECONDS + 1) == []
    dropped, asked = recovery.proceed(step=10 + H + 1, run="s", now=100.0 + LEAST_SECONDS + 2)
    assert dropped == ev.DropPeer(number=1)
    assert asked == ev.AskPeer(number=2, peer=B, step=10 + H + 1, run="s")
    assert recovery.why == "eu/0: no complete answer within 5 global steps and 62 s"
    assert recovery.seconds == LEAST_SECONDS + 2


def test_a_standstill_is_counted_from_the_newest_step():
    recovery, _ = begun(A, B)
    assert recovery.proceed(step=11, run="r", now=150.0) == []
    assert recovery.proceed(step=11, run="r", now=150.0 + LEAST_SECONDS) == []
    dropped, _ = recovery.proceed(step=11, run="r", now=150.5 + LEAST_SECONDS)
    assert dropped == ev.DropPeer(number=1)
    # The next one has a minute of its own.
    assert recovery.proceed(step=11, run="r", now=150.5 + 2 * LEAST_SECONDS) == []
    assert recovery.proceed(step=11, run="r", now=151.0 + 2 * LEAST_SECONDS) == [
        ev.DropPeer(number=2)
    ]


def test_a_trainer_that_no_longer_waits_ends_the_request_and_its_answer_does_not_count():
    recovery, _ = begun(A, B)
    assert recovery.stop() == [ev.DropPeer(number=1)]
    assert recovery.stop() == []
    assert (
        recovery.answered(ev.PeerAnswered(number=1, state=STATE), step=10, run="r", now=101.0) == []
    )
    assert recovery.source is None
