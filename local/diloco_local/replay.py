"""
`diloco replay`: executes the tape of a run with real processes, and compares what they do with it.

    syncer, then the first process of each learner ─► each ends where the tape has its end ─► the next one
                             every merge is compared as it comes: the first that differs ends the replay
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.journal import reader
from diloco.journal.parts import Position, parts
from diloco.journal.records import Merge, RecordError, decode
from diloco.journal.replay import Life, Plan
from diloco.journal.replay_difference import Difference, first_difference
from diloco.journal.replay_files import plan_from, processor, tapes_in
from diloco.runtime import files
from diloco.runtime.disk import PRIVATE
from diloco.spec import RunSpec
from diloco_agent.processes import Command, Processes, ProcessExit
from diloco_agent.restarts import exit_cause
from diloco_job.plan import plan as plan_of_job
from diloco_local.commands import Commands, Programs, local_problems
from diloco_local.manifest import load_job
from diloco_local.run_directory import RunDir
from diloco_local.settings import Settings, quiet_grpc

POLL_SECONDS = 0.1
COMPARE_SECONDS = 0.5

STALL_SECONDS = 900.0
"""Without a line of any process for this long, the replay cannot continue: a program may need minutes to start."""

COMPLETE_SECONDS = 120.0
"""How long the end waits for the syncer to write the model."""

END_SECONDS = 30.0
"""How long a process may take to end after SIGTERM."""

KILLED = -9

Show = Callable[[str], None]


class ReplayError(ConfigError):
    """The replay cannot continue; nothing was found to differ."""


def replay(
    run: Path, *, to: int | None, directory: Path | None, show: Show, programs: Programs | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> Difference | None:  # fmt: skip
    """
    Execute the tape of a run that has ended. Call it from the main thread.

    Args:
        run: the run directory.
        to: last global step; None: that of the run.
        directory: of the replay, new or empty; None: that of the run with "-replay" at its end.
        show: prints a sentence.
        programs: replacements for our own programs.
        stall_seconds: see STALL_SECONDS.

    Returns:
        The first difference; None: all that was compared is equal.

    Raises:
        ConfigError: nothing of the run can be replayed, it is still running, or the directory is not empty.
        ReplayError: a process failed, or none proceeds.
    """
    source = RunDir(run)
    if (pid := source.supervisor_pid()) is not None:
        raise ConfigError(
            f"{run}: the run is active (pid {pid}); stop it with: diloco suspend --dir {run}"
        )
    job = load_job(source.manifest)
    if problems := local_problems(job):
        raise ConfigError(f"{run}: cannot be replayed on one machine:\n" + "\n".join(problems))
    plan = plan_from(source.path, to=to)
    target = RunDir(directory or run.with_name(f"{run.name}-replay"))
    if target.path.exists() and any(target.path.iterdir()):
        raise ConfigError(f"{target.path}: is not empty; give a new directory with --into")
    for sentence in caveats(plan):
        show(sentence)
    quiet_grpc()
    with target.hold():
        spec = RunSpec.from_json(source.spec.read_text(), source=str(source.spec))
        # What the run has in an object store stays as it is.
        target.adopt(source.manifest, job, replace(spec, snapshot_url="", output_url=""))
        document = target.path / "state" / "replay.json"
        text = json.dumps({"run": str(source.path), "to": to}) + "\n"
        files.replace(document, text, mode=PRIVATE)
        commands = Commands(
            plan=plan_of_job(job), run_dir=target, settings=Settings.from_environment(),
            directory=source.origin().parent, programs=programs or Programs(),
        )  # fmt: skip
        return _Replay(plan, commands, document, show, stall_seconds=stall_seconds).run()


def caveats(plan: Plan) -> list[str]:
    """What a person must know before: how far the replay goes, and why bits may differ."""
    found = [f"replaying global steps 1 to {plan.to}"]
    for ended, begun in pairwise(plan.epochs):
        last = ended.rounds[-1].step if ended.rounds else ended.step
        found.append(
            f"step {last} is followed by epoch {begun.number} of the syncer, from step {begun.step}"
        )
    if plan.ends:
        found.append(plan.ends)
    machines = {life.process.begin.machine for life in plan.lives.values()}
    for machine in sorted(machines):
        there, here = machine.partition(";")[0], processor()
        if there != here:
            found.append(
                f"the run was on another processor ({there}; this is {here}): the last bits of sums may differ"
            )
    return found


class _Replay:
    """One replay; `run` returns when no process is left."""

    def __init__(
        self, plan: Plan, commands: Commands, document: Path, show: Show, *, stall_seconds: float
    ) -> None:
        self._plan, self._commands, self._document, self._show = plan, commands, document, show
        self._stall_seconds = stall_seconds
        self._directory = commands.run_dir.path
        self._processes = Processes()
        self._waiting = {
            learner.name: plan.lives_of(learner.name) for learner in commands.plan.learners
        }
        """The processes that have not begun, in order."""
        self._running: dict[str, Life] = {}
        self._endpoint = ""
        self._merges: list[Merge] = []
        self._complete = False
        self._at = Position()
        self._progress: tuple[int, ...] = ()
        self._progress_at = time.monotonic()

    def run(self) -> Difference | None:
        """Return the first difference."""
        try:
            self._warm_up()
            self._start_syncer()
            for learner in list(self._waiting):
                self._start_next(learner)
            difference = self._follow()
            if difference is None:
                difference = self._end()
        finally:
            self._processes.close()
        if difference is None:
            ends = sum(
                life.process.end is not None and not life.stopped
                for life in self._plan.lives.values()
            )
            epochs = len(self._plan.epochs)
            self._show(
                f"identical: {len(self._merges)} merges up to step {self._plan.to} by "
                f"{len(self._plan.lives)} processes of learners (merged parameters, Θ and momentum)"
                f"{f', in {epochs} epochs of the syncer' if epochs > 1 else ''}, and the last "
                f"parameters of {ends} of them"
            )
        return difference

    # ------------------------------------------------------------ processes

    def _command(self, name: str, *, restarts: int = 0) -> Command:
        command = self._commands.of(name, port=0, endpoint=self._endpoint, restarts=restarts)
        own = {"DILOCO_REPLAY": str(self._document)}
        return replace(command, environment={**command.environment, **own})

    def _warm_up(self) -> None:
        self._processes.start(self._commands.of("kernels", port=0, endpoint=""))
        while not self._processes.exits():
            time.sleep(POLL_SECONDS)

    def _start_syncer(self) -> None:
        self._processes.start(self._command("syncer"))
        endpoint = self._commands.run_dir.endpoint
        while not endpoint.exists():
            for done in self._processes.exits():
                raise ReplayError(f"the syncer did not start ({_cause(done)})")
            time.sleep(POLL_SECONDS)
        self._endpoint = endpoint.read_text().strip()

    def _start_next(self, learner: str) -> None:
        if self._waiting[learner]:
            life = self._running[learner] = self._waiting[learner].pop(0)
            self._processes.start(self._command(learner, restarts=life.key[1]))

    def _exited(self, done: ProcessExit) -> None:
        life = self._running.pop(done.name, None)
        if life is None:
            raise ReplayError(f"{done.name} ended during the replay ({_cause(done)})")
        if done.code != (KILLED if life.killed else 0):
            raise ReplayError(
                f"{done.name} ended before local step {life.last} of the tape ({_cause(done)}); see "
                f"{self._commands.run_dir.log(done.name)}"
            )
        self._start_next(done.name)

    # ------------------------------------------------------------ comparison

    def _follow(self) -> Difference | None:
        """Until everything on the tape is done, or something differs."""
        compare_at, compared = 0.0, 0
        while True:
            for done in self._processes.exits():
                self._exited(done)
            self._processes.limit_logs()
            now = time.monotonic()
            done_all = not self._running and not any(self._waiting.values())
            if now >= compare_at or done_all:
                compare_at = now + COMPARE_SECONDS
                self._read()
                if difference := first_difference(self._plan, self._merges, {}, since=compared):
                    return difference
                compared = len(self._merges)
                if done_all and len(self._merges) >= len(self._plan.rounds):
                    return None
                self._check_progress(now)
            time.sleep(POLL_SECONDS)

    def _read(self) -> None:
        for line in self._new_lines():
            try:
                record = decode(line)
            except RecordError:
                continue
            if isinstance(record, Merge):
                self._merges.append(record)
            self._complete = self._complete or line.get("event") == "complete"

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines of events.jsonl since the last call."""
        for number, part in parts(self._commands.run_dir.events):
            if number < self._at.part:
                continue
            begin = self._at.offset if number == self._at.part else 0
            with part.open("rb") as file:
                file.seek(begin)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._at = Position(number, begin + len(whole) + len(newline))
            yield from reader.objects(whole.split(b"\n"))

    def _check_progress(self, now: float) -> None:
        sizes = (path.stat().st_size for path in self._directory.glob("learners/*/tape.jsonl"))
        progress = (len(self._merges), len(self._running), *sizes)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        if now - self._progress_at < self._stall_seconds:
            return
        raise ReplayError(self._stalled())

    def _stalled(self) -> str:
        """What the first merge that did not come waits for."""
        text = f"nothing has happened for {self._stall_seconds:g} s"
        if len(self._merges) >= len(self._plan.rounds):
            return f"{text}; still running: {', '.join(sorted(self._running))}"
        merge = self._plan.rounds[len(self._merges)]
        positions = {
            name: processes[-1].last for name, processes in tapes_in(self._directory).items()
        }
        names = (
            f"{m.learner} at local step {positions.get(m.learner, 0)} of {m.step}"
            for m in merge.members
        )
        return f"{text}: step {merge.step} (fragment {merge.fragment}) waits for {', '.join(names)}"

    def _end(self) -> Difference | None:
        """End the syncer, and compare what the processes ended with."""
        deadline = time.monotonic() + COMPLETE_SECONDS
        while self._plan.complete and not self._complete and time.monotonic() < deadline:
            self._read()
            time.sleep(POLL_SECONDS)
        self._processes.terminate("syncer")
        deadline = time.monotonic() + END_SECONDS
        while not self._processes.exits() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return first_difference(self._plan, self._merges, tapes_in(self._directory))


def _cause(done: ProcessExit) -> str:
    return exit_cause(done.code, done.cause)
