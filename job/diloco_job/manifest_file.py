"""
Parses a manifest: YAML text in, a `DiLoCoJob` or all of its problems out.

YAML is read as kubectl reads it where PyYAML differs (3e-4 is a number; 12:30 and dates are text),
and more strictly where a mistake would pass: duplicate keys, several documents, tags.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diloco.errors import ConfigError
from diloco_job.rules import Location, rule_problems
from diloco_job.types import API_VERSION, KIND, DiLoCoJob
from diloco_job.validation_messages import message, path_text, shown


def parse_job(text: str, sets: Sequence[str] = (), *, name: str = "manifest") -> DiLoCoJob:
    """
    The job of a manifest.

    Args:
        text: the manifest, YAML.
        sets: changes from the command line, such as `spec.sync.quorum=2`.
        name: what error messages call the manifest, such as its path.

    Raises:
        ConfigError: the manifest is not valid; the message has one line per problem.
    """
    job, problems = examine(text, sets)
    if job is None or problems:
        raise refusal(name, problems)
    return job


def refusal(name: str, problems: Sequence[str]) -> ConfigError:
    """The error that lists all problems of a manifest, one per line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n".join([f"{name}: {count}", *problems]))


def examine(text: str, sets: Sequence[str] = ()) -> tuple[DiLoCoJob | None, list[str]]:
    """The job (None if too much is missing to build one) and all problems, as `path: message`."""
    data, problems = parse_yaml(text)
    if problems and data is None:
        return None, problems
    for change in sets:
        try:
            data = apply_set(data, change)
        except ConfigError as error:
            problems.append(str(error))
    job, stand_ins, found = _validate(data)
    problems += found
    if job is not None:
        problems += rule_problems(job, unusable=stand_ins)
    return job, problems


# ------------------------------------------------------------------------------ YAML

_TAG = "tag:yaml.org,2002:"
_KINDS = {_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.inf)\Z|\.nan\Z", re.I)


def _resolvers(base: type[yaml.resolver.BaseResolver]) -> dict[Any, list[tuple[str, Any]]]:
    """How plain scalars get their type: PyYAML's table with kubectl's numbers."""
    replaced = {_TAG + kind for kind in ("int", "float", "timestamp", "value")}
    table = {
        first: [(tag, pattern) for tag, pattern in entries if tag not in replaced]
        for first, entries in base.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        table.setdefault(first, []).extend([(_TAG + "int", _INT), (_TAG + "float", _FLOAT)])
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader)


class Dumper(yaml.SafeDumper):
    """Writes what kubectl reads as the same values; without anchors."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper)

    def ignore_aliases(self, data: object) -> bool:
        """Always."""
        return True


def parse_yaml(
    text: str, *, file: str = "manifest", content: str = "a DiLoCoJob"
) -> tuple[Any, list[str]]:
    """
    The value of one YAML document, and the problems of its syntax.

    Of a duplicate key, the last value counts; with any other problem the value is None.

    Args:
        text: the document.
        file: what problems call it.
        content: what it should be.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, [f"the {file}: is empty; write {content}"]
        duplicates, unreadable = _Form(file).inspect(node)
        if unreadable:
            return None, duplicates + unreadable
        return loader.construct_document(node), duplicates
    except yaml.MarkedYAMLError as error:
        return None, [_yaml_problem(error, file)]
    except yaml.YAMLError as error:
        return None, [f"the {file}: not YAML: {' '.join(str(error).split())}"]
    except RecursionError:
        return None, [f"the {file}: nested too deeply; {content} needs about ten levels"]
    except ValueError as error:
        return None, [f"the {file}: not YAML: {error}"]


def _yaml_problem(error: yaml.MarkedYAMLError, file: str) -> str:
    line = f"line {error.problem_mark.line + 1}" if error.problem_mark else f"the {file}"
    if error.problem == "but found another document":
        return f"{line}: a second document starts here; a {file} is one document"
    return f"{line}: not YAML: {error.problem or error.context}"


class _Form:
    """Checks the nodes of a document, before the values hide how they were written."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._duplicates: list[str] = []
        self._unreadable: list[str] = []
        self._seen: set[int] = set()

    def inspect(self, node: yaml.Node) -> tuple[list[str], list[str]]:
        """Duplicate keys, and problems that make the document unusable."""
        self._walk(node, (), frozenset())
        return self._duplicates, self._unreadable

    def _walk(self, node: yaml.Node, place: Location, above: frozenset[int]) -> None:
        if id(node) in above:
            self._report(node, place, "contains itself through an alias; write it out")
        # An aliased node is checked once, so that its problems are reported once.
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        above |= {id(node)}
        if node.tag not in _KINDS:
            self._report(node, place, f"has the YAML tag {node.tag.replace(_TAG, '!!')}; remove it")
        elif node.tag == _TAG + "float" and node.value.lower().endswith((".inf", ".nan")):
            self._report(
                node, place, f"{node.value} is not a number that a {self._file} can contain"
            )
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._walk(item, (*place, index), above)
        elif isinstance(node, yaml.MappingNode):
            self._keys(node, place)
            for key, value in node.value:
                self._walk(value, (*place, str(key.value)), above)

    def _keys(self, node: yaml.MappingNode, place: Location) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == _TAG + "merge":
                continue
            if key.tag != _TAG + "str":
                self._report(key, place, f"the key {shown(key.value)} is not text; quote it")
            elif key.value in lines:
                where = path_text((*place, key.value))
                self._duplicates.append(
                    f"{where}: duplicate key in lines {lines[key.value]} and {line}"
                )
            lines.setdefault(str(key.value), line)

    def _report(self, node: yaml.Node, place: Location, text: str) -> None:
        self._unreadable.append(f"{path_text(place)}: line {node.start_mark.line + 1}: {text}")


# ------------------------------------------------------------------------------ --set

_STEP = re.compile(r"\.?(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|\[(?P<item>[^\]]+)\]")


def apply_set(data: Any, change: str) -> Any:
    """
    A copy of the manifest's data with one field changed.

    `spec.sync.quorum=2`, `spec.regions[0].learners=3`, `spec.regions[eu].learners=3`; the value is
    YAML, and empty text if nothing follows the `=`; `[key]` also selects keys with other characters.

    Raises:
        ConfigError: the change has no `=`, or its path is malformed or does not exist.
    """
    path, equals, text = change.partition("=")
    if not equals:
        raise ConfigError(f"--set {change}: has no value; write path=value")
    steps = _steps(path, change)
    value, problems = parse_yaml(text) if text.strip() else ("", [])
    if problems:
        raise ConfigError(f"--set {change}: {problems[0]}")
    changed = copy.deepcopy(data) if isinstance(data, dict) else {}
    place: Any = changed
    for index, step in enumerate(steps):
        key = _key(place, step, change)
        if index == len(steps) - 1:
            place[key] = value
        else:
            if isinstance(place, dict) and place.get(key) is None:
                place[key] = {}
            place = place[key]
    return changed


def _steps(path: str, change: str) -> list[str]:
    steps, at = [], 0
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            raise ConfigError(
                f"--set {change}: the path is malformed at {shown(path[at:])}; write it "
                "like spec.regions[0].learners or spec.regions[eu].learners"
            )
        steps.append(found["name"] or found["item"])
        at = found.end()
    if not steps or steps[0] not in ("spec", "metadata"):
        raise ConfigError(f"--set {change}: a path starts with spec or metadata, like spec.steps")
    return steps


def _key(place: Any, step: str, change: str) -> str | int:
    if isinstance(place, dict):
        return step
    if not isinstance(place, list):
        raise ConfigError(f"--set {change}: {shown(place)} has no field {step}")
    if re.fullmatch("[0-9]{1,9}", step) and int(step) < len(place):
        return int(step)
    entries = [entry.get("name") if isinstance(entry, dict) else None for entry in place]
    if step in entries:
        return entries.index(step)
    raise ConfigError(
        f"--set {change}: no entry [{step}]; there are {len(place)}: "
        + ", ".join(f"[{index}] {name or ''}".strip() for index, name in enumerate(entries))
    )


# ------------------------------------------------------------------------------ types

_PASSES = 8
"""Each pass repairs one level of nesting; required fields are at most four levels deep."""


def _validate(data: Any) -> tuple[DiLoCoJob | None, list[Location], list[str]]:
    """
    The data as a job, with stand-ins for invalid values, so that rules between fields can be checked.

    Returns:
        The job, the locations of stand-ins, the problems.
    """
    data = copy.deepcopy(data)
    stand_ins: list[Location] = []
    problems: list[str] = []
    for _ in range(_PASSES):
        try:
            return DiLoCoJob.model_validate(data), stand_ins, problems
        except ValidationError as invalid:
            errors = invalid.errors(include_url=False)
        known = tuple(stand_ins)
        for error in errors:
            place = error["loc"]
            if not any(place[: len(above)] == above for above in known):
                problems.append(message(error))
            if not place:
                return None, stand_ins, problems
            if error["type"] != "extra_forbidden":
                stand_ins.append(place)
            _repair(data, error)
    return None, stand_ins, problems


def _repair(data: Any, error: ErrorDetails) -> None:
    """Remove an invalid value, or put a stand-in where a value is required."""
    *above, last = error["loc"]
    place: Any = data
    for part in above:
        place = place[part]
        if not isinstance(place, dict | list):
            return
    if isinstance(place, list):
        place[int(last)] = "x" if error["type"] == "string_type" else {}
    elif error["type"] == "missing":
        place[last] = _stand_in(error["loc"])
    else:
        place.pop(last, None)


def _stand_in(location: Location) -> object:
    match location:
        case (*_, "recipe", "name"):
            return "gpt"
        case (*_, int(index), "name"):
            return f"stand-in-{index}"
        case (*_, "regions"):
            return [{"name": "stand-in", "learners": 1}]
        case (*_, "metadata" | "spec" | "recipe"):
            return {}
        case ("apiVersion",):
            return API_VERSION
        case ("kind",):
            return KIND
        case (*_, "name"):
            return "stand-in"
        case _:
            return 1
