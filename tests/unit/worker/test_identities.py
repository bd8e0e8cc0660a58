"""What a program knows of its learner before it has a model: its part of the data, and its seeds."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from diloco.errors import ConfigError
from diloco.spec import RunSpec
from diloco_job.plan import learner_spec
from diloco_worker import Identity, Learner, identity

LEARNERS = {"us": 1, "eu": 3, "asia": 2}
NAMES = [f"{region}/{index}" for region, number in LEARNERS.items() for index in range(number)]


def of(name: str, **changes: object) -> Identity:
    return Identity(**{"name": name, "learners": LEARNERS, **changes})


@pytest.fixture
def enter(monkeypatch, tmp_path):
    """Sets the environment of a learner with this spec."""

    def set_env(spec: RunSpec, **variables: str) -> None:
        (tmp_path / "spec.json").write_text(spec.to_json())
        values = {
            "JOB": "j",
            "LEARNER": "eu/1",
            "SYNCER": "127.0.0.1:1",
            "SPEC": f"{tmp_path}/spec.json",
        }
        for key, value in {**values, **variables}.items():
            monkeypatch.setenv(f"DILOCO_{key}", value)

    return set_env


# ---------------------------------------------------------------- who


def test_ranks_have_no_gaps_and_count_all_learners():
    assert sorted(of(name).learner_rank for name in NAMES) == list(range(6))
    assert {of(name).num_learners for name in NAMES} == {6}


def test_the_environment_gives_the_identity_without_a_model(enter, tmp_path):
    for step in (5, 40):
        (tmp_path / f"checkpoint-{step:010d}.json").touch()
    (tmp_path / "checkpoint-0000000099.safetensors").touch()  # its manifest was never written
    spec = RunSpec(job="j", steps=9, seed=3, learners=LEARNERS)
    enter(spec, CONFIG='{"batch": 4}', STATE=str(tmp_path), RESTARTS="2")
    own = identity()
    assert (own.name, own.region, own.learner_rank, own.num_learners) == ("eu/1", "eu", 3, 6)
    assert (own.config, own.local_step, own.job_seed, own.restarts) == ({"batch": 4}, 40, 3, 2)


def test_without_a_job_there_is_one_learner_with_all_the_data(monkeypatch):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    assert (identity().learner_rank, identity().num_learners, identity().local_step) == (0, 1, 0)
    assert list(identity().shard([1, 2, 3])) == [1, 2, 3]


def test_an_environment_that_cannot_be_used_ends_the_process_for_good(enter, capsys):
    enter(RunSpec(job="j", steps=9), SPEC="/none/spec.json")
    with pytest.raises(SystemExit) as ended:
        identity()
    assert ended.value.code == 78
    assert "/none/spec.json: No such file" in capsys.readouterr().err


def test_in_a_cluster_the_number_of_learners_is_stated_to_be_unknown(enter, capsys):
    enter(learner_spec(RunSpec(job="j", steps=9, learners=LEARNERS)))
    with pytest.raises(ConfigError, match=r"asia, eu, us.*max_learners_per_region=N"):
        _ = identity().num_learners
    with pytest.raises(SystemExit) as ended:
        identity().shard(range(100))
    assert ended.value.code == 78
    assert "max_learners_per_region=N" in capsys.readouterr().err
    assert list(identity().shard(range(100), max_learners_per_region=4)) == list(range(5, 100, 12))


def test_a_learner_that_was_removed_by_scaling_has_no_rank():
    with pytest.raises(ConfigError, match="us has 1 of the 6 learners, expected more than 2"):
        _ = of("us/2").learner_rank


# ---------------------------------------------------------------- data


class Map(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


class Sized(IterableDataset):
    """Iterable, and with a length: its items have no index."""

    def __iter__(self):
        return iter(range(20))

    def __len__(self):
        return 20


class WithShards:
    """As the datasets of Hugging Face."""

    def __init__(self, items, num_shards=None):
        self.items, self.num_shards = items, num_shards

    def shard(self, *, num_shards, index):
        return self.items[index::num_shards]


@pytest.mark.parametrize(
    "dataset",
    [range(20), list(range(20)), torch.arange(20), Map(), Sized(), WithShards(list(range(20)))],
    ids=lambda dataset: type(dataset).__name__,
)
def test_the_parts_of_all_learners_are_disjoint_and_complete(dataset):
    parts = [{int(item) for item in of(name).shard(dataset)} for name in NAMES]
    assert all(parts)
    assert not any(a & b for a, b in combinations(parts, 2))
    assert set.union(*parts) == set(range(20))


def test_a_part_is_read_by_a_loader_again_and_again():
    part = of("eu/0").shard(Sized())
    assert [int(x) for x in DataLoader(part, batch_size=None)] == [2, 8, 14]
    assert [int(x) for x in DataLoader(part, batch_size=None)] == [2, 8, 14]
    assert isinstance(of("eu/0").shard(Map()), Subset)


def test_the_epoch_reaches_a_dataset_that_shuffles_by_it():
    class Shuffled(Sized):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    dataset = Shuffled()
    of("eu/0").shard(dataset).set_epoch(3)
    assert dataset.epoch == 3
    of("eu/0").shard(Sized()).set_epoch(3)


def test_a_division_by_the_largest_number_per_region_survives_scaling():
    before = [of(name).part(max_learners_per_region=4) for name in NAMES]
    scaled = {"us": 4, "eu": 4, "asia": 1}
    names = [f"{region}/{index}" for region, number in scaled.items() for index in range(number)]
    after = {n: of(n, learners=scaled).part(max_learners_per_region=4) for n in names}
    assert all(after.get(name, part) == part for name, part in zip(NAMES, before, strict=True))
    assert len(set(after.values())) == len(names)
    assert {parts for _, parts in after.values()} == {12}


@pytest.mark.parametrize("whole", [int, np.int64])
def test_without_a_job_numbers_of_each_region_give_all_of_the_data(monkeypatch, whole):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    numbers = {"eu": whole(8), "us": whole(2)}
    assert identity().part(max_learners_per_region=numbers) == (0, 1)
    assert list(identity().shard(range(5), max_learners_per_region=numbers)) == [0, 1, 2, 3, 4]
    assert of("eu/1").part(max_learners_per_region=whole(4)) == (5, 12)
    with pytest.raises(ConfigError, match="expected whole numbers"):
        identity().part(max_learners_per_region={"eu": 2.5})


def test_a_division_by_numbers_of_each_region_leaves_nothing_unread_and_survives_scaling():
    parts = {name: of(name).part(max_learners_per_region=LEARNERS) for name in NAMES}
    assert sorted(parts.values()) == [(number, 6) for number in range(6)]
    # As in a cluster, where one region of two is scaled and the third one is added later.
    most = {"us": 4, "eu": 3, "asia": 2}
    for regions in (("eu", "us"), ("asia", "eu", "us")):
        learners = dict.fromkeys(regions, 0)
        found = {
            f"{region}/{index}": of(f"{region}/{index}", learners=learners).part(
                max_learners_per_region=most
            )
            for region in regions
            for index in range(most[region])
        }
        assert len({number for number, _ in found.values()}) == len(found)
        assert {count for _, count in found.values()} == {9}
        assert (found["eu/0"], found["us/3"]) == ((2, 9), (8, 9))


@pytest.mark.parametrize(
    ("dataset", "most", "reason"),
    [
        (range(5), None, "the dataset has 5 items, expected at least 6"),
        (WithShards([], num_shards=2), None, "the dataset has 2 shards, expected at least 6"),
        (range(99), 1, "max_learners_per_region is 1, expected more than 1"),
        (range(99), {"us": 9, "eu": 1, "asia": 9}, "max_learners_per_region is 1, expected more"),
        (range(99), {"us": 9, "eu": 9}, "has no number for asia, expected one for each region"),
        (
            range(99),
            {**LEARNERS, "us": -1},
            "'us': -1, 'eu': 3, 'asia': 2}, expected whole numbers",
        ),
        (range(99), 2.5, "max_learners_per_region is 2.5, expected whole numbers"),
    ],
)
def test_a_part_that_cannot_be_had_ends_the_process_for_good(dataset, most, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        of("eu/1").shard(dataset, max_learners_per_region=most)
    assert ended.value.code == 78
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("dataset", [7, {"a": 1}, iter([1, 2]), (x for x in range(9))])
def test_what_has_no_parts_is_refused(dataset):
    with pytest.raises(TypeError, match=r"shard: got a .*expected a list"):
        of("eu/0").shard(dataset)


# ---------------------------------------------------------------- seeds


def test_every_learner_process_and_life_has_a_seed_of_its_own():
    changes = [
        {},
        {"restarts": 1},
        {"local_step": 7},
        {"process": 1},
        {"job_seed": 1},
        {"pod": "u"},
    ]
    seeds = [of(name, **change).seed() for name in NAMES for change in changes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_pod_that_replaces_another_one_has_a_seed_of_its_own(enter, tmp_path):
    """Its directory is empty, and its supervisor has counted no restart."""
    seeds = set()
    for uid in ("uid-1", "uid-2"):
        enter(RunSpec(job="j", steps=9), STATE=str(tmp_path / uid), POD_UID=uid)
        assert identity().seed() == identity().seed()
        seeds.add(identity().seed())
    assert len(seeds) == 2


def test_a_seed_is_the_same_on_every_machine():
    """It must not depend on the hash randomization of Python, nor on its version."""
    assert of("eu/1", job_seed=1, local_step=40, restarts=2).seed() == SEED
    assert of("eu/1", learners={"eu": 2}).seed() == of("eu/1").seed()


SEED = 3029875211


def test_all_generators_are_seeded():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    own, other = of("eu/0"), of("eu/1")
    assert own.seed_everything() == own.seed()
    first = draw()
    other.seed_everything()
    assert not set(first) & set(draw())
    own.seed_everything()
    assert draw() == first


# ---------------------------------------------------------------- the facade


def test_a_learner_without_a_job_has_an_identity(monkeypatch):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    model = torch.nn.Linear(1, 1)
    learner = Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert learner.identity == Identity()
    assert learner.seed() == Identity().seed()
    assert len(learner.shard(range(7))) == 7
