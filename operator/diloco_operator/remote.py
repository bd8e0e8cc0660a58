"""
What a job in a cluster left on its syncer's volume, fetched with the caller's own kubectl.

kubectl brings kubeconfig, contexts, credential plugins and proxies; the files come out of the
syncer's container, which needs no tools of its own but Python.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from diloco.errors import ConfigError, StorageError, UnavailableError
from diloco_operator import names

STATE = "/var/lib/diloco"
"""Where the syncer's volume is mounted."""

LOGS = ("events.jsonl", "eval.jsonl")
MODEL = ("model",)

_PACK = (
    "import os, sys, tarfile\n"
    "out = tarfile.open(fileobj=sys.stdout.buffer, mode='w|')\n"
    "for name in sys.argv[2:]:\n"
    "    path = os.path.join(sys.argv[1], name)\n"
    "    if os.path.exists(path): out.add(path, arcname=name)\n"
    "out.close()\n"
)
_MOST_WORDS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job in a cluster, as kubectl finds it."""

    name: str
    namespace: str = ""
    """"": the context's."""
    context: str = ""
    """"": the current one."""
    kubectl: str = "kubectl"

    def manifest(self) -> bytes:
        """
        The DiLoCoJob as YAML.

        Raises:
            ConfigError: there is no kubectl.
            UnavailableError: kubectl got no such job.
        """
        command = self._command("get", f"dilocojobs.diloco.dev/{self.name}", "-o", "yaml")
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
        if done.returncode:
            raise self._refused("read", done.stderr)
        return done.stdout

    def fetch(self, wanted: tuple[str, ...], to: Path) -> None:
        """
        Copy files and folders of the run directory into `to`; what is not there is left out.

        Raises:
            ConfigError: there is no kubectl.
            UnavailableError: the syncer's pod is not there, or the stream broke.
        """
        pod = f"deployment/{names.syncer_name(self.name)}"
        command = self._command("exec", pod, "-c", "main", "--", "python3", "-c", _PACK, STATE)
        with tempfile.TemporaryFile() as said:
            with subprocess.Popen(  # noqa: S603
                [*command, *wanted], stdout=subprocess.PIPE, stderr=said
            ) as process:
                whole = _unpack(process.stdout, to)
            said.seek(0)
            if process.returncode or not whole:
                raise self._refused("fetch files of", said.read())

    def _command(self, *words: str) -> list[str]:
        program = shutil.which(self.kubectl)
        if program is None:
            raise ConfigError(f"{self.kubectl}: no such program; install kubectl, it is what asks")
        where = [f"--context={self.context}"] if self.context else []
        where += [f"--namespace={self.namespace}"] if self.namespace else []
        return [program, *where, *words]

    def _refused(self, doing: str, said: bytes) -> UnavailableError:
        words = said.decode(errors="replace").strip()[-_MOST_WORDS:]
        return UnavailableError(
            f"cannot {doing} job {self.name}: {words or 'the stream broke off'}"
        )


def _unpack(stream: IO[bytes] | None, to: Path) -> bool:
    """Write the archive's files below `to`; False when it broke off."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(to, filter="data")
    except tarfile.ReadError:
        return False
    except OSError as error:
        raise StorageError(f"{error.filename or to}: {error.strerror}") from None
    return True
