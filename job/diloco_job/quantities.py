"""
Quantities of Kubernetes, such as `500m` and `10Gi`, as numbers.

Pure.
"""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    **{
        unit: Decimal(1000) ** power
        for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))
    },
    **{unit + "i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
    "m": Decimal("1e-3"),
    "u": Decimal("1e-6"),
    "n": Decimal("1e-9"),
}
_NUMBER = re.compile(r"(?P<number>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?)(?P<unit>[a-zA-Z]*)")


def amount(quantity: object) -> Decimal | None:
    """
    The value of a quantity; None: it is not one.

    >>> amount("1500m"), amount("2Ki"), amount("much")
    (Decimal('1.500'), Decimal('2048'), None)
    """
    found = _NUMBER.fullmatch(str(quantity))
    if found is None or found["unit"] not in _UNITS:
        return None
    return Decimal(found["number"]) * _UNITS[found["unit"]]
