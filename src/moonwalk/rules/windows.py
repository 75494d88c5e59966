"""Windowed linear maps: which taps can serve as pivots, and the elimination that follows.

Along one axis, with k taps, stride s, padding p in front and kernel dilation r, tap j of window i'
touches position s·i' + o_j, o_j = r·j - p:

    y[i'] = Σ_j w[j] x[s·i' + o_j]           h[i] = Σ_{(i', j): s·i' + o_j = i} w[j] h'[i']

Tap q is a *pivot* if the rows i = s·i' + o_q of the second sum determine h' one after the other. They
must exist,

    o_q ≥ 0   and   s·(n'-1) + o_q < n,

and in row s·i' + o_q, window i' + δ appears through the tap at r·q - s·δ, if there is one. So

    no such tap for any δ > 0:   h'[i'] needs only earlier windows: eliminate *forward*;
    no such tap for any δ < 0:   only later ones: eliminate *backward*;
    neither:                     the windows do not meet in these rows: fully *parallel*.

The paper's lemma is the pivot o_q = 0 (q = p) with s > p, i.e. forward; it is parallel iff k ≤ p + s
(docs/numerics.md §7.1, §7.4). Causal and anti-causal convolutions are the backward and forward pivots of
stride 1, and a patchifying one (s ≥ k) has every tap as a parallel pivot.

All parallel taps of an axis may be used together: their rows form one least-squares problem per window,
whose smallest singular value is at least that of any single tap, and which has enough rows for channels
to expand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a windowed map."""

    size: int  # n
    out: int  # n'
    taps: int  # k
    stride: int  # s
    low: int  # p
    dilation: int = 1  # r

    def offset(self, tap: int) -> int:
        """o_j: where tap j of window 0 lies."""
        return self.dilation * tap - self.low

    def exists(self, tap: int) -> bool:
        """Whether every window has this tap inside the input."""
        return self.offset(tap) >= 0 and self.stride * (self.out - 1) + self.offset(tap) < self.size

    def meeting(self, tap: int) -> dict[int, int]:
        """{δ: the tap through which window i' + δ appears in the pivot row of window i'}."""
        met = {}
        for delta in range(-self.out + 1, self.out):
            place = self.dilation * tap - self.stride * delta
            if delta and place % self.dilation == 0 and 0 <= place // self.dilation < self.taps:
                met[delta] = place // self.dilation
        return met

    @property
    def disjoint(self) -> bool:
        """Whether no two windows share a position."""
        return self.stride > self.dilation * (self.taps - 1) or self.out <= 1

    @property
    def touched(self) -> bool:
        """Whether every window touches the input at all."""
        return all(
            any(0 <= self.stride * i + self.offset(j) < self.size for j in range(self.taps))
            for i in {0, max(self.out - 1, 0)}
        )


@dataclass(frozen=True)
class AxisPlan:
    """The pivots of one axis: several parallel taps, or one tap and a direction."""

    axis: Axis
    taps: tuple[int, ...]
    direction: int  # 0: parallel, +1: forward, -1: backward

    @property
    def shifts(self) -> dict[int, int]:
        """{how many windows before (in the direction of elimination): through which tap}."""
        if self.direction == 0:
            return {}
        return {-self.direction * d: j for d, j in self.axis.meeting(self.taps[0]).items()}

    @property
    def reach(self) -> int:
        """The number of kernel taps from the first to the last pivot."""
        return self.taps[-1] - self.taps[0] + 1


def plan_axis(axis: Axis, single: bool) -> AxisPlan | None:
    """The pivots of an axis, or None if it has none.

    A declared structure (`single`) refers to one tap: the lemma's, o_q = 0, if that is a pivot at all.
    Without one, all parallel taps are used, or if there are none, the lemma's tap or the first.
    """

    def direction(tap: int) -> int | None:
        met = axis.meeting(tap)
        if not met:
            return 0
        if all(delta < 0 for delta in met):
            return 1
        return -1 if all(delta > 0 for delta in met) else None

    pivots = {q: direction(q) for q in range(axis.taps) if axis.exists(q)}
    pivots = {q: d for q, d in pivots.items() if d is not None}
    if not pivots:
        return None
    parallel = tuple(q for q, d in pivots.items() if d == 0)
    lemma = [q for q in pivots if axis.offset(q) == 0]
    if parallel and not single:
        return AxisPlan(axis, parallel, 0)
    tap = (lemma or list(parallel) or list(pivots))[0]
    return AxisPlan(axis, (tap,), pivots[tap])


def explain(axis: Axis, number: int) -> str:
    """Why an axis has no pivot."""
    a = axis
    return (
        f"spatial axis {number} (size {a.size} -> {a.out}, kernel {a.taps}, stride {a.stride}, padding "
        f"{a.low} in front, dilation {a.dilation}) has no pivot tap: none lies inside the input for "
        "every window and meets other windows on one side only (the lemma asks for stride > padding)"
    )


@dataclass(frozen=True)
class Plan:
    """The pivots of all axes."""

    axes: tuple[AxisPlan, ...]

    @property
    def pivots(self) -> int:
        """Number of taps in the pivot."""
        return math.prod(len(a.taps) for a in self.axes)

    @property
    def parallel(self) -> bool:
        """Whether all windows are solved at once."""
        return all(a.direction == 0 for a in self.axes)

    def describe(self) -> str:
        """The plan in words, for verdicts."""
        taps = " × ".join(
            str(a.taps[0]) if len(a.taps) == 1 else f"{{{a.taps[0]}…{a.taps[-1]}}}" for a in self.axes
        )
        ways = {0: "parallel", 1: "forward", -1: "backward"}
        if self.parallel:
            return f"pivot tap {taps}, fully parallel"
        order = ", ".join(ways[a.direction] for a in self.axes)
        return f"pivot tap {taps}, eliminated {order}"

    def pivot_matrix(self, kernel: Any) -> Any:
        """[g, pivots·m, m'] out of a kernel [k…, g, m, m']."""
        return self._rows(kernel, [a.taps for a in self.axes])

    @property
    def shifts(self) -> list[tuple[int, ...]]:
        """How many windows back, along each axis, the windows are that appear in a pivot row."""
        options = [(0, *a.shifts) for a in self.axes]
        return [shift for shift in itertools.product(*options) if any(shift)]

    def couplings(self, kernel: Any) -> list[Any]:
        """For each of the shifts, the rows [g, pivots·m, m'] through which that window appears."""

        def taps(shift: tuple[int, ...]) -> list[Sequence[int]]:
            pairs = zip(self.axes, shift, strict=True)
            return [(a.shifts[n],) if n else a.taps for a, n in pairs]

        return [self._rows(kernel, taps(shift)) for shift in self.shifts]

    @staticmethod
    def _rows(kernel: Any, taps: Sequence[Sequence[int]]) -> Any:
        for axis, chosen in enumerate(taps):
            kernel = jnp.take(kernel, np.asarray(chosen), axis=axis)
        g, m, m_out = kernel.shape[-3:]
        return jnp.moveaxis(kernel.reshape(-1, g, m, m_out), 0, 1).reshape(g, -1, m_out)

    def inverse_kernel(self, inverse: Any, m: int) -> Any:
        """The pivot's left inverse [g, m', pivots·m] as a kernel [reach…, m, g·m']."""
        g, m_out, _ = inverse.shape
        pivots = [len(a.taps) for a in self.axes]
        # a structure that uses only the first entries ignores the other rows
        inverse = jnp.pad(inverse, ((0, 0), (0, 0), (0, self.pivots * m - inverse.shape[-1])))
        taps = jnp.transpose(inverse, (2, 0, 1)).reshape((*pivots, m, g * m_out))
        if all(len(a.taps) == a.reach for a in self.axes):
            return taps
        kernel = jnp.zeros((*(a.reach for a in self.axes), m, g * m_out), inverse.dtype)
        return kernel.at[np.ix_(*(np.asarray(a.taps) - a.taps[0] for a in self.axes))].set(taps)

    def pivot_rows(self, h: Any, spatial: Sequence[int]) -> tuple[Any, list[int]]:
        """The part of h that the pivots touch, and the strides a convolution over it still needs.

        A single tap needs a strided slice and no window at all.
        """
        start, limit, step = [0] * h.ndim, list(h.shape), [1] * h.ndim
        strides = []
        for place, a in zip(spatial, self.axes, strict=True):
            start[place] = a.axis.offset(a.taps[0])
            limit[place] = a.axis.offset(a.taps[-1]) + a.axis.stride * (a.axis.out - 1) + 1
            step[place] = a.axis.stride if a.reach == 1 else 1
            strides.append(1 if a.reach == 1 else a.axis.stride)
        return lax.slice(h, start, limit, step), strides


def eliminate(plan: Plan, right: Any, couplings: Mapping[tuple[int, ...], Any]) -> Any:
    """Solve h'[i] = right[i] - Σ_a T_a h'[i - a] for all windows i, in the plan's directions.

    `right` is [N, n'…, g, m'], `couplings` {a: T_a [g, m', m']} with the a of `Plan.shifts`. All a
    have entries ≥ 0 and some entry > 0, so their sum is at least 1 and the windows with equal index
    sum t (over the axes that are not parallel) can be solved together: a wavefront of Σ(n'-1)+1 steps.

    To step along t, the first such axis is skewed: wave[t][i₂, …] = h'[t - i₂ - …, i₂, …].
    """
    flipped = [i + 1 for i, a in enumerate(plan.axes) if a.direction < 0]
    moving = [i for i, a in enumerate(plan.axes) if a.direction != 0]
    first, others = moving[0], moving[1:]
    b = jnp.moveaxis(jnp.flip(right, flipped), first + 1, 0)  # [n₁', N, other n'…, g, m']
    # axes of a wave: N, then the spatial axes without the first, then g, m'
    place = {i: 1 + sum(j != first and j < i for j in range(len(plan.axes))) for i in others}
    length, wave_shape = b.shape[0], b.shape[1:]
    lag = sum(
        (
            jnp.arange(wave_shape[place[i]]).reshape(
                [-1 if axis == place[i] else 1 for axis in range(len(wave_shape))]
            )
            for i in others
        ),
        start=jnp.zeros([1] * len(wave_shape), int),
    )
    steps = length + sum(wave_shape[place[i]] - 1 for i in others)
    times = jnp.arange(steps).reshape([-1] + [1] * len(wave_shape))
    row = times - lag[None]  # which row of b each entry of a wave belongs to
    valid = (row >= 0) & (row < length)
    if others:
        index = jnp.broadcast_to(jnp.clip(row, 0, length - 1), (steps, *wave_shape))
        waves = jnp.where(valid, jnp.take_along_axis(b, index, axis=0), 0)
    else:
        waves = b
    depth = max(sum(shift) for shift in couplings)
    history = jnp.zeros((depth, *wave_shape), b.dtype)

    def step(history: Any, inputs: Any) -> tuple[Any, Any]:
        wave, inside = inputs
        for shift, t in couplings.items():
            earlier = history[sum(shift) - 1]
            for i in others:
                earlier = shifted(earlier, shift[i], place[i])
            wave = wave - jnp.einsum("n...go,gpo->n...gp", earlier, t, precision=lax.Precision.HIGHEST)
        wave = jnp.where(inside, wave, 0)
        return jnp.concatenate([wave[None], history[:-1]]), wave

    _, waves = lax.scan(step, history, (waves, valid))
    if others:
        target = jnp.arange(length).reshape([-1] + [1] * len(wave_shape)) + lag[None]
        waves = jnp.take_along_axis(waves, jnp.broadcast_to(target, b.shape), axis=0)
    return jnp.flip(jnp.moveaxis(waves, 0, first + 1), flipped)


def shifted(array: Any, by: int, axis: int) -> Any:
    """array[i - by] along an axis, zero before the start."""
    if by == 0:
        return array
    size = array.shape[axis]
    pads = [(0, 0)] * array.ndim
    pads[axis] = (min(by, size), 0)
    return lax.slice_in_dim(jnp.pad(array, pads), 0, size, axis=axis)


def apply_couplings(plan: Plan, h: Any, couplings: Mapping[tuple[int, ...], Any]) -> Any:
    """-Σ_a T_a h[i - a], the part of the recursion's operator off its diagonal (for its gain)."""
    flipped = [i + 1 for i, a in enumerate(plan.axes) if a.direction < 0]
    h = jnp.flip(h, flipped)
    total = jnp.zeros_like(h)
    for shift, t in couplings.items():
        earlier = h
        for i, by in enumerate(shift):
            earlier = shifted(earlier, by, i + 1)
        total = total - jnp.einsum("n...go,gpo->n...gp", earlier, t)
    return jnp.flip(total, flipped)
