"""What transfers need of a syncer without threads: the part of `Host` that its coordinator answers."""

from __future__ import annotations

from diloco_syncer.attempts import Attempts
from diloco_syncer.coordinator import Coordinator
from diloco_syncer.sessions import Sessions
from diloco_syncer.state import StateView


class HostOverCoordinator:
    """See `diloco_syncer.rpc.transfers.Host`, which has the meanings."""

    coordinator: Coordinator

    @property
    def facts(self) -> StateView:
        """See `Host`."""
        return self.coordinator.facts

    @property
    def sessions(self) -> Sessions:
        """See `Host`."""
        return self.coordinator.sessions

    @property
    def attempts(self) -> Attempts:
        """See `Host`."""
        return self.coordinator.attempts
