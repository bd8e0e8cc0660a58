"""
Which learners a collecting round can count. Pure.

The engine asks after every event, and nearly every event concerns one learner. So the answer is kept
and changed for the learners that were touched since, instead of being computed over all of them:
with M learners that is the difference between M and M² per round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_syncer.core.learners import LearnerRecord, LearnerRecords


@dataclass(slots=True)
class Readiness:
    """Training learners with a fresh report that offers the fragment of one round."""

    learners: LearnerRecords
    _fragment: int | None = None
    _training: list[LearnerRecord] = field(default_factory=list)
    """The list, by identity, that the answer holds for."""
    _names: set[str] = field(default_factory=set)
    _touched: set[str] = field(default_factory=set)

    def touch(self, learner: str) -> None:
        """Its report, its lag or its claims have changed."""
        self._touched.add(learner)

    def ready(self, fragment: int) -> set[str]:
        """Those that could be pulled for the fragment; valid until the next event."""
        training = self.learners.training()
        if fragment != self._fragment or training is not self._training:
            self._fragment, self._training = fragment, training
            self._names = {record.name for record in training if _counts(record, fragment)}
        else:
            self._update(fragment)
        self._touched.clear()
        return self._names

    def _update(self, fragment: int) -> None:
        for name in self._touched:
            record = self.learners.by_name[name]
            if record.training and record.ejection is None and _counts(record, fragment):
                self._names.add(name)
            else:
                self._names.discard(name)


def _counts(record: LearnerRecord, fragment: int) -> bool:
    return record.fresh and record.report is not None and fragment in record.report.offers
