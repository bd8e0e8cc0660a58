"""The end of a syncer process: with the threads that it needs, and with a last snapshot in any case."""

import threading

import pytest

from diloco_syncer import __main__ as main
from diloco_syncer.rpc.call_limits import WATCH_THREAD


@pytest.fixture
def reported(monkeypatch):
    """What the hook of before reports."""
    reports = []
    monkeypatch.setattr(threading, "excepthook", reports.append)
    return reports


def end(name):
    def run():
        raise RuntimeError("can't start new thread")

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(30)


@pytest.mark.parametrize("name", [WATCH_THREAD, "Thread-7 (_serve)"])
def test_a_thread_without_which_no_call_is_answered_ends_the_process_with_its_reason(
    reported, caplog, name
):
    stop = threading.Event()
    ended = main._end_with_threads(stop)
    end("session eu/0")
    assert (stop.is_set(), ended) == (False, [])
    end(name)
    assert (stop.is_set(), ended) == (True, [name])
    assert "the syncer ends: thread" in caplog.text
    assert len(reported) == 2


def test_the_thread_of_a_grpc_server_has_the_name_that_is_expected():
    """gRPC does not promise it: a version that changes it must be noticed here."""
    server = main.server(max_workers=1)
    server.start()
    try:
        assert any(thread.name.endswith(main.SERVING) for thread in threading.enumerate())
    finally:
        assert server.stop(None).wait(30)


class Server:
    def __init__(self, error=None):
        self.error, self.stopped = error, threading.Event()

    def stop(self, grace):
        if self.error is not None:
            raise self.error
        return self.stopped


@pytest.mark.parametrize(
    ("server", "warning"),
    [
        (Server(), "gRPC has not ended within"),
        (Server(RuntimeError("can't start new thread")), "gRPC cannot end its streams"),
    ],
)
def test_a_grpc_server_that_cannot_end_does_not_keep_the_last_snapshot(
    monkeypatch, caplog, server, warning
):
    monkeypatch.setattr(main, "STOP_SECONDS", 0.01)
    main._stop_serving(server)
    assert warning in caplog.text
