"""Convolutions: any number of axes, layout, stride, padding, kernel dilation and groups.

With pivots chosen by `windows`, the rows of h that they touch read, per window and group,

    rows[i'] = M h'[i'] + Σ_a W_a h'[i' - a]          M: the pivot taps' matrix, W_a: the coupled taps'

so with K the left inverse of M (`pivot`) and T_a = K W_a,

    h'[i'] = K rows[i'] - Σ_a T_a h'[i' - a].

K rows[i'] for all i' is itself a convolution, with the input's own layout and groups: where the plan is
parallel it is the whole vijp. This corrects the paper's Algorithm 2, which leaves channel 0
unassigned, drops the diagonal and transposes the kernel, and its order of elimination Σi' + c'
(docs/numerics.md §7.1, §7.2).

Where channels expand, M has more columns than rows, and the part of each window's h' outside the row
space of M is lost. If windows are solved in parallel, a walk keeps those coordinates (`pivot`), and K is
M's pseudo-inverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from ..trace.graph import Block
from . import pivot, separators, spans, windows
from .fragments import Ask, FragmentRule, Place
from .kernels import Geometry, canonical, declared_of, geometry_of, like_weight, structure_of, unsuited
from .registry import Alarm, Gain, Rule, State, Verdict, register_vijp
from .windows import Plan


class Factors(NamedTuple):
    """The pivot's inverse, also as a kernel in the layout of w, and the T_a of the couplings."""

    pivot: pivot.Factors
    kernel: Any
    couplings: tuple[Any, ...]


def _pivots(block: Block) -> Plan | Verdict:
    """The pivots, whatever the number of channels, or why there are none."""
    geometry, structure = geometry_of(block), structure_of(block)
    chosen = []
    for number, axis in enumerate(geometry.axes):
        plan = windows.plan_axis(axis, single=structure is not None)
        if plan is None:
            return Verdict(
                None,
                windows.explain(axis, number),
                "take a stride larger than the padding, pad on one side only (causal), declare the "
                "whole operator isometric if it is, or solve it matrix-free: "
                "moonwalk.vijp(..., fallback=moonwalk.MatrixFree())",
            )
        chosen.append(plan)
    return Plan(tuple(chosen))


def _plan(block: Block) -> Plan | Verdict:
    """Pivots with as many equations as there are output channels, or why there are none."""
    plan, geometry = _pivots(block), geometry_of(block)
    if isinstance(plan, Plan) and geometry.m_out > plan.pivots * geometry.m:
        return Verdict(
            False if plan.pivots == 1 and block.sizes[1] > block.sizes[0] else None,
            f"the channels expand: {geometry.m_out} outputs per group, but the pivot ({plan.describe()})"
            f" offers {plan.pivots} × {geometry.m} equations for them",
            "use at most as many output as input channels (patchifying kernels, stride ≥ size, may "
            "expand up to the size of the patch)",
        )
    return plan


@register_vijp(lax.conv_general_dilated_p)
class Convolution(Rule):
    """Gaussian elimination at fixed places, chosen from the geometry alone."""

    name = "convolution"

    def verdict(self, block: Block) -> Verdict:
        refusal = unsuited(block)
        if refusal is not None:
            return refusal
        plan = _plan(block)
        if isinstance(plan, Verdict):
            return plan
        if declared_of(block) == "isometric" and not plan.parallel:
            # Windows that share nothing but their outermost taps are orthogonal: W_0ᵀ W_{k-1} = 0.
            return Verdict(None, "the kernel is declared isometric: its outermost taps are no pivots")
        return Verdict(True, f"{plan.describe()}, {structure_of(block) or 'general'}")

    def prepare(self, block: Block, operands: Sequence[Any]) -> Any:
        geometry, plan, structure = geometry_of(block), _plan(block), structure_of(block)
        assert isinstance(plan, Plan)
        w = operands[block.operands.index(block.eqn.invars[1])]
        kernel = canonical(geometry, w)
        factors = pivot.factorise(plan.pivot_matrix(kernel), structure, w)
        couplings = []
        for coupled in plan.couplings(kernel):
            rows = jnp.swapaxes(coupled.astype(factors.inverse.dtype), -1, -2)  # [g, m', pivots·m]
            wide = (
                factors._replace(inverse=factors.inverse[:, None])
                if structure == "diagonal"
                else factors
            )
            solved = pivot.apply(wide, structure, rows, lax.Precision.HIGHEST)
            couplings.append(jnp.swapaxes(solved, -1, -2))
        if structure == "diagonal":
            inverse_kernel = ()
        else:
            inverse_kernel = like_weight(geometry, plan.inverse_kernel(factors.inverse, geometry.m))
        return Factors(factors, inverse_kernel, tuple(couplings))

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        geometry, plan, structure, (h0,) = geometry_of(block), _plan(block), structure_of(block), h
        assert isinstance(plan, Plan)
        solved = _solve_windows(block, plan, structure, factors, h0)
        if not plan.parallel:
            batch, feature, *spatial = geometry.numbers.out_spec
            last = lax.transpose(solved, (batch, *spatial, feature))
            grouped = last.reshape((*last.shape[:-1], geometry.groups, geometry.m_out))
            couplings = dict(zip(plan.shifts, factors.couplings, strict=True))
            done = windows.eliminate(plan, grouped, couplings)
            order = np.argsort((batch, *spatial, feature))
            solved = lax.transpose(done.reshape(last.shape), tuple(int(i) for i in order))
        return (solved.astype(block.outputs[0].aval.dtype),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        plan, structure = _plan(block), structure_of(block)
        assert isinstance(plan, Plan)
        if operands is None:
            return pivot.gain(structure) if plan.parallel else Gain.unknown()
        w = operands[block.operands.index(block.eqn.invars[1])]
        matrix = plan.pivot_matrix(canonical(geometry_of(block), w))
        own = pivot.gain(structure, matrix)
        if plan.parallel:
            return own
        return Gain(own.factor * self._recursion_gain(block, operands, plan), mixes=True)

    def _recursion_gain(self, block: Block, operands: Sequence[Any], plan: Plan) -> float:
        """rms ‖A v‖ · rms ‖A⁻¹ u‖ of the recursion A h' = h' + Σ T_a h'[· - a], on random vectors."""
        factors = self.prepare(block, operands)
        geometry = geometry_of(block)
        couplings = dict(zip(plan.shifts, factors.couplings, strict=True))
        shape = (8, *(a.out for a in geometry.axes), geometry.groups, geometry.m_out)
        v = jax.random.normal(jax.random.key(0), shape, factors.pivot.inverse.dtype)
        solved = windows.eliminate(plan, v, couplings)
        applied = v - windows.apply_couplings(plan, v, couplings)
        norm = jnp.linalg.norm(v)
        return float(jnp.linalg.norm(solved) / norm * jnp.linalg.norm(applied) / norm)

    def fragmented(self, block: Block, ask: Ask) -> Iterator[FragmentRule]:
        if unsuited(block) is None:
            yield from _expanding(block)
            # Ordered by what they keep, counting the anchors that their gains require.
            yield from separators.candidates(block, ask)
            yield from spans.candidates(block, ask)
            yield from separators.short_ways(block, ask)

    def declared(self, block: Block) -> list[tuple[str, float]]:
        w, geometry = block.eqn.invars[1], geometry_of(block)
        size = max(geometry.m, geometry.m_out)
        what = f"the pivot of the kernel {block.name(w)}"
        return pivot.declared(structure_of(block), w.aval.dtype, size, what)

    def probe(self, block: Block, operands: Sequence[Any]) -> list[Any]:
        plan, structure = _plan(block), structure_of(block)
        assert isinstance(plan, Plan)
        assert structure is not None
        w = operands[block.operands.index(block.eqn.invars[1])]
        return [pivot.probe(plan.pivot_matrix(canonical(geometry_of(block), w)), structure)]

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return self.alarms(block, self.prepare(block, operands), None)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        plan, w = _plan(block), block.eqn.invars[1]
        assert isinstance(plan, Plan)
        what = f"the kernel {block.name(w)}, {plan.describe()}"
        return pivot.alarms(factors.pivot, structure_of(block), w.aval.dtype, what)


def _solve_windows(block: Block, plan: Plan, structure: str | None, factors: Factors, h: Any) -> Any:
    """K rows[i'] for all windows i', in the layout of the output."""
    geometry = geometry_of(block)
    h = h.astype(factors.pivot.inverse.dtype)
    rows, strides = plan.pivot_rows(h, geometry.numbers.lhs_spec[2:])
    if structure == "diagonal":
        return _divide_channels(geometry, rows, factors.pivot.inverse)
    return lax.conv_general_dilated(
        rows,
        factors.kernel,
        window_strides=strides,
        padding=[(0, 0)] * len(geometry.axes),
        rhs_dilation=[a.dilation for a in geometry.axes],
        dimension_numbers=geometry.numbers,
        feature_group_count=geometry.groups,
        precision=_precision(block),
    )


def _divide_channels(geometry: Geometry, rows: Any, diagonal: Any) -> Any:
    """Each group's first m' channels by the diagonal [g, m'], in the layout of the output."""
    batch, feature, *spatial = geometry.numbers.lhs_spec
    last = lax.transpose(rows, (batch, *spatial, feature))
    grouped = last.reshape((*last.shape[:-1], geometry.groups, geometry.m))
    solved = grouped[..., : geometry.m_out]
    solved = solved / diagonal.reshape([1] * (solved.ndim - 2) + list(diagonal.shape))
    solved = solved.reshape((*last.shape[:-1], geometry.groups * geometry.m_out))
    order = np.argsort(
        (geometry.numbers.out_spec[0], *geometry.numbers.out_spec[2:], geometry.numbers.out_spec[1])
    )
    return lax.transpose(solved, tuple(int(i) for i in order))


# --- channels that expand ---------------------------------------------------------------------------


def _expanding(block: Block) -> Iterator[FragmentRule]:
    """The fragment rule for a convolution with parallel windows whose channels expand, if it is one."""
    plan, geometry = _pivots(block), geometry_of(block)
    if not isinstance(plan, Plan) or not plan.parallel or geometry.m_out <= plan.pivots * geometry.m:
        return
    if geometry.numbers.out_spec[1] not in _jax.sharded_axes(block.outputs[0].aval):
        yield Expanding()


@dataclass(frozen=True)
class Expanding(FragmentRule):
    """More output channels than a parallel pivot has equations: keeps h' Q₂ for every window."""

    name = "expanding convolution"
    reads_factors = True

    def describe(self, block: Block) -> str:
        plan, geometry = _parallel(block), geometry_of(block)
        lost = geometry.m_out - plan.pivots * geometry.m
        each = f", in each of {geometry.groups} groups" if geometry.groups > 1 else ""
        return (
            f"{plan.describe()}, {structure_of(block) or 'general'}: {lost} of {geometry.m_out} "
            f"channels leave no trace{each}"
        )

    def prepare(self, block: Block, operands: Sequence[Any]) -> Any:
        """(the factors of the part that is seen, as a convolution, and the cokernel)."""
        geometry, plan = geometry_of(block), _parallel(block)
        w = operands[block.operands.index(block.eqn.invars[1])]
        found = pivot.expand(plan.pivot_matrix(canonical(geometry, w)), structure_of(block), w)
        kernel = like_weight(geometry, plan.inverse_kernel(found.pivot.inverse, geometry.m))
        return Factors(found.pivot, kernel, ()), found

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        return pivot.keep(factors[1], _windows(geometry_of(block), h[0]), _precision(block))

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        seen = _solve_windows(block, _parallel(block), None, factors[0], h[0])
        rest = pivot.kept_part(factors[1], fragment, _precision(block))
        whole = seen + _from_windows(geometry_of(block), rest, block.outputs[0].aval)
        return (whole.astype(block.outputs[0].aval.dtype),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        if operands is None:
            return pivot.gain(structure_of(block))
        w = operands[block.operands.index(block.eqn.invars[1])]
        matrix = _parallel(block).pivot_matrix(canonical(geometry_of(block), w))
        return pivot.gain(structure_of(block), matrix)

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        w = block.eqn.invars[1]
        what = f"the kernel {block.name(w)}, {_parallel(block).describe()}"
        factors = self.prepare(block, operands)[0].pivot
        return pivot.alarms(factors, structure_of(block), w.aval.dtype, what)


def _parallel(block: Block) -> Plan:
    plan = _pivots(block)
    assert isinstance(plan, Plan)
    return plan


def _precision(block: Block) -> Any:
    return pivot.solve_precision(structure_of(block), block.eqn.params["precision"])


def _windows(geometry: Geometry, h: Any) -> Any:
    """The output's cotangent as rows [g, windows, m']."""
    batch, feature, *spatial = geometry.numbers.out_spec
    last = lax.transpose(h, (batch, *spatial, feature))
    rows = last.reshape((-1, geometry.groups, geometry.m_out))
    return jnp.moveaxis(rows, 1, 0)


def _from_windows(geometry: Geometry, rows: Any, aval: Any) -> Any:
    """Rows [g, windows, m'] in the layout of the output."""
    batch, feature, *spatial = geometry.numbers.out_spec
    order = (batch, *spatial, feature)
    last = jnp.moveaxis(rows, 0, 1).reshape([aval.shape[a] for a in order])
    return lax.transpose(last, tuple(int(i) for i in np.argsort(order)))
