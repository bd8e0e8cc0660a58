"""
What a StatefulSet or Deployment records of its pod template: the template, and the hash of the
manifest's values that it was made of.

Pure. With the record, an operator can keep the template of running pods although it would make
another one from the same manifest (docs/adr/0017-a-running-workload-keeps-its-template.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.runtime import untrusted_json
from diloco.spec import canonical
from diloco_operator.resources.common import marked, short_hash
from diloco_operator.resources.overlay import without_nulls

INPUTS = "diloco.dev/template-inputs"
"""Annotation of a workload: `<FORMAT>-<hash>` of the values that its template was made of."""

TEMPLATE = "diloco.dev/template"
"""Annotation of a workload: the template that was applied, as JSON."""

FORMAT = 3
"""
1: the numbers of learners were an input of the syncer and the evaluator.
2: `learner.checkpoint.everySteps` was 100 by default, which the API server has stored in each job.

Raise it when the same manifest gives another hash, that is, when `inputs` hashes other values or
when a default of the manifest changes. Workloads with a record of another format are compared by
what the manifest states, so that the upgrade restarts nothing.
"""

MAX_TEMPLATE = 128 * 1024
"""Largest recorded template in bytes; the API server allows 256 KiB for all annotations together."""


def record(inputs: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, str]:
    """The annotations for a template that was made of `inputs`."""
    return {INPUTS: f"{FORMAT}-{short_hash(inputs)}", **_recorded(template)}


def with_template(want: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The workload `want` with another template and its record."""
    template = without_nulls(template)
    metadata = want["metadata"]
    annotations = {key: text for key, text in metadata["annotations"].items() if key != TEMPLATE}
    return marked(
        {
            **want,
            "metadata": {**metadata, "annotations": {**annotations, **_recorded(template)}},
            "spec": {**want["spec"], "template": template},
        }
    )


def with_former(
    want: Mapping[str, Any], live: Mapping[str, Any], template: Mapping[str, Any]
) -> dict[str, Any]:
    """The workload `want` with `template`, and with the record of `live`: its own is still to come."""
    annotations = {
        key: text
        for key, text in want["metadata"]["annotations"].items()
        if key not in (INPUTS, TEMPLATE)
    }
    former = {key: text for key in (INPUTS, TEMPLATE) if (text := _annotation(live, key))}
    return marked(
        {
            **want,
            "metadata": {**want["metadata"], "annotations": {**annotations, **former}},
            "spec": {**want["spec"], "template": without_nulls(template)},
        }
    )


def inputs_of(workload: Mapping[str, Any]) -> str:
    """The hash of inputs; "": there is none, or it has another format."""
    text = _annotation(workload, INPUTS)
    return text if text.startswith(f"{FORMAT}-") else ""


def template_text(workload: Mapping[str, Any]) -> str:
    """The recorded template as JSON; "": none."""
    return _annotation(workload, TEMPLATE)


def template_of(workload: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recorded template; None: there is none that could be one."""
    try:
        template = untrusted_json.parse(template_text(workload), finite=False)
    except ValueError:
        return None
    is_template = isinstance(template, dict) and isinstance(template.get("spec"), dict)
    return template if is_template else None


def _recorded(template: Mapping[str, Any]) -> dict[str, str]:
    text = canonical(template)
    return {TEMPLATE: text} if len(text.encode()) <= MAX_TEMPLATE else {}


def _annotation(workload: Mapping[str, Any], name: str) -> str:
    annotations = (workload.get("metadata") or {}).get("annotations") or {}
    return str(annotations.get(name) or "")
