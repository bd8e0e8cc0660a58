"""
The learner's counters (paper Algorithm 1): t_m, and per fragment c_steps and c_tokens since the
fragment was last received, and the version that it was received in. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_worker.core.inbox import Version, version_of

MOST_TOKENS = 1 << 40
"""Of one step: sums of many fit in the 64 bits of shared memory, and in what the syncer takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """t_m and the fragment's counters when the host copy was taken."""

    local_step: int
    steps: int
    tokens: int
    base: int
    """Inbox generation that the parameters had applied last; 0: none."""
    format: int = 0
    """0: the values; else the wire format in which a device encoded what is left of this generation without them."""


def check_tokens(tokens: object) -> None:
    """
    Refuse what cannot be counted.

    Raises:
        ValueError: `tokens` is not a whole number from 0 to MOST_TOKENS.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"tokens: {tokens!r} is not a whole number from 0 to 2**40; pass the number of tokens, or of any other "
            "unit of work, in the step"
        )


class Ledger:
    """Counts steps and tokens; only its methods change the counters."""

    def __init__(self, num_fragments: int) -> None:
        self.local_step = 0
        """t_m: position in this learner's data, over all its restarts."""
        self.total_tokens = 0
        """Tokens that this learner has trained on, over all its restarts."""
        self.steps = [0] * num_fragments
        self.tokens = [0] * num_fragments
        self.versions: list[Version | None] = [None] * num_fragments
        """Per fragment, the version that was received last; None: not known, so older than any."""

    def count(self, tokens: int) -> None:
        """
        Count one optimizer step on `tokens` tokens, for every fragment.

        Raises:
            ValueError: see `check_tokens`.
        """
        check_tokens(tokens)
        self.local_step += 1
        self.total_tokens += tokens
        self.steps = [c + 1 for c in self.steps]
        self.tokens = [c + tokens for c in self.tokens]

    def received(self, fragment: int, *, version: Version | None = None) -> None:
        """The fragment was overwritten with this version: reset its counters."""
        self.steps[fragment] = 0
        self.tokens[fragment] = 0
        self.versions[fragment] = version

    def host_copy(self, fragment: int, *, base: int) -> HostCopy:
        """The counters of a copy that is taken now."""
        return HostCopy(
            local_step=self.local_step, steps=self.steps[fragment], tokens=self.tokens[fragment], base=base
        )  # fmt: skip

    def resume(self, *, local_step: int, total_tokens: int) -> None:
        """Continue from these totals, unless the own ones are ahead."""
        self.local_step = max(self.local_step, local_step)
        self.total_tokens = max(self.total_tokens, total_tokens)

    def to_json(self) -> dict[str, Any]:
        """The form that local checkpoints hold."""
        return {
            "local_step": self.local_step,
            "total_tokens": self.total_tokens,
            "steps": [*self.steps],
            "tokens": [*self.tokens],
            "versions": [*self.versions],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """The inverse of `to_json`."""
        ledger = cls(len(data["steps"]))
        ledger.local_step, ledger.total_tokens = int(data["local_step"]), int(data["total_tokens"])
        ledger.steps, ledger.tokens = (
            [int(c) for c in data["steps"]],
            [int(c) for c in data["tokens"]],
        )
        # Checkpoints of earlier releases have no versions.
        for fragment, version in enumerate(data.get("versions", ())[: len(ledger.steps)]):
            ledger.versions[fragment] = version_of(version)
        return ledger
