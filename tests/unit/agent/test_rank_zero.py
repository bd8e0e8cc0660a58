"""What the agents of one learner exchange, over real connections."""

from __future__ import annotations

import json
import threading
import time
from urllib.parse import unquote

from diloco_agent.probe_server import Server
from diloco_agent.probes import Reply
from diloco_agent.rank_zero import PATH, RankZero
from diloco_agent.unit import Follower, Leader, Report

SOON = 20.0


def until(what):
    deadline = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_reports_and_gets_the_run_as_the_reply():
    leader = Leader(boot="a", size=2)
    reports: list[Report] = []
    lock = threading.Lock()

    def answer(path, query):
        assert path == PATH
        with lock:
            reports.append(Report.of(json.loads(unquote(query))))
            leader.receive_report(reports[-1], time.monotonic())
            return Reply(ok=True, message=json.dumps(leader.order(1).to_json()))

    server = Server(0, answer)
    follower = Follower(boot="b", rank=1, ready_to_start=True)
    rank_zero = RankZero(("127.0.0.1", server.port), follower.report)
    until(lambda: rank_zero.reply is not None)
    follower.receive_order(*rank_zero.reply)
    assert not follower.may_start(time.monotonic())
    with lock:
        assert leader.may_start(time.monotonic())
        leader.started(time.monotonic())
    until(lambda: rank_zero.reply[0].run == leader.run)
    follower.receive_order(*rank_zero.reply)
    assert follower.may_start(time.monotonic())
    follower.started(time.monotonic())
    follower.exited(1, 'öäü "quoted" ' * 100, time.monotonic(), by_itself=True)
    rank_zero.update(follower.report)
    until(lambda: reports[-1].ended == leader.run)
    assert reports[-1].code == 1
    assert reports[-1].cause.startswith('exit code 1: öäü "quoted"')
    with lock:
        assert leader.must_end(time.monotonic()).startswith("rank 1: exit code 1")


def test_a_rank_zero_that_refuses_or_answers_nonsense_leaves_no_reply():
    texts = ["[]", "[" * 5000, '{"run": 1e999}']
    answers = [
        Reply(ok=False, message="{}"),
        *(Reply(ok=True, message=t) for t in texts),
        None,
        None,
    ]
    left = list(answers)

    def answer(path, query):
        return left.pop() if left else None

    server = Server(0, answer)
    follower = Follower(boot="b", rank=1)
    rank_zero = RankZero(("127.0.0.1", server.port), follower.report)
    until(lambda: not left)
    assert rank_zero.reply is None
