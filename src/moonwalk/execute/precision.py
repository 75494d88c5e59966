"""Copies of blocks for the cotangents' chain: the same equations in higher precision.

A walk divides by what Phase II multiplied with, so rounding in that chain grows where its gain exceeds
one. There, products use true float32 instead of the accelerator's default (docs/numerics.md §3).
Cotangents underflow in float16, so those of float16 activations are float32. Phase I's activations
always have the user's own precision.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..trace.facts import Constants
from ..trace.graph import Block

PRODUCTS = frozenset({lax.dot_general_p, lax.conv_general_dilated_p})


class Wide:
    """A variable that stands for another, of a wider type."""

    def __init__(self, v: Any):
        self.aval = v.aval.update(dtype=cotangent_dtype(v.aval.dtype))


def cotangent_dtype(dtype: Any) -> Any:
    """The dtype that a walk gives the cotangents of arrays of a dtype."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def precise(block: Block, precision: Any) -> Block:
    """The block with its products in a given precision."""
    if not any(e.primitive in PRODUCTS for e in block.eqns):
        return block
    eqns = tuple(
        e.replace(params={**e.params, "precision": _pair(precision)}) if e.primitive in PRODUCTS else e
        for e in block.eqns
    )
    return _with(block, eqns)


def _pair(precision: Any) -> Any:
    return (
        precision if isinstance(precision, lax.DotAlgorithmPreset) else (lax.Precision(precision),) * 2
    )


def _with(block: Block, eqns: tuple[JaxprEqn, ...]) -> Block:
    return Block(
        eqns,
        block.inputs,
        block.outputs,
        block.operands,
        block.exports,
        block.declarations,
        block.names,
        block.constants,
    )


def is_narrow(block: Block) -> bool:
    """Whether a block's state is float16."""
    return any(v.aval.dtype == jnp.float16 for v in (*block.inputs, *block.outputs))


def widened(block: Block) -> Block | None:
    """The block on float32 in place of float16, or None where a call inside fixes its types."""
    wider: dict[Any, Any] = {}

    def wide(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom
        if atom.aval.dtype != jnp.float16:
            return atom
        return wider.setdefault(atom, Wide(atom))

    eqns = []
    for e in block.eqns:
        if _jax.inner_jaxprs(e) or e.primitive.name == "custom_vijp_call":
            return None
        params = {k: _wide_param(p) for k, p in e.params.items()}
        invars = [_wide_literal(v) for v in map(wide, e.invars)]
        eqns.append(e.replace(invars=invars, outvars=[wide(v) for v in e.outvars], params=params))

    def renamed(known: Any) -> dict[Any, Any]:
        return {wider.get(v, v): fact for v, fact in known.items()}

    return Block(
        tuple(eqns),
        tuple(map(wide, block.inputs)),
        tuple(map(wide, block.outputs)),
        tuple(map(wide, block.operands)),
        tuple(map(wide, block.exports)),
        renamed(block.declarations),
        renamed(block.names),
        Constants((), {wide(v): block.constants[v] for v in block.operands if v in block.constants}),
    )


def _wide_param(value: Any) -> Any:
    try:
        narrow = value is not None and jnp.dtype(value) == jnp.float16
    except TypeError:
        return value
    return jnp.dtype(jnp.float32) if narrow else value


def _wide_literal(atom: Any) -> Any:
    if isinstance(atom, Literal) and _jax.literal(atom).dtype == jnp.float16:
        return Literal(jnp.float32(atom.val), Wide(atom).aval)
    return atom


def as_cotangent(v: Any, h: Any) -> Any:
    """A cotangent of a variable in the dtype that walks give it."""
    return h.astype(cotangent_dtype(v.aval.dtype))
