"""Convolutions without a pivot: keep the first slices of every span of windows, restore the others.

Along one axis (`windows` has the letters), the rows i = s·u + c - p of h, for one residue c < s, read

    h[s·u + c - p] = W_c h'[u] + W_{c+s} h'[u-1] + W_{c+2s} h'[u-2] + …             (R further taps)

so with K a left inverse of the pivot W_c and T_a = K W_{c+sa},

    h'[u] = K h[s·u + c - p] - Σ_a T_a h'[u-a].                                             (*)

For stride 1 there is one residue, and R = k-1. Going from window to window (*) is unstable unless the
T_a are small, so it is started again in every span of B windows: the first R of them are kept, and (*)
restores the other B-R, in all spans side by side. In several axes a span is a tile, and kept are the
first R slices along every axis. This is the paper's fragmental checkpointing with its formula put right
(docs/numerics.md §7.3): all channels of the other taps count, the pivot's triangle and its division too.

**Edges.** The first windows (u < p/s) have no row inside the input. They are kept, and the row that they
would have had follows from them: a row before the input reads kept windows only.

**Staggering.** The rows that restore the span [t, t+B) are h[t+R-p … t+B-1-p]. If the layer before had a
span that starts at t+R-p, the first R of these were kept there and are exact; so an error lives only
(B-R)/R layers, if each layer's grid lies R-p windows before the last one's. In a scan over layers the
grid's place is a number that the loop counts.

**Cost.** In one axis, six windows at a time are one product of the R windows before them and of h with
a matrix made from the weights: one product for B ≤ 8. Long spans, and tiles, take a loop.

**Error.** Restoring is linear, and what is kept is exact. So the growth of error over layers is measured
by sending noise through copies of this layer, with derivatives as the activations between them have.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from ..trace.graph import Block
from . import pivot, windows
from .fragments import Ask, FragmentRule, Place
from .kernels import Geometry, canonical, geometry_of, structure_of
from .registry import Alarm, Gain, State
from .windows import Axis, AxisPlan

PRODUCT = 6  # windows restored by one product: enough for a span of 8 with three taps
_PRODUCTS = 8  # the most products before a loop is used instead
# Lengths to try, in units of the reach; twice the reach is stable if pivots are.
_SPANS = (16, 8, 4, 2)
_HIGHEST = lax.Precision.HIGHEST


@dataclass(frozen=True)
class Line:
    """One axis, read in the direction of elimination."""

    size: int  # n
    out: int  # n'
    stride: int  # s
    first: int  # c - p: where the row of window 0 lies
    taps: tuple[int, ...]  # the pivot's tap, and those through which earlier windows appear
    unit: int = 1  # how many windows lie between successive taps of these
    flipped: bool = False  # from the end to the start
    span: int = 0  # B; 0 where no window appears in another's row

    @property
    def reach(self) -> int:
        """R: how far back a row reads."""
        return self.unit * (len(self.taps) - 1)

    @property
    def lead(self) -> int:
        """Windows at the start that have no row inside the input."""
        return min(self.out, max(0, -(self.first // self.stride)))

    @property
    def trail(self) -> int:
        """Windows at the end that have no row inside the input."""
        inside = (self.size - 1 - self.first) // self.stride + 1
        return max(0, self.out - max(0, inside))

    @property
    def moves(self) -> int:
        """How many windows before this one's the next layer's grid should start."""
        return self.reach + self.first if self.stride == 1 else 0

    def tiles(self, offset: Any) -> int:
        """The number of spans; if the grid's offset is traced, enough for any offset."""
        most = offset if isinstance(offset, int) else self.length - 1
        return -(-(self.out + most) // self.length)

    @property
    def length(self) -> int:
        """The length of a span."""
        return self.span or self.out

    def keeps_lead(self, stagger: bool) -> bool:
        """Whether the first windows are kept separately. On an aligned grid they are the first
        span's."""
        return self.lead > 0 and (stagger or self.lead > self.reach)

    def shortened(self, out: int) -> Line:
        """The same line with fewer windows."""
        return replace(self, out=out, size=self.size - self.stride * (self.out - out))


def line_of(axis: Axis, own: AxisPlan | None, declared: bool) -> Line | None:
    """How an axis is eliminated with the help of kept slices; None if no way is known.

    `own`: the axis's own pivots, if it has any. Along them (*) can run in one direction, perhaps with
    fewer edges. A declared structure refers to one tap, so its line uses the tap of `own` if there is
    one.
    """
    size, out, stride, taps = axis.size, axis.out, axis.stride, axis.taps
    if declared and own is not None and own.direction == 0:
        (tap,) = own.taps
        return Line(size, out, stride, axis.offset(tap), (tap,))
    backward = own is not None and own.direction < 0
    high = stride * (out - 1) + axis.dilation * (taps - 1) - axis.low - (size - 1)
    if stride == 1:
        order = tuple(range(taps))
        if backward:
            return Line(size, out, 1, -high, order[::-1], axis.dilation, flipped=True)
        return Line(size, out, 1, -axis.low, order, axis.dilation)
    if axis.dilation != 1:
        return None
    if declared and own is not None:
        (tap,) = own.taps
        if backward:
            order = tuple(range(tap, -1, -stride))
            return Line(size, out, stride, taps - 1 - tap - high, order, flipped=True)
        return Line(size, out, stride, tap - axis.low, tuple(range(tap, taps, stride)))
    residues = range(min(stride, taps))
    lines = [Line(size, out, stride, c - axis.low, tuple(range(c, taps, stride))) for c in residues]
    return min(lines, key=lambda x: (x.reach, x.lead + x.trail))


def declared_tap(axis: Axis) -> int | None:
    """The tap along an axis that a declared structure refers to; None: no rule reads one.

    It is the elimination's tap if there is one, else that of spans. Layers put their structure there.
    """
    own = windows.plan_axis(axis, single=True)
    if own is not None:
        return own.taps[0]
    line = line_of(axis, None, declared=True)
    return None if line is None else line.taps[0]


def candidates(block: Block, ask: Ask) -> Iterator[FragmentRule]:
    """Spans that could serve a block, the longest first; only the requested one if the user asked."""
    geometry, structure = geometry_of(block), structure_of(block)
    if geometry.m_out > geometry.m or len(geometry.axes) > 3:
        return
    found = []
    for axis in geometry.axes:
        own = windows.plan_axis(axis, single=structure is not None)
        line = line_of(axis, own, declared=structure is not None)
        if line is None:
            return
        found.append(line)
    reach = max(x.reach for x in found)
    if ask.requested is not None:
        for line in found:
            if line.reach and ask.requested.span <= line.reach:
                raise ValueError(
                    f"Fragment(span={ask.requested.span}): the convolution at "
                    f"{_jax.source_line(block.eqn)} has {line.reach + 1} taps along an axis and keeps "
                    f"{line.reach} slices of every span; take a span of at least {line.reach + 1}"
                )
        yield Spans(_with_span(found, ask.requested.span), ask.requested.stagger, ask.slope, asked=True)
        return
    # A grid that moves needs room, because tiles overlap the edges.
    room = min((x.out for x in found if x.reach), default=0) // (1 if len(found) == 1 else 2)
    lengths = [times * reach for times in _SPANS]
    fitting = [b for b in lengths if b <= room] if reach else []  # without a reach only edges are kept
    for span in fitting or lengths[-1:]:
        yield Spans(_with_span(found, span), True, ask.slope)


def _with_span(lines: Sequence[Line], span: int) -> tuple[Line, ...]:
    """Spans of a given length, but not much longer than the axis."""
    longest = [max(x.reach + 1, x.out) for x in lines]
    return tuple(
        replace(x, span=min(span, n) if x.reach else 0) for x, n in zip(lines, longest, strict=True)
    )


class Factors(NamedTuple):
    """The pivot M [g, m, m'], its left inverse K [g, m', m], and T_a [g, m', m'] by a."""

    pivot: pivot.Factors
    matrix: Any
    inverse: Any
    couplings: dict[tuple[int, ...], Any]


class Pieces(NamedTuple):
    """What is kept of h': slices cut out of tiles if there is one axis, gathered windows if several."""

    slices: list[Any]  # per axis: the first R of every span, of what earlier axes left
    leads: list[Any]  # per axis: the windows at its start
    trails: list[Any]


@dataclass(frozen=True)
class Spans(FragmentRule):
    """Fragments on a grid of spans."""

    name = "spans"
    lines: tuple[Line, ...]
    stagger: bool
    slope: float = 1.0
    asked: bool = False

    @property
    def label(self) -> str:
        grid = "staggered" if self.stagger else "aligned"
        return f"spans of {self.span}, {grid}, slope {self.slope:.3g}"

    @property
    def span(self) -> int:
        return max(x.span for x in self.lines)

    def describe(self, block: Block) -> str:
        if not self.span:
            return "the first and last windows have no pivot row of their own"
        grid = "staggered" if self.stagger else "aligned"
        kept = " × ".join(str(x.reach) for x in self.lines)
        structure = structure_of(block) or "general"
        return f"{kept} slices of every span of {self.span}, {grid}; pivot {structure}"

    def moves(self, block: Block) -> tuple[int, ...]:
        del block
        return tuple(x.moves if self.stagger else 0 for x in self.lines)

    def prepare(self, block: Block, operands: Sequence[Any]) -> Factors:
        geometry = geometry_of(block)
        w = operands[block.operands.index(block.eqn.invars[1])]
        return factorise(self.lines, canonical(geometry, w), structure_of(block), w)

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Pieces:
        del factors, kept
        return pieces_of(self.lines, self.stagger, _spread(block, self.lines, h[0]), place)

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        del kept
        geometry = geometry_of(block)
        rows = _rows(geometry, self.lines, h[0].astype(factors.inverse.dtype))
        precision = block.eqn.params["precision"]
        found = solve(self.lines, self.stagger, factors, rows, fragment, place, precision)
        out = _gather(block, self.lines, found)
        return (out.astype(block.outputs[0].aval.dtype),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        if operands is None:
            return self._promised(block)
        geometry = geometry_of(block)
        w = operands[block.operands.index(block.eqn.invars[1])]
        kernel = canonical(geometry, w)
        kernel = kernel.astype(_jax.working_dtype(kernel.dtype))
        structure = structure_of(block)
        found = float(growth(self.lines, self.stagger, structure, self.slope, kernel))
        return Gain(max(1.0, found), mixes=True, lasting=self._lasting)

    def _promised(self, block: Block) -> Gain:
        """While tracing: spans of twice the reach were stable wherever the pivot was well conditioned.

        Declared pivots are assumed to be well conditioned; the certificate checks the result.
        """
        reach = max(x.reach for x in self.lines)
        if structure_of(block) is None or self.span > 2 * reach or not self.stagger:
            return Gain.unknown()
        return Gain(10.0, mixes=True, assumed=True, lasting=self._lasting)

    @property
    def _lasting(self) -> float | None:
        """Error dies at kept slices; if only edges are kept, it compounds."""
        return 1.0 if self.span else None

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return self.alarms(block, self.prepare(block, operands), None)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        w = block.eqn.invars[1]
        taps = " × ".join(str(x.taps[0]) for x in self.lines)
        what = f"the kernel {block.name(w)}, pivot tap {taps} of its fragments"
        return pivot.alarms(factors.pivot, structure_of(block), w.aval.dtype, what)


# --- layout -----------------------------------------------------------------------------------------


def _spread(block: Block, lines: Sequence[Line], h: Any) -> Any:
    """h' as [N, n'…, g, m'], in the direction of elimination."""
    geometry = geometry_of(block)
    batch, feature, *spatial = geometry.numbers.out_spec
    last = lax.transpose(h, (batch, *spatial, feature))
    last = last.reshape((*last.shape[:-1], geometry.groups, geometry.m_out))
    return _flip(lines, last)


def _gather(block: Block, lines: Sequence[Line], h: Any) -> Any:
    """The way back."""
    geometry = geometry_of(block)
    batch, feature, *spatial = geometry.numbers.out_spec
    h = _flip(lines, h)
    h = h.reshape((*h.shape[:-2], geometry.groups * geometry.m_out))
    order = np.argsort((batch, *spatial, feature))
    return lax.transpose(h, tuple(int(i) for i in order))


def _flip(lines: Sequence[Line], h: Any) -> Any:
    axes = tuple(1 + i for i, x in enumerate(lines) if x.flipped)
    return lax.rev(h, axes) if axes else h


def _rows(geometry: Geometry, lines: Sequence[Line], h: Any) -> Any:
    """The rows of h that the windows use, [N, n'…, g, m]; zero where they lie outside."""
    batch, feature, *spatial = geometry.numbers.lhs_spec
    h = lax.transpose(h, (batch, *spatial, feature))
    h = h.reshape((*h.shape[:-1], geometry.groups, geometry.m))
    h = _flip(lines, h)
    config = [(0, 0, 0)] * h.ndim
    for i, x in enumerate(lines):
        # Negative padding crops: what lies before the first row, and after the last.
        last = x.stride * (x.out - 1) + x.first
        config[1 + i] = (-x.first, last + 1 - x.size, 0)
    h = lax.pad(h, jnp.zeros((), h.dtype), config)
    strides = [1, *(x.stride for x in lines), 1, 1]
    return lax.slice(h, [0] * h.ndim, h.shape, strides)


def factorise(lines: Sequence[Line], kernel: Any, structure: str | None, weight: Any) -> Factors:
    """K and T_a of a kernel [k…, g, m, m']."""
    for i, x in enumerate(lines):
        kernel = jnp.take(kernel, np.asarray(x.taps), axis=i)
    zero = (0,) * len(lines)
    factors = pivot.factorise(kernel[zero], structure, weight)
    m = kernel.shape[-2]
    if structure == "diagonal":
        inverse = jnp.eye(kernel.shape[-1], dtype=factors.inverse.dtype) / factors.inverse[..., None]
    else:
        inverse = factors.inverse
    # Structures that use only the first entries ignore the others.
    inverse = jnp.pad(inverse, ((0, 0), (0, 0), (0, m - inverse.shape[-1])))
    couplings = {}
    for taps in itertools.product(*(range(len(x.taps)) for x in lines)):
        if any(taps):
            shift = tuple(x.unit * t for x, t in zip(lines, taps, strict=True))
            coupled = kernel[taps].astype(inverse.dtype)
            couplings[shift] = jnp.matmul(inverse, coupled, precision=_HIGHEST)
    return Factors(factors, kernel[zero].astype(inverse.dtype), inverse, couplings)


# --- the grid ---------------------------------------------------------------------------------------


def _offset(x: Line, stagger: bool, place: Any) -> Any:
    """The position of window 0 in the first span."""
    if not stagger or not x.span:
        return 0
    return place % x.length


def _tiled(lines: Sequence[Line], stagger: bool, h: Any, place: Place) -> Any:
    """[N, n'…, g, m] as [N, tiles…, B…, g, m]; zero outside."""
    for i, x in enumerate(lines):
        offset = _offset(x, stagger, place[i])
        size = x.tiles(offset) * x.length
        if isinstance(offset, int):
            config = [(0, 0, 0)] * h.ndim
            config[1 + i] = (offset, size - offset - x.out, 0)
            h = lax.pad(h, jnp.zeros((), h.dtype), config)
        else:
            shape = (*h.shape[: 1 + i], size, *h.shape[2 + i :])
            h = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, h.dtype), h, offset, 1 + i)
    d = len(lines)
    split = [n for i, x in enumerate(lines) for n in (h.shape[1 + i] // x.length, x.length)]
    h = h.reshape((h.shape[0], *split, *h.shape[1 + d :]))
    order = [0, *range(1, 2 * d, 2), *range(2, 2 * d + 1, 2), 2 * d + 1, 2 * d + 2]
    return lax.transpose(h, order)


def _untiled(lines: Sequence[Line], stagger: bool, h: Any, place: Place) -> Any:
    """The way back."""
    d = len(lines)
    order = [0, *(a for i in range(d) for a in (1 + i, 1 + d + i)), 2 * d + 1, 2 * d + 2]
    h = lax.transpose(h, order)
    sizes = [h.shape[1 + 2 * i] * h.shape[2 + 2 * i] for i in range(d)]
    h = h.reshape((h.shape[0], *sizes, *h.shape[-2:]))
    for i, x in enumerate(lines):
        offset = _offset(x, stagger, place[i])
        cut = lax.slice_in_dim if isinstance(offset, int) else lax.dynamic_slice_in_dim
        h = cut(h, offset, offset + x.out if isinstance(offset, int) else x.out, axis=1 + i)
    return h


def pieces_of(lines: Sequence[Line], stagger: bool, h: Any, place: Place) -> Pieces:
    """What is kept of h' [N, n'…, g, m']."""
    leads = [
        lax.slice_in_dim(h, 0, x.lead if x.keeps_lead(stagger) else 0, axis=1 + i)
        for i, x in enumerate(lines)
    ]
    trails = [lax.slice_in_dim(h, x.out - x.trail, None, axis=1 + i) for i, x in enumerate(lines)]
    if len(lines) == 1:
        slices = [_tiled(lines, stagger, h, place)[:, :, : lines[0].reach]]
        return Pieces(slices, leads, trails)
    slices = []
    for i, x in enumerate(lines):
        kept, rest = _kept_windows(x, _offset(x, stagger, place[i]))
        slices.append(jnp.take(h, kept, axis=1 + i, mode="fill", fill_value=0))
        h = jnp.take(h, rest, axis=1 + i, mode="fill", fill_value=0)
    return Pieces(slices, leads, trails)


def _kept_windows(x: Line, offset: Any) -> tuple[Any, Any]:
    """Windows that are kept, and all others; padded with n' if the grid's offset is traced."""

    def are_kept(offset: Any) -> Any:
        return (np.arange(x.out) + offset) % x.length < x.reach

    if isinstance(offset, int):
        return np.flatnonzero(are_kept(offset)), np.flatnonzero(~are_kept(offset))
    counts = [int(are_kept(o).sum()) for o in range(x.length)]
    mask = are_kept(offset)
    (kept,) = jnp.nonzero(mask, size=max(counts), fill_value=x.out)
    (rest,) = jnp.nonzero(~mask, size=x.out - min(counts), fill_value=x.out)
    return kept, rest


def _known(lines: Sequence[Line], stagger: bool, slices: Sequence[Any], place: Place) -> Any:
    """h' where it was kept, and zeros elsewhere."""
    h = jnp.zeros(())
    for i in reversed(range(len(lines))):
        x, kept = lines[i], slices[i]
        at, rest = _kept_windows(x, _offset(x, stagger, place[i]))
        whole = jnp.zeros((*kept.shape[: 1 + i], x.out, *kept.shape[2 + i :]), kept.dtype)
        index = (slice(None),) * (1 + i)
        if h.ndim:
            whole = whole.at[(*index, rest)].set(h, mode="drop")
        h = whole.at[(*index, at)].set(kept, mode="drop")
    return h


# --- restoring --------------------------------------------------------------------------------------


def _own_rows(factors: Factors, h: Any, axes: int) -> Any:
    """K times the rows that windows [N, …, g, m'] would have had: h' + Σ_a T_a h'[· - a]."""
    h = h.astype(factors.inverse.dtype)
    return h + _coupled(factors.couplings, h, axes)


def _coupled(couplings: Mapping[tuple[int, ...], Any], h: Any, axes: int) -> Any:
    """Σ_a T_a h[· - a] over the axes before the last two."""
    total = jnp.zeros_like(h)
    for shift, t in couplings.items():
        earlier = h
        for i, by in enumerate(shift):
            earlier = windows.shifted(earlier, by, h.ndim - 2 - axes + i)
        total = total + jnp.einsum("...go,gpo->...gp", earlier, t, precision=_HIGHEST)
    return total


def solve(
    lines: Sequence[Line],
    stagger: bool,
    factors: Factors,
    rows: Any,
    pieces: Pieces,
    place: Place,
    precision: Any = _HIGHEST,
) -> Any:
    """h' [N, n'…, g, m'] from the rows of h and what was kept."""
    if len(lines) == 1 and 0 < lines[0].length - lines[0].reach <= PRODUCT * _PRODUCTS:
        return _by_product(lines[0], stagger, factors, rows, pieces, place, precision)
    right = jnp.einsum("...gi,goi->...go", rows, factors.inverse, precision=precision)
    for lead in pieces.leads:
        if lead.size:
            own = _own_rows(factors, lead, len(lines))
            right = lax.dynamic_update_slice(right, own, (0,) * right.ndim)
    tiles = _tiled(lines, stagger, right, place)
    if len(lines) == 1:
        found = _by_loop(lines[0], factors, tiles, pieces.slices[0])
    else:
        known = _known(lines, stagger, [a.astype(right.dtype) for a in pieces.slices], place)
        found = _by_wavefront(lines, factors, tiles, _tiled(lines, stagger, known, place))
    return _with_trails(lines, _untiled(lines, stagger, found, place), pieces.trails)


def _with_trails(lines: Sequence[Line], h: Any, trails: Sequence[Any]) -> Any:
    for i, (x, trail) in enumerate(zip(lines, trails, strict=True)):
        if trail.size:
            h = lax.dynamic_update_slice_in_dim(h, trail.astype(h.dtype), x.out - x.trail, 1 + i)
    return h


def _by_product(
    x: Line,
    stagger: bool,
    factors: Factors,
    rows: Any,
    pieces: Pieces,
    place: Place,
    precision: Any,
) -> Any:
    """(*) in one axis, some windows at a time: products with a matrix made from the weights."""
    (kept,), (lead,), (trail,) = pieces
    kept = kept.astype(rows.dtype)
    if lead.size:
        own = _own_rows(factors, lead, 1)
        own = jnp.einsum("...go,gio->...gi", own, factors.matrix, precision=_HIGHEST)
        rows = lax.concatenate([own, lax.slice_in_dim(rows, x.lead, None, axis=1)], 1)
    tiles = _tiled([x], stagger, rows, place)[:, :, x.reach :]
    g, m_out, m = factors.inverse.shape
    count = tiles.shape[2]
    each = -(-count // -(-count // PRODUCT))
    known, free = jnp.split(_operator(x, factors, each), [x.reach * m_out], axis=1)
    found = kept
    for first in range(0, count, each):
        size = min(each, count - first)  # the last may be fewer, as no window reads a later row
        before = found[:, :, first : first + x.reach]
        new = _flat_product(before, known[..., : size * m_out], precision)
        own = free[:, : size * m, : size * m_out]
        new = new + _flat_product(tiles[:, :, first : first + size], own, precision)
        new = jnp.moveaxis(new.reshape((*new.shape[:2], g, size, m_out)), 2, 3)
        found = lax.concatenate([found, new], 2)
    return _with_trails([x], _untiled([x], stagger, found, place), [trail])


def _flat_product(tiles: Any, matrix: Any, precision: Any) -> Any:
    """[N, tiles, t, g, c] by [g, t·c, o] is [N, tiles, g, o]."""
    n, s, t, g, c = tiles.shape
    flat = jnp.moveaxis(tiles, 3, 2).reshape((n, s, g, t * c))
    if g == 1:  # no batch in the product
        return jnp.matmul(flat[:, :, 0], matrix[0], precision=precision)[:, :, None]
    return jnp.einsum("nsgi,gio->nsgo", flat, matrix, precision=precision)


def _operator(x: Line, factors: Factors, count: int) -> Any:
    """The matrix [g, in, out] from R windows, and the rows of h of those that follow, to the latter."""
    g, m_out, m = factors.inverse.shape
    dtype = factors.inverse.dtype
    kept, size = x.reach * m_out, x.reach * m_out + count * m

    def placed(matrix: Any, row: int) -> Any:
        return jnp.zeros((g, size, m_out), dtype).at[:, row : row + matrix.shape[1]].set(matrix)

    unit = jnp.broadcast_to(jnp.eye(m_out, dtype=dtype), (g, m_out, m_out))
    found = [placed(unit, t * m_out) for t in range(x.reach)]
    inverse = jnp.swapaxes(factors.inverse, -1, -2)
    for t in range(count):
        new = placed(inverse, kept + t * m)
        for (shift,), coupling in factors.couplings.items():
            earlier = found[x.reach + t - shift]
            new = new - jnp.einsum("gio,gpo->gip", earlier, coupling, precision=_HIGHEST)
        found.append(new)
    return jnp.concatenate(found[x.reach :], axis=-1)


def _by_loop(x: Line, factors: Factors, right: Any, kept: Any) -> Any:
    """(*) in one axis: right is [N, tiles, B, g, m'], a loop over the B-R windows of all spans."""
    if not x.reach:
        return right
    kept = kept.astype(right.dtype)
    history = jnp.flip(jnp.moveaxis(kept, 2, 0), 0)  # the last window first

    def step(history: Any, right: Any) -> tuple[Any, Any]:
        for (shift,), t in factors.couplings.items():
            earlier = history[shift - 1]
            right = right - jnp.einsum("...go,gpo->...gp", earlier, t, precision=_HIGHEST)
        return jnp.concatenate([right[None], history[:-1]]), right

    _, found = lax.scan(step, history, jnp.moveaxis(right[:, :, x.reach :], 2, 0))
    return jnp.concatenate([kept, jnp.moveaxis(found, 0, 2)], axis=2)


def _by_wavefront(lines: Sequence[Line], factors: Factors, right: Any, known: Any) -> Any:
    """(*) in several axes: right and known are [N, tiles…, B…, g, m'], known zero where it is not."""
    d = len(lines)
    right = right - _coupled(factors.couplings, known, d)
    for i, x in enumerate(lines):
        right = lax.slice_in_dim(right, x.reach, None, axis=1 + d + i)
    outer, inner = right.shape[: 1 + d], right.shape[1 + d :]
    plan = windows.Plan(tuple(_inner_axis(x) for x in lines))
    couplings = {a: factors.couplings[a] for a in plan.shifts}
    flat = right.reshape((-1, *inner))
    found = windows.eliminate(plan, flat, couplings) if couplings else flat
    reaches = [(x.reach, 0) for x in lines]
    inside = jnp.pad(found.reshape((*outer, *inner)), [*[(0, 0)] * (1 + d), *reaches, (0, 0), (0, 0)])
    return known + inside


def _inner_axis(x: Line) -> AxisPlan:
    """The windows of a span that are restored, as an axis of their own."""
    out = x.length - x.reach
    axis = Axis(size=out, out=out, taps=len(x.taps), stride=1, low=0, dilation=x.unit)
    return AxisPlan(axis, (0,), 1 if axis.meeting(0) else 0)


# --- the growth of error ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def growth(
    lines: tuple[Line, ...], stagger: bool, structure: str | None, slope: float, kernel: Any
) -> Any:
    """How large relative error becomes over layers like this one, if rounding adds 1 in every step.

    Cotangents and noise are taken to be white. A layer's h is larger than its h' by a factor `signal`,
    so noise of unit relative size in h becomes noise in h' of size `signal` × that of K and the T_a.
    """
    lines = tuple(x.shortened(min(x.out, 4 * x.length, 32 * x.reach or 8)) for x in lines)
    factors = factorise(lines, kernel, structure, kernel)
    g, m_out, m = factors.inverse.shape
    shape = (2, *(x.out for x in lines), g)
    keys = iter(jax.random.split(jax.random.key(0), 3))

    def noise(key: Any, channels: int) -> Any:
        return jax.random.normal(key, (*shape, channels), factors.inverse.dtype)

    def size(h: Any) -> Any:
        return jnp.sqrt(jnp.mean(h**2))

    white = noise(next(keys), m_out)
    own = _own_rows(factors, white, len(lines))
    signal = size(jnp.einsum("...go,gio->...gi", own, factors.matrix, precision=_HIGHEST)) / size(white)
    zero = tuple(jnp.int32(0) for _ in lines)  # traced: the layers' grids differ
    nothing = jax.tree.map(jnp.zeros_like, pieces_of(lines, stagger, white, zero))
    moves = [x.moves if stagger else 0 for x in lines]

    def layer(carry: Any, key: Any) -> tuple[Any, Any]:
        error, place = carry
        first, second, third = jax.random.split(key, 3)
        rows = error
        for i, x in enumerate(lines):  # the row of window u lies first + u after the start
            rows = windows.shifted(rows, max(0, -x.first), 1 + i)
        new = signal * solve(lines, stagger, factors, rows, nothing, place) + noise(first, m_out)
        derivative = jnp.where(jax.random.bernoulli(second, shape=new.shape), 1, slope).astype(new.dtype)
        after = new / derivative * size(derivative)
        # If channels become fewer, such layers cannot be chained, so noise fills the missing ones.
        error = noise(third, m).at[..., :m_out].add(after)
        place = tuple(a + b for a, b in zip(place, moves, strict=True))
        return (error, place), jnp.maximum(size(new), size(after))

    # Staggered, an error lives (B - R) / R layers; on a grid at rest, B - R.
    lives = [-(-(x.length - x.reach) // (x.reach if stagger else 1)) for x in lines if x.reach]
    layers = 2 + min(32, max(lives, default=1))
    start = noise(next(keys), m), zero
    _, sizes = lax.scan(layer, start, jax.random.split(next(keys), layers))
    return jnp.max(jnp.where(jnp.isfinite(sizes), sizes, jnp.inf))
