"""
Follows the spec document while the syncer runs, for the numbers of learners in it.

In a cluster the document is a key of a mounted ConfigMap, which the kubelet replaces within about a
minute of a change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from diloco.errors import ConfigError
from diloco.spec import RunSpec
from diloco_syncer.core import learner_limits

log = logging.getLogger(__name__)

READ_SECONDS = 2.0
"""Between two reads; the document has a few KiB."""


class SpecFile:
    """
    Passes on what is new in the document; a document that cannot be used changes nothing.

    Args:
        read: reads the document.
        text: what it contained when the syncer started.
        spec: of that text.
        changed: takes the new numbers of learners.
        refused: takes why a document is not used, once.
    """

    def __init__(
        self, read: Callable[[], str], text: str, spec: RunSpec, *,
        changed: Callable[[Mapping[str, int]], object], refused: Callable[[ConfigError], object],
    ) -> None:  # fmt: skip
        self._read, self._spec = read, spec
        self._changed, self._refused = changed, refused
        self._seen = text
        """The last text, or why there was none."""
        self._end = threading.Event()

    def check(self) -> None:
        """Read it once."""
        unreadable = ""
        try:
            text = self._read()
        except (OSError, UnicodeDecodeError) as error:
            text = unreadable = repr(error)
        if text == self._seen:
            return
        self._seen = text
        try:
            if unreadable:
                raise ConfigError(f"spec document: cannot be read: {unreadable}")
            learners = learner_limits.parse(text, self._spec)
        except ConfigError as error:
            self._refused(error)
        else:
            self._changed(learners)

    def follow(self) -> None:
        """Check it every READ_SECONDS, on a thread, until `stop`."""
        threading.Thread(target=self._run, name="spec file", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(READ_SECONDS):
            try:
                self.check()
            except Exception:  # whatever is wrong with one version, the next one may be good
                log.exception("the spec document could not be followed")
