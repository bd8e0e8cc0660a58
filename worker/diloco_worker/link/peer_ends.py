"""
A learner among its peers: answers them, and asks one if this process needs their state (docs/adr/0033).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.errors import ConfigError
from diloco.model.fragments import Layout
from diloco.spec import RunSpec
from diloco_worker.core import events as ev
from diloco_worker.link.peer_client import PeerClient
from diloco_worker.link.peer_server import Facts, PeerServer
from diloco_worker.settings import LearnerSettings

log = logging.getLogger("diloco.link")


class Peers:
    """
    Both ends; without `LearnerSettings.peers`, neither.

    Args:
        config: from the environment.
        spec: of the job.
        layout: of the model.
        facts: of this learner, for the server.
        post: takes `PeerAnswered`.
    """

    def __init__(
        self, config: LearnerSettings, spec: RunSpec, layout: Layout, *, facts: Facts,
        post: Callable[[ev.PeerAnswered], object],
    ) -> None:  # fmt: skip
        self.address = ""
        """Where this learner answers others; "": it does not."""
        self._client: PeerClient | None = None
        if not config.peers or config.state is None:
            return
        self._client = PeerClient(
            job=config.job, learner=config.learner, layout=layout.digest,
            elements=layout.elements,
            directory=config.state, tls=config.tls, post=post,
        )  # fmt: skip
        server = PeerServer(
            job=config.job, layout=layout.digest, directory=config.state, interval=spec.interval,
            facts=facts, tls=config.tls,
        )  # fmt: skip
        host = config.peer.rpartition(":")[0]
        try:
            self.address = f"{host}:{server.listen(config.peer)}"
        except ConfigError as error:
            log.warning("DILOCO_PEER: other learners cannot ask this one: %s", error)

    def ask(self, request: ev.AskPeer) -> None:
        """Ask a peer; `PeerAnswered` follows unless it is dropped."""
        if self._client is None:
            raise AssertionError("peers are not used")
        self._client.ask(request)

    def drop(self, number: int) -> None:
        """End a request."""
        if self._client is not None:
            self._client.drop(number)
