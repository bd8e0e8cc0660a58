"""One kind of log line for all that runs here: our own, kopf's, the Kubernetes client's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from diloco.telemetry import configure_logging
from diloco_operator.workqueue import Key

_KEY: ContextVar[str] = ContextVar("job")


@contextmanager
def about(key: Key) -> Iterator[None]:
    """Every line that this thread logs in the body carries the job's key, whoever logs it."""
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
    # One line for each event of each object says nothing that a reconcile does not say.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    # kopf runs beside the main thread, which handles signals itself: its warning is untrue here.
    logging.getLogger("kopf._core.reactor.running").addFilter(_no_signal_warning)


def _keyed(record: logging.LogRecord) -> bool:
    """Add the job's key; take off what kopf attaches for its own formatter."""
    fields = vars(record)
    seen = fields.pop("k8s_ref", None)
    for name in ("settings", "k8s_skip"):
        fields.pop(name, None)
    if seen is not None:
        what = "job" if seen.get("kind") == "DiLoCoJob" else "object"
        fields.setdefault(what, f"{seen.get('namespace')}/{seen.get('name')}")
    if (key := _KEY.get(None)) is not None:
        fields.setdefault("job", key)
    return True


def _no_signal_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("OS signals are ignored")
