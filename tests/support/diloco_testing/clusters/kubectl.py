"""kubectl as a user runs it, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco_testing.clusters.reads import Reads, UnansweredError
from diloco_testing.machine import slowdown

Object = dict[str, Any]
SLOWEST_POLL_SECONDS = 2.0
"""Some polls start a program in a pod, and they are thousands."""


class KubectlError(Exception):
    """kubectl ended with another code than 0; the text is its standard error."""


class Kubectl:
    """kubectl for one cluster; objects are plain dicts."""

    def __init__(self, program: Sequence[str], kubeconfig: Path) -> None:
        """
        Args:
            program: the command, such as ("kubectl",); may first enter a network namespace.
            kubeconfig: the cluster and the user.
        """
        self._program = (*program, "--kubeconfig", str(kubeconfig))
        self.reads = Reads(self._program)

    def __call__(self, *args: str, stdin: str | None = None, seconds: float = 120.0) -> str:
        """
        Standard output.

        Raises:
            KubectlError: it refused, or took longer than `seconds`.
        """
        return self.raw(*args, stdin=stdin, seconds=seconds).decode(errors="replace")

    def raw(self, *args: str, stdin: str | bytes | None = None, seconds: float = 120.0) -> bytes:
        """Standard output as it came; see `__call__`."""
        command = " ".join(args)
        content = stdin.encode() if isinstance(stdin, str) else stdin
        try:
            done = subprocess.run(
                [*self._program, *args],
                input=content,
                stdin=subprocess.DEVNULL if content is None else None,
                capture_output=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {command}: no end within {seconds} s") from None
        if done.returncode:
            error = done.stderr.decode(errors="replace").strip()
            raise KubectlError(f"kubectl {command}: code {done.returncode}: {error}")
        return done.stdout

    def popen(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command that keeps running, such as a watch; the caller ends it."""
        return subprocess.Popen(
            [*self._program, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **options,
        )

    def close(self) -> None:
        """End what runs between two commands."""
        self.reads.close()

    def script(self, folder: Path) -> Path:
        """Write a program `kubectl` for this cluster, for programs that call kubectl themselves."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "kubectl"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(self._program)} "$@"\n')
        path.chmod(0o755)
        return path

    def get(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        """The object, or None where there is none."""
        with contextlib.suppress(UnansweredError):
            return self.reads.get(kind, name, namespace)
        text = self("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return dict(json.loads(text)) if text.strip() else None

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> list[Object]:
        """Objects of a kind; namespace "" is all of them."""
        with contextlib.suppress(UnansweredError):
            return self.reads.list(kind, namespace, selector)
        where = ["-n", namespace] if namespace else ["-A"]
        chosen = ["-l", selector] if selector else []
        return list(json.loads(self("get", kind, *where, *chosen, "-o", "json"))["items"])

    def apply(self, *objects: Object, namespace: str = "default") -> str:
        """Apply all of them, strictly; returns kubectl's output."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return self("apply", "-n", namespace, "--validate=strict", "-f", "-", stdin=text)

    def patch(self, kind: str, name: str, change: Object, namespace: str = "default") -> None:
        """Merge a change into an object."""
        text = json.dumps(change)
        self("patch", kind, name, "-n", namespace, "--type=merge", "-p", text)

    def delete(self, kind: str, name: str, namespace: str = "default", *flags: str) -> None:
        """Delete it; waits until it is deleted unless a flag changes that."""
        self("delete", kind, name, "-n", namespace, "--ignore-not-found", *flags)

    def exec(self, pod: str, *command: str, namespace: str, seconds: float = 60.0) -> str:
        """Run a command in a pod's container `main`; returns its output."""
        return self("exec", "-n", namespace, pod, "-c", "main", "--", *command, seconds=seconds)


def until(
    what: Callable[[], Any],
    seconds: float,
    *,
    expected: str,
    every: float = 0.5,
    details: Callable[[], str] | None = None,
) -> Any:
    """
    Poll until `what` gives something true, and return that.

    An error of kubectl counts as false: the API server may be stopped on purpose.

    Args:
        what: the question.
        seconds: how long at most, on a machine where no process waits for a core; longer on a busy one.
        expected: the promise, for the failure's text.
        every: pause between two polls, in seconds; it grows with the time waited, to 2 s.
        details: more for the failure's text.
    """
    begun = time.monotonic()
    seen: Any = None
    while True:
        try:
            seen = what()
        except KubectlError as error:
            seen, refused = None, str(error)
        else:
            refused = repr(seen)
        if seen:
            return seen
        took = time.monotonic() - begun
        if took > seconds * slowdown():
            more = f"\n{details()}" if details else ""
            raise AssertionError(f"{expected}: not within {took:.0f} s; last seen: {refused}{more}")
        time.sleep(max(every, min(SLOWEST_POLL_SECONDS, took / 20)))
