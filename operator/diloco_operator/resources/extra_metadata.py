"""
Labels and annotations that children carry for others, such as the attribution of costs.

Pure. They come from the operator's installation and from the DiLoCoJob's own metadata, and never
replace what the operator itself sets. None of them is an input of a pod template: a change reaches
every child at once, and pods when they are recreated (docs/adr/0017).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

OWN_PREFIX = "diloco.dev/"
OWN_KEYS = tuple(
    f"app.kubernetes.io/{name}"
    for name in ("name", "instance", "component", "managed-by", "part-of")
)
_NEVER_INHERITED = "kubectl.kubernetes.io/last-applied-configuration"
"""The whole manifest: too long for a pod, and of no use there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Labels and annotations of an object."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMetadata:
    """What an operator adds to the metadata of all children."""

    fixed: Metadata = field(default_factory=Metadata)
    """The same for all jobs."""
    inherited_labels: tuple[str, ...] = ()
    """Labels that a child gets from its job: keys, or prefixes that end with "/"."""
    inherited_annotations: tuple[str, ...] = ()
    """As above, for annotations."""

    def of_children(self, job: Metadata) -> Metadata:
        """What the children of a job with this metadata get; the job's own value wins."""
        labels = _selected(job.labels, self.inherited_labels)
        annotations = _selected(job.annotations, self.inherited_annotations)
        return Metadata(
            labels={**self.fixed.labels, **labels},
            annotations={**self.fixed.annotations, **annotations},
        )


def is_own(key: str) -> bool:
    """Whether the operator itself sets this label or annotation, or may one day."""
    return key.startswith(OWN_PREFIX) or key in OWN_KEYS


def _selected(given: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    patterns = tuple(patterns)
    return {
        key: text
        for key, text in given.items()
        if not is_own(key) and key != _NEVER_INHERITED and _matches(key, patterns)
    }


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(
        key.startswith(pattern) if pattern.endswith("/") else key == pattern for pattern in patterns
    )
