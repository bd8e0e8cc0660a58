"""
Leaf types of the manifest: grammars and bounds that pydantic has no word for.

Every type also carries its JSON schema, from which the CRD is made: the same bound as a pattern or
a length, and as CEL with the same words where a schema has none. A refusal says what was seen and
what is allowed; the field's path is put before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from diloco_operator import names
from diloco_operator.cel import quoted, validation

BILLION = 10**9
INT32_MOST = 2**31 - 1
INT64_MOST = 2**63 - 1
LEVELS_MOST = 64
"""Of objects and lists inside each other, where a manifest may hold anything."""
_QUANTITY_MOST = 63

_QUANTITY = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+))?"

T = TypeVar("T")

# Words that the CRD says too; `{}` stands for what was seen.
NOT_ABOVE = "{} is not more than {}"
NOT_BELOW = "{} is not less than {}"
RESERVED = (
    '"{}" is taken by the job\'s own children; no region is called '
    f"{', '.join(names.RESERVED_REGIONS)}"
)
NO_ENDPOINT = (
    '"{}" is no endpoint; write host:port, where host is a DNS name, an IPv4 address or an [IPv6] '
    "address and port is 1 to 65535"
)


def refuse(message: str, *seen: object, **values: object) -> PydanticCustomError:
    """The error of a leaf check: `message`, filled in, is shown after the field's path."""
    # "{message}" is pydantic's own template; the text itself may hold braces.
    return PydanticCustomError("leaf", "{message}", {"message": message.format(*seen, **values)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecimalBounds:
    """Bounds of a quoted decimal, compared as written; `_decimal_schema` has them for the CRD."""

    above: str | None = None
    """Exclusive lower bound; a decimal is never below 0 anyway."""
    below: str | None = None
    """Exclusive upper bound."""

    def __call__(self, text: str) -> str:
        """Return `text`, or refuse it."""
        if self.above is not None and not Decimal(text) > Decimal(self.above):
            raise refuse(NOT_ABOVE, text, self.above)
        if self.below is not None and not Decimal(text) < Decimal(self.below):
            raise refuse(NOT_BELOW, text, self.below)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueBy:
    """No two entries of a list share the value of `key`; `list_map` has it for the CRD."""

    key: str

    def __call__(self, entries: list[T]) -> list[T]:
        """Return `entries`, or refuse them."""
        seen: set[str] = set()
        for entry in entries:
            value = getattr(entry, self.key)
            if value in seen:
                raise refuse(
                    'two entries have the {key} "{value}"; every {key} may come once',
                    key=self.key,
                    value=value,
                )
            seen.add(value)
        return entries


def _decimal(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise refuse(
            '{value} is a number; write it as a quoted decimal: "{plain}"',
            value=value,
            plain=format(Decimal(repr(value)), "f"),
        )
    if isinstance(value, str) and not re.fullmatch(names.DECIMAL_PATTERN, value):
        raise refuse(
            '"{value}" is no decimal; write digits, at most nine before and nine after the point, '
            'such as "0.7"',
            value=value,
        )
    return value


def _quantity(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT64_MOST:
        return value
    if isinstance(value, str) and len(value) <= _QUANTITY_MOST and re.fullmatch(_QUANTITY, value):
        return value
    raise refuse(
        '{value!r} is no quantity; write an integer or quoted text such as "500m" or "10Gi"',
        value=value,
    )


def _job_name(value: str) -> str:
    if not re.fullmatch(names.JOB_PATTERN, value) or len(value) > names.CHILD_MOST - 2:
        raise refuse(
            '"{value}" is no job name; use at most {most} lower-case letters, digits and dashes, '
            "a letter first and no dash last",
            value=value,
            most=names.CHILD_MOST - 2,
        )
    return value


def _region_name(value: str) -> str:
    if not re.fullmatch(names.REGION_PATTERN, value) or len(value) > names.REGION_MOST:
        raise refuse(
            '"{value}" is no region name; use at most {most} lower-case letters, digits and '
            "dashes, no dash first or last",
            value=value,
            most=names.REGION_MOST,
        )
    if value in names.RESERVED_REGIONS:
        raise refuse(RESERVED, value)
    return value


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    # Level by level: the API server stores 10 000 levels, on which a recursion would end.
    level: list[Any] = [value]
    for _ in range(LEVELS_MOST):
        entries = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for some in entries for one in some if isinstance(one, dict | list)]
        if not level:
            return value
    raise refuse("is nested deeper than {} levels; that is the most", LEVELS_MOST)


def _endpoint(value: str) -> str:
    if value and not names.is_endpoint(value):
        raise refuse(NO_ENDPOINT, value)
    return value


# ---------------------------------------------------------------- what the CRD says of them


def list_map(key: str) -> dict[str, Any]:
    """Schema words for a list in which no two entries share the value of `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _schema(
    pattern: str, most: int, *rules: tuple[str, str], empty: bool = False
) -> WithJsonSchema:
    """Text of at most `most` characters that matches; a rule is CEL and its words about `self`."""
    anchored = f"^({pattern})?$" if empty else f"^({pattern})$"
    said: dict[str, Any] = {"type": "string", "pattern": anchored, "maxLength": most}
    if rules:
        # A text that breaks the pattern still reaches CEL; one complaint is enough.
        said["x-kubernetes-validations"] = [
            validation(f"!self.matches({quoted(anchored)}) || {rule}", words, "self")
            for rule, words in rules
        ]
    return WithJsonSchema(said)


def _decimal_schema(above: str | None = None, below: str | None = None) -> WithJsonSchema:
    rules = []
    if above is not None:
        rules.append((f"double(self) > {float(above)}", NOT_ABOVE.format("{}", above)))
    if below is not None:
        rules.append((f"double(self) < {float(below)}", NOT_BELOW.format("{}", below)))
    return _schema(names.DECIMAL_PATTERN, 19, *rules)


_RESERVED_CEL = f"!(self in [{', '.join(quoted(name) for name in names.RESERVED_REGIONS)}])"
_HOST_CEL = "self.substring(0, self.lastIndexOf(':'))"
_SIX_CEL = "self.substring(1, self.lastIndexOf(']'))"
_ENDPOINT_CEL = (
    "(self == '' || (int(self.substring(self.lastIndexOf(':') + 1)) <= 65535"
    f" && self.lastIndexOf(':') <= {names.HOST_MOST}"
    f" && (self.startsWith('[') ? isIP({_SIX_CEL}) && ip({_SIX_CEL}).family() == 6"
    f" : (!self.matches('(^|[.])[0-9]+:[0-9]+$') || isIP({_HOST_CEL})))))"
)

# ------------------------------------------------------------------------------- the types

Fraction = Annotated[str, BeforeValidator(_decimal), _decimal_schema()]
Positive = Annotated[
    str,
    BeforeValidator(_decimal),
    AfterValidator(DecimalBounds(above="0")),
    _decimal_schema(above="0"),
]
BelowOne = Annotated[
    str,
    BeforeValidator(_decimal),
    AfterValidator(DecimalBounds(below="1")),
    _decimal_schema(below="1"),
]
Quantity = Annotated[
    int | str,
    PlainValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": f"^{_QUANTITY}$",
            "maxLength": _QUANTITY_MOST,
        }
    ),
]
JobName = Annotated[
    str, AfterValidator(_job_name), _schema(names.JOB_PATTERN, names.CHILD_MOST - 2)
]
RegionName = Annotated[
    str,
    AfterValidator(_region_name),
    _schema(names.REGION_PATTERN, names.REGION_MOST, (_RESERVED_CEL, RESERVED)),
]
Endpoint = Annotated[
    str,
    AfterValidator(_endpoint),
    _schema(names.ENDPOINT_PATTERN, names.HOST_MOST + 6, (_ENDPOINT_CEL, NO_ENDPOINT), empty=True),
]
UpToBillion = Annotated[int, Field(ge=1, le=BILLION)]
Count = Annotated[int, Field(ge=0, le=INT32_MOST)]
Text = Annotated[str, Field(max_length=1024)]
LongText = Annotated[str, Field(max_length=32768)]
Words = Annotated[list[LongText], Field(min_length=1, max_length=256)]
ObjectName = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
"""Name of another object of the cluster, or empty."""
Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=256)]
Annotations = Annotated[dict[str, LongText], Field(max_length=256)]
Passed = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
"""An object that is passed through: what is inside is not ours to know."""
Config = Annotated[
    dict[str, Any],
    Field(max_length=256),
    AfterValidator(_not_too_deep),
    # CEL compares an object of unknown fields wrongly, but a map of unknown values rightly.
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 256,
            "additionalProperties": {
                "x-kubernetes-preserve-unknown-fields": True,
                "nullable": True,
            },
        }
    ),
]
"""Settings of a program, passed through."""
