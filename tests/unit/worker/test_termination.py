"""SIGTERM: noticed in the training process, fatal in its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from diloco_worker.trainer.termination import Termination

FORKED = """
import os, signal, time
from diloco_worker.trainer.termination import Termination
term = Termination()
ready, notify = os.pipe()
child = os.fork()
if child == 0:
    os.write(notify, b"x")
    time.sleep(20)
    os._exit(0)
os.read(ready, 1)  # Python drops a signal that arrives during fork
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status), term.received)
os.kill(os.getpid(), signal.SIGTERM)
print(term.received)
term.restore()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


def test_a_forked_child_still_ends_on_sigterm_and_the_parent_notices_only_its_own_signal():
    out = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:3] == ["15 False", "True", "True"]


def test_a_learner_that_ends_in_another_thread_gives_the_signal_back_when_it_arrives():
    """Python lets only the main thread set handlers: the end of such a loop was a traceback."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("own"))
    try:
        termination = Termination()
        thread = threading.Thread(target=termination.restore)
        thread.start()
        thread.join()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (seen, termination.received) == (["own", "own"], False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_program_had_before_is_called_too_and_comes_back():
    seen = []
    own = lambda *_: seen.append("own")  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        termination = Termination()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (seen, termination.received) == (["own"], True)
        termination.restore()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
