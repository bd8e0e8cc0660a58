"""
Messages for invalid fields: what was found, what is allowed.

Pure. pydantic detects the problem; its own messages are for programmers, these are for the author of
the manifest.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from diloco_job.types import DiLoCoJob

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def path_text(location: tuple[str | int, ...]) -> str:
    """
    A location in the manifest, written as the API server does.

    >>> path_text(("spec", "regions", 0, "name"))
    'spec.regions[0].name'
    """
    text = ""
    for part in location:
        if isinstance(part, int) or not _WORD.fullmatch(part):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text or "the manifest"


def shown(value: object, *, limit: int = 60) -> str:
    """A value as the manifest would write it, on one line and truncated."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def message(error: ErrorDetails) -> str:
    """One problem as `path: what was found, what is allowed`."""
    return f"{path_text(error['loc'])}: {_problem(error)}"


def _problem(error: ErrorDetails) -> str:
    seen, context = error["input"], error.get("ctx", {})
    match error["type"]:
        case "missing":
            return "missing; it is required"
        case "extra_forbidden":
            return _unknown(error["loc"])
        case _ if seen is None:
            return "is empty; give it a value or leave it out"
        case "leaf":
            return str(context["message"])
        case "int_type" if isinstance(seen, str) and re.fullmatch(r"-?\d+", seen):
            return f"{shown(seen)} is text; write {seen} without quotes"
        case "int_type":
            return f"{shown(seen)} is not an integer"
        case "bool_type":
            return f"{shown(seen)} is neither true nor false"
        case "string_type" if isinstance(seen, bool | int | float):
            return f'{shown(seen)} is not text; quote it: "{shown(seen)}"'
        case "string_type":
            return f"{shown(seen)} is not text"
        case "list_type":
            return f"{shown(seen)} is not a list"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"{shown(seen)} is not an object with fields"
        case "literal_error":
            return f"{shown(seen)} is not one of {str(context['expected']).replace(chr(39), '')}"
        case "greater_than_equal":
            return f"{seen} is less than {context['ge']}, the minimum"
        case "less_than_equal":
            return f"{seen} is more than {context['le']}, the maximum"
        case "too_short" | "string_too_short":
            return f"is empty; at least {context.get('min_length', 1)} is required"
        case "too_long":
            return f"{len(seen)} entries are more than {context['max_length']}, the maximum"
        case "string_too_long":
            return f"{len(seen)} characters are more than {context['max_length']}, the maximum"
        case "string_pattern_mismatch":
            return f"{shown(seen)} does not match {context['pattern']}"
        case _:
            return f"{shown(seen)}: {error['msg']}"


def _unknown(location: tuple[str | int, ...]) -> str:
    name, known = str(location[-1]), _fields_at(location[:-1])
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    if not close:
        close = [field for field in known if field.lower() == name.replace("_", "").lower()]
    if close:
        return f"unknown field; did you mean {' or '.join(close)}?"
    return f"unknown field; the fields here are {', '.join(known)}"


def _fields_at(location: tuple[str | int, ...]) -> list[str]:
    """The fields of the model at a location, as a manifest writes them."""
    model: type[BaseModel] = DiLoCoJob
    for part in location:
        if isinstance(part, str):
            field = next(f for f in model.model_fields.values() if f.alias == part)
            model = _model_in(field.annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if (found := _model_in(inner)) is not None:
            return found
    return None
