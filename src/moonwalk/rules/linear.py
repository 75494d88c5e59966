"""Dense layers: `dot_general` with the state on one side and a weight on the other.

    y[b, f, o] = Σ_i x[b, f, i] M[b, i, o]      b: batch, f: the state's free axes, i: contracted, o: out
    h[b, f, i] = Σ_o h'[b, f, o] M[b, i, o]     submersive iff M[b] has full column rank (out ≤ in)

Axes may lie in any order and number; the rule reads them off the dimension numbers, so weights stored
[in, out] or [out, in], vmapped, stacked or multi-headed are all the same to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .. import compat
from ..compat import Literal
from ..graph import Block
from ..registry import Alarm, Gain, Rule, State, Verdict, register_vijp
from . import pivot


class Layout(NamedTuple):
    """Which axis of which array is what."""

    weight: Any  # the weight's variable
    state_first: bool  # whether the state is the left operand
    x_batch: tuple[int, ...]
    x_free: tuple[int, ...]
    x_in: tuple[int, ...]
    w_batch: tuple[int, ...]
    w_in: tuple[int, ...]
    w_out: tuple[int, ...]


def _layout(block: Block) -> Layout:
    eqn = block.eqn
    (lhs_in, rhs_in), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    sides = [(eqn.invars[0], lhs_in, lhs_batch), (eqn.invars[1], rhs_in, rhs_batch)]
    state_first = eqn.invars[0] in block.inputs
    (x, x_in, x_batch), (w, w_in, w_batch) = sides if state_first else reversed(sides)
    free = [a for a in range(x.aval.ndim) if a not in (*x_in, *x_batch)]
    out = [a for a in range(w.aval.ndim) if a not in (*w_in, *w_batch)]
    axes = (x_batch, free, x_in, w_batch, w_in, out)
    return Layout(w, state_first, *(tuple(int(a) for a in group) for group in axes))


def _structure(block: Block, layout: Layout) -> str | None:
    declaration = block.declaration(layout.weight)
    if declaration is None or len(layout.w_in) != 1 or len(layout.w_out) != 1:
        return None
    structure = declaration.of_matrix(layout.w_in[0], layout.w_out[0])
    return "orthogonal" if structure == "isometric" else structure


def _matrix(layout: Layout, w: Any) -> Any:
    """The weight as [*batch, in, out]."""
    order = (*layout.w_batch, *layout.w_in, *layout.w_out)
    sizes = [math.prod(w.shape[a] for a in axes) for axes in (layout.w_in, layout.w_out)]
    batch = [w.shape[a] for a in layout.w_batch]
    return lax.transpose(w, order).reshape((*batch, *sizes))


@register_vijp(lax.dot_general_p)
class Dense(Rule):
    """h' = h · (left inverse of M)ᵀ."""

    name = "dense"

    def verdict(self, block: Block) -> Verdict:
        if len(block.inputs) != 1 or block.eqn.invars[0] is block.eqn.invars[1]:
            return Verdict(
                None,
                "both factors of the product depend on the state",
                "wrap the layer in moonwalk.custom_vijp and give it a rule",
            )
        layout = _layout(block)
        if isinstance(layout.weight, Literal):
            return Verdict(None, "the weight is a scalar literal", "multiply with `*` instead")
        shape = layout.weight.aval.shape
        n, n_out = (math.prod(shape[a] for a in axes) for axes in (layout.w_in, layout.w_out))
        if n_out > n:
            return Verdict(
                False,
                f"the layer expands: {n} features become {n_out}, so part of the output's "
                "cotangent leaves no trace in the input's",
                "make the layer no wider than its input, or keep this cotangent "
                "instead of recovering it",
            )
        structure = _structure(block, layout) or "general"
        return Verdict(True, f"dense {n} -> {n_out}, {structure}, of full column rank")

    def prepare(self, block: Block, operands: Sequence[Any]) -> Any:
        layout = _layout(block)
        w = operands[block.operands.index(layout.weight)]
        return pivot.factorise(_matrix(layout, w), _structure(block, layout), w)

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        layout, structure, (h0,) = _layout(block), _structure(block, _layout(block)), h
        batch = [h0.shape[a] for a in layout.x_batch]
        free = [h0.shape[a] for a in layout.x_free]
        rows = lax.transpose(h0, (*layout.x_batch, *layout.x_free, *layout.x_in))
        features = math.prod(h0.shape[a] for a in layout.x_in)
        # Without a batch there is no need to merge the free axes, any of which may be sharded.
        merged = (math.prod(free),) if batch else free
        rows = rows.reshape((*batch, *merged, features)).astype(factors.inverse.dtype)
        precision = pivot.solve_precision(structure, block.eqn.params["precision"])
        if structure == "diagonal":
            factors = factors._replace(inverse=factors.inverse[..., None, :])
        out = [layout.weight.aval.shape[a] for a in layout.w_out]
        in_place = layout.state_first and not batch and len(out) == 1
        sharding = compat.explicit_sharding(block.outputs[0].aval) if in_place else None
        solved = pivot.apply(factors, structure, rows, precision, sharding)
        if layout.state_first:
            solved = solved.reshape((*batch, *free, *out))
        else:
            solved = jnp.moveaxis(solved, -1, len(batch)).reshape((*batch, *out, *free))
        return (solved.astype(block.outputs[0].aval.dtype),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        layout = _layout(block)
        structure = _structure(block, layout)
        if operands is None:
            return pivot.gain(structure)
        w = operands[block.operands.index(layout.weight)]
        return pivot.gain(structure, _matrix(layout, w))

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return self.alarms(block, self.prepare(block, operands), None)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        layout = _layout(block)
        weight = f"the weight {block.name(layout.weight)}"
        dtype = layout.weight.aval.dtype
        return pivot.alarms(factors, _structure(block, layout), dtype, weight)
