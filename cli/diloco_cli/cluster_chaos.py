"""
`diloco chaos --job`: injects a plan of faults into a job in a cluster.

The plan, its schedule, its journal and the ending are those of a run on this machine (`diloco_local.chaos`). Who
trains is read with kubectl before a fault begins, and the files of the job are fetched at the end. One loop does all
of it; only the faults run beside it (`pod_faults`).
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from diloco.errors import EXIT_DONE, ConfigError, UnavailableError
from diloco.runtime.formatting import duration, printable
from diloco.runtime.signals import handled
from diloco_cli.job_view import View, view
from diloco_cli.pod_faults import Disturbance, Stage
from diloco_cli.pod_files import Retries, is_permanent
from diloco_cli.remote import RemoteJob, adopt, fetch_run
from diloco_cli.step_copies import StepCopies
from diloco_local.chaos.fault_plan import CLUSTER_RATES, Options, lines, plan
from diloco_local.chaos.fault_schedule import Begin, Decision, End, Skip
from diloco_local.chaos.injection import Injection
from diloco_local.chaos.run import EXIT_FAILED, conclude
from diloco_local.display import console_on
from diloco_local.faults import KILLS, LINK_KINDS, SYNCER, Fault, Kind
from diloco_local.run_directory import RunDir

TURN_SECONDS = 0.25
READ_SECONDS = 5.0
"""Between two reads of the job while no fault is due."""
FRESH_SECONDS = 1.5
"""A fault begins after a read that is not older."""
STALL_SECONDS = 10.0
"""For one reply of the API server."""
GIVE_UP_SECONDS = 300.0
"""Without any reply of the API server."""
MAX_BYTES = 256 << 20
"""Of one reply of the API server."""
SHOW_SECONDS = 30.0
"""Between two lines of progress."""
STEPS_SECONDS = 15.0
"""Between two copies of a learner's steps: when the job is complete, its pods are gone."""
QUIET_SECONDS = 5.0
"""Before the next fault, for such a copy."""
UNDO_SECONDS = 20.0

EXIT_INTERRUPTED = 130

_NO_LINKS = (
    "faults of connections need a proxy between the learners and the syncer, which a job in a cluster does not have; "
    "give --kill-rate, --syncer-kill-rate, --pause-rate, --slow-rate or --delete-rate"
)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user chooses."""

    seed: int
    rates: Mapping[Kind, float]
    """Per minute; empty: the defaults."""
    spare: int | None
    """None: the quorum, and at most all but one."""
    longest_seconds: float
    minutes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What is disturbed in this cluster, and when at most."""

    options: Options
    """`spare`: of the learners of this cluster, if all others train."""
    spare: int
    """Of all learners of the job."""
    targets: tuple[str, ...]
    notes: tuple[str, ...]
    """What a user should know of it."""

    def plan(self) -> tuple[Fault, ...]:
        """The faults."""
        return plan(self.options, self.targets)


def refuse(wanted: Wanted) -> None:
    """
    Refuse kinds that a cluster does not have.

    Raises:
        ConfigError: one of them has a rate.
    """
    for kind, rate in wanted.rates.items():
        if rate and kind in LINK_KINDS:
            raise ConfigError(f"--{kind}-rate: {_NO_LINKS}")


def aim(wanted: Wanted, found: View, quorum: int) -> Aim:
    """
    What of a job is disturbed in this cluster.

    Raises:
        ConfigError: the options do not fit the job, or what it has in this cluster.
    """
    total, here = len(found.learners), len(found.here)
    options = _options(wanted, total, quorum)
    spare, notes = options.spare, list[str]()
    if not found.syncer and options.rates.get(Kind.SYNCER_KILL):
        where = "the syncer has no pod in this cluster"
        if wanted.rates:
            raise ConfigError(
                f"--syncer-kill-rate: {where}; run the command with the --context of the cluster that runs it, or "
                "leave the option out"
            )
        notes.append(f"{where}: it is not killed")
    of_learners = [
        kind for kind, rate in options.rates.items() if rate and kind is not Kind.SYNCER_KILL
    ]
    if not here and of_learners:
        if wanted.rates or not found.syncer:
            raise ConfigError(
                f"--{of_learners[0]}-rate: this cluster has no pods of learners of the job; run the command with the "
                "--context of a cluster that has some"
            )
        notes.append("this cluster has no pods of learners: none is disturbed")
    elif here < total:
        notes.append(
            f"{here} of {total} learners are in this cluster, and only they are disturbed: {_some(found.here)}"
        )
    rates = {
        kind: rate
        for kind, rate in options.rates.items()
        if (found.syncer if kind is Kind.SYNCER_KILL else here)
    }
    return Aim(
        options=replace(options, rates=rates, spare=max(0, min(here, spare - (total - here)))),
        spare=spare, targets=found.here, notes=tuple(notes),
    )  # fmt: skip


def _options(wanted: Wanted, learners: int, quorum: int) -> Options:
    """The options for a job of so many learners; raises ConfigError if they do not fit it."""
    spare = min(quorum, max(0, learners - 1)) if wanted.spare is None else wanted.spare
    options = Options(
        seed=wanted.seed, rates=dict(wanted.rates or CLUSTER_RATES), spare=spare,
        longest_seconds=wanted.longest_seconds, minutes=wanted.minutes,
    )  # fmt: skip
    options.check(learners)
    return options


def counted_kills(faults: Sequence[Fault], limit: int | None) -> str:
    """A warning if the plan kills a learner more often than runPolicy.learnerRestartLimit; "": it does not."""
    kills = Counter(fault.target for fault in faults if fault.kind is Kind.KILL)
    if limit is None or not kills or max(kills.values()) <= limit:
        return ""
    target, count = kills.most_common(1)[0]
    return (
        f"warning: the plan kills {target} {count} times, and runPolicy.learnerRestartLimit is {limit}: kills count, "
        "and a learner that exceeds it fails"
    )


def dry_run(remote: RemoteJob, wanted: Wanted) -> list[str]:
    """
    The plan as lines of text.

    Raises:
        ConfigError: the options do not fit the job.
        UnavailableError: the job cannot be read.
    """
    refuse(wanted)
    job = remote.read()
    found = view(job, remote.pods())
    made = aim(wanted, found, _quorum(job))
    faults = made.plan()
    warning = counted_kills(faults, found.restart_limit)
    text = lines(faults, made.options, len(made.targets))
    return [*made.notes, *([warning] if warning else []), *text]


def run(
    remote: RemoteJob, directory: Path, wanted: Wanted, *, console: Console | None = None
) -> int:
    """
    Inject faults until the plan or the job ends, then fetch the job's files and print what the faults cost.

    Args:
        remote: the job.
        directory: the run directory to write.
        wanted: the options.
        console: where progress is shown; None: standard output.

    Returns:
        The exit code: 0 if the audit found no violation and the job did not fail; 130 after Ctrl-C.

    Raises:
        ConfigError: the options do not fit the job, it does not train, a right is missing, or kubectl is not installed.
        StorageError: the directory cannot be written.
        UnavailableError: the job cannot be read.
    """
    refuse(wanted)
    console = console or console_on(sys.stdout)
    quick = Retries(attempts=1, stall_seconds=STALL_SECONDS)
    chaos = _Chaos(
        remote=replace(remote, retries=quick, most_bytes=MAX_BYTES), wanted=wanted,
        run=RunDir(directory), console=console,
    )  # fmt: skip
    job = remote.read()
    first = view(job, remote.pods())
    if first.end:
        raise ConfigError(_not_training(remote.name, first))
    _options(wanted, len(first.learners), _quorum(job))
    check_rights(remote, str(job["metadata"].get("namespace") or ""), wanted)
    adopt(remote, directory, option="--dir")
    interrupted = False
    try:
        chaos.inject(first, _quorum(job))
    except KeyboardInterrupt:
        interrupted = True
        chaos.note("stopping: all faults are undone")
    finally:
        chaos.undo()
    chaos.note(chaos.outlook(interrupted=interrupted))
    try:
        with handled((signal.SIGHUP,), lambda _: None):
            code = _finish(remote, directory, chaos)
    except KeyboardInterrupt:
        chaos.note(f"stopped before the audit; fetch the files with: {_logs(remote, directory)}")
        return EXIT_INTERRUPTED
    return EXIT_INTERRUPTED if interrupted else code


def check_rights(remote: RemoteJob, namespace: str, wanted: Wanted) -> None:
    """
    Refuse to begin what the user may not do.

    Raises:
        ConfigError: a right is missing.
        UnavailableError: the API server does not reply.
    """
    rates = wanted.rates or CLUSTER_RATES
    needed = [("create", "exec", "run commands in its pods", "")]
    if rates.get(Kind.DELETE):
        needed.append(("delete", "", "delete its pods", ", or give the rates of other kinds"))
    for verb, sub, what, instead in needed:
        if not remote.may(namespace, verb, "pods", sub):
            resource = f"pods/{sub}" if sub else "pods"
            raise ConfigError(
                f"you may not {what}: ask for the right to {verb} {resource} in namespace {namespace}{instead}"
            )


def _finish(remote: RemoteJob, directory: Path, chaos: _Chaos) -> int:
    code = EXIT_FAILED if chaos.found.end == "Failed" else EXIT_DONE
    chaos.keep_steps()
    try:
        missing = fetch_run(remote, directory)
    except (UnavailableError, ConfigError) as error:
        chaos.note(f"{error}\nwhen it can be reached, fetch with: {_logs(remote, directory)}")
        return EXIT_FAILED
    for line in (*missing, *([chaos.late_steps] if missing and chaos.late_steps else [])):
        chaos.note(line)
    code = conclude(directory, code, chaos.uncounted, chaos.console)
    from diloco_local.report.page import write_report

    write_report(directory)
    chaos.note(f"report: {directory / 'report.html'}")
    return code


@dataclass(slots=True, kw_only=True)
class _Chaos:
    """The loop."""

    remote: RemoteJob
    wanted: Wanted
    run: RunDir
    console: Console
    found: View = field(init=False)
    _injection: Injection | None = None
    _active: dict[int, Disturbance] = field(default_factory=dict)
    """By the number of the fault."""
    _begun: set[int] = field(default_factory=set)
    """Faults that have begun, of `_active`."""
    _read_at: float = 0.0
    _failing_since: float | None = None
    _shown_at: float = 0.0
    _copies: StepCopies = field(init=False)
    _copied: dict[str, float] = field(default_factory=dict)
    """Learner → when its steps were copied last, or that was tried."""
    _over: str = ""
    """Why no more faults are injected."""

    def __post_init__(self) -> None:
        """Nothing is copied yet."""
        self._copies = StepCopies(self.run)

    def inject(self, first: View, quorum: int) -> None:
        """Until the plan or the job ends."""
        self._seen(first)
        made = self._wait(quorum)
        if made is None:
            return
        for line in made.notes:
            self.note(line)
        faults = made.plan()
        self._injection = Injection(
            faults, len(self.found.learners), self.run.path / "faults.jsonl",
            seed=self.wanted.seed, spare=made.spare,
        )  # fmt: skip
        if warning := counted_kills(faults, self.found.restart_limit):
            self.note(warning)
        self.note(next(lines(faults, made.options, len(made.targets))))
        began, seconds = time.monotonic(), 60.0 * made.options.minutes
        self._injection.begins(self.found.training, self.note)
        while not self._ends():
            now = time.monotonic() - began
            if now >= seconds:
                self._over = "the plan is over"
                return
            self._turn(self._injection, now)
            time.sleep(TURN_SECONDS)

    def undo(self) -> None:
        """Undo all faults, and wait for it, for a while."""
        injection, until = self._injection, time.monotonic() + UNDO_SECONDS
        try:
            if injection is None:
                return
            for decision in injection.schedule.close():
                self._carry_out(injection, decision, 0.0)
            for disturbance in self._active.values():
                disturbance.release()
            while self._active and time.monotonic() < until:
                self._poll(injection)
                time.sleep(TURN_SECONDS / 5)
        finally:
            for disturbance in self._active.values():
                disturbance.abort()
                if disturbance.fault.kind not in KILLS:
                    self._unconfirmed(disturbance.fault)
            self._active.clear()

    @property
    def uncounted(self) -> str:
        """As of `Injection`."""
        return (
            self._injection.uncounted
            if self._injection
            else "none, because too few learners trained"
        )

    def outlook(self, *, interrupted: bool) -> str:
        """How the job continues."""
        name, end = self.remote.name, self.found.end
        if end:
            about = f": {self.found.message}" if self.found.message else ""
            return f"job {name}: {end} at step {self.found.step}{about if end == 'Failed' else ''}"
        why = "" if interrupted or not self._over else f"{self._over}: "
        return f"{why}all faults are undone; job {name} continues without them in the cluster"

    @property
    def late_steps(self) -> str:
        """What the copies of steps lack where the pods were gone at the end; "": nothing is known to be missing."""
        if not self.found.end or not self._copied:
            return ""
        return (
            f"of learners whose pods are gone, up to about {STEPS_SECONDS:g} s of the last steps are missing: in a "
            "short run, the goodput is too low; runPolicy.cleanupPolicy None keeps the pods"
        )

    def note(self, text: str) -> None:
        """Show a line."""
        self.console.print(Text(printable(text, lines=True)), soft_wrap=True)

    # ------------------------------------------------------------------------------ parts

    def _wait(self, quorum: int) -> Aim | None:
        """Until enough learners train; None: the job ended before."""
        shown = ""
        while not self._ends():
            if self._failing_since is None and self.found.learners:
                made = aim(self.wanted, self.found, quorum) if self.found.training else None
                training, total = len(self.found.training), len(self.found.learners)
                if made is not None and training >= min(made.spare + 1, total):
                    return made
                spared = f", and {made.spare} are spared" if made else ""
                text = f"waiting: {training} of {total} learners train{spared}"
                if text != shown:
                    self.note(text)
                shown = text
            time.sleep(READ_SECONDS / 5)
            self._read(READ_SECONDS / 2)
        return None

    def _ends(self) -> bool:
        if self.found.end and not self._over:
            self._over = f"the job is {self.found.end.lower()}"
        return bool(self._over)

    def _turn(self, injection: Injection, now: float) -> None:
        self._poll(injection)
        pending = injection.schedule.pending
        due = pending[0].at - now if pending else float("inf")
        self._read(FRESH_SECONDS if due <= TURN_SECONDS else READ_SECONDS)
        if self._failing_since is not None or self.found.end:
            # Faults that are due wait, or are over before they could begin; those that are active end by themselves.
            return
        decisions = injection.schedule.step(
            now, training=self.found.training, serves=self.found.serves
        )
        for decision in decisions:
            self._carry_out(injection, decision, now)
        if due > QUIET_SECONDS:
            self._copy_steps()
        if time.monotonic() - self._shown_at > SHOW_SECONDS:
            self._shown_at = time.monotonic()
            found = self.found
            self.note(
                f"step {found.step}/{found.steps}, {len(found.training)} of {len(found.learners)} learners train"
            )

    def _carry_out(self, injection: Injection, decision: Decision, now: float) -> None:
        fault = decision.fault
        match decision:
            case Begin():
                self._begin(injection, fault, now)
            case Skip():
                self._skip(injection, fault, decision.reason)
            case End():
                if fault.number in self._active:
                    self._active[fault.number].release()

    def _begin(self, injection: Injection, fault: Fault, now: float) -> None:
        syncer = fault.target == SYNCER
        pods, problem = self.found.syncer_targets() if syncer else self.found.targets(fault.target)
        if problem:
            self._skip(injection, fault, problem)
            return
        try:
            self._active[fault.number] = Disturbance(
                self.remote.program, fault, pods, max(0.0, fault.until - now)
            )
        except UnavailableError as error:
            self._skip(injection, fault, str(error))

    def _skip(self, injection: Injection, fault: Fault, reason: str) -> None:
        injection.schedule.withdraw(fault)
        injection.skipped(fault, reason, self.note)
        self.note(f"fault {fault.number} is skipped ({fault.kind} {fault.target}): {reason}")

    def _poll(self, injection: Injection) -> None:
        """Write down which faults have begun and ended."""
        for number, disturbance in list(self._active.items()):
            fault, stage = disturbance.fault, disturbance.poll()
            if stage is Stage.FAILED:
                del self._active[number]
                self._skip(injection, fault, disturbance.reason)
                continue
            if stage is not Stage.BEGINNING and number not in self._begun:
                self._begun.add(number)
                injection.begun(fault, self.found.step, self.note)
            if stage is Stage.OVER:
                del self._active[number]
                if fault.kind not in KILLS:
                    injection.ended(fault, self.note)
                    if not disturbance.confirmed:
                        self._unconfirmed(fault)

    def _unconfirmed(self, fault: Fault) -> None:
        self.note(
            f"fault {fault.number} ({fault.kind} {fault.target}): no reply that it is undone; its program in the pod "
            f"undoes it when its standard input ends, and at the latest {duration(fault.seconds)} after it began"
        )

    def _read(self, age: float) -> None:
        """Read the job, unless the last read is not older than `age` seconds."""
        if time.monotonic() - self._read_at < age:
            return
        try:
            self._seen(view(self.remote.read(), self.remote.pods()))
        except UnavailableError as error:
            self._failed(error)
            return
        if self._failing_since is not None:
            self.note("the cluster replies again")
        self._failing_since = None

    def _seen(self, found: View) -> None:
        self.found, self._read_at = found, time.monotonic()

    def _failed(self, error: UnavailableError) -> None:
        now = time.monotonic()
        self._read_at = now
        if self._failing_since is None:
            self._failing_since = now
            self.note(f"{error}; trying again, and no fault begins meanwhile")
        if is_permanent(str(error)) or now - self._failing_since > GIVE_UP_SECONDS:
            raise error

    def _copy_steps(self) -> None:
        """Copy the steps of the learner whose copy is the oldest, if it is old."""
        now = time.monotonic()
        names = [name for name in self.found.here if not self.found.targets(name)[1]]
        oldest = min(names, key=lambda name: self._copied.get(name, 0.0), default=None)
        if oldest is None or now - self._copied.get(oldest, -STEPS_SECONDS) < STEPS_SECONDS:
            return
        self._copied[oldest] = now
        self._copies.copy(self._brief(), oldest, self.found.pods[oldest][0])

    def keep_steps(self) -> None:
        """Copy the steps of learners in new pods: the last copy would replace what earlier pods wrote."""
        for name in self.found.here:
            pods, problem = self.found.targets(name)
            if not problem and self._copies.is_new(name, pods[0]):
                self._copies.copy(self._brief(), name, pods[0])

    def _brief(self) -> RemoteJob:
        """The next copy, or the last, succeeds; neither retries nor messages are worth it."""
        brief = Retries(attempts=1, stall_seconds=QUIET_SECONDS, chunk_seconds=STALL_SECONDS)
        return replace(self.remote, retries=brief, announce=lambda _: None)


def _quorum(job: Mapping[str, Any]) -> int:
    return int(((job.get("spec") or {}).get("sync") or {}).get("quorum") or 1)


def _not_training(name: str, found: View) -> str:
    if found.end == "Suspended":
        return f"job {name} is suspended, so nothing trains; resume it with spec.runPolicy.suspend: false"
    return f"job {name} is {found.end.lower()}: faults can be injected only while it trains"


def _logs(remote: RemoteJob, directory: Path) -> str:
    where = f" --namespace {remote.namespace}" if remote.namespace else ""
    where += f" --context {remote.context}" if remote.context else ""
    return f"diloco logs {remote.name} --to {directory}{where}"


def _some(learners: Sequence[str]) -> str:
    more = len(learners) - 8
    return ", ".join(learners[:8]) + (f" and {more} more" if more > 0 else "")
