"""Dense layers: `dot_general` with the state on one side and a weight on the other.

    y[b, f, o] = Σ_i x[b, f, i] M[b, i, o]      b: batch, f: the state's free axes, i: contracted, o: out
    h[b, f, i] = Σ_o h'[b, f, o] M[b, i, o]     submersive iff M[b] has full column rank (out ≤ in)

Axes may lie in any order and number; the rule reads them off the dimension numbers, so it does not
matter whether weights are stored as [in, out] or [out, in], vmapped, stacked or multi-headed. For a
layer of full row rank that expands, a walk keeps the out - in coordinates of h' that it loses (`pivot`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._jax import Literal
from ..trace.graph import Block
from . import pivot
from .fragments import FragmentRule, Place
from .registry import Alarm, Gain, Rule, State, Verdict, register_vijp


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


def _features(layout: Layout) -> tuple[int, int]:
    """(in, out)."""
    shape = layout.weight.aval.shape
    n, n_out = (math.prod(shape[a] for a in axes) for axes in (layout.w_in, layout.w_out))
    return n, n_out


def _free(layout: Layout, block: Block) -> list[int]:
    """Sizes of the state's free axes as laid out in rows: merged if there is a batch."""
    free = [block.inputs[0].aval.shape[a] for a in layout.x_free]
    # Without a batch the free axes need not be merged, and any of them may be sharded.
    return [math.prod(free)] if layout.x_batch else free


def _in_rows(layout: Layout, block: Block, h: Any) -> Any:
    """The state's cotangent as rows [*batch, *free, in]."""
    rows = lax.transpose(h, (*layout.x_batch, *layout.x_free, *layout.x_in))
    batch = [h.shape[a] for a in layout.x_batch]
    return rows.reshape((*batch, *_free(layout, block), _features(layout)[0]))


def _out_rows(layout: Layout, block: Block, h: Any) -> Any:
    """The output's cotangent as rows [*batch, *free, out]."""
    batch, free, out = h.shape[: len(layout.x_batch)], _free(layout, block), _features(layout)[1]
    if layout.state_first:
        return h.reshape((*batch, *free, out))
    return jnp.moveaxis(h.reshape((*batch, out, *free)), len(batch), -1)


def _as_output(layout: Layout, block: Block, rows: Any) -> Any:
    """Rows [*batch, *free, out] as the output's cotangent."""
    if not layout.state_first:
        rows = jnp.moveaxis(rows, -1, len(layout.x_batch))
    return rows.reshape(block.outputs[0].aval.shape).astype(block.outputs[0].aval.dtype)


def _out_sharding(layout: Layout, block: Block) -> Any:
    """The output's sharding, if rows have the output's layout."""
    in_place = layout.state_first and not layout.x_batch and len(layout.w_out) == 1
    return _jax.explicit_sharding(block.outputs[0].aval) if in_place else None


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
        n, n_out = _features(layout)
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
        rows = _in_rows(layout, block, h0).astype(factors.inverse.dtype)
        if structure == "diagonal":
            factors = factors._replace(inverse=factors.inverse[..., None, :])
        solved = pivot.apply(
            factors, structure, rows, _precision(block, layout), _out_sharding(layout, block)
        )
        return (_as_output(layout, block, solved),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        layout = _layout(block)
        structure = _structure(block, layout)
        if operands is None:
            return pivot.gain(structure)
        w = operands[block.operands.index(layout.weight)]
        return pivot.gain(structure, _matrix(layout, w))

    def declared(self, block: Block) -> list[tuple[str, float]]:
        layout = _layout(block)
        weight = f"the weight {block.name(layout.weight)}"
        size = max(_features(layout))
        return pivot.declared(_structure(block, layout), layout.weight.aval.dtype, size, weight)

    def probe(self, block: Block, operands: Sequence[Any]) -> list[Any]:
        layout, structure = _layout(block), _structure(block, _layout(block))
        assert structure is not None
        w = operands[block.operands.index(layout.weight)]
        return [pivot.probe(_matrix(layout, w), structure)]

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return self.alarms(block, self.prepare(block, operands), None)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        layout = _layout(block)
        weight = f"the weight {block.name(layout.weight)}"
        dtype = layout.weight.aval.dtype
        return pivot.alarms(factors, _structure(block, layout), dtype, weight)

    def fragmented(self, block: Block, ask: Any) -> Iterator[FragmentRule]:
        if self.verdict(block).submersive is False and not _splits_out(block, _layout(block)):
            yield Expanding()


def _splits_out(block: Block, layout: Layout) -> bool:
    """Whether the output's features lie on several devices, so that none has a whole row of h'."""
    first = len(layout.x_batch) + (len(layout.x_free) if layout.state_first else 0)
    own = range(first, first + len(layout.w_out))
    return any(a in own for a in _jax.sharded_axes(block.outputs[0].aval))


@dataclass(frozen=True)
class Expanding(FragmentRule):
    """A dense layer with more outputs than inputs: keeps h' Q₂."""

    name = "expanding dense"
    reads_factors = True

    def describe(self, block: Block) -> str:
        layout = _layout(block)
        n, n_out = _features(layout)
        structure = _structure(block, layout) or "general"
        return f"dense {n} -> {n_out}, {structure}: {n_out - n} of {n_out} coordinates leave no trace"

    def prepare(self, block: Block, operands: Sequence[Any]) -> Any:
        layout = _layout(block)
        w = operands[block.operands.index(layout.weight)]
        return pivot.expand(_matrix(layout, w), _structure(block, layout), w)

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        layout = _layout(block)
        return pivot.keep(factors, _out_rows(layout, block, h[0]), _precision(block, layout))

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        layout, precision = _layout(block), _precision(block, _layout(block))
        rows = _in_rows(layout, block, h[0]).astype(factors.basis.dtype)
        seen = pivot.apply(factors.pivot, None, rows, precision, _out_sharding(layout, block))
        return (_as_output(layout, block, seen + pivot.kept_part(factors, fragment, precision)),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        return Dense().gain(block, operands)

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return Dense().alarms(block, self.prepare(block, operands).pivot, None)


def _precision(block: Block, layout: Layout) -> Any:
    return pivot.solve_precision(_structure(block, layout), block.eqn.params["precision"])
