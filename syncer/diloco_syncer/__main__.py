"""Composition root of the syncer: settings → store → state → runner → server; signals; exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from diloco.codec import formats
from diloco.errors import EXIT_DONE, EXIT_USAGE, ConfigError, DilocoError
from diloco.journal.background import BackgroundWriter
from diloco.journal.replay_files import plan_in
from diloco.journal.writer import JournalWriter
from diloco.rpc.servers import bind, server
from diloco.rpc.tls import Tls
from diloco.runtime import files
from diloco.runtime.health import BackgroundHealthFile, Health, HealthFile
from diloco.runtime.interpreter import tune_interpreter
from diloco.runtime.logs import configure_logging
from diloco.runtime.malloc import tune_malloc
from diloco.runtime.memory_limit import memory_bytes
from diloco.runtime.sysctl import kernel_warnings
from diloco.spec import RunSpec
from diloco_syncer import settings
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission
from diloco_syncer.core.replay import ReplayEngine
from diloco_syncer.merging import streaming
from diloco_syncer.metrics import Metrics
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.authorizer import Authorizer
from diloco_syncer.rpc.bulk import BulkService
from diloco_syncer.rpc.call_limits import WATCH_THREAD, CallLimits
from diloco_syncer.rpc.control import EVALUATIONS_PART_BYTES, ControlService
from diloco_syncer.runner import Runner
from diloco_syncer.spec_file import SpecFile
from diloco_syncer.state import State
from diloco_syncer.storage import snapshots
from diloco_syncer.storage.lock import hold
from diloco_syncer.storage.mirror import Mirror
from diloco_syncer.storage.model_output import Output
from diloco_syncer.storage.object_store import Objects, StoppedError
from diloco_syncer.storage.restore import restore
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.writer import make_durable

log = logging.getLogger("diloco_syncer")

SIGNAL_SECONDS = 1.0
"""Another thread may receive a signal (after SIGCONT it does); the main thread runs its handler when it wakes up."""

STOP_SECONDS = 2.0
"""How long open streams may take to end on shutdown, and then gRPC to notice it."""

SERVING = "(_serve)"
"""End of the name of the thread of a gRPC server: of its target, which gRPC does not name otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; 0 when it ended cleanly, 2 for a usage error, 1 otherwise (see `Runner.failure`)."""
    try:
        given = settings.read(arguments)
        configure_logging(json=given.json_logs, name="syncer", background=True)
        return _run(given)
    except ConfigError as error:
        print(f"diloco-syncer: {error}", file=sys.stderr)
        return EXIT_USAGE
    except DilocoError as error:
        print(f"diloco-syncer: {error}", file=sys.stderr)
        return 1


def _run(given: settings.Settings) -> int:
    tune_malloc()
    tune_interpreter()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    text = _read(given.spec)
    spec = RunSpec.from_json(text, source=str(given.spec))
    tls = Tls.load(given.tls)
    given.directory.mkdir(parents=True, exist_ok=True)
    grpc_server = server(max_workers=1)  # each service has threads of its own (rpc/call_limits.py)
    port = bind(grpc_server, given.listen, tls, tls_dir=given.tls)
    # Port and directory come before the epoch: a second syncer must not count one.
    if hold(given.directory, stop) is None:
        return EXIT_DONE
    try:
        parts = _assemble(given, spec, tls=tls is not None, stop=stop)
    except StoppedError:
        return EXIT_DONE
    runner, engine = parts.runner, parts.state.engine
    grpc_server.add_generic_rpc_handlers((parts.control.handler(), parts.bulk.handler()))
    spec_file = _spec_file(given, text, runner, parts.limits)
    ended = _end_with_threads(stop)
    runner.start()
    grpc_server.start()
    spec_file.follow()
    host = given.listen.rpartition(":")[0]
    log.info("epoch %d serves %s:%d from step %d", engine.epoch, host, port, engine.step)
    for warning in kernel_warnings():
        log.warning("%s", warning)
    if given.endpoint_file is not None:
        _publish(given, f"{host}:{port}")
    while not stop.wait(SIGNAL_SECONDS):
        pass
    if runner.failure is None:
        log.info("stopping: writing the last snapshot")
    spec_file.stop()
    runner.stop_deciding()
    _stop_serving(grpc_server)
    runner.stop()
    parts.scores.close()
    parts.events.close()
    if runner.failure is not None:
        make_durable(parts.events.path)
        return 1  # the supervisor starts a successor, which resumes from the newest snapshot
    return 1 if ended else EXIT_DONE


def _end_with_threads(stop: threading.Event) -> list[str]:
    """
    End the process when a thread ends by an error without which it looks alive and answers no call.

    Returns:
        The names of those threads, as they end.
    """
    ended: list[str] = []
    report = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread is not None else ""
        if name == WATCH_THREAD or name.endswith(SERVING):
            ended.append(name)
            stop.set()
            log.critical("the syncer ends: thread %s: %r", name, arguments.exc_value)
        report(arguments)

    threading.excepthook = hook
    return ended


def _stop_serving(grpc_server: grpc.Server) -> None:
    """Bounded, also when gRPC's thread has ended or none can be started: the last snapshot comes after it."""
    try:
        if not grpc_server.stop(STOP_SECONDS).wait(2 * STOP_SECONDS):
            log.warning("gRPC has not ended within %g s", 2 * STOP_SECONDS)
    except RuntimeError as error:
        log.warning("gRPC cannot end its streams: %s", error)


def _read(spec: Path) -> str:
    try:
        return spec.read_text()
    except OSError as error:
        raise ConfigError(f"{spec}: {error.strerror}; give the RunSpec of the job") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{spec}: not UTF-8 text; give the RunSpec of the job") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What this process consists of, besides the gRPC server."""

    state: State
    runner: Runner
    limits: CallLimits
    control: ControlService
    bulk: BulkService
    events: BackgroundWriter
    scores: BackgroundWriter


def _assemble(
    given: settings.Settings, spec: RunSpec, *, tls: bool, stop: threading.Event
) -> _Parts:
    """Begin an epoch, from the newest snapshot; no thread of the job runs yet."""
    store = Store(given.directory / "snapshots", keep=spec.syncer_checkpoint.keep)
    health = BackgroundHealthFile(given.health_file)
    objects = _objects(spec.snapshot_url, given, spec)
    models = _objects(spec.output_url, given, spec)
    output = Output(models, given.directory) if models is not None else None
    restored = None
    if objects is not None and store.is_empty:
        restored = restore(
            objects, store, spec=spec.hash, stop=stop, show=partial(_show, health)
        )  # fmt: skip
    epoch = store.next_epoch()
    events = BackgroundWriter(JournalWriter(given.directory / "events.jsonl"))
    snapshot = store.start()
    run = store.run(begins=snapshot is None)
    engine, parameters = snapshots.resume(
        spec, given.directory, snapshot, epoch=epoch, run=run, output=output.url if output else ""
    )
    if given.replay is not None:
        engine = _replayed(spec, given, fresh=snapshot is None)
    formats.warm_up()
    streaming.warm_up()
    newest = max((learner.incarnation for learner in engine.learners), default=0)
    admission = Admission(
        spec,
        layout=parameters.layout if parameters else None,
        source=parameters.source if parameters else "",
        issued_before=max(newest, store.issued_incarnations()),
        memory_bytes=memory_bytes(),
    )
    state = State(
        engine=engine,
        admission=admission,
        parameters=parameters,
        model=snapshots.exported(given.directory, run=run),
        run=run,
        start_id=store.start_id,
        snapshot_start_id=store.snapshot_start_id,
    )
    metrics = Metrics(given.metrics_port)
    mirror = None
    if objects is not None:

        def record(event: str, **fields: object) -> None:
            runner.record(event, **fields)  # which needs the mirror

        mirror = Mirror(
            objects, store, keep=spec.syncer_checkpoint.keep, run=run, record=record,
            claimed=restored.claim if restored else None,
            verified=restored.copy if restored else None,
        )  # fmt: skip
        state.copies = mirror.state
    runner = Runner(
        state, given.directory, store=store, events=events, metrics=metrics, health=health,
        mirror=mirror, output=output, on_failure=stop.set,
    )  # fmt: skip
    authorizer = Authorizer(job=spec.job, tls=tls)
    limits = CallLimits(spec, RefusalLog(runner.record))
    scores = BackgroundWriter(
        JournalWriter(given.directory / "eval.jsonl"), part_bytes=EVALUATIONS_PART_BYTES
    )
    control = ControlService(
        runner, scores, authorizer, limits,
        # Below a number in events.jsonl, a fresh learner would be refused as a replaced one.
        next_incarnation=partial(store.next_incarnation, at_least=newest),
    )  # fmt: skip
    return _Parts(
        state=state, runner=runner, limits=limits, control=control,
        bulk=BulkService(runner, authorizer, limits), events=events, scores=scores,
    )  # fmt: skip


def _replayed(spec: RunSpec, given: settings.Settings, *, fresh: bool) -> ReplayEngine:
    if given.replay is None or not fresh:
        raise ConfigError(f"{given.directory}: holds snapshots; a replay needs a new directory")
    return ReplayEngine.of(spec, plan_in(given.replay))


def _objects(url: str, given: settings.Settings, spec: RunSpec) -> Objects | None:
    """The folder of this job below a URL; None: there is no URL."""
    if not url:
        return None
    # The library is loaded by jobs that need it.
    from diloco_syncer.storage.obstore_objects import ObstoreObjects

    return ObstoreObjects(url, spec.job, plain_http=given.plain_http)


def _show(health: HealthFile, why: str) -> None:
    now = time.monotonic()
    health.write(Health(at=now, ready=False, why=why, progress_at=now))


def _spec_file(given: settings.Settings, text: str, runner: Runner, limits: CallLimits) -> SpecFile:
    """Passes new numbers of learners on, and records documents that cannot be used."""

    def changed(learners: Mapping[str, int]) -> None:
        limits.provide(learners)
        runner.post(ev.LimitsChanged(learners=learners))

    def refused(error: ConfigError) -> None:
        log.warning("keeping the current numbers of learners: %s", error)
        runner.record("refuse", learner="", reason=error.reason, detail=str(error))

    return SpecFile(given.spec.read_text, text, runner.spec, changed=changed, refused=refused)


def _publish(given: settings.Settings, endpoint: str) -> None:
    file = given.endpoint_file
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace(file, endpoint + "\n")


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # gRPC threads of streams that have not ended would keep the interpreter alive.
    os._exit(code)
