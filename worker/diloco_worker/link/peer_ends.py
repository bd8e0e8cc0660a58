"""
A learner among its peers: answers them, and asks one if this process needs their state (docs/adr/0033).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.errors import ConfigError
from diloco.model.fragments import Layout
from diloco.rpc.identity import learner_server_name
from diloco.rpc.tls import lacks_name
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
        self._config, self._address = config, ""
        self._nameless = False
        """It is known that the certificate lacks the name of this region's learners."""
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
        host = config.peer_host or config.peer.rpartition(":")[0]
        try:
            self._address = f"{host}:{server.listen(config.peer)}"
        except ConfigError as error:
            log.warning("DILOCO_PEER: other learners cannot ask this one: %s", error)

    @property
    def address(self) -> str:
        """Where this learner answers others; "": it does not, or its certificate of now does not let it."""
        tls = self._config.tls
        if not self._address or tls is None:
            return self._address
        name = learner_server_name(self._config.job, self._config.region)
        before, self._nameless = self._nameless, lacks_name(tls, name)
        if self._nameless and not before:
            log.warning(
                "other learners cannot ask this one for the state of its optimizers: tls.crt lacks the DNS name %s; "
                "renew the Secret of region %s (diloco certs)", name, self._config.region,
            )  # fmt: skip
        return "" if self._nameless else self._address

    def ask(self, request: ev.AskPeer) -> None:
        """Ask a peer; `PeerAnswered` follows unless it is dropped."""
        if self._client is None:
            raise AssertionError("peers are not used")
        self._client.ask(request)

    def drop(self, number: int) -> None:
        """End a request."""
        if self._client is not None:
            self._client.drop(number)
