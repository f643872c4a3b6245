"""Bytes and rates as people write them: "20GiB", "1.5 TB", "55GB/s"."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {"": 1, "b": 1, **_DECIMAL, **_BINARY}

_NUMBER = re.compile(r"\s*([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_BYTES_HELP = 'a number of bytes or a string with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), such as "20GiB"'
_RATE_HELP = 'bytes per second as a number or a string, such as "55GB/s" or "3.87TB/s"'

# What a C size can hold; a larger answer is a typing mistake.
_LARGEST = 2**63 - 1


def _parse(value: object, what: str, accepted: str, unit_suffix: str) -> int:
    """The one parser behind both public ones; every refusal says what was given and what is accepted."""

    def refuse(why: str) -> ValueError:
        return ValueError(f"{what}: {value!r} {why}; accepted is {accepted}")

    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{what}: {value!r} is a {type(value).__name__}; accepted is {accepted}")
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise refuse("is empty")
        if unit_suffix and text.lower().endswith(unit_suffix):
            text = text[: -len(unit_suffix)]
        match = _NUMBER.fullmatch(text)
        if match is None:
            raise refuse("cannot be read")
        number, unit = match.groups()
        scale = _UNITS.get(unit.lower())
        if scale is None:
            raise refuse(f"has the unknown unit {unit!r}")
        # Decimal, so that "0.1GB" is 100000000 and not one byte beside it.
        exact = Decimal(number.replace("_", "")) * scale
    else:
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse("is not a finite number")
        exact = Decimal(value)
    if exact < 0:
        raise refuse("is negative")
    if exact > _LARGEST:
        raise refuse("is too large")
    return int(exact)


def parse_bytes(value: int | float | str, what: str = "size") -> int:
    """A size in bytes, from an int, a float or a string with a unit.

    GB is 10^9 and GiB is 2^30; case does not matter; a part of a byte is dropped. ``what`` names the argument in
    the error.

    Raises:
        ValueError: empty, unreadable, unknown unit, negative, NaN, infinite or too large.
        TypeError: neither a number nor a string.

    >>> parse_bytes("20GiB"), parse_bytes("18 GB"), parse_bytes("1.5TB"), parse_bytes(4096)
    (21474836480, 18000000000, 1500000000000, 4096)
    """
    return _parse(value, what, _BYTES_HELP, "")


def parse_rate(value: int | float | str, what: str = "rate") -> int:
    """A rate in bytes per second, from a number or a string with or without "/s". Zero is refused.

    Raises:
        ValueError: as :func:`parse_bytes`, and for zero.
        TypeError: neither a number nor a string.

    >>> parse_rate("55GB/s"), parse_rate("3.87TB/s")
    (55000000000, 3870000000000)
    """
    rate = _parse(value, what, _RATE_HELP, "/s")
    if rate == 0:
        raise ValueError(f"{what}: {value!r} is zero; accepted is {_RATE_HELP}")
    return rate


def format_bytes(size: int | float, *, binary: bool = False) -> str:
    """A size for people, three significant digits: "31.4 GB", or "29.2 GiB" with ``binary``.

    >>> format_bytes(31_400_000_000), format_bytes(2**30, binary=True), format_bytes(12)
    ('31.4 GB', '1.00 GiB', '12 B')
    """
    names, base = (("KiB", "MiB", "GiB", "TiB"), 1024.0) if binary else (("kB", "MB", "GB", "TB"), 1000.0)
    sign, amount = ("-" if size < 0 else ""), abs(float(size))
    if amount < base:
        return f"{sign}{amount:.0f} B"
    unit = -1
    while unit + 1 < len(names) and (unit < 0 or amount >= 999.5):
        amount /= base
        unit += 1
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{sign}{amount:.{digits}f} {names[unit]}"
