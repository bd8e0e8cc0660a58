"""
The reference page of `DiLoCoJob`, made from what the code itself goes by.

Pure. Fields, bounds and defaults come from the CRD's schema, rules from `validate.py`, conditions
and reasons from `reasons.py`, metrics from `diloco.telemetry`: nothing is said here twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from diloco.telemetry import METRICS
from diloco_operator import names
from diloco_operator.api import API_VERSION, KIND
from diloco_operator.crd import PLURAL, SHORT_NAMES, Schema, schema
from diloco_operator.reasons import CONDITIONS, REASONS
from diloco_operator.validate import CHANGES, FIXED, RULES, fixed_words

_HEAD = f"""<!-- Made by scripts/generate.py; do not edit. -->
# Reference: {KIND}

`{API_VERSION}`, kind `{KIND}`, resource `{PLURAL}`, short name `{SHORT_NAMES[0]}`, namespaced.
A job with everything in it: [tests/golden/everything.yaml](../tests/golden/everything.yaml).

Unknown fields are errors (`diloco validate`; `kubectl apply` says so too). Numbers with a fraction are
quoted decimals, at most nine digits before and nine after the point: `"0.7"`. A quantity is an
integer or text such as `500m` or `10Gi`. *Passed through* means that what is inside belongs to
Kubernetes or to your program and is not looked at; it may be nested 64 levels deep.
"""


def reference() -> str:
    """The page as Markdown."""
    job = schema()["properties"]
    spec = job["spec"]
    plain: list[Row] = [("metadata.name", job["metadata"]["properties"]["name"], True)]
    sections = []
    for name, field in spec["properties"].items():
        path = f"spec.{name}"
        if _has_fields(field):
            table = _fields_table(_walk(path, field))
            sections.append(f"## {path}\n\n{field['description']}\n\n{table}")
        else:
            plain.append((path, field, name in spec["required"]))
    first = f"## The job\n\n{_fields_table(plain)}"
    last = (_rules(), _changes(), _status(job["status"]), _conditions(), _metrics())
    return "\n".join((_HEAD, first, *sections, *last))


# ----------------------------------------------------------------------------------- fields

Row = tuple[str, Schema, bool]
"""Path, schema, whether it is required."""


def _has_fields(field: Schema) -> bool:
    return "properties" in field or "properties" in field.get("items", {})


def _walk(path: str, field: Schema) -> Iterator[Row]:
    """Every field below one, in the order of the types."""
    if "items" in field:
        path, field = f"{path}[]", field["items"]
    for name, inner in field.get("properties", {}).items():
        yield f"{path}.{name}", inner, name in field.get("required", ())
        yield from _walk(f"{path}.{name}", inner)


def _fields_table(rows: Iterable[Row]) -> str:
    return _table(
        ("field", "type", "default", "may change", "meaning"),
        (
            (
                f"`{path}`",
                _type(field),
                _default(field, required),
                "" if _has_fields(field) else _may_change(path),
                field["description"],
            )
            for path, field, required in rows
        ),
    )


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if field.get("x-kubernetes-preserve-unknown-fields"):
        return "object, passed through"
    match field["type"]:
        case "integer":
            least, most = field["minimum"], field.get("maximum")
            return f"integer, at least {least}" if most is None else f"integer, {least} to {most}"
        case "string" if names.DECIMAL_PATTERN in field.get("pattern", ""):
            return "decimal"
        case "string" if field.get("format") == "date-time":
            return "time"
        case "string":
            least = "1 to " if field.get("minLength") else "at most "
            most = field.get("maxLength")
            return f"text, {least}{most} characters" if most else "text"
        case "array":
            least = f"{field['minItems']} to " if "minItems" in field else "at most "
            return f"list of {_type(field['items'])}; {least}{field['maxItems']}"
        case "object" if "additionalProperties" in field:
            inner = field["additionalProperties"]
            values = "anything, passed through" if "type" not in inner else _type(inner)
            if inner.get("x-kubernetes-int-or-string"):
                values = "quantity"
            return f"map to {values}; at most {field['maxProperties']}"
        case kind:
            return str(kind)


def _default(field: Schema, required: bool) -> str:
    if required:
        return "required"
    if "default" in field and not _has_fields(field):
        return f"`{json.dumps(field['default'], ensure_ascii=False)}`"
    return "" if _has_fields(field) else "none"


def _may_change(path: str) -> str:
    if any(path == one or path.startswith(f"{one}.") for one in FIXED):
        return "no"
    if path == "spec.steps":
        return "up"
    return "no" if any(path == change.path for change in CHANGES) else "yes"


# ------------------------------------------------------------------- rules, status, metrics


def _rules() -> str:
    rows = ((f"`{rule.path}`", _template(rule.message)) for rule in RULES)
    return (
        "## Rules between fields\n\nSaid by `diloco validate` and by the API server, after the "
        "field's path.\n\n" + _table(("field", "what is said"), rows)
    )


def _changes() -> str:
    rows = [(f"`{change.path}`", _template(change.message)) for change in CHANGES]
    rows += [(f"`{path}`", _template(fixed_words(path))) for path in FIXED]
    return (
        "## What may not change\n\nSaid by the API server, and by `diloco run` in a directory of "
        "the same job.\n\n" + _table(("field", "what is said"), rows)
    )


def _status(status: Schema) -> str:
    rows = (
        (f"`{path}`", _type(field) if not _has_fields(field) else "", field["description"])
        for path, field, _ in _walk("status", status)
    )
    return f"## status\n\n{status['description']}\n\n" + _table(("field", "type", "meaning"), rows)


def _conditions() -> str:
    parts = ["## Conditions\n\nAll are there from the first visit of the operator on.\n"]
    for condition, meaning in CONDITIONS.items():
        rows = (
            (one.status, f"`{one.reason}`", f"`{one.message}`", one.event, one.advice)
            for one in REASONS
            if one.condition == condition
        )
        table = _table(("status", "reason", "message", "Event", "what to do"), rows)
        parts.append(f"### {condition}\n\nTrue when {meaning}.\n\n{table}")
    return "\n".join(parts)


def _metrics() -> str:
    rows = (
        (metric.component, f"`{metric.name}`", metric.kind, ", ".join(metric.labels), metric.help)
        for metric in METRICS
    )
    return "## Metrics\n\n" + _table(("served by", "name", "kind", "labels", "meaning"), rows)


def _template(message: str) -> str:
    return message.replace("{}", "…")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(_cell(one) for one in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
