"""Convolutions declared isometric: J Jᵀ = I, so the vijp is the jvp, h' = J h.

A dense layer declared isometric is orthogonal (`linear`). A convolution is an isometry only as a whole,
together with the copying step before it (`chain`); its pivot alone need not be. The declaration of a
kernel says that its windows on an endless axis, at the convolution's stride, have orthonormal rows. They
still do if the axis is closed to a circle, and whenever all windows lie inside the input.

**Zero padding** cuts off the windows at the edges: their rows r̃ are what the input leaves of the whole
rows r. The row q of an inside window has no entry outside the input, so that

    ⟨q, r̃⟩ = ⟨q, r⟩ = 0        and        h = Σ_inside h'_q q + Σ_edge h'_r r̃    ⇒    h'_q = ⟨q, h⟩:

on inside windows h' = J h as ever. The edge rows are orthogonal to these, but neither normal nor
orthogonal to each other, and may even be zero, so h' is kept there: a fragment, of p slices at each end
of an axis. It loses no accuracy. An error e of h arrives as its part along orthonormal rows, no longer
than e, and ‖h‖ ≤ ‖h'‖ because no truncated operator is larger than the whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .. import _jax
from ..errors import DeclarationError, SingularError
from ..trace.declare import tolerance
from ..trace.graph import Block
from .chain import is_declared_isometric
from .fragments import Ask, FragmentRule, Place
from .kernels import geometry_of
from .registry import (
    Alarm,
    Gain,
    Rule,
    State,
    Verdict,
    cast_like_outputs,
    pushforward,
    random_cotangents,
    register_region,
)
from .windows import Axis


class _Orthonormal(Rule):
    """What both rules share: h' by orthonormal rows."""

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=True)

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return self.alarms(block, (), _pullback(block, operands))


@register_region
class Isometry(_Orthonormal):
    """A convolution whose kernel is declared "isometric"."""

    name = "isometry"

    def matches(self, block: Block) -> bool:
        return is_declared_isometric(block)

    def verdict(self, block: Block) -> Verdict:
        n, n_out = block.sizes
        if n_out > n:
            return Verdict(
                False,
                f"declared isometric, but {n} numbers cannot hold {n_out} orthogonal rows",
                "declare only operators whose output is no larger than their input",
            )
        if _is_cut(block):
            return Verdict(
                None,
                f"declared isometric, but its padding cuts off windows at the edges ({_cuts(block)}): "
                "their cotangents cannot be told from h alone",
                "pad circularly; or differentiate with moonwalk.value_and_grad, which keeps the "
                "cotangents of the edges and recovers the others",
            )
        return Verdict(True, "declared isometric")

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors
        return cast_like_outputs(block, pushforward(block, kept, h))

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        """J Jᵀ u = u on a random u."""
        del factors
        return _alarms(block, kept, random_cotangents(block))

    def fragmented(self, block: Block, ask: Ask) -> Iterator[FragmentRule]:
        del ask
        if _is_cut(block):
            yield Edges()


# --- zero padding -------------------------------------------------------------------------------------


def _inside(axis: Axis) -> tuple[int, int]:
    """(start, stop) of the windows that lie inside the input along an axis."""
    start = max(0, -(axis.offset(0) // axis.stride))
    stop = (axis.size - 1 - axis.offset(axis.taps - 1)) // axis.stride + 1
    return min(start, axis.out), min(max(stop, start), axis.out)


def _is_cut(block: Block) -> bool:
    """Whether padding cuts off any window."""
    params = block.eqn.params
    if any(d != 1 for d in params["lhs_dilation"]) or params["batch_group_count"] != 1:
        return False  # its windows are not windows of the input; trust the declaration
    return any(_inside(a) != (0, a.out) for a in geometry_of(block).axes)


def _cuts(block: Block) -> str:
    """How many windows are cut off along each axis, in words."""
    spans = [(*_inside(a), a.out) for a in geometry_of(block).axes]
    return " × ".join(f"{start} + {out - stop} of {out}" for start, stop, out in spans)


@dataclass(frozen=True)
class Edges(_Orthonormal, FragmentRule):
    """Keeps h' at the windows that padding cuts off.

    The edges are cut into strips: the first and the last windows along each axis, with all earlier axes
    cropped to the inside, so that no corner is in two strips.
    """

    name = "edges"

    def describe(self, block: Block) -> str:
        return f"declared isometric; padding cuts off windows at the edges, {_cuts(block)}"

    def _strips(self, block: Block) -> list[tuple[list[int], list[int]]]:
        """(start, stop) of each strip, along all axes of the output."""
        geometry, shape = geometry_of(block), block.outputs[0].aval.shape
        start, stop = [0] * len(shape), list(shape)
        strips = []
        for place, axis in zip(geometry.numbers.out_spec[2:], geometry.axes, strict=True):
            first, last = _inside(axis)
            strips.append((list(start), [*stop[:place], first, *stop[place + 1 :]]))
            strips.append(([*start[:place], last, *start[place + 1 :]], list(stop)))
            start[place], stop[place] = first, last
        return [(a, b) for a, b in strips if all(i < j for i, j in zip(a, b, strict=True))]

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        return [lax.slice(h[0], start, stop) for start, stop in self._strips(block)]

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        (whole,) = cast_like_outputs(block, pushforward(block, kept, h))
        for (start, _), strip in zip(self._strips(block), fragment, strict=True):
            whole = lax.dynamic_update_slice(whole, strip.astype(whole.dtype), start)
        return (whole,)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        """J Jᵀ u = u on a random u inside; at the edges both are zero."""
        del factors
        (u,) = random_cotangents(block)
        for start, stop in self._strips(block):
            strip = jnp.zeros([b - a for a, b in zip(start, stop, strict=True)], u.dtype)
            u = lax.dynamic_update_slice(u, strip, start)
        return _alarms(block, kept, (u,), " on windows inside the input")


# --- values -------------------------------------------------------------------------------------------


def _pullback(block: Block, operands: Sequence[Any]) -> Any:
    """h' ↦ h' J, at any state: the map is linear."""
    x = [_jax.full(v.aval, 0.0) for v in block.inputs]
    return jax.vjp(lambda *x: block(x, operands), *x)[1]


def _alarms(block: Block, pullback: Any, u: State, where: str = "") -> list[Alarm]:
    """Alarms that ring unless J Jᵀ u = u."""
    back = pushforward(block, pullback, pullback(u))
    off = _norm([a - b for a, b in zip(back, u, strict=True)]) / _norm(u)
    return [
        Alarm(
            ~jnp.isfinite(off),
            "vijp: an operator that is declared 'isometric' holds NaN or infinity (values that are not "
            "finite); look for the step that made them",
            SingularError,
        ),
        Alarm(
            off > tolerance(block.outputs[0].aval.dtype, 256),
            f"vijp: an operator is declared 'isometric', but J Jᵀ is not the identity{where}; check "
            "the kernel, its stride and its padding, or leave the declaration out",
            DeclarationError,
        ),
    ]


def _norm(arrays: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(_jax.working_dtype(a.dtype)))) for a in arrays))
