"""
Entry point of the link process: `python -m diloco_worker.link`, started by the training process.

It inherits two file descriptors, the shared memory and a socket, and runs exactly as long as the
training process: end of file on the socket, or the death of the parent, ends it.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco.runtime.interpreter import tune_interpreter
from diloco.runtime.logs import configure_logging
from diloco.runtime.malloc import tune_malloc
from diloco.runtime.sysctl import kernel_warnings
from diloco_worker import settings
from diloco_worker.core.messages import LinkState
from diloco_worker.ipc.pipe import Pipe
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.link.link import Link

log = logging.getLogger("diloco.link")


def main() -> None:
    """Run until the trainer is gone."""
    parser = argparse.ArgumentParser(
        description="The network side of one learner; started by the learner."
    )
    parser.add_argument(
        "--memory", type=int, required=True, help="file descriptor of the shared memory"
    )
    parser.add_argument(
        "--socket", type=int, required=True, help="file descriptor of the socket to the trainer"
    )
    parser.add_argument("--parent", type=int, required=True, help="process ID of the trainer")
    options = parser.parse_args()
    _die_with(options.parent)
    tune_malloc()
    tune_interpreter()
    config = settings.from_env()
    if config is None:
        raise SystemExit(
            "DILOCO_SYNCER is not set; a learner starts the link, do not run it directly"
        )
    configure_logging(json=config.json_logs, name="link", background=True)
    for warning in kernel_warnings():
        log.info("%s", warning)
    pipe = Pipe(socket.socket(fileno=options.socket))
    try:
        link = Link(config, config.read_spec(), SharedMemory.attach(options.memory), pipe)
    except ConfigError as error:
        pipe.offer(LinkState(refused_exit=EXIT_REFUSED, text=str(error)).to_line())
        _exit(EXIT_REFUSED)
    failure = 1
    try:
        failure = 1 if link.run() else 0
    finally:
        _exit(failure)


def _exit(code: int) -> NoReturn:
    """
    End the process without waiting for its threads.

    Those of gRPC and of transfers may still wait for the network, and that of the log for its reader,
    with the lock of standard error. Each line that was logged is flushed, for a limited time.
    """
    logging.shutdown()
    os._exit(code)


def _die_with(parent: int) -> None:
    """Die with the trainer and only then: it alone handles signals to the process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)  # it died before prctl took effect


if __name__ == "__main__":
    main()
