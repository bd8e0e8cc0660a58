"""
Leaf types of the manifest: grammars and bounds that pydantic does not provide.

Each type also has its JSON schema, from which the CRD is generated: the same bound as a pattern or a
length, or as CEL with the same message where a schema cannot express it. Messages state what was found
and what is allowed; the field's path is prepended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from diloco_job import names
from diloco_job.cel import quoted, validation

BILLION = 10**9
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_LEVELS = 64
"""Maximum nesting of objects and lists where a manifest may contain anything."""
_MAX_QUANTITY = 63

_QUANTITY = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+))?"

T = TypeVar("T")

# Messages that the CRD uses too; `{}` stands for the value.
NOT_ABOVE = "{} is not more than {}"
NOT_BELOW = "{} is not less than {}"
RESERVED = (
    '"{}" is reserved for the job\'s own objects; no region can be named '
    f"{', '.join(names.RESERVED_REGIONS)}"
)
NO_ENDPOINT = (
    '"{}" is not an endpoint; write host:port, where host is a DNS name, an IPv4 address or an [IPv6] '
    "address and port is 1 to 65535"
)
LOCAL_ENDPOINT = (
    '"{}" is a loopback, link-local or unspecified address, which each machine has for itself; give one '
    "that the other regions reach"
)
NO_SOURCE_RANGE = (
    '"{}" is not a range of addresses; write an IPv4 or IPv6 address, a slash and the length of the '
    "prefix, such as 10.0.0.0/8"
)

NO_OBJECTS_URL = (
    '"{}" is not a place for objects; write s3://bucket/path, gs://bucket/path, az://container/path or '
    "file:///path, without credentials: names of letters, digits and ._=-, none of which begins with a dot"
)


def refuse(message: str, *seen: object, **values: object) -> PydanticCustomError:
    """The error of a leaf check: `message` with its values is shown after the field's path."""
    # "{message}" is pydantic's own template; the text itself may contain braces.
    return PydanticCustomError("leaf", "{message}", {"message": message.format(*seen, **values)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecimalBounds:
    """Bounds of a quoted decimal; `_decimal_schema` is their form in the CRD."""

    above: str | None = None
    """Exclusive lower bound; a decimal is never negative."""
    below: str | None = None
    """Exclusive upper bound."""

    def __call__(self, text: str) -> str:
        """Return `text`, or raise the error."""
        if self.above is not None and not Decimal(text) > Decimal(self.above):
            raise refuse(NOT_ABOVE, text, self.above)
        if self.below is not None and not Decimal(text) < Decimal(self.below):
            raise refuse(NOT_BELOW, text, self.below)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueBy:
    """No two entries of a list share the value of `key`; `list_map` is its form in the CRD."""

    key: str

    def __call__(self, entries: list[T]) -> list[T]:
        """Return `entries`, or raise the error."""
        seen: set[str] = set()
        for entry in entries:
            value = getattr(entry, self.key)
            if value in seen:
                raise refuse(
                    'two entries have the {key} "{value}"; each {key} must be unique',
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
            '"{value}" is not a decimal; write digits, at most nine before and nine after the point, '
            'such as "0.7"',
            value=value,
        )
    return value


def _quantity(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT64_MAX:
        return value
    if isinstance(value, str) and len(value) <= _MAX_QUANTITY and re.fullmatch(_QUANTITY, value):
        return value
    raise refuse(
        '{value!r} is not a quantity; write an integer or quoted text such as "500m" or "10Gi"',
        value=value,
    )


def _env_name(value: str) -> str:
    if not re.fullmatch(names.ENV_PATTERN, value) or len(value) > names.MAX_ENV_NAME:
        raise refuse(
            '"{value}" is not the name of an environment variable; use at most {limit} printable ASCII '
            "characters other than =",
            value=value,
            limit=names.MAX_ENV_NAME,
        )
    return value


def _process_text(value: str) -> str:
    if "\0" in value:
        raise refuse("a NUL character; arguments and environment variables cannot contain one")
    return value


def _job_name(value: str) -> str:
    if not re.fullmatch(names.JOB_PATTERN, value) or len(value) > names.MAX_CHILD_NAME - 2:
        raise refuse(
            '"{value}" is not a job name; use at most {limit} lower-case letters, digits and dashes, '
            "starting with a letter and not ending with a dash",
            value=value,
            limit=names.MAX_CHILD_NAME - 2,
        )
    return value


def _region_name(value: str) -> str:
    if not re.fullmatch(names.REGION_PATTERN, value) or len(value) > names.MAX_REGION_NAME:
        raise refuse(
            '"{value}" is not a region name; use at most {limit} lower-case letters, digits and '
            "dashes, not starting or ending with a dash",
            value=value,
            limit=names.MAX_REGION_NAME,
        )
    if value in names.RESERVED_REGIONS:
        raise refuse(RESERVED, value)
    return value


def _cluster_name(value: str) -> str:
    if value and (
        not re.fullmatch(names.REGION_PATTERN, value) or len(value) > names.MAX_REGION_NAME
    ):
        raise refuse(
            '"{value}" is not the name of a cluster; write region.name of its operator: at most {limit} '
            "lower-case letters, digits and dashes, not starting or ending with a dash",
            value=value,
            limit=names.MAX_REGION_NAME,
        )
    return value


def _bounded_depth(value: dict[str, Any]) -> dict[str, Any]:
    # Iterative: the API server stores up to 10 000 levels, which would exceed the recursion limit.
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS):
        groups = (node.values() if isinstance(node, dict) else node for node in level)
        level = [entry for group in groups for entry in group if isinstance(entry, dict | list)]
        if not level:
            return value
    raise refuse("is nested deeper than {} levels, the maximum", MAX_LEVELS)


def _endpoint(value: str) -> str:
    if value and not names.is_endpoint(value):
        raise refuse(NO_ENDPOINT, value)
    if value and names.is_local_endpoint(value):
        raise refuse(LOCAL_ENDPOINT, value)
    return value


def _source_range(value: str) -> str:
    if not names.is_source_range(value):
        raise refuse(NO_SOURCE_RANGE, value)
    return value


def _objects_url(value: str) -> str:
    if value and not names.is_objects_url(value):
        raise refuse(NO_OBJECTS_URL, value)
    return value


# ---------------------------------------------------------------- schemas


def list_map(key: str) -> dict[str, Any]:
    """Schema of a list in which no two entries share the value of `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _schema(
    pattern: str, limit: int, *rules: tuple[str, str], empty: bool = False
) -> WithJsonSchema:
    """Text of at most `limit` characters that matches; a rule is CEL and its message about `self`."""
    anchored = f"^({pattern})?$" if empty else f"^({pattern})$"
    schema: dict[str, Any] = {"type": "string", "pattern": anchored, "maxLength": limit}
    if rules:
        # Text that violates the pattern still reaches CEL; one message is enough.
        schema["x-kubernetes-validations"] = [
            validation(f"!self.matches({quoted(anchored)}) || {rule}", message, "self")
            for rule, message in rules
        ]
    return WithJsonSchema(schema)


def _decimal_schema(above: str | None = None, below: str | None = None) -> WithJsonSchema:
    rules = []
    if above is not None:
        rules.append((f"double(self) > {float(above)}", NOT_ABOVE.format("{}", above)))
    if below is not None:
        rules.append((f"double(self) < {float(below)}", NOT_BELOW.format("{}", below)))
    return _schema(names.DECIMAL_PATTERN, 19, *rules)


def _reachable(host: str) -> str:
    """CEL: whether the IP address is of one machine for others."""
    kinds = ("isLoopback", "isLinkLocalUnicast", "isUnspecified")
    return "!(" + " || ".join(f"ip({host}).{kind}()" for kind in kinds) + ")"


_RESERVED_CEL = f"!(self in [{', '.join(quoted(name) for name in names.RESERVED_REGIONS)}])"
_HOST_CEL = "self.substring(0, self.lastIndexOf(':'))"
_SIX_CEL = "self.substring(1, self.lastIndexOf(']'))"
_ENDPOINT_CEL = (
    "(self == '' || (int(self.substring(self.lastIndexOf(':') + 1)) <= 65535"
    f" && self.lastIndexOf(':') <= {names.MAX_HOST_NAME}"
    f" && (self.startsWith('[') ? isIP({_SIX_CEL}) && ip({_SIX_CEL}).family() == 6"
    f" : (!{_HOST_CEL}.matches('{names.IPV4_PATTERN}') || isIP({_HOST_CEL})))))"
)
_NOT_LOCAL_CEL = (
    "(self == '' || !self.matches('(?i)^(.*[.])?localhost:')"
    f" && (self.startsWith('[') ? !isIP({_SIX_CEL}) || {_reachable(_SIX_CEL)}"
    f" : !isIP({_HOST_CEL}) || {_reachable(_HOST_CEL)}))"
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
            "maxLength": _MAX_QUANTITY,
        }
    ),
]
JobName = Annotated[
    str, AfterValidator(_job_name), _schema(names.JOB_PATTERN, names.MAX_CHILD_NAME - 2)
]
RegionName = Annotated[
    str,
    AfterValidator(_region_name),
    _schema(names.REGION_PATTERN, names.MAX_REGION_NAME, (_RESERVED_CEL, RESERVED)),
]
ClusterName = Annotated[
    str,
    AfterValidator(_cluster_name),
    _schema(names.REGION_PATTERN, names.MAX_REGION_NAME, empty=True),
]
Endpoint = Annotated[
    str,
    AfterValidator(_endpoint),
    _schema(
        names.ENDPOINT_PATTERN,
        names.MAX_HOST_NAME + 6,
        (_ENDPOINT_CEL, NO_ENDPOINT),
        (_NOT_LOCAL_CEL, LOCAL_ENDPOINT),
        empty=True,
    ),
]
SourceRange = Annotated[
    str,
    AfterValidator(_source_range),
    _schema(names.SOURCE_RANGE_PATTERN, 43, ("isCIDR(self)", NO_SOURCE_RANGE)),
]
ObjectsUrl = Annotated[
    str,
    AfterValidator(_objects_url),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": names.MAX_OBJECTS_URL,
            "x-kubernetes-validations": [
                validation(
                    f"self == '' || self.matches({quoted(f'^({names.OBJECTS_URL_PATTERN})$')})",
                    NO_OBJECTS_URL,
                    "self",
                )
            ],
        }
    ),
]
LoadBalancerClass = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^(([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    ),
]
IpFamilyPolicy = Annotated[
    str, Field(max_length=16, pattern=r"^(SingleStack|PreferDualStack|RequireDualStack)?$")
]
UpToBillion = Annotated[int, Field(ge=1, le=BILLION)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Text = Annotated[str, Field(max_length=1024)]
LongText = Annotated[str, Field(max_length=32768)]
EnvName = Annotated[str, AfterValidator(_env_name), _schema(names.ENV_PATTERN, names.MAX_ENV_NAME)]
ProcessText = Annotated[
    str, Field(max_length=32768), AfterValidator(_process_text), _schema(r"[^\x00]*", 32768)
]
"""An argument, or the value of an environment variable."""
Command = Annotated[list[ProcessText], Field(min_length=1, max_length=256)]
ObjectName = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
"""Name of another object in the cluster, or empty."""
Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=256)]
Annotations = Annotated[dict[str, LongText], Field(max_length=256)]
Passed = Annotated[dict[str, Any], AfterValidator(_bounded_depth)]
"""An object that is passed through unchecked."""
Config = Annotated[
    dict[str, Any],
    Field(max_length=256),
    AfterValidator(_bounded_depth),
    # CEL compares maps of unknown values correctly, but not objects with unknown fields.
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
"""Settings of a program, passed through unchecked."""
