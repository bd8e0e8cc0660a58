"""Composition root of the syncer: settings → store → engine → runner → server; signals; exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from diloco import wire
from diloco.errors import EXIT_DONE, EXIT_USAGE, ConfigError, DilocoError
from diloco.health import HealthFile
from diloco.spec import RunSpec
from diloco.telemetry import configure_logging
from diloco.transport import Tls, bind, kernel_warnings, server, tune_interpreter, tune_malloc
from diloco.v1 import syncer_pb2_grpc
from diloco_syncer import settings, state
from diloco_syncer.core import merge
from diloco_syncer.identity import Gate
from diloco_syncer.lock import hold
from diloco_syncer.metrics import Metrics
from diloco_syncer.runner import Runner
from diloco_syncer.service import BulkService, SyncerService
from diloco_syncer.store import EventLog, Store

log = logging.getLogger("diloco_syncer")

SIGNAL_SECONDS = 1.0
"""A signal may reach another thread (after SIGCONT it does): only a main thread that wakes up by itself hears of it."""

STOP_SECONDS = 2.0
"""How long open streams may take to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; 0 when it ended cleanly, 2 for a usage error, 1 otherwise."""
    try:
        given = settings.read(arguments)
        configure_logging(json=given.json_logs, name="syncer")
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
    try:
        text = given.spec.read_text()
    except OSError as error:
        raise ConfigError(f"{given.spec}: {error.strerror}; give the RunSpec of the job") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{given.spec}: not UTF-8 text; give the RunSpec of the job") from None
    spec = RunSpec.from_json(text, source=str(given.spec))
    tls = Tls.load(given.tls)
    given.directory.mkdir(parents=True, exist_ok=True)
    most_learners = max(64, 2 * sum(spec.learners.values()))
    # Each learner holds one thread for its session and up to 2 τ for bulk streams.
    grpc_server = server(max_workers=32 + most_learners * (1 + 2 * spec.overlap))
    port = bind(grpc_server, given.listen, tls, tls_dir=given.tls)
    # Bound and held before the epoch is counted: a second syncer must not get that far.
    if hold(given.directory, stop) is None:
        return EXIT_DONE
    store = Store(given.directory / "snapshots", keep=spec.syncer_checkpoint.keep)
    epoch = store.next_epoch()
    events = EventLog(given.directory / "events.jsonl")
    engine, theta = state.resume(spec, given.directory, store, epoch=epoch)
    wire.warm_up()
    merge.warm_up()
    runner = Runner(
        spec, given.directory, engine=engine, theta=theta, store=store, events=events,
        metrics=Metrics(given.metrics_port), stall_seconds=given.stall_seconds,
        health=HealthFile(given.health_file),
    )  # fmt: skip
    runner.record(
        "start",
        step=engine.step,
        steps=spec.steps,
        fragments=spec.fragments,
        interval=spec.interval,
        quorum=spec.quorum,
        spec=spec.hash,
    )
    gate = Gate(job=spec.job, tls=tls is not None)
    service = SyncerService(runner, EventLog(given.directory / "eval.jsonl"), gate)
    syncer_pb2_grpc.add_SyncerServicer_to_server(service, grpc_server)
    grpc_server.add_generic_rpc_handlers((BulkService(runner, gate).handler(),))
    runner.start()
    grpc_server.start()
    host = given.listen.rpartition(":")[0]
    log.info("epoch %d serves %s:%d from step %d", epoch, host, port, engine.step)
    for warning in kernel_warnings():
        log.warning("%s", warning)
    if given.endpoint_file is not None:
        _publish(given, f"{host}:{port}")
    while not stop.wait(SIGNAL_SECONDS):
        pass
    log.info("ending: last snapshot")
    grpc_server.stop(STOP_SECONDS).wait()
    runner.stop()
    events.close()
    return EXIT_DONE


def _publish(given: settings.Settings, endpoint: str) -> None:
    file = given.endpoint_file
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(endpoint + "\n")
    os.replace(temporary, file)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # gRPC's threads of streams that never ended would keep the interpreter alive.
    os._exit(code)
