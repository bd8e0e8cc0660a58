"""
The environment of a learner process; no other module of this package reads it.

Tests inject faults: DILOCO_FAULTS="upload:corrupt-chunk=3@1;upload:nan" gives a point and its
effect; `=` adds a value, `@` limits the fault to the first uploads that answer a pull.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.runtime.env import PROXY, Environment
from diloco.spec import RunSpec

STEPS_PART_BYTES = 32 << 20
"""Size of each of the two parts of steps.jsonl: about 170,000 steps."""

_FAULT = re.compile(r"(?P<point>[a-z]+):(?P<effect>[a-z-]+)(=(?P<value>\d+))?(@(?P<times>\d+))?")
_LISTEN = r"\S+:[0-9]{1,5}"
_EFFECTS = ("corrupt-chunk", "truncate", "repeat", "reorder", "nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to inject."""

    point: str
    effect: str
    value: int = 0
    times: int | None = None
    """Number of uploads that it affects, from the first on; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The DILOCO_ variables of a learner or evaluator; None means unset."""

    job: str
    learner: str
    """ "<region>/<index>"; empty in an evaluator."""
    syncer: str
    """host:port."""
    spec: Path
    config: dict[str, Any] = field(default_factory=dict)
    state: Path | None = None
    tls: Path | None = None
    proxy: str = ""
    """http://host:port of the HTTP proxy through which a learner dials the syncer; "": none."""
    metrics_port: int = 0
    peer: str = ""
    """host:port on which the learner answers other learners, port 0: any free one; "": peers are not used."""
    peer_host: str = ""
    """Host at which others find it; "": that of `peer`."""
    cluster: str = ""
    """Name of the network that this host is of; "": there is only one."""
    rank: int = 0
    """Rank of this process in its learner."""
    world_size: int = 1
    """Number of processes of the learner."""
    master: str = ""
    """Host of rank 0, as torch.distributed finds it; "": not known."""
    machine: str = ""
    """Ranks with another one are taken to be on another machine."""
    relay_port: int = 0
    """Port of rank 0 for ranks on other machines; 0: any free one."""
    encode_on: str = "host"
    """Where deltas of a model on a GPU are encoded: "host" or "device"."""
    restarts: int = 0
    """Previous restarts of this learner."""
    pod: str = ""
    """UID of the pod; "": not in a pod."""
    health_file: Path | None = None
    """Where to write the health file; see diloco.runtime.health."""
    json_logs: bool = False
    examination: Path | None = None
    """Where to record three steps instead of joining the job; see diloco_worker.examined."""
    replay: Path | None = None
    """The document of the replay that this process is part of (diloco.journal.replay); None: it is of none."""
    examination_step: int = 0
    """The global step at which they begin."""
    faults: tuple[Fault, ...] = ()

    @property
    def region(self) -> str:
        """First half of the learner's name."""
        return self.learner.partition("/")[0]

    @property
    def peers(self) -> bool:
        """Whether this learner answers others and asks them: one of several ranks does neither."""
        return bool(self.peer) and self.state is not None and self.world_size == 1

    def index(self, spec: RunSpec) -> int:
        """See `Learner.index`."""
        regions = sorted({*spec.learners, self.region})
        index_in_region = int(self.learner.rpartition("/")[2])
        return index_in_region * len(regions) + regions.index(self.region)

    def read_spec(self) -> RunSpec:
        """
        Read the RunSpec.

        Raises:
            ConfigError: the file cannot be read, or is not a RunSpec.
        """
        try:
            text = self.spec.read_text()
        except OSError as error:
            raise ConfigError(
                f"DILOCO_SPEC: {self.spec}: {error.strerror}; expected the job's spec.json"
            ) from None
        return RunSpec.from_json(text, source=str(self.spec))


def in_job(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is part of a job."""
    return bool(Environment(os.environ if environ is None else environ).text("DILOCO_SYNCER"))


def from_env(
    environ: Mapping[str, str] | None = None, *, observer: bool = False
) -> LearnerSettings | None:
    """
    The settings in the environment; None if this process is not part of a job (no DILOCO_SYNCER).

    An observer (the evaluator) has no DILOCO_LEARNER: its name is empty.

    Raises:
        ConfigError: a variable is missing or cannot be used; the message names all of them.
    """
    env = Environment(os.environ if environ is None else environ)
    syncer = env.text("DILOCO_SYNCER")
    if not syncer:
        return None
    name = r"[^/]+/[0-9]+"
    if not observer:
        env.required("DILOCO_LEARNER", "<region>/<index>, because DILOCO_SYNCER is set")
    settings = LearnerSettings(
        job=env.required("DILOCO_JOB", "the job's name, because DILOCO_SYNCER is set"),
        learner=env.text("DILOCO_LEARNER", pattern=name, expected="<region>/<index>"),
        syncer=syncer,
        spec=Path(env.required("DILOCO_SPEC", "the job's spec.json, because DILOCO_SYNCER is set")),
        config=env.json_object("DILOCO_CONFIG"),
        state=env.path("DILOCO_STATE"),
        tls=env.path("DILOCO_TLS"),
        proxy=env.text("DILOCO_SYNCER_PROXY", pattern=PROXY, expected="http://<host>:<port>"),
        metrics_port=env.port("DILOCO_METRICS_PORT", 0),
        peer=env.text("DILOCO_PEER", pattern=_LISTEN, expected="<host>:<port>"),
        peer_host=env.text("DILOCO_PEER_HOST"),
        cluster=env.text("DILOCO_CLUSTER"),
        rank=env.integer("RANK", 0, least=0),
        world_size=env.integer("WORLD_SIZE", 1, least=1),
        master=env.text("MASTER_ADDR"),
        machine=env.text("DILOCO_MACHINE"),
        relay_port=env.port("DILOCO_RELAY_PORT", 0),
        encode_on=env.choice("DILOCO_ENCODE_ON", "host", "device"),
        restarts=env.integer("DILOCO_RESTARTS", 0, least=0),
        pod=env.text("DILOCO_POD_UID"),
        health_file=env.path("DILOCO_HEALTH_FILE"),
        json_logs=env.text("DILOCO_LOG_FORMAT") == "json",
        examination=env.path("DILOCO_EXAMINATION"),
        replay=env.path("DILOCO_REPLAY"),
        examination_step=env.integer("DILOCO_EXAMINATION_STEP", 0, least=0),
        faults=_faults(env),
    )
    env.check()
    return settings


def progress_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """
    Where a rank above 0 reports its progress; None: nowhere.

    Of several processes of a pod (torchrun), the first reports: a hung one holds up all of them.
    """
    env = Environment(os.environ if environ is None else environ)
    return env.path("DILOCO_PROGRESS_FILE") if env.text("LOCAL_RANK", "0") == "0" else None


def _faults(env: Environment) -> tuple[Fault, ...]:
    faults = []
    for part in filter(None, (p.strip() for p in env.text("DILOCO_FAULTS").split(";"))):
        found = _FAULT.fullmatch(part)
        if found is None or found["point"] != "upload" or found["effect"] not in _EFFECTS:
            env.problem(
                f"DILOCO_FAULTS: {part!r}, expected upload:<{'|'.join(_EFFECTS)}>[=number][@times]"
            )
            continue
        times = int(found["times"]) if found["times"] else None
        faults.append(
            Fault(
                point=found["point"],
                effect=found["effect"],
                value=int(found["value"] or 0),
                times=times,
            )
        )
    return tuple(faults)
