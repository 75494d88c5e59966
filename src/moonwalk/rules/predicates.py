"""Which booleans of a jaxpr follow from one another, according to its equations.

Comparing a with b has one of four outcomes: a < b, a = b, a > b, or none of these where one of them is
NaN. Every comparison is a set of outcomes, so all comparisons of a and b, however they are written,
follow from two bits, a ≥ b and a ≤ b:

    gt(a, b) = lt(b, a) = {>}        ne(a, b) = not eq(a, b) = {<, >, NaN}        gt(-a, -b) = lt(a, b)
    eq(a, max(a, b)) = {>, =}        eq(a, min(a, b)) = {<, =}

Values are never used: two predicates that agree wherever they are probed may differ elsewhere. And gt is
not the opposite of le, because a `where` may hide a NaN from the output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import JaxprEqn, Literal

# Why a walk does not pass a block whose Jacobian is singular there.
TIE = (
    "at a tie of two values JAX averages their derivatives, and the cotangent cannot be recovered: "
    "write it with jnp.where on one comparison, or use moonwalk.nn.MaxMin"
)

LESS, EQUAL, GREATER, UNORDERED = 1, 2, 4, 8
_ORDERED = LESS | EQUAL | GREATER
_DIFFERENT = LESS | GREATER | UNORDERED
_TRUE_AT = {
    lax.lt_p: LESS,
    lax.le_p: LESS | EQUAL,
    lax.gt_p: GREATER,
    lax.ge_p: GREATER | EQUAL,
    lax.eq_p: EQUAL,
    lax.ne_p: _DIFFERENT,
}


class Number(NamedTuple):
    """A literal. Zeros of either sign are equal, here as in every comparison."""

    value: Any
    dtype: Any

    def __neg__(self) -> Number:
        return Number(0 - self.value, self.dtype)


class Pair(NamedTuple):
    """Two values that are compared: variables, or numbers."""

    a: Any
    b: Any
    outcomes: int  # the possible outcomes: integers have no NaN


class Comparison(NamedTuple):
    """A boolean that is true at some outcomes of comparing a pair."""

    pair: Pair
    true_at: int

    @property
    def opposite(self) -> Comparison:
        return Comparison(self.pair, self.pair.outcomes & ~self.true_at)

    def value(self, at_least: Any, at_most: Any) -> Any:
        """From the two bits of its pair, a ≥ b and a ≤ b."""
        cases = {
            LESS: ~at_least & at_most,
            EQUAL: at_least & at_most,
            GREATER: at_least & ~at_most,
            UNORDERED: ~(at_least | at_most),
        }
        return functools.reduce(jnp.bitwise_or, [v for k, v in cases.items() if k & self.true_at])


class Opaque(NamedTuple):
    """A boolean about which nothing is known, or its negation."""

    variable: Any
    negated: bool = False

    @property
    def opposite(self) -> Opaque:
        return Opaque(self.variable, not self.negated)


class Reader:
    """Reads the booleans of some equations as comparisons."""

    def __init__(self, eqns: Iterable[JaxprEqn]):
        self.makers = {v: e for e in eqns for v in e.outvars}
        self.places: dict[Any, int] = {}  # of operands, in the order of their first use

    def read(self, v: Any) -> Comparison | Opaque:
        """A boolean as a comparison, if it is one."""
        eqn = self.makers.get(v)
        if eqn is None or v.aval.dtype != np.bool_:
            return Opaque(v)
        if eqn.primitive is lax.not_p and not isinstance(eqn.invars[0], Literal):
            return self.read(eqn.invars[0]).opposite
        if eqn.primitive in _TRUE_AT and all(map(_has_order, eqn.invars)):
            a, b = map(_named, eqn.invars)
            return self._comparison(a, b, _TRUE_AT[eqn.primitive])
        return Opaque(v)

    def comparisons(self) -> dict[Any, Comparison]:
        """All comparisons, by variable."""
        found = {v: self.read(v) for v, e in self.makers.items() if e.primitive in _TRUE_AT}
        return {v: c for v, c in found.items() if isinstance(c, Comparison)}

    def _comparison(self, a: Any, b: Any, true_at: int) -> Comparison:
        outcomes = _ORDERED | (UNORDERED if jnp.issubdtype(_dtype(a), jnp.floating) else 0)
        if true_at in (EQUAL, _DIFFERENT):
            for one, other in ((a, b), (b, a)):
                if (extreme := self._extreme(one, other)) is not None:
                    found = self._comparison(one, *extreme)
                    return found if true_at == EQUAL else found.opposite
        negatives = [self._negative(v) for v in (a, b)]
        if None not in negatives and not all(isinstance(v, Number) for v in (a, b)):
            (a, b), true_at = negatives, _mirrored(true_at)
        if self.places.setdefault(a, len(self.places)) > self.places.setdefault(b, len(self.places)):
            a, b, true_at = b, a, _mirrored(true_at)
        return Comparison(Pair(a, b, outcomes), true_at & outcomes)

    def _extreme(self, a: Any, b: Any) -> tuple[Any, int] | None:
        """If b = max(a, c): c, and the outcomes of comparing a with c for which a = b. Likewise for
        min."""
        eqn = None if isinstance(b, Number) else self.makers.get(b)
        if eqn is None or eqn.primitive not in (lax.max_p, lax.min_p):
            return None
        operands = [_named(v) for v in eqn.invars]
        if a not in operands:
            return None
        other = operands[1 - operands.index(a)]
        return other, EQUAL | (GREATER if eqn.primitive is lax.max_p else LESS)

    def _negative(self, v: Any) -> Any:
        """-v if it is available: of a number, or of a real value that was itself negated."""
        if not jnp.issubdtype(_dtype(v), jnp.floating):
            return None
        if isinstance(v, Number):
            return -v
        eqn = self.makers.get(v)
        return _named(eqn.invars[0]) if eqn is not None and eqn.primitive is lax.neg_p else None


def _named(v: Any) -> Any:
    if not isinstance(v, Literal):
        return v
    return Number(np.asarray(v.val).item(), cast(Any, v.aval).dtype)


def _has_order(v: Any) -> bool:
    real = jnp.issubdtype(v.aval.dtype, jnp.floating) or jnp.issubdtype(v.aval.dtype, jnp.integer)
    return real and (v.aval.shape == () or not isinstance(v, Literal))


def _dtype(v: Any) -> Any:
    return v.dtype if isinstance(v, Number) else v.aval.dtype


def _mirrored(outcomes: int) -> int:
    """The outcomes with the operands exchanged."""
    same = outcomes & (EQUAL | UNORDERED)
    return same | (LESS if outcomes & GREATER else 0) | (GREATER if outcomes & LESS else 0)


# --- bits -------------------------------------------------------------------------------------------


class Bits:
    """The fewest bits from which some booleans follow.

    One bit for every unknown boolean, one for a pair that is compared in one way only, two for other
    pairs.
    """

    def __init__(self, reader: Reader, booleans: Sequence[Any]):
        self.meaning = {v: reader.read(v) for v in booleans}
        ways: dict[Pair, set[int]] = {}
        for c in self.meaning.values():
            if isinstance(c, Comparison):
                ways.setdefault(c.pair, set()).add(min(c.true_at, c.opposite.true_at))
        kept = [bit for c in self.meaning.values() for bit in self._bits(c, ways)]
        self.kept = list(dict.fromkeys(kept))

    @staticmethod
    def _bits(said: Comparison | Opaque, ways: dict[Pair, set[int]]) -> list[Comparison | Opaque]:
        if isinstance(said, Opaque):
            return [Opaque(said.variable)]
        if len(ways[said.pair]) == 1:
            return [Comparison(said.pair, min(said.true_at, said.opposite.true_at))]
        return [Comparison(said.pair, EQUAL | GREATER), Comparison(said.pair, EQUAL | LESS)]

    @property
    def reads(self) -> list[Any]:
        """The variables that the bits are made from."""
        read = [v for c in self.kept for v in ((c.variable,) if isinstance(c, Opaque) else c.pair[:2])]
        return [v for v in dict.fromkeys(read) if not isinstance(v, Number)]

    def make(self, env: dict[Any, Any], shape: tuple[int, ...]) -> list[Any]:
        """The bits, from the values of what they read."""

        def value(v: Any) -> Any:
            return np.asarray(v.value, v.dtype) if isinstance(v, Number) else env[v]

        made = []
        for c in self.kept:
            if isinstance(c, Opaque):
                made.append(env[c.variable])
            else:
                a, b = value(c.pair.a), value(c.pair.b)
                made.append(jnp.broadcast_to(c.value(jnp.asarray(a >= b), jnp.asarray(a <= b)), shape))
        return made

    def read(self, bits: Sequence[Any]) -> dict[Any, Any]:
        """The booleans, by variable."""
        known = dict(zip(self.kept, bits, strict=True))
        return {v: self._value(c, known) for v, c in self.meaning.items()}

    @staticmethod
    def _value(said: Comparison | Opaque, known: dict[Any, Any]) -> Any:
        if said in known:
            return known[said]
        if said.opposite in known:
            return ~known[said.opposite]
        assert isinstance(said, Comparison)
        at_least, at_most = (known[Comparison(said.pair, EQUAL | w)] for w in (GREATER, LESS))
        return said.value(at_least, at_most)
