"""
The evaluator: downloads the syncer's Θ at intervals, scores it, and submits the score.

    python -m diloco_worker.evaluator

It is an observer: no learner waits for it, and it may die at any time. The model of a recipe is
scored in this process; the model of a user's own loop is written to a file and scored by the user's
command.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import math
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from diloco.errors import (
    EXIT_REFUSED,
    ConfigError,
    DilocoError,
    ProtocolError,
    UnavailableError,
)
from diloco.rpc import channels, status_codes
from diloco.rpc.identity import server_name
from diloco.runtime import backoff, files, logs, untrusted_json
from diloco.runtime.formatting import shorten
from diloco.runtime.health import Health, HealthFile
from diloco.spec import EVALUATION_SECONDS, RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_worker import settings
from diloco_worker.fetch import fetch_model
from diloco_worker.recipes import RECIPES

log = logging.getLogger("diloco.evaluator")

Weights = Mapping[str, NDArray[Any]]
Score = dict[str, Any]
"""At least {"loss": number}."""

_POLL_SECONDS = 1.0
# The Θ^(0) of a user's own loop is available only until the first merge.
_FIRST_POLL_SECONDS = 0.2
_CALL_SECONDS = 10.0
_LEFT_SECONDS = 1.0
"""How long what a command started may still write to its output when the command has ended."""
_MAX_STDERR = 2000
_KEPT_BYTES = 64 << 10
"""Of what a command prints, however much that is."""
_PREFIX = "diloco-evaluation-"
DETAIL_BYTES, MAX_TEXT = 16 << 10, 256
"""What the syncer takes of the members of a score besides its loss, and characters of a text or name of them."""
_MAX_NAMES = 500
_MAX_HEAD, _MAX_LAST = 100, 200
"""Of the first and the last line of an error that are shown in the status."""


class NoScoreError(Exception):
    """The user's command returned no score for this model; the next model gets another try."""


class Scorer(Protocol):
    """Scores weights."""

    def __call__(self, weights: Weights) -> Score:
        """
        The score, with at least `loss`.

        Raises:
            NoScoreError: this model could not be scored.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandScorer:
    """
    The user's `evaluation.command`, called with the path of a model.safetensors as its last
    argument.
    """

    command: tuple[str, ...]

    def __call__(self, weights: Weights) -> Score:
        """The last JSON object on the command's standard output."""
        program = (
            (sys.executable, *self.command[1:]) if self.command[0] == "python" else self.command
        )
        try:
            with _directory() as directory:
                path = directory / "model.safetensors"
                arrays = {name: np.asarray(array, order="C") for name, array in weights.items()}
                safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
                code, stdout, stderr = _run([*program, str(path)], seconds=EVALUATION_SECONDS)
        except (OSError, SafetensorError, subprocess.TimeoutExpired) as error:
            raise NoScoreError(f"evaluation.command: {error}") from None
        if code != 0:
            raise NoScoreError(
                f"evaluation.command ended with {code}, expected 0; its standard error "
                f"ends with: {stderr.strip()[-_MAX_STDERR:]}"
            )
        return parse_score(stdout, stderr=stderr)


def _run(command: Sequence[str], *, seconds: float) -> tuple[int, str, str]:
    """
    Exit code of a command, and the last `_KEPT_BYTES` of its standard output and of its standard error.

    What the command started is killed when this returns, or raises.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: it took too long.
    """
    until = time.monotonic() + seconds
    with (
        subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, process_group=0
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        try:
            kept = {pipe.fileno(): b"" for pipe in (process.stdout, process.stderr) if pipe}
            for pipe in kept:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                if process.returncode is None and process.poll() is not None:
                    # What it started may have its pipes, and never close them.
                    until = min(until, time.monotonic() + _LEFT_SECONDS)
                for key, _ in selector.select(min(left, _POLL_SECONDS)):
                    part = os.read(key.fd, _KEPT_BYTES)
                    kept[key.fd] = (kept[key.fd] + part)[-_KEPT_BYTES:]
                    if not part:
                        selector.unregister(key.fd)
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(command, seconds) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    stdout, stderr = (text.decode(errors="replace") for text in kept.values())
    return code, stdout, stderr


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """A temporary directory. Those that killed evaluators left behind, each with a model, are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _opened(left) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not locked, so nothing uses it; if it is empty, another evaluator may be about to lock it.
            if any(left.iterdir()):
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _opened(Path(name)) as fd:
        # Some file systems, such as NFS, lock no directories: there, none is removed.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(name)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """
    A descriptor, whose lock lasts until the end of this process at the latest.

    Raises:
        OSError: it is another user's, or no directory.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(f"{directory} belongs to another user")
        yield fd
    finally:
        os.close(fd)


def parse_score(stdout: str, *, stderr: str = "") -> Score:
    """
    The last line of `stdout` that is a JSON object.

    Raises:
        NoScoreError: there is none, or its `loss` is not a number.
    """
    for line in reversed(stdout.splitlines()):
        try:
            score = untrusted_json.parse(line, finite=False)
        except ValueError:
            continue
        if isinstance(score, dict):
            loss = score.get("loss")
            is_number = isinstance(loss, (int, float)) and not isinstance(loss, bool)
            # Whole numbers of hundreds of digits are none for float().
            if not is_number or (isinstance(loss, int) and abs(loss) > sys.float_info.max):
                raise NoScoreError(
                    f'evaluation.command printed {line.strip()[:_MAX_STDERR]!r}, expected a number under "loss"'
                )
            return score
    raise NoScoreError(
        'evaluation.command printed no line with a JSON object, expected {"loss": number}; '
        f"its output ends with: {stdout.strip()[-200:]!r}, its standard error with: "
        f"{stderr.strip()[-_MAX_STDERR:]}"
    )


def submittable(members: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The members of a score that the syncer takes, and the names of the others."""
    taken, left_out, room = {}, [], DETAIL_BYTES
    for name, value in members.items():
        size = _size(name, value)
        if size <= room:
            taken[name], room = value, room - int(size)
        else:
            left_out.append(name)
    return taken, left_out


def _size(name: str, value: object) -> float:
    """Bytes of a member in JSON; infinite: the syncer does not take its value."""
    finite = not isinstance(value, float) or math.isfinite(value)
    short = all(len(text) <= MAX_TEXT for text in (name, value) if isinstance(text, str))
    plain = finite and short and not isinstance(value, (list, dict))
    return len(json.dumps({name: value})) if plain else math.inf


def is_due(*, step: int, last: int | None, every: int, complete: bool) -> bool:
    """
    Whether Θ at global step `step` should be scored; `last` is the step of the last score, if any.

    The first Θ seen, the final one, and one in each interval of `every` steps.
    """
    if last is None:
        return True
    return step // every > last // every or (complete and step > last)


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """
    One run of the evaluator: `run` returns when the job's final model has its score.

    All side effects go through its fields, so tests can replace them.
    """

    spec: RunSpec
    status: Callable[[], pb.StatusReply]
    fetch: Callable[[pb.StatusReply], dict[str, NDArray[Any]]]
    submit: Callable[[pb.Evaluation], object]
    scorer: Scorer
    state_file: Path | None = None
    """Keeps the last score's step and, if the job was complete, model over restarts; None: keeps neither."""
    health: HealthFile = field(default_factory=lambda: HealthFile(None))
    """Where a model without a score is reported, until one has a score."""
    sleep: Callable[[float], object] = time.sleep
    backoff: backoff.Backoff = field(
        # Jitter needs no secure randomness.
        default_factory=lambda: backoff.Backoff(0.5, 10.0, random.Random())  # noqa: S311
    )
    _scored: int | None = field(init=False, default=None)
    """Step of the last score of these parameters that was submitted."""

    def run(self, *, initial: Weights | None = None) -> None:
        """
        Score until the final step has its score.

        Args:
            initial: Θ^(0) if it is known without a download; scored first, unless an earlier run
                submitted a score.
        """
        every = self.spec.evaluation_every_steps or self.spec.steps
        last, final_model = self._last_score()
        self._scored = last
        if initial is not None and last is None:
            last = 0
            self._score(last, initial, tokens=0)
        while True:
            try:
                status = self.status()
                complete = status.state == "Complete"
                if last is not None and status.step < last:
                    # The job continues from an older snapshot: other parameters follow.
                    last, self._scored = status.step, None
                if complete and final_model and final_model != status.model_sha256:
                    # It did so, and reached the last step again, while this was down.
                    last, self._scored, final_model = None, None, ""
                if (
                    status.state != "Initialising"
                    and status.tensors
                    and is_due(step=status.step, last=last, every=every, complete=complete)
                ):
                    weights = self.fetch(status)
                    # The step before the download: a merge during it changes some fragments, and the
                    # model of the last step must not count as scored before all of it is there.
                    # A model without a score is not scored again; the next interval is.
                    last, final_model = status.step, ""
                    if not self._score(last, weights, tokens=status.tokens):
                        continue
                self.backoff.reset()
            except (grpc.RpcError, DilocoError) as error:
                if isinstance(error, ConfigError):
                    raise
                self._wait_after(error)
                continue
            if complete and last is not None and last >= status.step:
                if self._scored == last:
                    self._save_score(last, status.model_sha256)
                return
            self.sleep(_POLL_SECONDS if last is not None else _FIRST_POLL_SECONDS)

    def _score(self, step: int, weights: Weights, *, tokens: int) -> bool:
        """
        Score and submit, however long the syncer is unavailable; report a model without a score.

        Returns:
            False: meanwhile the job continues from an older step, so the score is of no use.
        """
        started = time.monotonic()
        try:
            score = self.scorer(weights)
            loss = float(score["loss"])
            if not math.isfinite(loss):
                raise NoScoreError(
                    f"the loss is {loss}, expected a finite number; the model may have diverged"
                )
        except NoScoreError as error:
            return self._has_no_score(step, error)
        seconds = round(time.monotonic() - started, 3)
        own = {"seconds": seconds, "tokens": tokens}
        others = {name: score[name] for name in score if name != "loss" and name not in own}
        detail, left_out = submittable(own | others)
        if left_out:
            log.warning(
                "left out of the score, expected finite numbers and short texts of together at most %d bytes: %s",
                *(DETAIL_BYTES, shorten(", ".join(left_out), _MAX_NAMES)),
                extra={"step": step},
            )
        evaluation = pb.Evaluation(step=step, loss=loss, detail=json.dumps(detail))
        while True:
            try:
                self.submit(evaluation)
            except (grpc.RpcError, DilocoError) as error:
                # Without a reason of the syncer, a proxy in between may have ended the call.
                sent = status_codes.sent_error(error) if isinstance(error, grpc.RpcError) else error
                if isinstance(sent, ProtocolError):
                    return self._has_no_score(step, f"the syncer refused it: {sent}")
                self._wait_after(error)
                if self._was_undone(step):
                    return False
            else:
                break
        self.backoff.reset()
        self._report("", "scored")
        log.info("scored", extra={"step": step, "loss": f"{loss:.4f}", "seconds": seconds})
        self._save_score(step)
        return True

    def _has_no_score(self, step: int, why: object) -> bool:
        """Report it; the next model gets another try."""
        log.warning("no score: %s", why, extra={"step": step})
        self._report("NoScore", f"the model of step {step} has no score: {_brief(str(why))}")
        return True

    def _was_undone(self, step: int) -> bool:
        """Whether the syncer has returned to an older step, as far as it can be asked."""
        try:
            now = self.status().step
        except (grpc.RpcError, DilocoError):
            return False  # the next submission shows why
        if now < step:
            log.warning("the score of step %d is not submitted: the job is at step %d", step, now)
        return now < step

    def _report(self, problem: str, why: str) -> None:
        now = time.monotonic()
        self.health.write(
            Health(at=now, ready=True, why=why, progress_at=now, problem=problem), now=True
        )

    def _wait_after(self, error: Exception) -> None:
        cause = status_codes.error_of(error) if isinstance(error, grpc.RpcError) else error
        seconds = self.backoff.next()
        level = logging.INFO if isinstance(cause, UnavailableError) else logging.WARNING
        log.log(level, "retrying: %s", cause, extra={"seconds": round(seconds, 1)})
        self.sleep(seconds)

    def _last_score(self) -> tuple[int | None, str]:
        """Step of the last score (None: there is none), and digest of the model if it was the job's final one."""
        try:
            score = untrusted_json.parse(files.read(self.state_file)) if self.state_file else {}
            return int(score["step"]), str(score.get("model", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None, ""

    def _save_score(self, step: int, model: str = "") -> None:
        self._scored = step
        if self.state_file is None:
            return
        try:
            self.state_file.parent.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            text = json.dumps({"step": step, "model": model}) + "\n"
            files.replace(self.state_file, text, mode=files.PRIVATE)
        except OSError as error:
            # The only consequence is a second score of the same step after a restart.
            log.warning("%s: %s", self.state_file, error.strerror)


def _brief(text: str) -> str:
    """The first and the last line of an error, such as those around the traceback of a command."""
    first, *others = [line.strip() for line in text.strip().split("\n") if line.strip()] or [""]
    if not others:
        return shorten(first, _MAX_HEAD + _MAX_LAST)
    head = first.partition("; its standard error")[0]
    return f"{shorten(head, _MAX_HEAD)}: {shorten(others[-1], _MAX_LAST)}"


def make_scorer(spec: RunSpec, config: Mapping[str, Any]) -> tuple[Scorer, Weights | None]:
    """
    The job's scorer, and Θ^(0) if it is known without a download.

    Raises:
        ConfigError: the job has neither a recipe nor a command, or the recipe's config is wrong.
    """
    if spec.evaluation_command:
        return CommandScorer(command=spec.evaluation_command), None
    if spec.recipe not in RECIPES:
        raise ConfigError(
            "spec.evaluation.command: not set, and the job has no recipe that can score its model; "
            "set one"
        )
    recipe = importlib.import_module(f"diloco_worker.recipes.{spec.recipe}")
    scorer = recipe.Scorer(config, seed=spec.seed)
    return scorer, scorer.initial()


def _evaluator(
    spec: RunSpec,
    job: settings.LearnerSettings,
    scorer: Scorer,
    control: channels.Connection,
    bulk: channels.Connection,
) -> Evaluator:
    def stub() -> SyncerStub:
        return SyncerStub(control.channel)

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        # Between two calls, so no call on the channels is interrupted.
        control.renew()
        bulk.renew()

    return Evaluator(
        spec=spec,
        status=lambda: stub().GetStatus(pb.StatusRequest(), timeout=_CALL_SECONDS),
        fetch=lambda status: fetch_model(bulk.channel, status=status, spec=spec),
        submit=lambda evaluation: stub().Evaluated(evaluation, timeout=_CALL_SECONDS),
        scorer=scorer,
        state_file=job.state / "evaluator.json" if job.state else None,
        health=HealthFile(job.health_file),
        sleep=pause,
    )


def main() -> None:
    """Evaluate the job that the environment names."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Learners have priority where cores are few.
    os.nice(5)
    try:
        job = settings.from_env(observer=True)
        if job is None:
            raise ConfigError(
                "DILOCO_SYNCER is not set; the evaluator runs inside a job (`diloco run`)"
            )
        logs.configure_logging(json=job.json_logs, name="evaluator")
        spec = job.read_spec()
        name = server_name(job.job)
        control = channels.Connection(
            job.syncer, tls_dir=job.tls, purpose="control", server_name=name
        )
        bulk = channels.Connection(job.syncer, tls_dir=job.tls, purpose="bulk", server_name=name)
        scorer, initial = make_scorer(spec, job.config)
        with contextlib.closing(control), contextlib.closing(bulk):
            _evaluator(spec, job, scorer, control, bulk).run(initial=initial)
    except ConfigError as error:
        print(str(error).replace("\n", "; "), file=sys.stderr)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
