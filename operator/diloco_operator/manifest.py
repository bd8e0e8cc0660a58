"""
Reads a manifest: YAML in, a `DiLoCoJob` out, or everything that is wrong with it at once.

YAML is read as kubectl reads it where PyYAML differs (3e-4 is a number; 12:30 and dates are text),
and stricter where a mistake would pass: a key that comes twice, several documents, tags.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diloco.errors import ConfigError
from diloco_operator.api import API_VERSION, KIND, DiLoCoJob
from diloco_operator.validate import Location, rule_problems
from diloco_operator.words import path_text, say, shown


def load_job(source: Path | str, sets: Sequence[str] = ()) -> DiLoCoJob:
    """
    The job of a manifest.

    Args:
        source: a file, or (as str) the YAML text itself.
        sets: changes from the command line, such as `spec.sync.quorum=2`.

    Raises:
        ConfigError: the file cannot be read, or one line per problem for everything that is wrong.
    """
    job, problems = examine(source, sets)
    if job is None or problems:
        raise refusal(source if isinstance(source, Path) else "manifest", problems)
    return job


def refusal(name: Path | str, problems: Sequence[str]) -> ConfigError:
    """The error that lists all problems of a manifest, one a line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n".join([f"{name}: {count}", *problems]))


def examine(source: Path | str, sets: Sequence[str] = ()) -> tuple[DiLoCoJob | None, list[str]]:
    """
    The job (None where too much is missing to make one) and all problems, as `path: message`.

    Raises:
        ConfigError: the file cannot be read.
    """
    text = _read(source) if isinstance(source, Path) else source
    data, problems = parse_yaml(text)
    if problems and data is None:
        return None, problems
    for one in sets:
        try:
            data = apply_set(data, one)
        except ConfigError as error:
            problems.append(str(error))
    job, stand_ins, found = _fit(data)
    problems += found
    if job is not None:
        problems += rule_problems(job, unusable=stand_ins)
    return job, problems


def dump_job(job: DiLoCoJob) -> str:
    """The manifest of a job as YAML, without defaults that were not written; reads back equal."""
    data = job.model_dump(by_alias=True, exclude_unset=True)
    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; a manifest is a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a manifest") from None


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


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """
    The value of one YAML document and what is wrong with its form.

    A key that comes twice is a problem, and the last one counts; after any other problem the value
    is None.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, ["the manifest: is empty; write a DiLoCoJob"]
        twice, unreadable = _Form().inspect(node)
        if unreadable:
            return None, twice + unreadable
        return loader.construct_document(node), twice
    except yaml.MarkedYAMLError as error:
        return None, [_yaml_problem(error)]
    except yaml.YAMLError as error:
        return None, [f"the manifest: not YAML: {' '.join(str(error).split())}"]
    except RecursionError:
        return None, ["the manifest: nested too deep; a job needs a dozen levels"]
    except ValueError as error:
        return None, [f"the manifest: not YAML: {error}"]


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "the manifest"
    if error.problem == "but found another document":
        return f"{line}: a second document begins here; a manifest is one document"
    return f"{line}: not YAML: {error.problem or error.context}"


class _Form:
    """Looks through the nodes of a document, before values hide how they were written."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        self._unreadable: list[str] = []
        self._seen: set[int] = set()

    def inspect(self, node: yaml.Node) -> tuple[list[str], list[str]]:
        """Keys that come twice, and what no manifest may hold."""
        self._walk(node, (), frozenset())
        return self._twice, self._unreadable

    def _walk(self, node: yaml.Node, place: Location, above: frozenset[int]) -> None:
        if id(node) in above:
            self._say(node, place, "holds itself through an alias; write it out")
        # An alias is looked at once: what is wrong with it is wrong once.
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        above |= {id(node)}
        if node.tag not in _KINDS:
            self._say(node, place, f"has the YAML tag {node.tag.replace(_TAG, '!!')}; leave it out")
        elif node.tag == _TAG + "float" and node.value.lower().endswith((".inf", ".nan")):
            self._say(node, place, f"{node.value} is no number that a manifest can hold")
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
                self._say(key, place, f"the key {shown(key.value)} is not text; write it in quotes")
            elif key.value in lines:
                where = path_text((*place, key.value))
                self._twice.append(f"{where}: comes twice, in line {lines[key.value]} and {line}")
            lines.setdefault(str(key.value), line)

    def _say(self, node: yaml.Node, place: Location, text: str) -> None:
        self._unreadable.append(f"{path_text(place)}: line {node.start_mark.line + 1}: {text}")


# ------------------------------------------------------------------------------ --set

_STEP = re.compile(r"\.?(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|\[(?P<item>[^\]]+)\]")


def apply_set(data: Any, change: str) -> Any:
    """
    A copy of the manifest's data with one field changed.

    `spec.sync.quorum=2`, `spec.regions[0].learners=3`, `spec.regions[eu].learners=3`; the value is
    YAML, nothing after the `=` is empty text; `[key]` also reaches a key that is no plain word.

    Raises:
        ConfigError: the change has no `=`, its path cannot be read or leads nowhere.
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
                f"--set {change}: the path cannot be read from {shown(path[at:])} on; write it "
                "like spec.regions[0].learners or spec.regions[eu].learners"
            )
        steps.append(found["name"] or found["item"])
        at = found.end()
    if not steps or steps[0] not in ("spec", "metadata"):
        raise ConfigError(f"--set {change}: a path begins with spec or metadata, like spec.steps")
    return steps


def _key(place: Any, step: str, change: str) -> str | int:
    if isinstance(place, dict):
        return step
    if not isinstance(place, list):
        raise ConfigError(f"--set {change}: {shown(place)} has no field {step}")
    if step.isdigit() and int(step) < len(place):
        return int(step)
    entries = [one.get("name") if isinstance(one, dict) else None for one in place]
    if step in entries:
        return entries.index(step)
    raise ConfigError(
        f"--set {change}: no entry [{step}]; there are {len(place)}: "
        + ", ".join(f"[{index}] {name or ''}".strip() for index, name in enumerate(entries))
    )


# ------------------------------------------------------------------------------ types

_ROUNDS = 8
"""Each round mends one level of nesting; a manifest's required fields lie at most four deep."""


def _fit(data: Any) -> tuple[DiLoCoJob | None, list[Location], list[str]]:
    """
    The data as a job, with stand-ins where it does not fit, so that the other rules can be tried.

    Returns:
        The job, the places of stand-ins, the problems.
    """
    data = copy.deepcopy(data)
    stand_ins: list[Location] = []
    problems: list[str] = []
    for _ in range(_ROUNDS):
        try:
            return DiLoCoJob.model_validate(data), stand_ins, problems
        except ValidationError as refused:
            errors = refused.errors(include_url=False)
        known = tuple(stand_ins)
        for error in errors:
            place = error["loc"]
            if not any(place[: len(one)] == one for one in known):
                problems.append(say(error))
            if not place:
                return None, stand_ins, problems
            if error["type"] != "extra_forbidden":
                stand_ins.append(place)
            _mend(data, error)
    return None, stand_ins, problems


def _mend(data: Any, error: ErrorDetails) -> None:
    """Take out what does not fit; put a stand-in where something must be."""
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
