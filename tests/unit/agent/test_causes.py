"""Which line of a log is the cause of an exit."""

from __future__ import annotations

import pytest

from diloco_agent.causes import cause_of, code_of

BANNER = """\
E1123 13:00:07.103000 71 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: {code}) \
local_rank: {rank} (pid: 74) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 10, in <module>
    sys.exit(main())
  File "/usr/lib/python3/site-packages/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_13:00:07
  host      : a
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 74)
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""
HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
NOISE = (
    "W1123 13:00:06.900000 71 torch/distributed/elastic/multiprocessing/api.py:908] Sending SIGTERM"
)


def banner(rank=0, code=1, traceback=HINT):
    return BANNER.format(rank=rank, code=code, traceback=traceback)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_log_without_lines_has_no_cause(text):
    assert cause_of(text) == ""


def test_the_cause_is_the_last_line_of_an_ordinary_program():
    text = "Traceback (most recent call last):\n  File x\nKeyError: 'a'\nTerminated\n\n"
    assert cause_of(text) == "Terminated"


@pytest.mark.parametrize(
    "bar",
    [
        "\r  0%|          | 0/40 [00:09<?, ?it/s]",
        "\r 12%|█▎   | 5/40 [1:02:03<8:00:00, 3.62s/it]",
        "\r17it [100:00:00, 3.62s/it]",
        "\rEpoch 3:  12%|█▎   | 5/40 [00:01<00:09,  3.62it/s, v_num=0]\rEpoch 3:  15%|█▌   | 6/40 [00:01<00:09]",
        "\r17it [01:00,  3.53s/it]",
        "\router:  0%|   | 0/2 [00:00<?, ?it/s]\n\rinner: 12%|█▎   | 5/40 [00:01<00:09,  3.62it/s]\x1b[A",
        "\r 12%|\x1b[32m█▎   \x1b[0m| 5/40 [00:01<00:09,  3.62it/s]",
    ],
)
def test_a_progress_bar_after_a_traceback_is_not_the_cause(bar):
    text = f"{bar}Traceback (most recent call last):\n  File x\nKeyError: 'a'\n{bar}\n"
    assert cause_of(text) == "KeyError: 'a'"
    assert cause_of(f"{bar}\n") == ""
    assert cause_of(f"done [0:12] 50%|x\n{bar}") == "done [0:12] 50%|x"


def test_under_torchrun_the_cause_is_the_error_of_the_rank_and_not_the_banner():
    text = (
        "step 1\nTraceback (most recent call last):\n"
        '  File "/job/train.py", line 3, in <module>\n    import nothing\n'
        f"ModuleNotFoundError: No module named 'nothing'\n{NOISE}\n{banner()}"
    )
    assert cause_of(text) == "rank 0: ModuleNotFoundError: No module named 'nothing'"


def test_the_error_of_the_rank_that_failed_first_comes_before_those_of_others():
    text = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: ValueError: bad batch\n"
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File y\n[rank0]: RuntimeError: closed by peer\n"
        f"{banner(rank=1)}"
    )
    assert cause_of(text) == "rank 1: ValueError: bad batch"


def test_a_rank_that_a_signal_ended_has_that_signal_as_cause():
    text = f"step 1\n{banner(rank=1, code=-11, traceback='Signal 11 (SIGSEGV) received by PID 74')}"
    assert cause_of(text) == "rank 1: Signal 11 (SIGSEGV)"


def test_a_rank_that_ended_without_a_traceback_has_its_last_line_as_cause():
    text = f"diloco: eu/0: another shape\n{NOISE}\n{banner(code=78)}"
    assert cause_of(text) == "rank 0: diloco: eu/0: another shape"


def test_a_banner_whose_beginning_is_not_known_has_its_rank_as_cause():
    assert cause_of(banner().split("launch_agent", 1)[1]).startswith("rank 0: ")


@pytest.mark.parametrize(
    ("of_rank", "found"),
    [(75, 75), (78, 78), (1, 1), (-9, 1)],
    ids=["away", "refused", "crash", "kill"],
)
def test_under_torchrun_a_learner_that_was_refused_or_missed_the_syncer_has_its_own_code(
    of_rank, found
):
    assert code_of(f"step 1\n{banner(code=of_rank)}", 1) == found


def test_only_the_code_of_torchrun_is_replaced():
    text = banner(code=75)
    assert [code_of(text, code) for code in (0, -15, 2)] == [0, -15, 2]
    assert code_of("Root Cause (first observed failure):\n  exitcode  : 75 (pid: 7)\n", 1) == 1
    assert code_of("", 1) == 1


LOST = (
    "diloco: eu/0: joined\ndiloco: Learner.connect: called while a process imports the program\n"
    "Traceback (most recent call last):\n  File x\n"
    "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code {code}. Details are lost\n"
    "\nThe above exception was the direct cause of the following exception:\n\n"
    "Traceback (most recent call last):\n  File y\n"
    "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly\n"
)


def test_a_program_that_lost_a_worker_which_was_refused_is_refused_with_its_sentence():
    text = LOST.format(code=78)
    assert cause_of(text).startswith("diloco: Learner.connect: called while")
    assert code_of(text, 1) == 78
    assert code_of(text, -9) == -9


def test_a_program_that_lost_another_worker_has_its_own_last_line_as_cause():
    text = LOST.format(code=1)
    assert cause_of(text) == "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly"
    assert code_of(text, 1) == 1
