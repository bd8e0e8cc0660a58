"""Logging of the operator: the same line format for our records, kopf's and the client library's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from diloco.runtime.logs import configure_logging
from diloco_operator.workqueue import Key

_KEY: ContextVar[str] = ContextVar("job")


@contextmanager
def job_context(key: Key) -> Iterator[None]:
    """Add the job's key to every record that this thread logs in the body, from any logger."""
    token = _KEY.set(str(key))
    try:
        yield
    finally:
        _KEY.reset(token)


def configure(*, json: bool, stream: TextIO | None = None) -> None:
    """Send all records of this process to standard error; call once, in `__main__`."""
    configure_logging(json=json, name="operator", stream=stream)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_keyed)
    # kopf logs each event of each object; the reconciler's own lines are enough.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    # kopf warns that it ignores signals outside the main thread; here, __main__ handles them.
    logging.getLogger("kopf._core.reactor.running").addFilter(_no_signal_warning)


def _keyed(record: logging.LogRecord) -> bool:
    """Add the job's key; remove the attributes that kopf adds for its own formatter."""
    fields = vars(record)
    reference = fields.pop("k8s_ref", None)
    for name in ("settings", "k8s_skip"):
        fields.pop(name, None)
    if reference is not None:
        field = "job" if reference.get("kind") == "DiLoCoJob" else "object"
        fields.setdefault(field, f"{reference.get('namespace')}/{reference.get('name')}")
    if (key := _KEY.get(None)) is not None:
        fields.setdefault("job", key)
    return True


def _no_signal_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("OS signals are ignored")
