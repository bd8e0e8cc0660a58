"""
The user's kubectl, which handles kubeconfig, contexts, credential plugins and proxies.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from dataclasses import dataclass, field

from diloco.errors import ConfigError, UnavailableError
from diloco_cli.pod_files import Retries, is_permanent

_MAX_MESSAGE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl for one namespace of one cluster."""

    namespace: str = ""
    """"": that of the context."""
    context: str = ""
    """"": the current one."""
    program: str = "kubectl"
    retries: Retries = field(default_factory=Retries)

    def run(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """
        The output of a command, which is repeated when the API server fails for a moment.

        Args:
            arguments: of kubectl.
            stdin: None: that of this process, where a credential plugin may ask its user.

        Raises:
            ConfigError: kubectl is not installed.
            UnavailableError: it failed; the message is kubectl's.
        """
        command, backoff = self.command(*arguments), self.retries.backoff()
        for attempt in range(1, self.retries.attempts + 1):
            problem = "no reply from the API server"
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(  # noqa: S603
                    command, input=stdin, capture_output=True, check=False,
                    timeout=self.retries.stall_seconds,
                )  # fmt: skip
                if not done.returncode:
                    return done.stdout
                problem = done.stderr.decode(errors="replace").strip()[-_MAX_MESSAGE:] or problem
            if is_permanent(problem) or attempt == self.retries.attempts:
                break
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
