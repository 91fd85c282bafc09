"""Quantities as people type them: 14.8T tokens, 60d, h100=2.5,gb300=6."""

import math
import re

from moeplan.errors import InvalidInputError
from moeplan.units import DAY_S, HOUR_S

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_TIMES = {"": DAY_S, "d": DAY_S, "h": HOUR_S, "w": 7 * DAY_S}
_NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_count(text: str, flag: str) -> float:
    """``14.8T``, ``500B``, ``2e12``, ``5M`` as a number above 0."""
    return _scaled(text, _SCALES, flag, "a number above 0, with k, M, B or T: 14.8T")


def parse_time(text: str, flag: str) -> float:
    """``60d``, ``36h``, ``8w`` or days without a unit, in seconds."""
    return _scaled(text, _TIMES, flag, "a time above 0, with h, d or w: 60d")


def parse_prices(text: str, flag: str) -> dict[str, float]:
    """``2.5`` for all hardware (key ""), or ``h100=2.5,gb300=6``."""
    prices: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, written = item.rpartition("=")
        if separator and not name.strip():
            raise InvalidInputError(f"{flag}: got {item!r}, allowed: USD, or hardware=USD", "for example h100=2.5")
        prices[name.strip()] = parse_count(written, flag)
    return prices


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """``64,128,256`` as whole numbers of at least 1, each once, in order."""
    found: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        if not re.fullmatch(r"[0-9]{1,7}", item) or int(item) < 1:
            raise InvalidInputError(
                f"{flag}: got {item!r}, allowed: whole numbers from 1 to 9999999, several with commas",
                "for example 256, or 64,128,256",
            )
        found.append(int(item))
    return tuple(dict.fromkeys(found))


def _scaled(text: str, scales: dict[str, float], flag: str, allowed: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    try:
        value = float(found[1]) * scales[found[2].lower()] if found else math.nan
    except (KeyError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidInputError(f"{flag}: got {text!r}, allowed: {allowed}", "moeplan search --help has examples")
    return value
