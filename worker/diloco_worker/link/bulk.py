"""Bulk transfers of the link: uploads and downloads on threads, and placing what was downloaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diloco.errors import DilocoError
from diloco.rpc.channels import Connection
from diloco.rpc.identity import server_name
from diloco.spec import RunSpec
from diloco_worker.core import events as ev
from diloco_worker.core.inbox import Staged
from diloco_worker.ipc.shared_memory import SharedMemory
from diloco_worker.link import download
from diloco_worker.link.buffers import BufferPool, most_idle_bytes, most_transfers
from diloco_worker.link.encoder import Encoder
from diloco_worker.link.placement import Placement
from diloco_worker.link.schedule import Schedule
from diloco_worker.link.transfer import CancelToken, Identity, initial_ended
from diloco_worker.link.upload import Uploader
from diloco_worker.settings import LearnerSettings

log = logging.getLogger("diloco.link")

_Job = Callable[[CancelToken], ev.Event | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A transfer has ended; `BulkTransfers.settle` returns the event if it still counts."""

    schedule: Schedule[_Job]
    cancel: CancelToken
    event: ev.Event | None


class BulkTransfers:
    """
    Runs transfers and posts their ends; call it from one thread.

    Args:
        config: from the environment.
        spec: of the job.
        shared: memory shared with the trainer.
        post: takes the ends, from the threads of the transfers; pass each to `settle`.

    Raises:
        ConfigError: the TLS files cannot be used.
    """

    def __init__(
        self, config: LearnerSettings, spec: RunSpec, shared: SharedMemory,
        post: Callable[[Ended], None],
    ) -> None:  # fmt: skip
        self._post = post
        # Two connections: a download that waits for a merge must not delay an upload.
        self._up, self._down = (
            Connection(
                config.syncer, tls_dir=config.tls, purpose="bulk",
                server_name=server_name(config.job), proxy=config.proxy,
            )
            for _ in range(2)
        )  # fmt: skip
        self.buffers = BufferPool(most_idle_bytes=most_idle_bytes(shared.layout, spec))
        self._placement = Placement(shared, spec, self.buffers)
        self._encoder = Encoder(shared, spec, self.buffers, faults=config.faults)
        self._uploader = Uploader(lambda: self._up.channel, self._encoder)
        self._uploads = self._scheduled(most_transfers(spec), "upload")
        self._downloads = self._scheduled(most_transfers(spec), "download")

    @property
    def uploading(self) -> bool:
        """Whether an upload runs; any thread may ask."""
        return self._uploads.running > 0

    @property
    def unchanged(self) -> int:
        """See `Encoder.unchanged`."""
        return self._encoder.unchanged

    # ------------------------------------------------------------ starting and cancelling

    def upload(self, pull: ev.Pulled, identity: Identity) -> None:
        """Answer a pull."""
        self._uploads.add(pull.fragment, partial(self._upload, pull, identity))

    def upload_initial(self, decision: ev.UploadInitial, identity: Identity) -> None:
        """Upload Θ^(0); `InitialUploaded` follows."""
        self._uploads.add("initial", partial(self._upload_initial, decision, identity))

    def download(self, request: ev.Download, identity: Identity) -> None:
        """Download a fragment or the constants; `Downloaded` follows unless it is cancelled."""
        model = request.round == 0 and request.exact  # of a fresh process, beside any result
        key = (request.fragment, model)
        job = partial(self._download, request, identity)
        self._downloads.add(key, job, round=request.round)

    def cancel_all(self) -> None:
        """Cancel every transfer that still runs: nothing of it will reach the protocol."""
        self._uploads.cancel_all()
        self._downloads.cancel_all()

    def settle(self, ended: Ended) -> ev.Event | None:
        """
        The event of a transfer that has ended; None if there is none or it was cancelled.

        Call `proceed` once its decisions were carried out.
        """
        counts = ended.schedule.ended(ended.cancel)
        if not counts and isinstance(ended.event, ev.Downloaded) and ended.event.staged:
            self.discard(ended.event.staged)
        return ended.event if counts else None

    def proceed(self) -> None:
        """Start the transfers that waited for others to end."""
        self._uploads.proceed()
        self._downloads.proceed()

    def renew_connections(self) -> None:
        """Reconnect if the certificate files were replaced."""
        self._up.renew()
        self._down.renew()

    def place(self, decision: ev.Place) -> ev.Placed:
        """Decode a staged fragment into its inbox, and release it."""
        return self._placement.place(decision)

    def discard(self, staged: Staged) -> None:
        """Release a staged fragment."""
        self._placement.discard(staged)

    # ------------------------------------------------------------ on the threads

    def _scheduled(self, most: int, name: str) -> Schedule[_Job]:
        def run(job: _Job, cancel: CancelToken) -> None:
            event = None
            try:
                event = job(cancel)
            finally:
                self._post(Ended(schedule=schedule, cancel=cancel, event=event))

        def start(job: _Job, cancel: CancelToken) -> None:
            # Not an executor: from Python 3.12 on, it may count a busy thread as idle, and start none.
            threading.Thread(target=run, args=(job, cancel), name=name, daemon=True).start()

        schedule: Schedule[_Job] = Schedule(most, start)
        return schedule

    def _upload(self, pull: ev.Pulled, identity: Identity, cancel: CancelToken) -> None:
        try:
            self._uploader.pull(pull, identity, cancel)
        except DilocoError as error:
            self.renew_connections()
            if not cancel.stopped:
                log.warning(
                    "upload of fragment %d for round %d attempt %d: %s: %s",
                    pull.fragment, pull.round, pull.attempt, error.reason, error,
                )  # fmt: skip
        except Exception:
            log.exception("upload of fragment %d", pull.fragment)

    def _upload_initial(
        self, decision: ev.UploadInitial, identity: Identity, cancel: CancelToken
    ) -> ev.InitialUploaded:
        ended = ev.InitialUploaded(request=decision.request)
        try:
            if not cancel.wait(decision.delay_seconds):
                self._uploader.initial(identity, cancel)
        except DilocoError as problem:
            self.renew_connections()
            ended = initial_ended(decision.request, problem)
        except Exception as problem:
            log.exception("upload of the initial model")
            ended = ev.InitialUploaded(request=decision.request, error=repr(problem))
        if ended.error and not cancel.stopped:
            log.warning("upload of the initial model: %s", ended.error)
        return ended

    def _download(
        self, request: ev.Download, identity: Identity, cancel: CancelToken
    ) -> ev.Downloaded:
        staged, error = None, ""
        try:
            if not cancel.wait(request.delay_seconds):
                assembly = self._placement.begin(request, identity)
                payloads = download.fetch(self._down.channel, assembly, cancel)
                if payloads is not None:
                    staged = self._placement.stage(request, payloads)
        except DilocoError as problem:
            self.renew_connections()
            error = f"{problem.reason}: {problem}"
        except Exception as problem:
            log.exception("download of fragment %d", request.fragment)
            error = repr(problem)
        if error and not cancel.stopped:
            log.info(
                "download of fragment %d for round %d: %s", request.fragment, request.round, error
            )
        aborted = staged is None and not error
        return ev.Downloaded(request=request, staged=staged, error=error, aborted=aborted)
