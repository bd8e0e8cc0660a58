"""
Which exits of a process are crashes: the one rule of the agent, of `diloco run` and of the operator. Pure.

Codes are those of `subprocess`: minus the signal's number when a signal ended the process.
"""

from __future__ import annotations

import signal

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_OF_SIGNALS = 128


def is_crash(code: int) -> bool:
    """
    Whether an exit counts against learnerRestartLimit: neither success nor a kill from outside.

    >>> is_crash(1), is_crash(-signal.SIGSEGV), is_crash(-signal.SIGKILL), is_crash(0)
    (True, True, False, False)
    """
    return code > 0 or -code in _CRASHES


def of_container(code: int) -> int:
    """
    The exit code of a container, which Kubernetes reports as 128 plus the signal's number.

    128 and codes above those of signals come from the runtime itself (255: the state is unknown). They count as
    signals that do not exist, so they are no crashes.

    >>> of_container(1), of_container(139), of_container(137)
    (1, -11, -9)
    """
    return code if code < _OF_SIGNALS else _OF_SIGNALS - code
