"""Which blocks compute the same: equal equations between equal types.

A network of 12 equal layers has a dozen copies of every block. What is derived from a block alone (its
rule, its residuals, its bytes) is derived once, from the first of them. Two blocks are equal if their
equations are, variable by variable, parameter by parameter, with equal literals, equal constants and
equal declarations. Names and source lines do not count.

A custom derivative is a Python function, and two of those cannot be compared. Their programs can: a
`custom_jvp` or `custom_vjp` call counts as what it computes and what its derivative computes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._jax import JaxprEqn, Literal

if TYPE_CHECKING:
    from .graph import Block

_SMALL = 4096  # bytes up to which arrays are compared by value


class _Opaque(Exception):
    """Something that can be compared with nothing."""


def fingerprint(block: Block) -> Hashable:
    """A key that is equal for blocks that compute the same; the block itself if none can be made."""
    return block.once(_fingerprint)


def _fingerprint(block: Block) -> Hashable:
    numbers: dict[Any, int] = {}
    for v in (*block.inputs, *block.operands):
        numbers.setdefault(v, len(numbers))
    try:
        own = (
            type(block),
            len(block.inputs),
            tuple(v.aval for v in numbers),
            _equations(block.eqns, numbers),
            tuple(numbers.setdefault(v, len(numbers)) for v in (*block.inputs, *block.outputs)),
            tuple(numbers[v] for v in block.exports),
            tuple((n, block.declarations[v]) for v, n in numbers.items() if v in block.declarations),
            tuple((numbers[v], block.constants.key(v)) for v in block.operands if v in block.constants),
        )
        hash(own)
    except (_Opaque, TypeError):
        return block
    return own


def of_equations(eqns: Sequence[JaxprEqn], numbers: dict[Any, int]) -> Hashable:
    """A key that is equal for equations that compute the same from the variables in `numbers`. It equals
    nothing else if they cannot be compared."""
    try:
        own = tuple(v.aval for v in numbers), _equations(eqns, numbers)
        hash(own)
    except (_Opaque, TypeError):
        return _Identity(object())
    return own


def _equations(eqns: Iterable[JaxprEqn], numbers: dict[Any, int], *, derived: bool = False) -> Hashable:
    """`derived`: these equations are themselves a derivative, and are not differentiated again."""
    rows = []
    for eqn in eqns:
        if _jax.has_effects(eqn):
            raise _Opaque
        reads = tuple(
            (_value(v.val), v.aval) if isinstance(v, Literal) else numbers[v] for v in eqn.invars
        )
        for v in eqn.outvars:
            numbers.setdefault(v, len(numbers))
        types = tuple(v.aval for v in eqn.outvars)
        rows.append((eqn.primitive, reads, types, _params(eqn, derived), _jax.context_of(eqn)))
    return tuple(rows)


def _params(eqn: JaxprEqn, derived: bool) -> Hashable:
    functions = _jax.CUSTOM_RULES.get(eqn.primitive)
    if functions is None:
        return tuple((k, _param(v, derived)) for k, v in sorted(eqn.params.items()))
    plain = {k: _param(v, derived) for k, v in eqn.params.items() if k not in functions}
    if derived:
        return (*sorted(plain.items()), None)
    try:
        return (*sorted(plain.items()), _derivative(eqn))
    except Exception:  # it has no derivative in some of its inputs
        raise _Opaque from None


def _derivative(eqn: JaxprEqn) -> Hashable:
    """What the derivative of a custom call computes."""
    avals = [_jax.struct(v.aval) for v in eqn.invars]
    whole = [*avals, *(_jax.struct(v.aval) for v in eqn.outvars)]
    if eqn.params.get("symbolic_zeros") or not all(jnp.issubdtype(a.dtype, jnp.floating) for a in whole):
        raise _Opaque  # it may ask which of its arguments are differentiated

    jvp = _jax.custom_jvp(eqn)
    if jvp is not None:
        return _program(jvp.jaxpr, jvp.consts, derived=True), jvp.out_zeros

    def call(*args: Any) -> Any:
        return _jax.bind(eqn, args)

    shapes = jax.eval_shape(call, *avals)

    def both_ways(args: Any, h: Any) -> Any:
        y, pullback = jax.vjp(call, *args)
        return y, pullback(h)

    closed = jax.make_jaxpr(both_ways)(avals, shapes)
    return _program(*_jax.open_jaxpr(closed), derived=True)


def _program(jaxpr: Any, consts: Sequence[Any], *, derived: bool) -> Hashable:
    numbers = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    eqns = _equations(jaxpr.eqns, numbers, derived=derived)
    outs = tuple(
        (_value(v.val), v.aval) if isinstance(v, Literal) else numbers[v] for v in jaxpr.outvars
    )
    types = tuple(v.aval for v in (*jaxpr.constvars, *jaxpr.invars))
    return types, eqns, outs, tuple(map(_value, consts))


def _param(value: Any, derived: bool) -> Any:
    if _jax.is_jaxpr(value):
        return _program(*_jax.open_jaxpr(value), derived=derived)
    if isinstance(value, list | tuple) and any(_jax.is_jaxpr(v) for v in value):
        return tuple(_param(v, derived) for v in value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _value(value)
    return value


def _value(value: Any) -> Hashable:
    """An array by its values if it is small, by its identity otherwise."""
    if isinstance(value, _jax.Tracer):
        return _Identity(value)
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return _Identity(value)
    # Checked before copying to the host: the array may be large, or lie on other hosts.
    if getattr(value, "nbytes", 0) > _SMALL or not getattr(value, "is_fully_addressable", True):
        return _Identity(value)
    array = np.asarray(value)
    return array.shape, str(array.dtype), array.tobytes()


class _Identity:
    """Equal to itself alone; it keeps the object alive, so that no other gets its id."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def renamed(text: str, old: Block, new: Block) -> str:
    """A sentence about one block, with the operand names of another that computes the same."""
    pairs: Sequence[tuple[Any, Any]] = list(zip(old.operands, new.operands, strict=True))
    for a, b in pairs:
        if old.names.get(a) != new.names.get(b):
            text = text.replace(old.name(a), new.name(b))
    return text
