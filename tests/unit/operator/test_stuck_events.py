"""How often the Events of objects that are stuck are read."""

from diloco_operator.cluster.stuck_events import LONGEST_SECONDS, SHARE, StuckEvents
from diloco_operator.workqueue import Key

KEY = Key("ns", "a")


class SlowEvents:
    """An API server that needs `seconds` for the Events of one object, and its clock."""

    def __init__(self):
        self.now, self.seconds, self.reads = 0.0, 0.1, []
        self.reason = "FailedMount"

    def clock(self):
        return self.now

    def events_about(self, item):
        self.now += self.seconds
        uid = item["metadata"]["uid"]
        self.reads.append(uid)
        about = {"involvedObject": {"uid": uid}, "type": "Warning"}
        return tuple(
            {**about, "reason": reason, "lastTimestamp": f"2026-11-21T12:00:0{second}Z"}
            for second, reason in enumerate(["FailedScheduling", self.reason])
        )


def stuck(*uids):
    return [{"kind": "Pod", "metadata": {"uid": uid, "namespace": "ns"}} for uid in uids]


def reasons(events):
    return [event["reason"] for event in events]


def made():
    server = SlowEvents()
    return server, StuckEvents(server, server.clock)


def test_an_object_is_read_again_the_later_the_longer_that_takes():
    server, events = made()
    assert reasons(events.about(KEY, stuck("1"))) == ["FailedMount"]
    server.reason = "FailedAttachVolume"
    server.now += server.seconds / SHARE - 1
    assert reasons(events.about(KEY, stuck("1"))) == ["FailedMount"], "as it was"
    server.now += 1
    assert reasons(events.about(KEY, stuck("1"))) == ["FailedAttachVolume"]
    assert len(server.reads) == 2


def test_however_long_it_takes_it_is_read_again():
    server, events = made()
    server.seconds = 60.0
    events.about(KEY, stuck("1"))
    server.now += LONGEST_SECONDS
    events.about(KEY, stuck("1"))
    assert server.reads == ["1", "1"]


def test_jobs_that_are_stuck_for_long_cost_a_share_of_the_time_that_one_read_takes():
    server, events = made()
    keys = [Key("ns", f"job-{number}") for number in range(100)]
    rounds, every = 20, 30.0
    for at in range(rounds):
        server.now = at * every
        for key in keys:
            assert reasons(events.about(key, stuck(key.name))) == ["FailedMount"]
        assert server.now < (at + 1) * every
    busy = len(server.reads) * server.seconds
    assert busy <= len(keys) * SHARE * rounds * every
    assert set(server.reads[:100]) == set(server.reads[100:]), "each has its turn"


def test_another_object_is_read_at_once_and_nothing_is_kept_of_those_that_are_not_stuck():
    server, events = made()
    events.about(KEY, stuck("1"))
    events.about(KEY, stuck("2"))
    events.about(KEY, stuck("1", "2"))
    assert server.reads == ["1", "2", "1"]
    events.about(KEY, [])
    events.about(KEY, stuck("2"))
    assert server.reads == ["1", "2", "1", "2"]


def test_of_each_object_one_event_is_kept():
    _, events = made()
    assert reasons(events.about(KEY, stuck("1", "2"))) == ["FailedMount"] * 2


def test_nothing_is_kept_of_a_job_that_is_gone():
    server, events = made()
    events.about(KEY, stuck("1"))
    events.forget(KEY)
    events.about(KEY, stuck("1"))
    assert server.reads == ["1", "1"]
