"""
Leaf types of the manifest: grammars and bounds that pydantic has no word for.

Every check is an object or a named function on an `Annotated` type, so that the CRD can carry the
same bound. A refusal says what was seen and what is allowed; the field's path is put before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from diloco_operator import names

BILLION = 10**9
INT32_MOST = 2**31 - 1

_QUANTITY = re.compile(
    r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+))?"
)

T = TypeVar("T")


def refuse(message: str, **values: object) -> PydanticCustomError:
    """The error of a leaf check: `message`, filled in, is shown after the field's path."""
    # "{message}" is pydantic's own template; the text itself may hold braces.
    return PydanticCustomError("leaf", "{message}", {"message": message.format(**values)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecimalBounds:
    """Bounds of a quoted decimal, compared as written; the CRD carries them as CEL on the leaf."""

    above: str | None = None
    """Exclusive lower bound; a decimal is never below 0 anyway."""
    below: str | None = None
    """Exclusive upper bound."""

    def __call__(self, text: str) -> str:
        """Return `text`, or refuse it."""
        if self.above is not None and not Decimal(text) > Decimal(self.above):
            raise refuse("{text} is not more than {bound}", text=text, bound=self.above)
        if self.below is not None and not Decimal(text) < Decimal(self.below):
            raise refuse("{text} is not less than {bound}", text=text, bound=self.below)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueBy:
    """No two entries of a list share the value of `key`; in the CRD `list-type: map`."""

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
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= 63 and _QUANTITY.fullmatch(value):
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
        raise refuse(
            '"{value}" is taken by the job\'s own children; no region is called {reserved}',
            value=value,
            reserved=", ".join(names.RESERVED_REGIONS),
        )
    return value


def _endpoint(value: str) -> str:
    if value and not names.is_endpoint(value):
        raise refuse(
            '"{value}" is no endpoint; write host:port, where host is a DNS name, an IPv4 address '
            "or an [IPv6] address and port is 1 to 65535",
            value=value,
        )
    return value


Fraction = Annotated[str, BeforeValidator(_decimal)]
Positive = Annotated[str, BeforeValidator(_decimal), AfterValidator(DecimalBounds(above="0"))]
BelowOne = Annotated[str, BeforeValidator(_decimal), AfterValidator(DecimalBounds(below="1"))]
Quantity = Annotated[int | str, PlainValidator(_quantity)]
JobName = Annotated[str, AfterValidator(_job_name)]
RegionName = Annotated[str, AfterValidator(_region_name)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
UpToBillion = Annotated[int, Field(ge=1, le=BILLION)]
Count = Annotated[int, Field(ge=0, le=INT32_MOST)]
Words = Annotated[list[str], Field(min_length=1)]
Passed = dict[str, Any]
"""An object that is passed through: what is inside is not ours to know."""
