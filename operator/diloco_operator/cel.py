"""
CEL as text: how a check is written into a CustomResourceDefinition.

Pure. What CEL may and may not do there (each was seen on a real API server): rules must be total,
because bounds and patterns that are broken do not keep them from running; what `string()` or a
list's `join` returns has no bound, so anything done to it is over budget; `format` is cheap.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"]


def validation(
    rule: str, message: str, *values: str, reason: Reason = "FieldValueInvalid"
) -> dict[str, str]:
    """
    One entry of x-kubernetes-validations.

    Args:
        rule: CEL that is true of what is allowed, whatever else is wrong with the object.
        message: the words of the same check in Python; `{}` stands for one of `values`.
        values: CEL for what is filled in.
        reason: what the server writes between the field's path and the words.
    """
    # The server falls back to `message` where it cannot make the other.
    entry = {"rule": rule, "message": message.replace("{}", "..."), "reason": reason}
    if values:
        words = quoted(message.replace("{}", "%s"))
        entry["messageExpression"] = f"{words}.format([{', '.join(values)}])"
    return entry


def quoted(text: str) -> str:
    """A CEL string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
