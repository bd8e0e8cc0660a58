"""
Which line of a log states why a program ended, and its exit code there. Pure.

It is the last one, except under torchrun: that ends with a banner about the rank that failed first, and the error
of the rank itself is further up. Nor is it the last one if a worker of a data loader was refused: the program then ends
because it lost a worker. Progress bars do not count: one that is open is drawn once more after a traceback.
"""

from __future__ import annotations

import re

from diloco.errors import EXIT_REFUSED, EXIT_TRY_AGAIN

_BAR = re.compile(
    r"(?<![^\r\n])[^\r\n]{0,200}?(\d%\|[^|\r\n]{0,300}\||\dit) [^\r\n\[]{0,40}\[\d+:\d\d[^\]\r\n]{0,200}\]"
)
"""Of tqdm, with and without a known end, and what is before it in the line; bounded, for lines of any length."""
_ESCAPE = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
"""Of a terminal, such as a color, or the way up to the bar that contains this one."""
_BANNER = "ChildFailedError"
_CODE_OF_ERROR = 1
"""Of a program of Python that an exception ended, and of torchrun."""
_FAILED = re.compile(r"failed \(exitcode: ")
"""In torchrun's own line before its traceback and banner."""
_ROOT_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: ", re.MULTILINE)
_ROOT_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: ", re.MULTILINE)
_ROOT_SIGNAL = re.compile(r"^\s*traceback\s*: (Signal \d+ \(\w+\))", re.MULTILINE)
_ROOT = "Root Cause (first observed failure):"
_OF_RANK = re.compile(r"^\[rank(\d+)\]:\s?")
"""Before each line of a traceback after torch.distributed was initialized."""
_OF_TORCHRUN = re.compile(r"^[WEI]\d{4} \d\d:\d\d:\d\d")
_TRACEBACK = "Traceback (most recent call last):"
_LOST_WORKER = re.compile(
    rf"^RuntimeError: DataLoader worker \(pid \d+\) exited unexpectedly with exit code {EXIT_REFUSED}\b",
    re.MULTILINE,
)
_SENTENCE = re.compile(r"^diloco: .+", re.MULTILINE)
"""With which a process of this package ends, or states its progress."""


def cause_of(text: str) -> str:
    """
    The line of the end of a log that states why the program ended; "": there is no line.

    >>> cause_of("started\\nNo such file\\n")
    'No such file'
    """
    text = _BAR.sub("", _ESCAPE.sub("", text))
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    if not lines:
        return ""
    before, root = _banner(text)
    if not root:
        return _refusal_of_worker(text) or lines[-1].strip()
    found = _ROOT_RANK.search(root)
    rank = found[1] if found else ""
    if signal := _ROOT_SIGNAL.search(root):
        return f"rank {rank}: {signal[1]}"
    own = _lines_of_ranks(before)
    error = _last_error([line for owner, line in own if owner == rank]) or _last_error(
        [line for _, line in own]
    )
    # Without a traceback: what it logged last, such as the reason of a refusal.
    last = own[-1][1].strip() if own else lines[-1].strip()
    return f"rank {rank}: {error or last}"


def code_of(text: str, code: int) -> int:
    """
    The exit code of a program: under torchrun, which always ends with 1, that of the rank that failed first; likewise
    that of the worker of a data loader whose end is why the program ended.

    Only the codes of a learner itself replace the other one: it is unavailable or refused, and did not crash.

    Args:
        text: end of its log.
        code: of the process; minus the signal's number when a signal ended it.
    """
    if code != _CODE_OF_ERROR:
        return code
    _, root = _banner(text)
    if not root:
        return EXIT_REFUSED if _refusal_of_worker(text) else code
    found = _ROOT_CODE.search(root)
    own = int(found[1]) if found else code
    return own if own in (EXIT_TRY_AGAIN, EXIT_REFUSED) else code


def _banner(text: str) -> tuple[str, str]:
    """What precedes the facts about the rank that failed first, and those; "": there is no banner of torchrun."""
    before, _, root = text.rpartition(_ROOT)
    return (before, root) if _BANNER in before else (text, "")


def _refusal_of_worker(text: str) -> str:
    """The sentence of the worker of a data loader that was refused, if that ended the program; "": it did not."""
    lost = _LOST_WORKER.search(text)
    own = _SENTENCE.findall(text, 0, lost.start()) if lost else []
    return own[-1].strip() if own else ""


def _lines_of_ranks(text: str) -> list[tuple[str, str]]:
    """(rank or "", line) of what the ranks wrote before torchrun reported the failure."""
    out = []
    for line in text.split("\n"):
        if _FAILED.search(line):
            break
        if line.strip() and not _OF_TORCHRUN.match(line):
            found = _OF_RANK.match(line)
            out.append((found[1] if found else "", line[found.end() :] if found else line))
    return out


def _last_error(lines: list[str]) -> str:
    """The line at the end of the last traceback; "": there is none."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return ""
    after = (line for line in lines[starts[-1] + 1 :] if not line.startswith((" ", "\t")))
    return next(after, "")
