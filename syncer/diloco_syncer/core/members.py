"""
Who takes part: sessions, incarnations, and what each learner last reported. Pure.

Rule: only `Members` decides which incarnation of a learner is the living one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from diloco_syncer.core.events import Hello, Reported
from diloco_syncer.core.schedule import ema


@dataclass(slots=True, kw_only=True)
class Member:
    """One learner as the syncer knows it, over all its lives."""

    name: str
    region: str
    incarnation: int = 0
    session: int | None = None
    """None: not connected."""
    heard: float = 0.0
    """Monotonic time of the last sign of life."""
    report: Reported | None = None
    """Newest metadata of this session; None until the first step after a join."""
    pulled_step: int = -1
    """t_m of its last pull: only newer reports count (decision 4)."""
    local_step: int = 0
    """Highest t_m ever reported: where its data stands."""
    total_tokens: int = 0
    step_tokens: float = 0.0
    """Tokens of its last step."""
    step_seconds: float | None = None
    """ξ_step of this learner, moving average."""
    merged_round: int = 0
    """Global step of the last merge it was part of."""
    merges: int = 0
    restarts: int = 0
    """Lives before this one, as its supervisor counts them."""

    @property
    def training(self) -> bool:
        """Connected and stepping."""
        return self.session is not None and self.report is not None

    @property
    def state(self) -> str:
        """For people: Training, Joining or Gone."""
        if self.session is None:
            return "Gone"
        return "Training" if self.training else "Joining"

    @property
    def fresh(self) -> bool:
        """Has metadata newer than what it was last pulled with."""
        return self.report is not None and self.report.local_step > self.pulled_step


@dataclass(slots=True)
class Members:
    """All learners ever seen, by name."""

    by_name: dict[str, Member] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Member]:
        """In the fixed order of names, so that nothing depends on who came first."""
        return iter(sorted(self.by_name.values(), key=lambda m: m.name))

    def of_session(self, learner: str, session: int) -> Member | None:
        """The learner, if this session is its living one."""
        member = self.by_name.get(learner)
        return member if member is not None and member.session == session else None

    def connected(self) -> list[Member]:
        """Learners with a living session, by name."""
        return [m for m in self if m.session is not None]

    def training(self) -> list[Member]:
        """Connected learners that have reported since they joined, by name."""
        return [m for m in self if m.training]

    def fastest_step_seconds(self) -> float | None:
        """ξ_step: that of the fastest learner that is training."""
        known = [m.step_seconds for m in self.training() if m.step_seconds is not None]
        return min(known, default=None)

    def admit(self, hello: Hello, *, now: float) -> tuple[Member, int | None] | None:
        """
        Let a session in, as a new life or as the continuation of one.

        Returns:
            The member and the session it replaces (None: there was none); or None when the presented incarnation has
            been replaced by a newer one and must be refused.
        """
        member = self.by_name.setdefault(
            hello.learner, Member(name=hello.learner, region=hello.region)
        )
        if 0 < hello.presented_incarnation < member.incarnation:
            return None
        continues = hello.presented_incarnation > 0
        replaced = member.session
        member.incarnation = hello.presented_incarnation if continues else hello.fresh_incarnation
        member.session = hello.session
        member.heard = now
        member.restarts = hello.restarts
        member.report = None
        member.region = hello.region
        member.step_seconds = None
        member.local_step = max(member.local_step, hello.local_step)
        if not continues:
            member.pulled_step = -1
        return member, replaced

    def report(self, event: Reported, *, now: float) -> tuple[Member, int] | None:
        """
        Take metadata in.

        Returns:
            The member and by how many steps it moved on (0: nothing new); None for a session that is not living.
        """
        member = self.of_session(event.learner, event.session)
        if member is None:
            return None
        member.heard = now
        before = member.report.local_step if member.report is not None else event.local_step - 1
        moved = event.local_step - before
        if moved <= 0:
            return member, 0
        member.report = event
        member.local_step = max(member.local_step, event.local_step)
        if event.total_tokens > member.total_tokens:
            member.step_tokens = (event.total_tokens - member.total_tokens) / moved
            member.total_tokens = event.total_tokens
        if event.step_seconds > 0:
            member.step_seconds = ema(member.step_seconds, event.step_seconds + event.sync_seconds)
        return member, moved

    def leave(self, learner: str, session: int) -> Member | None:
        """Forget a living session; None if it was not living."""
        member = self.of_session(learner, session)
        if member is not None:
            member.session = None
            member.report = None
            member.step_seconds = None
        return member

    def to_json(self) -> dict[str, Any]:
        """What must outlive the syncer: data positions, tokens, incarnations."""
        return {
            m.name: {
                "region": m.region,
                "incarnation": m.incarnation,
                "localStep": m.local_step,
                "tokens": m.total_tokens,
                "pulledStep": m.pulled_step,
                "mergedRound": m.merged_round,
                "merges": m.merges,
                "restarts": m.restarts,
            }
            for m in self
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Members:
        """What `to_json` wrote; nobody is connected."""
        return cls(
            {
                name: Member(
                    name=name,
                    region=str(m["region"]),
                    incarnation=int(m["incarnation"]),
                    local_step=int(m["localStep"]),
                    total_tokens=int(m["tokens"]),
                    pulled_step=int(m["pulledStep"]),
                    merged_round=int(m["mergedRound"]),
                    merges=int(m["merges"]),
                    restarts=int(m.get("restarts", 0)),  # older snapshots have none
                )
                for name, m in data.items()
            }
        )

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """
        Catch up with audit lines written after the snapshot this was read from.

        A syncer that was killed forgets merges after its last snapshot; what it must not forget is which lives of
        learners it admitted and which reports it used, or a replaced process could come back, or a report be merged
        in two epochs.
        """
        for line in lines:
            if line.get("event") == "join":
                member = self.by_name.setdefault(
                    line["learner"],
                    Member(name=line["learner"], region=line["learner"].split("/")[0]),
                )
                if line["incarnation"] > member.incarnation:
                    member.incarnation, member.pulled_step = line["incarnation"], -1
                member.local_step = max(member.local_step, line["localStep"])
            elif line.get("event") == "merge":
                for fact in line["members"]:
                    known = self.by_name.get(fact["learner"])
                    if known is not None:
                        known.local_step = max(known.local_step, fact["step"])
                        if known.incarnation == fact["incarnation"]:
                            known.pulled_step = max(known.pulled_step, fact["step"])
