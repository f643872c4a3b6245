"""The 8-bit formats, by the names that torch gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One way to keep a number in a byte."""

    name: str
    dtype: torch.dtype
    scaled: bool  # whether each row of a weight gets a scale where nobody says otherwise
    needs_scale: bool


FORMATS = {
    f.name: f
    for f in (
        Format("float8_e4m3fn", torch.float8_e4m3fn, scaled=True, needs_scale=True),
        Format("float8_e5m2", torch.float8_e5m2, scaled=False, needs_scale=False),
        Format("int8", torch.int8, scaled=True, needs_scale=True),
    )
}
ALIASES = {"bf8": "float8_e5m2"}
BY_DTYPE = {f.dtype: f for f in FORMATS.values()}


def find(name: str) -> Format:
    """ValueError, with the names that there are, for any other."""
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        known = ", ".join([*FORMATS, *(f"{short} (= {long})" for short, long in ALIASES.items())])
        raise ValueError(f"unknown 8-bit format {name!r}: there are {known}") from None
