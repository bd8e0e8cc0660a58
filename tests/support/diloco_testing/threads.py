"""Threads that the system refuses to start."""

from __future__ import annotations

import threading

import pytest


def refused_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many of the next threads of pools the system refuses to start."""
    refused, start = [0], threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if refused[0] and thread.name.startswith("test"):
            refused[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    return refused
