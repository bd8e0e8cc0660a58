"""
The user's kubectl, which handles kubeconfig, contexts, credential plugins and proxies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, cast

from diloco.errors import ConfigError, UnavailableError
from diloco.runtime.formatting import size
from diloco_cli.pod_files import Retries, is_permanent

_MAX_MESSAGE = 400
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl for one namespace of one cluster."""

    namespace: str = ""
    """"": that of the context."""
    context: str = ""
    """"": the current one."""
    program: str = "kubectl"
    retries: Retries = field(default_factory=Retries)
    most_bytes: int | None = None
    """Of the output of `run`, which a container may send; None: no limit."""

    def run(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """
        The output of a command, which is repeated when the API server fails for a moment.

        Args:
            arguments: of kubectl.
            stdin: None: that of this process, where a credential plugin may ask its user.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: it failed, and the message is kubectl's; or its output is over the limit.
        """
        command, backoff = self.command(*arguments), self.retries.backoff()
        for attempt in range(1, self.retries.attempts + 1):
            problem = "no reply from the API server"
            with contextlib.suppress(subprocess.TimeoutExpired):
                seconds = self.retries.stall_seconds
                if self.most_bytes is not None:
                    done = _limited(command, seconds, self.most_bytes)
                else:
                    done = subprocess.run(  # noqa: S603
                        command, input=stdin, capture_output=True, check=False, timeout=seconds
                    )
                if not done.returncode:
                    return done.stdout
                problem = done.stderr.decode(errors="replace").strip()[-_MAX_MESSAGE:] or problem
            if is_permanent(problem) or attempt == self.retries.attempts:
                break
            self.retries.announce(f"{problem}; trying again")
            time.sleep(backoff.next())
        raise UnavailableError(problem)

    def command(self, *arguments: str) -> list[str]:
        """
        The command line.

        Raises:
            ConfigError: kubectl is not installed.
        """
        program = shutil.which(self.program)
        if program is None:
            raise ConfigError(f"{self.program}: program not found; install kubectl")
        options = [f"--context={self.context}"] if self.context else []
        options += [f"--namespace={self.namespace}"] if self.namespace else []
        return [program, *options, *arguments]


def _limited(
    command: Sequence[str], seconds: float, most_bytes: int
) -> subprocess.CompletedProcess[bytes]:
    """
    Run a command without reading more than so many bytes of each of its streams.

    Raises:
        TimeoutExpired: it takes longer.
        UnavailableError: it sends more.
    """
    deadline = time.monotonic() + seconds
    output, errors = bytearray(), bytearray()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,  # noqa: S603
        selectors.DefaultSelector() as pipes,
    ):
        try:
            pipes.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, output)
            pipes.register(cast("IO[bytes]", process.stderr), selectors.EVENT_READ, errors)
            while pipes.get_map():
                for key, _ in pipes.select(max(0.0, deadline - time.monotonic())):
                    found = os.read(key.fd, _READ_BYTES)
                    key.data.extend(found)
                    if not found:
                        pipes.unregister(key.fileobj)
                    if len(key.data) > most_bytes:
                        raise UnavailableError(f"it sends more than {size(most_bytes)}")
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, seconds)
            code = process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, code, bytes(output), bytes(errors))
