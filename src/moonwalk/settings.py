"""Checks of user settings, with one form of error message.

Every function returns the setting as plain Python, or raises a `ValueError` of the form
`owner: name <what it must be>, got <value>`. Booleans do not count as numbers, because `depth=True` is a
mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np


def refuse(owner: str, name: str, rule: str, given: Any) -> ValueError:
    """The error for a setting that breaks the rule."""
    return ValueError(f"{owner}: {name} {rule}, got {given!r}")


def is_count(given: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`."""
    is_whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    return is_whole and bool(given >= least)


def count(owner: str, name: str, given: Any, least: int = 1, what: str = "is a whole number") -> int:
    """A whole number.

    **Example:**

    >>> count("Linear", "in_features", 0)
    Traceback (most recent call last):
    ValueError: Linear: in_features is a whole number, at least 1, got 0
    """
    if not is_count(given, least):
        raise refuse(owner, name, f"{what}, at least {least}", given)
    return int(given)


def counts(owner: str, least: int = 1, /, **given: Any) -> None:
    """Several settings, all of which are whole numbers."""
    for name, value in given.items():
        count(owner, name, value, least)


def number(owner: str, name: str, given: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """A real number that satisfies a condition; NaN fails every comparison."""
    is_number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not is_number or not holds(float(given)):
        raise refuse(owner, name, rule, given)
    return float(given)


def finite(owner: str, name: str, given: Any) -> float:
    """A real number that is neither infinite nor NaN."""
    return number(owner, name, given, "is a finite number", lambda v: abs(v) < float("inf"))


def positive(owner: str, name: str, given: Any) -> float:
    """A real number above zero that is not infinite."""
    return number(owner, name, given, "is a positive number", lambda v: 0 < v < float("inf"))


def flag(owner: str, name: str, given: Any) -> bool:
    """True or False itself, not a value that is merely truthy."""
    if not isinstance(given, bool | np.bool_):
        raise refuse(owner, name, "is True or False", given)
    return bool(given)


def choice(owner: str, name: str, given: Any, words: Collection[str]) -> str:
    """One of several words."""
    if not isinstance(given, str) or given not in words:
        raise refuse(owner, name, f"must be one of {', '.join(map(repr, words))}", given)
    return given


def sizes(owner: str, name: str, given: Any, ranks: Collection[int], rule: str) -> tuple[int, ...]:
    """Positive whole numbers; how many there are must be one of `ranks`."""
    is_sequence = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    if not is_sequence or len(given) not in ranks or not all(is_count(n) for n in given):
        raise refuse(owner, name, rule, tuple(given) if isinstance(given, list) else given)
    return tuple(int(n) for n in given)


_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(owner: str, name: str, given: Any) -> int:
    """Bytes, from a whole number or from words such as '24GB' (10⁹) and '24GiB' (2³⁰).

    **Example:**

    >>> size("Moonwalk", "budget", "1.5 kB"), size("Moonwalk", "budget", "2MiB")
    (1500, 2097152)
    """
    rule = "is a number of bytes above zero, or a size such as '24GB' or '512MiB'"
    if is_count(given) or (isinstance(given, float) and given.is_integer() and given >= 1):
        return int(given)
    found = None
    if isinstance(given, str):
        pattern = r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?)(i?)B?\s*"
        found = re.fullmatch(pattern, given, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise refuse(owner, name, rule, given)
    unit = found[2].upper()
    whole = float(found[1]) * (_BINARY[unit] if found[3] else _DECIMAL[unit])
    if not 1 <= whole < math.inf:
        raise refuse(owner, name, rule, given)
    return int(whole)
