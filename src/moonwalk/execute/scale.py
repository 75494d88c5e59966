"""Cotangents with exponents: h = value · 2^exponent.

A cotangent that every layer halves leaves the range of float32 after some 120 layers. Backpropagation
loses nothing that matters there: the gradients of the first layers, tiny anyway, become zero. But a walk
recovers all cotangents from the first one, and recovers nothing from zeros. So from time to time a walk
divides by a power of two, which is exact, and carries the exponent along. It reads the size of a
cotangent off the sketches that certificates use.

An exponent that is the Python number 0 costs nothing: nothing was rescaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from .. import _jax

Exponent = Any  # an int, or an int32 scalar


class Cotangents(dict[Any, Any]):
    """Cotangents by variable, each with its exponent."""

    def __init__(
        self,
        values: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        exponents: Mapping[Any, Exponent] | None = None,
    ):
        super().__init__(values)
        self.exponents: dict[Any, Exponent] = dict(exponents or {})

    def exponent(self, v: Any) -> Exponent:
        return self.exponents.get(v, 0)

    def put(self, v: Any, value: Any, exponent: Exponent = 0) -> None:
        self[v], self.exponents[v] = value, exponent

    def add(self, v: Any, value: Any, exponent: Exponent = 0) -> None:
        """Add to the cotangent of a variable, at a common exponent."""
        if v not in self:
            self.put(v, value, exponent)
            return
        common = largest([self.exponent(v), exponent])
        self.move(v, common)
        self[v] = self[v] + shifted(value, difference(exponent, common))

    def move(self, v: Any, exponent: Exponent) -> None:
        """Give a cotangent another exponent."""
        self.put(v, shifted(self[v], difference(self.exponent(v), exponent)), exponent)

    def align(self, variables: Iterable[Any]) -> Exponent:
        """Give several cotangents one exponent, the largest of theirs."""
        present = [v for v in variables if v in self]
        common = largest([self.exponent(v) for v in present])
        for v in present:
            self.move(v, common)
        return common

    def unscaled(self) -> dict[Any, Any]:
        """The cotangents without exponents. What leaves the range here, backpropagation loses too."""
        return {v: shifted(a, self.exponent(v)) for v, a in self.items()}


def largest(exponents: Iterable[Exponent]) -> Exponent:
    """The largest exponent; the same object if all are the same object."""
    result: Exponent = None
    for e in exponents:
        if result is None:
            result = e
        elif result is not e and not (is_none(result) and is_none(e)):
            result = jnp.maximum(result, e)
    return 0 if result is None else result


def difference(a: Exponent, b: Exponent) -> Exponent:
    return 0 if a is b else a - b


def sum_of(a: Exponent, b: Exponent) -> Exponent:
    return b if is_none(a) else a if is_none(b) else a + b


MODERATE = 8  # binary orders of magnitude


def exponent_for(order: Any) -> Any:
    """The exponent of a cotangent whose entries are about 2^order: 0 while the order is moderate.

    Products with huge or tiny activations are then about as large as in backpropagation. A cotangent
    that is not moderate is scaled to a size of 1. Either way some 118 binary orders are left in float32
    until the next rescaling: 16 layers may divide by 100 each, which takes 106 of them, and small
    entries have the rest.
    """
    return jnp.where(jnp.abs(order) <= MODERATE, 0, order)


def is_none(exponent: Exponent) -> bool:
    """Whether nothing was rescaled, as far as a trace can see."""
    return isinstance(exponent, int) and exponent == 0


def shifted(a: Any, by: Exponent) -> Any:
    """a · 2^by, exactly wherever that is in range."""
    if is_none(by):
        return a
    if a.dtype == jnp.float16:  # two factors could not span its range
        return shifted(a.astype(jnp.float32), by).astype(a.dtype)
    # 2^by itself may be out of range where the product is not: two factors, each well inside it.
    info = jnp.finfo(a.dtype)  # for a complex dtype, that of its parts
    most = int(info.maxexp) - 2
    first = jnp.clip(by, -most, most)
    rest = jnp.clip(by - first, -most, most)
    one = jnp.ones((), _jax.working_dtype(info.dtype))
    return a * jnp.ldexp(one, first).astype(info.dtype) * jnp.ldexp(one, rest).astype(info.dtype)
