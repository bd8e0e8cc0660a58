"""
Which learner this process is, before it has a model: for its part of the data, and its seeds.

`identity()` reads the environment, the spec and the names of local checkpoints. It does not connect, so that a
program can build its dataset, its loader and its model from it; `Learner.connect` comes after that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, Subset

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco_worker import settings
from diloco_worker.trainer.termination import exit_with


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """
    One learner among those of its job. Without a job: the only one, "alone/0".

    The numbers of learners are those at the start of this process: a job that is scaled gives other
    parts of the data to the learners that start after that, so parts of the old and of the new
    division overlap until every learner has restarted. A division into `max_learners_per_region`
    parts per region changes only with the set of regions; with numbers by region, not even then.
    """

    name: str = "alone/0"
    """ "<region>/<index>"."""
    learners: Mapping[str, int] = field(default_factory=lambda: {"alone": 1})
    """Region → number of learners; 0: not known, as in the spec of a cluster."""
    config: dict[str, Any] = field(default_factory=dict)
    """DILOCO_CONFIG."""
    local_step: int = 0
    """t_m of the newest local checkpoint, after connecting what the syncer counts from; 0: none."""
    job_seed: int = 0
    """`spec.seed` of the manifest."""
    restarts: int = 0
    """Previous restarts of this learner, as far as its supervisor counts them."""
    pod: str = ""
    """UID of its pod; "": not in a pod."""
    process: int = 0
    """RANK of this process in its learner."""

    @property
    def region(self) -> str:
        """First half of the name."""
        return self.name.partition("/")[0]

    @property
    def index_in_region(self) -> int:
        """Second half of the name."""
        return int(self.name.rpartition("/")[2])

    @property
    def num_learners(self) -> int:
        """
        Learners of the job, in all regions.

        Raises:
            ConfigError: the spec does not have their numbers.
        """
        if not self.learners.get(self.region):
            raise ConfigError(
                f"learner {self.name}: the number of learners is not known at the start; the document "
                f"of a cluster names only the regions ({', '.join(self._regions)}), because a job may "
                "be scaled while it runs; pass shard(..., max_learners_per_region=N), or put your own "
                "numbers into regions[].config"
            )
        return sum(self.learners.values())

    @property
    def learner_rank(self) -> int:
        """
        Position among all learners of the job, without gaps: 0 to `num_learners` - 1.

        Raises:
            ConfigError: the spec does not have the numbers of learners, or not this one.
        """
        num_learners, own = self.num_learners, self.learners[self.region]
        if self.index_in_region >= own:
            raise ConfigError(
                f"learner {self.name}: region {self.region} has {own} of the {num_learners} learners, "
                f"expected more than {self.index_in_region}; the job was scaled down"
            )
        before = itertools.takewhile(lambda region: region != self.region, self._regions)
        return sum(self.learners[region] for region in before) + self.index_in_region

    @property
    def _regions(self) -> list[str]:
        return sorted({*self.learners, self.region})

    @property
    def _alone(self) -> bool:
        """Whether there is no job."""
        own = Identity()
        return (self.name, self.learners) == (own.name, own.learners)

    # ------------------------------------------------------------ data

    def part(
        self, *, max_learners_per_region: int | Mapping[str, int] | None = None
    ) -> tuple[int, int]:
        """
        The part of the data that belongs to this learner: its number and the number of parts.

        Args:
            max_learners_per_region: None: a part for each learner there is. A number: so many parts
                for each region, whose learners keep theirs however the job is scaled; parts without
                a learner remain unread. Numbers by region: so many for each, also for regions that
                are added later. All learners must give the same. Without a job, numbers by region give
                all of the data.

        Raises:
            ConfigError: the numbers of learners are not known, or there is no part for this one.
        """
        if max_learners_per_region is None:
            return self.learner_rank, self.num_learners
        most = self._most_learners(max_learners_per_region)
        before = itertools.takewhile(lambda region: region != self.region, sorted(most))
        return sum(most[region] for region in before) + self.index_in_region, sum(most.values())

    def _most_learners(self, given: int | Mapping[str, int]) -> Mapping[str, int]:
        """Region → number of parts, for each region of the job."""
        numbers = given if isinstance(given, Mapping) else dict.fromkeys(self._regions, given)
        most = {region: _whole(number) for region, number in numbers.items()}
        if any(number < 0 for number in most.values()):
            raise ConfigError(
                f"learner {self.name}: max_learners_per_region is {given}, expected whole numbers"
            )
        if self._alone and self.region not in most:
            return {self.region: 1}
        if without := [region for region in self._regions if region not in most]:
            raise ConfigError(
                f"learner {self.name}: max_learners_per_region has no number for {', '.join(without)}, "
                f"expected one for each region of the job: {', '.join(self._regions)}"
            )
        if most[self.region] <= self.index_in_region:
            raise ConfigError(
                f"learner {self.name}: max_learners_per_region is {most[self.region]}, expected "
                f"more than {self.index_in_region}; give the largest number that a region may have"
            )
        return most

    def shard(
        self, dataset: Any, *, max_learners_per_region: int | Mapping[str, int] | None = None
    ) -> Any:
        """
        The items of a dataset that no other learner reads.

        The processes of one learner get the same items: a DistributedSampler divides those.

        Args:
            dataset: with `shard(num_shards=, index=)` of its own (Hugging Face datasets), or with a
                length and items by index (a list, a map-style dataset), or iterable. An iterable
                dataset must give all learners the same items in the same order; if its loader has
                workers, it has the same number of them in all learners.
            max_learners_per_region: see `part`.

        Returns:
            What the dataset's own `shard` returns, else a `torch.utils.data.Subset` or
            `IterableDataset`.

        Raises:
            SystemExit: 78 for what `part` refuses, or if there are fewer items than parts. One
                sentence on standard error gives the reason.
            TypeError: the dataset is none of these.
        """
        try:
            number, parts = self.part(max_learners_per_region=max_learners_per_region)
            return _shard(dataset, number, parts)
        except ConfigError as error:
            raise exit_with(EXIT_REFUSED, str(error)) from None

    # ------------------------------------------------------------ randomness

    def seed(self) -> int:
        """
        A seed of 32 bits that no other learner, no other process of it and no other life of it has.

        It is a function of the job's seed, the name, the local step at which this life begins and
        the restarts before it: the same position gives the same seed. Of a pod also of its UID, because a
        pod that replaces another one knows neither before it is connected. Outside of pods, a life that is
        lost without a trace (neither a step nor a restart was counted) is repeated with its seed.
        """
        life = (self.job_seed, self.name, self.process, self.local_step, self.restarts)
        digest = hashlib.sha256(repr((*life, self.pod) if self.pod else life).encode()).digest()
        return int.from_bytes(digest[:4], "little")

    def seed_everything(self) -> int:
        """Seed torch on all devices, numpy and `random` with `seed()`; returns it."""
        seed = self.seed()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return seed


class _Part(IterableDataset[Any]):
    """Every so many-th item of an iterable dataset."""

    def __init__(self, dataset: Iterable[Any], *, number: int, parts: int) -> None:
        self._dataset, self._number, self._parts = dataset, number, parts

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._number, None, self._parts)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a dataset that shuffles by it."""
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)


def identity() -> Identity:
    """
    The learner that the environment names; usable before there is a model.

    Raises:
        SystemExit: 78 if the environment or the spec cannot be used. One sentence on standard error
            gives the reason.
    """
    try:
        config = settings.from_env()
        return Identity() if config is None else of(with_ranks(config))
    except ConfigError as error:
        raise exit_with(EXIT_REFUSED, str(error)) from None


def with_ranks(config: settings.LearnerSettings) -> settings.LearnerSettings:
    """
    The settings with rank and number of ranks of torch.distributed, if the environment states none.

    A program that starts its ranks by `torch.multiprocessing.spawn` passes both to `init_process_group`.
    """
    if config.world_size > 1 or not (distributed.is_available() and distributed.is_initialized()):
        return config
    return dataclasses.replace(
        config, rank=distributed.get_rank(), world_size=distributed.get_world_size()
    )


def of(config: settings.LearnerSettings, *, local_step: int | None = None) -> Identity:
    """
    The identity in these settings.

    Args:
        config: from the environment.
        local_step: t_m as the syncer counts it; None: not connected yet.

    Raises:
        ConfigError: the spec cannot be read.
    """
    spec = config.read_spec()
    return Identity(
        name=config.learner,
        learners=dict(spec.learners),
        config=dict(config.config),
        local_step=_newest_step(config.state) if local_step is None else local_step,
        job_seed=spec.seed,
        restarts=config.restarts,
        pod=config.pod,
        process=config.rank,
    )


def _whole(number: object) -> int:
    """A whole number of Python or numpy; -1: it is not one."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _newest_step(state: Path | None) -> int:
    """Local step of the newest complete checkpoint by its name; its content is verified when connecting."""
    if state is None:
        return 0
    names = (path.stem.rpartition("-")[2] for path in state.glob("checkpoint-*.json"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _shard(dataset: Any, number: int, parts: int) -> Any:
    items = None if isinstance(dataset, IterableDataset) else _length(dataset)
    if callable(getattr(dataset, "shard", None)):
        shards = getattr(dataset, "num_shards", None) if items is None else items
        _refuse_fewer(shards, parts, "shards" if items is None else "items")
        return dataset.shard(num_shards=parts, index=number)
    if items is not None and hasattr(dataset, "__getitem__"):
        _refuse_fewer(items, parts, "items")
        return Subset(dataset, range(number, items, parts))
    if isinstance(dataset, Iterable) and not isinstance(dataset, Iterator):
        return _Part(dataset, number=number, parts=parts)
    raise TypeError(
        f"shard: got a {type(dataset).__name__}, expected a list, a dataset with __len__ and "
        "__getitem__, or one that can be iterated again and again"
    )


def _length(dataset: Any) -> int | None:
    if isinstance(dataset, Mapping):
        raise TypeError("shard: got a mapping, expected a list or a dataset; pass its items")
    try:
        return len(dataset)
    except TypeError:
        return None


def _refuse_fewer(found: Any, parts: int, what: str) -> None:
    if isinstance(found, int) and found < parts:
        raise ConfigError(
            f"shard: the dataset has {found} {what}, expected at least {parts}, one for each part; "
            "give more data or start fewer learners"
        )
