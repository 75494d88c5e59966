"""Reductions and pooling.

Where no input entry belongs to two outputs, the rows of J have disjoint supports, J Jᵀ is diagonal, and

    h' = (J h) / diag(J Jᵀ).

The sum of the rows, pullback(1), then holds all rows at once, so J h is the reduction of rows · h and
diag(J Jᵀ) that of rows². Sums, means, products and maxima (global, or over windows that do not
overlap) are all of this kind; the rows of a maximum are what JAX's own gradient says, ties included.

Overlapping sums are convolutions with a kernel of ones, solved as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from .. import _jax
from ..errors import SingularError
from ..trace.graph import Block
from . import windows
from .predicates import TIE
from .registry import (
    Alarm,
    Gain,
    Rule,
    State,
    Verdict,
    cast_like_outputs,
    pull_back_ones,
    pull_back_units,
    register_region,
    register_vijp,
)
from .windows import Axis, Plan


class DisjointRows(Rule):
    """h' = (J h) / diag(J Jᵀ)."""

    def reduce(self, block: Block, values: Any) -> Any:
        """The sum over each output's inputs."""
        raise NotImplementedError

    def _norms(self, block: Block, kept: Any) -> tuple[Any, Any]:
        (rows,) = pull_back_ones(block, kept)
        rows = rows.astype(_jax.working_dtype(rows.dtype))
        return rows, self.reduce(block, rows * rows)

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors
        rows, norms = self._norms(block, kept)
        return cast_like_outputs(block, (self.reduce(block, rows * h[0].astype(rows.dtype)) / norms,))

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        del factors
        _, norms = self._norms(block, kept)
        return [
            Alarm(
                ~jnp.isfinite(norms),
                f"vijp: a {block.eqn.primitive.name} has a derivative that is NaN or infinite at some "
                "outputs: what it reads is not finite; look for the step that made it so",
                SingularError,
            ),
            Alarm(
                norms == 0,
                f"vijp: a {block.eqn.primitive.name} has a derivative that is exactly zero at some "
                "outputs: their cotangents cannot be recovered",
                SingularError,
            ),
        ]


@register_vijp(lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p, lax.reduce_prod_p)
class Reduction(DisjointRows):
    """Global sum, mean, maximum, minimum, product over some axes."""

    name = "reduction"

    def verdict(self, block: Block) -> Verdict:
        if block.inputs[0].aval.size == 0:
            return Verdict(False, "it reduces nothing: there are no inputs", "drop the empty axis")
        return Verdict(True, "each output reduces inputs of its own")

    def reduce(self, block: Block, values: Any) -> Any:
        return jnp.sum(values, axis=tuple(block.eqn.params["axes"]))

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        if block.eqn.primitive is lax.reduce_prod_p:
            return Gain.unknown()
        return Gain(1.0, mixes=True)


@register_region
class Extremes(Rule):
    """Maximum and minimum of pairs, as two reductions over an axis of length two: a permutation.

    For two equal values JAX gives each half of the derivative, so the Jacobian is singular there.
    """

    name = "extremes"

    def matches(self, block: Block) -> bool:
        return (
            {e.primitive for e in block.eqns} == {lax.reduce_max_p, lax.reduce_min_p}
            and len(block.eqns) == len(block.outputs) == 2
            and block.eqns[0].params["axes"] == block.eqns[1].params["axes"]
            and len(block.eqns[0].params["axes"]) == 1
            and block.sizes[0] == block.sizes[1]
        )

    def verdict(self, block: Block) -> Verdict:
        return Verdict(True, "sorts pairs")

    def keep(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        """Two bits per pair: whether its first was at least, and at most, its second."""
        (axis,) = block.eqn.params["axes"]
        first, second = (lax.index_in_dim(x[0], i, axis, keepdims=False) for i in range(2))
        largest = block.eqns[0].primitive is lax.reduce_max_p
        return block(x, operands), Partial(_Unsort(axis, largest), first >= second, first <= second)

    def _rows(self, block: Block, kept: Any) -> list[Any]:
        return [rows for (rows,) in pull_back_units(block, kept)]

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        axes = tuple(block.eqn.params["axes"])
        found = [jnp.sum(r * h[0], axes) for r in self._rows(block, kept)]
        # At a tie only the sum of both cotangents is left, so no number would be right.
        tied = [jnp.sum(r * r, axes) < 1 for r in self._rows(block, kept)]
        return cast_like_outputs(
            block, [jnp.where(t, jnp.nan, a) for t, a in zip(tied, found, strict=True)]
        )

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        return Gain(math.inf, mixes=False, reason=TIE)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        axes = tuple(block.eqn.params["axes"])
        norms = [jnp.sum(r * r, axes) for r in self._rows(block, kept)]
        return [
            Alarm(
                (norms[0] < 1) | (norms[1] < 1),
                "vijp: a pair is equal (a tie), and JAX splits its derivative: which of the two was the "
                "maximum cannot be told; sort the pairs instead (jnp.sort), or use moonwalk.nn.MaxMin",
                SingularError,
            )
        ]


class _Unsort(NamedTuple):
    """The pullback of Extremes, from two bits per pair."""

    axis: int
    largest_first: bool

    def __call__(self, at_least: Any, at_most: Any, h: State) -> State:
        larger, smaller = h if self.largest_first else h[::-1]
        # Half at a tie; 0 / 0 where one of them is NaN, as JAX has it.
        bits = [bit.astype(larger.dtype) for bit in (at_least, at_most)]
        first, second = (bit / sum(bits) for bit in bits)
        pair = [first * larger + second * smaller, second * larger + first * smaller]
        return (jnp.stack(pair, self.axis),)


def _axes(block: Block) -> list[Axis]:
    params, x, y = block.eqn.params, block.inputs[0].aval, block.outputs[0].aval
    return [
        Axis(x.shape[d], y.shape[d], k, s, low, r)
        for d, (k, s, (low, _), r) in enumerate(
            zip(
                params["window_dimensions"],
                params["window_strides"],
                params["padding"],
                params["window_dilation"],
                strict=True,
            )
        )
    ]


class Pooling(DisjointRows):
    """A reduction over windows."""

    def verdict(self, block: Block) -> Verdict:
        axes = _axes(block)
        if any(d != 1 for d in block.eqn.params["base_dilation"]):
            return Verdict(None, "the pooled input is dilated", "pool without base_dilation")
        if not all(a.touched for a in axes):
            return Verdict(
                False,
                "a window lies wholly in the padding: its output does not depend on the input",
                "pad by less than the window's size",
            )
        if all(a.disjoint for a in axes):
            return Verdict(True, "windows that do not overlap")
        return self.overlapping(block, axes)

    def overlapping(self, block: Block, axes: list[Axis]) -> Verdict:
        """The verdict on windows that overlap."""
        raise NotImplementedError

    def reduce(self, block: Block, values: Any) -> Any:
        params = block.eqn.params
        return lax.reduce_window(
            values,
            jnp.zeros((), values.dtype),
            lax.add,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params["base_dilation"],
            params["window_dilation"],
        )

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        return Gain(1.0, mixes=True)


@register_vijp(lax.reduce_window_max_p, lax.reduce_window_min_p)
class MaxPooling(Pooling):
    """The largest (smallest) entry of each window, if the windows are disjoint."""

    name = "max pooling"

    def overlapping(self, block: Block, axes: list[Axis]) -> Verdict:
        axis = next(i for i, a in enumerate(axes) if not a.disjoint)
        return Verdict(
            False,
            f"its windows overlap (axis {axis}: size {axes[axis].taps}, stride {axes[axis].stride}), so "
            "one entry may be the maximum of two windows, whose cotangents then add up",
            "use a stride at least as large as the window, or average pooling",
        )


@register_vijp(lax.reduce_window_sum_p)
class SumPooling(Pooling):
    """Sums (means) over windows; overlapping ones as a convolution with a kernel of ones."""

    name = "sum pooling"

    def overlapping(self, block: Block, axes: list[Axis]) -> Verdict:
        plan = self._plan(axes)
        if isinstance(plan, str):
            return Verdict(
                None, plan, "use windows that do not overlap, or a stride larger than the padding"
            )
        return Verdict(True, f"overlapping windows, {plan.describe()}")

    @staticmethod
    def _plan(axes: Sequence[Axis]) -> Plan | str:
        plans = []
        for number, axis in enumerate(axes):
            plan = windows.plan_axis(axis, single=False)
            if plan is None:
                return windows.explain(axis, number)
            plans.append(plan)
        return Plan(tuple(plans))

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        axes = _axes(block)
        if all(a.disjoint for a in axes):
            return super().vijp(block, factors, kept, h)
        plan = self._plan(axes)
        assert isinstance(plan, Plan)
        h0 = h[0].astype(_jax.working_dtype(h[0].dtype))
        # Each axis offers several pivot rows; the mean over them is their least-squares solution.
        rows, strides = plan.pivot_rows(h0, range(h0.ndim))
        solved = self._mean_over_taps(plan, rows, strides)
        if not plan.parallel:
            couplings = {shift: jnp.ones((1, 1, 1), h0.dtype) for shift in plan.shifts}
            solved = windows.eliminate(plan, solved[None, ..., None, None], couplings)[0, ..., 0, 0]
        return cast_like_outputs(block, (solved,))

    @staticmethod
    def _mean_over_taps(plan: Plan, rows: Any, strides: Sequence[int]) -> Any:
        for axis, (a, stride) in enumerate(zip(plan.axes, strides, strict=True)):
            if a.reach == 1:
                continue
            extent = a.axis.stride * (a.axis.out - 1) + 1
            taken = [
                lax.slice_in_dim(rows, start, start + extent, stride, axis)
                for start in (a.axis.dilation * (tap - a.taps[0]) for tap in a.taps)
            ]
            rows = sum(taken) / len(taken)
        return rows

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        return super().alarms(block, factors, kept) if all(a.disjoint for a in _axes(block)) else []

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        axes = _axes(block)
        if all(a.disjoint for a in axes):
            return Gain(1.0, mixes=True)
        plan = self._plan(axes)
        return Gain(1.0, mixes=True) if isinstance(plan, Plan) and plan.parallel else Gain.unknown()
