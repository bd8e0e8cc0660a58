"""
CEL as text: how a check is written into a CustomResourceDefinition.

Pure. Observed on a real API server: rules must be total, because they run even when bounds and
patterns are violated; the results of `string()` and of a list's `join` have no size estimate, so any
operation on them exceeds the cost budget; `format` is cheap.
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
        rule: CEL that is true for allowed objects, whatever else is wrong with them.
        message: the message of the same check in Python; `{}` stands for one of `values`.
        values: CEL expressions for the placeholders.
        reason: what the server writes between the field's path and the message.
    """
    # The server uses `message` when `messageExpression` fails.
    entry = {"rule": rule, "message": message.replace("{}", "..."), "reason": reason}
    if values:
        template = quoted(message.replace("{}", "%s"))
        entry["messageExpression"] = f"{template}.format([{', '.join(values)}])"
    return entry


def quoted(text: str) -> str:
    """A CEL string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
