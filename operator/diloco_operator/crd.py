"""
The CustomResourceDefinition of `DiLoCoJob`, made from the types and the rules.

Pure. Fields, bounds and words come from `api.py` (and `status_api.py`), rules between fields and
what may not change from `validate.py`; here stands only how Kubernetes wants them written. The
result is structural, needs no webhook, and refuses what `diloco validate` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from diloco_operator import cel
from diloco_operator.api import API_VERSION, KIND, DiLoCoJob
from diloco_operator.fields import INT32_MOST
from diloco_operator.manifest import Dumper
from diloco_operator.status_api import Status
from diloco_operator.validate import CHANGES, FIXED, RULES, fixed_words

Schema = dict[str, Any]

GROUP, _, VERSION = API_VERSION.partition("/")
PLURAL = "dilocojobs"
SHORT_NAMES = ("dlj",)

HEADER = "# Made by scripts/generate.py from operator/diloco_operator/api.py; do not edit.\n"


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition, as `kubectl apply` takes it; equal on every call."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": list(SHORT_NAMES),
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": schema()},
                }
            ],
        },
    }


def crd_yaml() -> str:
    """The CustomResourceDefinition as YAML."""
    text: str = yaml.dump(crd(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return HEADER + text


def schema() -> Schema:
    """The structural schema of a DiLoCoJob, with CEL rules."""
    whole = _structural(DiLoCoJob, defaults=True)
    fields = whole["properties"]
    for name in ("apiVersion", "kind"):
        fields[name] = {"type": "string", "description": fields[name]["description"]}
    # Of metadata a CRD may constrain the name alone.
    name = fields["metadata"]["properties"]["name"]
    fields["metadata"] = {"type": "object", "properties": {"name": name}}
    fields["status"] = _structural(Status, defaults=False)
    for where, rule in _rules(whole):
        where.setdefault("x-kubernetes-validations", []).append(rule)
    return whole


def _columns() -> list[dict[str, Any]]:
    quorum = '.status.conditions[?(@.type=="QuorumMet")].status'
    columns: list[tuple[str, str, str, bool]] = [
        ("State", "string", ".status.state", False),
        ("Step", "string", ".status.progress", False),
        ("Learners", "string", ".status.learners.summary", False),
        ("Quorum", "string", quorum, False),
        ("Region", "string", ".status.syncer.region", True),
        ("Endpoint", "string", ".status.syncer.endpoint", True),
        ("Tokens", "integer", ".status.tokens", True),
        ("Age", "date", ".metadata.creationTimestamp", False),
    ]
    # A server leaves out a priority of 0: written, it would look like a change for ever.
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})
        for name, kind, path, wide in columns
    ]


# ----------------------------------------------------------------------------------- schema


def _structural(model: type[BaseModel], *, defaults: bool) -> Schema:
    """
    The model's schema in the dialect of a CRD: nothing referred to, nothing that is no bound.

    Args:
        model: a type of the manifest or the status.
        defaults: whether the server fills in defaults and takes null for "left out".
    """
    whole = model.model_json_schema(by_alias=True)
    return _Writer(whole.get("$defs", {}), defaults=defaults).write(whole)


class _Writer:
    def __init__(self, definitions: Mapping[str, Schema], *, defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults

    def write(self, node: Schema) -> Schema:
        """One node of pydantic's JSON schema and all below it."""
        node, nullable = self._resolved(node)
        if "description" in node:
            node["description"] = " ".join(node["description"].split())
        if "const" in node:
            node["enum"] = [node["const"]]
        made = {key: node[key] for key in _KEPT if key in node}
        made |= {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}
        if node.get("type") == "integer":
            small = node.get("maximum", INT32_MOST + 1) <= INT32_MOST
            made["format"] = "int32" if small else "int64"
        if nullable and self._defaults:
            made["nullable"] = True
        if self._defaults and "default" in node and not _is_empty(node["default"]):
            # {}: the server fills in the defaults of what is inside.
            made["default"] = {} if "properties" in node else node["default"]
        if "items" in node:
            made["items"] = self.write(node["items"])
        if "properties" in node:
            fields = node["properties"].items()
            made["properties"] = {name: self.write(field) for name, field in fields}
        elif node.get("additionalProperties") is True:
            made["x-kubernetes-preserve-unknown-fields"] = True
        elif "additionalProperties" in node:
            made["additionalProperties"] = self.write(node["additionalProperties"])
        return made

    def _resolved(self, node: Schema) -> tuple[Schema, bool]:
        """A copy of the node with what it refers to laid under it, and whether it may be null."""
        node, nullable = dict(node), False
        if "anyOf" in node:
            [inner] = [one for one in node["anyOf"] if one != {"type": "null"}]
            node, nullable = inner | {k: v for k, v in node.items() if k != "anyOf"}, True
        if "$ref" in node:
            node = self._definitions[node["$ref"].rpartition("/")[2]] | node
        return node, nullable


_KEPT = (
    *("description", "type", "format", "nullable", "enum", "pattern", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    "required",
)


def _is_empty(default: object) -> bool:
    """Whether a default says nothing: stored, it would only make jobs longer to read."""
    if isinstance(default, dict):
        return all(_is_empty(value) for value in default.values())
    return default is None or default == []


# ------------------------------------------------------------------------------------ rules


def _rules(whole: Schema) -> list[tuple[Schema, dict[str, str]]]:
    """Every rule of `validate.py` with the place in the schema where it stands."""
    made: list[tuple[Schema, dict[str, str]]] = []
    for rule in RULES:
        reason: cel.Reason = "FieldValueRequired" if rule.missing else "FieldValueForbidden"
        entry = cel.validation(rule.cel, rule.message, *rule.cel_values, reason=reason)
        made.append(_placed(whole, rule.path, entry))
    for change in CHANGES:
        entry = cel.validation(
            change.cel, change.message, *change.cel_values, reason="FieldValueForbidden"
        )
        made.append(_placed(whole, change.path, entry))
    # A server never changes a name.
    made += [_fixed(whole, path) for path in FIXED if path != "metadata.name"]
    return made


def _placed(whole: Schema, path: str, entry: dict[str, str]) -> tuple[Schema, dict[str, str]]:
    """A rule on the spec; on the whole job where it reads the name."""
    # Not on the whole job without need: there a rule is asked again with every write of status.
    spec = path.startswith("spec.")
    where = whole["properties"]["spec"] if spec else whole
    return where, entry | {"fieldPath": path.removeprefix("spec") if spec else f".{path}"}


def _fixed(whole: Schema, path: str) -> tuple[Schema, dict[str, str]]:
    """The rule that a field keeps its value."""
    leaf = _at(whole, path)
    if leaf.get("type") == "array" and not leaf.get("nullable"):
        # An empty default is not worth storing, but a rule needs a value on both sides.
        leaf.setdefault("default", [])
    if "default" in leaf:
        rule, now, old = "self == oldSelf", "self", "oldSelf"
    elif leaf.get("nullable"):
        # A rule on the field itself is not asked when the field comes or goes.
        now, old = path.replace("spec.", "self."), path.replace("spec.", "oldSelf.")
        rule = f"has({now}) == has({old}) && (!has({now}) || {now} == {old})"
        now, old = (f"has({one}) ? dyn({one}) : dyn(null)" for one in (now, old))
    else:
        raise ValueError(f"{path}: has no default and is not optional; say how it is compared")
    words = fixed_words(path)
    values = (_shown(leaf, old), _shown(leaf, now)) if "{}" in words else ()
    entry = cel.validation(rule, words, *values, reason="FieldValueForbidden")
    return (leaf, entry) if rule == "self == oldSelf" else _placed(whole, path, entry)


def _shown(leaf: Schema, value: str) -> str:
    """CEL for a value as JSON writes it: text in quotes."""
    if leaf.get("x-kubernetes-int-or-string"):
        return f"(type({value}) == string ? '\"%s\"' : '%s').format([{value}])"
    if leaf["type"] == "string":
        return f"'\"%s\"'.format([{value}])"
    return value


def _at(whole: Schema, path: str) -> Schema:
    for part in path.split("."):
        whole = whole["properties"][part]
    return whole
