"""The ranks of a learner as threads of this process, which find each other through a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_replica import RankReplica


def in_ranks(size: int, body: Callable[[RankGroup], Any], *, timeout_seconds: float = 60) -> list:
    """What each rank returns, or its error."""
    store, found = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        try:
            group = RankGroup("eu/0", store, rank=rank, size=size, timeout_seconds=timeout_seconds)
            found[rank] = body(group)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def copied_bytes(replica: RankReplica) -> int:
    """What a rank copies out of all fragments."""
    return sum(pair.view.nbytes for places in replica._copier.out for pair in places[0])
