"""
The learner's counters (paper Algorithm 1): t_m, and per fragment c_steps and c_tokens since it was
last received. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Ledger:
    """Counts what was trained; nothing else may change these numbers."""

    def __init__(self, num_fragments: int) -> None:
        self.local_step = 0
        """t_m: position in this learner's data over all its lives."""
        self.total_tokens = 0
        """Ever trained by this learner."""
        self.steps = [0] * num_fragments
        self.tokens = [0] * num_fragments

    def count(self, tokens: int) -> None:
        """One optimizer step on `tokens` tokens: counts for every fragment."""
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ValueError(
                f"tokens: {tokens!r} is not a whole number >= 0; pass how many tokens the step used"
            )
        self.local_step += 1
        self.total_tokens += tokens
        self.steps = [c + 1 for c in self.steps]
        self.tokens = [c + tokens for c in self.tokens]

    def received(self, fragment: int) -> None:
        """The fragment was overwritten: it starts to count anew."""
        self.steps[fragment] = 0
        self.tokens[fragment] = 0

    def resume(self, *, local_step: int, total_tokens: int) -> None:
        """Continue where this learner's data stands; never goes back."""
        self.local_step = max(self.local_step, local_step)
        self.total_tokens = max(self.total_tokens, total_tokens)

    def to_json(self) -> dict[str, Any]:
        """What a local checkpoint holds."""
        return {
            "local_step": self.local_step,
            "total_tokens": self.total_tokens,
            "steps": self.steps,
            "tokens": self.tokens,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """What `to_json` gave."""
        ledger = cls(len(data["steps"]))
        ledger.local_step, ledger.total_tokens = int(data["local_step"]), int(data["total_tokens"])
        ledger.steps, ledger.tokens = (
            [int(c) for c in data["steps"]],
            [int(c) for c in data["tokens"]],
        )
        return ledger
