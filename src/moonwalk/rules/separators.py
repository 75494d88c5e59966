"""Convolutions whose centre tap dominates: keep a slice of every span, or nothing; restore the others.

Along one axis with stride 1, k = 2b+1 taps and padding b on both sides, every window has the row of its
centre tap inside the input,

    h[i] = W_b h'[i] + Σ_{0<a≤b} (W_{b+a} h'[i-a] + W_{b-a} h'[i+a]),                               (*)

and windows beyond the ends are zero. In blocks of b windows (*) is block-tridiagonal and Toeplitz:

    h_t = L h'_{t-1} + D h'_t + U h'_{t+1}.

There are as many equations as unknowns. Where the centre tap dominates they are well conditioned, and
nothing need be kept. `spans` uses the same equations from window to window, by their outermost tap. That
is stable if the roots z of det Σ_j W_j z^j all lie on one side of the unit circle, whereas (*) asks for
one half of them on either side: over long spans, a kernel is good for one of the two, or for neither.

**Separators.** If the first block of every span is kept, (*) splits into systems of B-b windows, each
between two known blocks. These are better conditioned than the whole, and only half of what `spans`
keeps for the same B is kept.

**Cyclic reduction.** Blocks 0, 2, 4, … meet odd ones only. With z_t = D⁻¹ h_t for even t,

    odd t:    h_t - L z_{t-1} - U z_{t+1} = L' h'_{t-2} + D' h'_t + U' h'_{t+2},
              L' = -L D⁻¹ L,   D' = D - L D⁻¹ U - U D⁻¹ L,   U' = -U D⁻¹ U,
    even t:   h'_t = z_t - D⁻¹ L h'_{t-1} - D⁻¹ U h'_{t+1},

which leaves half the blocks, and a system of the same kind. The products of all levels take 5b m² per
window, where the convolution takes (2b+1) m². Each level has five matrices of (bm)²; an inverse of (*)
over a span of B windows would have (Bm)².

**Ends.** Since block 0 is eliminated, the first remaining block has two eliminated neighbours like all
others. The last one may not, so the last block has its own (L, D, U). If the axis ends inside the last
block, that is filled up with windows that are held at zero. All of this is exact, for every length.

**Error** compounds from layer to layer, because little is exact for it to die at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from ..trace.graph import Block
from . import pivot
from .fragments import Ask, FragmentRule, Place
from .kernels import Geometry, canonical, geometry_of
from .registry import Alarm, Gain, State

_HIGHEST = lax.Precision.HIGHEST

# Gains that compound ask for an anchor, a whole cotangent, every log(limit) / log(gain) layers; gain is
# that of a layer with its activation. So a share of 1/times + log(gain) / log(limit) is kept per layer.
# Plans take the first way that is exact enough, and must not meet these before spans that keep less. Up
# to a quarter they do not: of 114 such kernels none had stable spans beyond four times their reach, and
# 61 had no stable span at all. Other separators come after all spans, the shortest of which keep half.
_LIMIT = 84.0  # how far error may grow in float32, by default (docs/numerics.md §8)
_QUARTER, _HALF = 1 / 4, 1 / 2
_LONG = (0, 32, 16, 8)  # spans to try, in blocks; 0: the whole axis is one, and nothing is kept
_SHORT = (8, 4)

# Each layer rounds again, by f ≈ 2 eps, so over K layers error is f gain^K · gain / (gain - 1). Plans
# reckon with eps gain^K and a margin of 10. For gains from 1.05 to 2, this much more makes up for it.
_ANEW = 0.1

# A known cotangent must come back, up to rounding: there is no pivoting between blocks.
_ROUNDING = 64


def candidates(block: Block, ask: Ask) -> Iterator[FragmentRule]:
    """Separators that keep less than spans can, those that keep least first."""
    return _ways(block, ask, _LONG, _QUARTER)


def short_ways(block: Block, ask: Ask) -> Iterator[FragmentRule]:
    """Separators that keep no more than the shortest spans do."""
    return _ways(block, ask, _SHORT, _HALF)


def _ways(block: Block, ask: Ask, lengths: Sequence[int], budget: float) -> Iterator[FragmentRule]:
    geometry = geometry_of(block)
    if ask.requested is not None or not _is_centred(geometry):
        return
    blocks = -(-geometry.axes[0].out // _half(geometry))
    for times in lengths:
        if times < blocks:
            yield Separators(times, budget, ask.slope)


def _is_centred(geometry: Geometry) -> bool:
    """Whether (*) holds: one axis, and as many windows and channels as before."""
    if len(geometry.axes) != 1 or geometry.m != geometry.m_out:
        return False
    (x,) = geometry.axes
    same = x.out == x.size > 0 and 2 * x.low + 1 == x.taps
    return same and x.taps > 1 and x.stride == 1 and x.dilation == 1


def _half(geometry: Geometry) -> int:
    """b."""
    return geometry.axes[0].taps // 2


class Level(NamedTuple):
    """The matrices of one level of reduction, all [g, bm, bm]."""

    inverse: Any  # D⁻¹
    lower: Any  # L
    upper: Any  # U
    left: Any  # D⁻¹ L
    right: Any  # D⁻¹ U


Triple = tuple[Any, Any, Any]  # (L, D, U)
NOTHING = Level(None, None, None, None, None)


class Reduction(NamedTuple):
    """The levels of a system, and those of its last block."""

    levels: list[Level]
    lasts: list[Level]


class Factors(NamedTuple):
    """Factors for the whole spans, and for a shorter one at the end of the axis."""

    spans: Reduction | None
    rest: Reduction | None
    ends: tuple[Any, Any]  # L and U: through which kept blocks appear
    quality: pivot.Factors


@dataclass(frozen=True)
class Grid:
    """The windows of an axis in blocks, and the blocks in spans."""

    out: int  # n'
    half: int  # b
    times: int  # blocks in a span; 0: no spans

    @property
    def blocks(self) -> int:
        return -(-self.out // self.half)

    @property
    def filled(self) -> int:
        """The number of windows that the last block lacks."""
        return self.blocks * self.half - self.out

    @property
    def spans(self) -> int:
        """The number of whole spans."""
        return self.out // (self.times * self.half) if self.times else 0

    @property
    def rest(self) -> int:
        """The number of blocks to restore after the whole spans."""
        return max(0, self.blocks - self.spans * self.times - 1) if self.times else self.blocks


@dataclass(frozen=True)
class Separators(FragmentRule):
    """The first block of every span, or nothing, and (*) for the others."""

    name = "separators"
    blind = False  # without a dominant centre it is useless
    times: int  # blocks in a span; 0: no spans
    budget: float = _HALF  # the share of cotangents that it may cost, anchors included
    slope: float = 1.0

    @property
    def label(self) -> str:
        return f"separators every {self.times} blocks, for {self.budget:.0%}"

    def describe(self, block: Block) -> str:
        grid = self._grid(block)
        if not self.times:
            return f"its centre tap dominates: cyclic reduction of the whole axis, {grid.out} windows"
        return (
            f"{grid.half} {'slice' if grid.half == 1 else 'slices'} of every span of "
            f"{grid.half * self.times}; its centre tap dominates: cyclic reduction between them"
        )

    def _grid(self, block: Block) -> Grid:
        geometry = geometry_of(block)
        return Grid(geometry.axes[0].out, _half(geometry), self.times)

    def prepare(self, block: Block, operands: Sequence[Any]) -> Factors:
        w = operands[block.operands.index(block.eqn.invars[1])]
        return factorise(self._grid(block), canonical(geometry_of(block), w), w)

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        del factors, kept, place
        if not self.times:
            return ()
        geometry = geometry_of(block)
        blocks = _blocked(self._grid(block), _channels_last(geometry, geometry.numbers.out_spec, h[0]))
        return lax.slice_in_dim(blocks, 0, None, self.times, axis=1)

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        del kept, place
        geometry, grid = geometry_of(block), self._grid(block)
        rows = _channels_last(geometry, geometry.numbers.lhs_spec, h[0])
        rows = _blocked(grid, rows.astype(factors.quality.inverse.dtype))
        found = solve(grid, factors, rows, fragment)
        found = _unblocked(grid, found)
        batch, feature, *spatial = geometry.numbers.out_spec
        found = found.reshape((*found.shape[:2], geometry.groups * geometry.m_out))
        found = lax.transpose(found, [int(i) for i in np.argsort((batch, *spatial, feature))])
        return (found.astype(block.outputs[0].aval.dtype),)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        if operands is None:
            return Gain.unknown()
        w = operands[block.operands.index(block.eqn.invars[1])]
        kernel = _jax.gathered(canonical(geometry_of(block), w))
        kernel = kernel.astype(_jax.working_dtype(kernel.dtype))
        # Where the centre tap alone is worse, there is no need to look further.
        most = self._largest_gain()
        if not float(_centre_gain(kernel)) <= most:
            return Gain.unknown()
        # All of a long axis, since an error that grows along it may be small at first.
        count = self.times - 1 if self.times else self._grid(block).blocks
        found, error = measure(count, kernel)
        factor = max(1.0, found) + _ANEW
        if not (factor <= most and error <= _ROUNDING * factor * float(jnp.finfo(kernel.dtype).eps)):
            return Gain.unknown()
        return Gain(factor, mixes=True)

    def _largest_gain(self) -> float:
        """The largest gain within the budget, not counting that of the activation."""
        share = 1 / self.times if self.times else 0.0
        between = (1 + self.slope**2) / (2 * self.slope) if self.slope > 0 else math.inf
        return _LIMIT ** (self.budget - share) / between

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        return self.alarms(block, self.prepare(block, operands), None)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        del kept
        w = block.eqn.invars[1]
        what = f"the kernel {block.name(w)}, reduced around its centre tap"
        return pivot.alarms(factors.quality, None, w.aval.dtype, what)


# --- layout -----------------------------------------------------------------------------------------


def _channels_last(geometry: Geometry, spec: Sequence[int], h: Any) -> Any:
    """[N, n, g, m]."""
    batch, feature, *spatial = spec
    h = lax.transpose(h, (batch, *spatial, feature))
    return h.reshape((*h.shape[:2], geometry.groups, h.shape[2] // geometry.groups))


def _blocked(grid: Grid, h: Any) -> Any:
    """[N, n, g, m] as [N, blocks, g, bm], zero after the end."""
    h = jnp.pad(h, ((0, 0), (0, grid.filled), (0, 0), (0, 0)))
    n, _, g, m = h.shape
    h = jnp.moveaxis(h.reshape((n, grid.blocks, grid.half, g, m)), 2, 3)
    return h.reshape((n, grid.blocks, g, grid.half * m))


def _unblocked(grid: Grid, h: Any) -> Any:
    """The way back."""
    n, _, g, c = h.shape
    h = jnp.moveaxis(h.reshape((n, grid.blocks, g, grid.half, c // grid.half)), 3, 2)
    h = h.reshape((n, grid.blocks * grid.half, g, c // grid.half))
    return lax.slice_in_dim(h, 0, grid.out, axis=1)


# --- factors ----------------------------------------------------------------------------------------


def factorise(grid: Grid, kernel: Any, weight: Any) -> Factors:
    """All levels, of a kernel [k, g, m, m]."""
    kernel = _jax.gathered(kernel)
    kernel = kernel.astype(_jax.working_dtype(kernel.dtype))
    lower, centre, upper = blocks_of(kernel)
    quality: list[pivot.Factors] = []

    def inverted(matrix: Any) -> Any:
        quality.append(pivot.factorise(matrix, None, weight))
        return quality[-1].inverse

    inside = (lower, centre, upper)
    spans = rest = None
    if grid.spans:
        spans = _reduce(inside, None, grid.times - 1, inverted)
    if grid.rest:
        last = _cut(inside, _real(grid, lower.shape[-1])) if grid.filled else None
        rest = _reduce(inside, last, grid.rest, inverted)
    whole = quality[0]._replace(singular=jnp.concatenate([q.singular for q in quality], -1))
    return Factors(spans, rest, (lower, upper), whole)


def blocks_of(kernel: Any) -> Triple:
    """L, D and U [g, bm, bm] of a kernel [2b+1, g, m, m]: window c of block s is in row r by one tap."""
    taps, g, m, _ = kernel.shape
    half = taps // 2
    r, c = np.indices((half, half))
    padded = jnp.pad(kernel, ((0, 1), (0, 0), (0, 0), (0, 0)))  # one tap more, for those that are not

    def block(s: int) -> Any:
        tap = half + r - c - half * s
        chosen = jnp.take(padded, np.where((tap >= 0) & (tap < taps), tap, taps), axis=0)
        return jnp.transpose(chosen, (2, 0, 3, 1, 4)).reshape((g, half * m, half * m))

    return block(-1), block(0), block(1)


def _real(grid: Grid, size: int) -> int:
    """How many entries of the last block, of so many, lie before the end."""
    return size - grid.filled * (size // grid.half)


def _cut(inside: Triple, entries: int) -> Triple:
    """(L, D, U) of a block of so many entries before the end; after it, h' = 0."""
    lower, centre, upper = inside
    size = centre.shape[-1]
    real = np.arange(size) < entries
    centre = jnp.where(real[:, None] & real, centre, jnp.eye(size, dtype=centre.dtype))
    return jnp.where(real[:, None], lower, 0), centre, jnp.where(real, upper, 0)


def _reduce(
    inside: Triple, last: Triple | None, count: int, inverted: Callable[[Any], Any]
) -> Reduction:
    """The levels of `count` blocks. `last`: of the last one, where it is not like the others.

    Its L is that in its own row, its U that by which it appears in the row before.
    """
    levels: list[Level] = []
    lasts: list[Level] = []
    its = last or inside
    while count > 1:
        (lower, centre, upper), (its_lower, its_centre, its_upper) = inside, its
        inverse = inverted(centre)
        left, right = _mul(inverse, lower), _mul(inverse, upper)
        levels.append(Level(inverse, lower, upper, left, right))
        own = NOTHING
        after_lower, after_upper = -_mul(lower, left), -_mul(upper, right)
        without = centre - _mul(lower, right)  # D where only the block before has gone
        inside = after_lower, without - _mul(upper, left), after_upper
        if count % 2 == 0:
            # The last block stays, with no neighbour after it.
            if its_lower is lower:
                its = after_lower, its_centre - _mul(lower, right), after_upper
            else:
                its_right = _mul(inverse, its_upper)
                own = NOTHING._replace(lower=its_lower, right=its_right)
                its = (
                    -_mul(its_lower, left),
                    its_centre - _mul(its_lower, its_right),
                    -_mul(upper, its_right),
                )
        elif its_centre is centre:
            its = inside
        else:
            # The last block goes. Of those that stay, the last had it for a neighbour.
            its_inverse = inverted(its_centre)
            its_left = _mul(its_inverse, its_lower)
            own = NOTHING._replace(inverse=its_inverse, upper=its_upper, left=its_left)
            its = after_lower, without - _mul(its_upper, its_left), after_upper
        lasts.append(own)
        count //= 2
    levels.append(NOTHING._replace(inverse=inverted(its[1])))
    return Reduction(levels, [*lasts, NOTHING])


def _mul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=_HIGHEST)


# --- restoring --------------------------------------------------------------------------------------


def solve(grid: Grid, factors: Factors, rows: Any, kept: Any) -> Any:
    """h' in blocks, from rows in blocks [N, blocks, g, bm] and those that were kept."""
    if not grid.times:
        assert factors.rest is not None
        return substitute(factors.rest, rows)
    kept = kept.astype(rows.dtype)
    whole = grid.spans * grid.times
    found = []
    if factors.spans is not None:
        found.append(_whole_spans(grid, factors, rows[:, :whole], kept))
    if grid.blocks > whole:
        found.append(kept[:, grid.spans :])
    if factors.rest is not None:
        right = rows[:, whole + 1 :]
        right = right - _padded(_product(kept[:, grid.spans :], factors.ends[0]), 0, right)
        right = right.at[:, -1, :, _real(grid, right.shape[-1]) :].set(0)
        found.append(substitute(factors.rest, right))
    return lax.concatenate(found, 1)


def _whole_spans(grid: Grid, factors: Factors, rows: Any, kept: Any) -> Any:
    """The blocks of all whole spans."""
    assert factors.spans is not None
    shape = (rows.shape[0], grid.spans, grid.times, *rows.shape[2:])
    right = rows.reshape(shape)[:, :, 1:]
    # After the end of the axis h' is zero.
    kept = jnp.pad(kept, ((0, 0), (0, 1), (0, 0), (0, 0)))[:, : grid.spans + 1, None]
    before, after = (
        _product(a, w) for a, w in zip((kept[:, :-1], kept[:, 1:]), factors.ends, strict=True)
    )
    right = right - _padded(before, 0, right) - _padded(after, grid.times - 2, right)
    found = lax.concatenate([kept[:, :-1], substitute(factors.spans, right)], 2)
    return found.reshape(rows.shape)


def substitute(reduction: Reduction, rows: Any, depth: int = 0) -> Any:
    """h' [..., blocks, g, bm] from its rows; before the first block and after the last it is zero."""
    level, last = reduction.levels[depth], reduction.lasts[depth]
    axis, count = rows.ndim - 3, rows.shape[-3]
    if count == 1:
        return _product(rows, level.inverse)
    z = _applied(rows[..., ::2, :, :], level.inverse, last.inverse)
    odd = rows[..., 1::2, :, :]
    odd = odd - _applied(z[..., : count // 2, :, :], level.lower, last.lower)
    odd = odd - _padded(_applied(z[..., 1:, :, :], level.upper, last.upper), 0, odd)
    odd = substitute(reduction, odd, depth + 1)
    before = odd[..., : z.shape[axis] - 1, :, :]
    even = z - _padded(_applied(before, level.left, last.left), 1, z)
    even = even - _padded(_applied(odd, level.right, last.right), 0, z)
    pairs = jnp.stack([even[..., : count // 2, :, :], odd], axis + 1)
    pairs = pairs.reshape((*rows.shape[:axis], 2 * (count // 2), *rows.shape[axis + 1 :]))
    return pairs if count % 2 == 0 else lax.concatenate([pairs, even[..., -1:, :, :]], axis)


def _applied(blocks: Any, matrix: Any, last: Any) -> Any:
    """A matrix times all blocks, or another one times the last block, if there is one."""
    if last is None or not blocks.shape[-3]:
        return _product(blocks, matrix)
    parts = _product(blocks[..., :-1, :, :], matrix), _product(blocks[..., -1:, :, :], last)
    return lax.concatenate(parts, blocks.ndim - 3)


def _product(blocks: Any, matrix: Any) -> Any:
    """[..., g, i] by [g, o, i]."""
    if matrix.shape[0] == 1:  # no batch in the product
        return jnp.matmul(blocks, jnp.swapaxes(matrix[0], 0, 1), precision=_HIGHEST)
    return jnp.einsum("...gi,goi->...go", blocks, matrix, precision=_HIGHEST)


def _padded(blocks: Any, before: int, like: Any) -> Any:
    """Padded with zero blocks before and after to the length of another array."""
    after = like.shape[-3] - blocks.shape[-3] - before
    config = [(0, 0)] * (blocks.ndim - 3) + [(before, after), (0, 0), (0, 0)]
    return jnp.pad(blocks, config)


# --- error ------------------------------------------------------------------------------------------


def _signal(kernel: Any) -> Any:
    """The factor by which (*) enlarges white noise, in each group."""
    return jnp.sqrt(jnp.sum(kernel**2, (0, 2, 3)) / kernel.shape[-1])


@jax.jit
def _centre_gain(kernel: Any) -> Any:
    """The gain if A had only the centre tap."""
    inverse = jnp.linalg.inv(kernel[kernel.shape[0] // 2])
    return jnp.max(_signal(kernel) * jnp.sqrt(jnp.sum(inverse**2, (1, 2)) / kernel.shape[-1]))


def measure(count: int, kernel: Any) -> tuple[float, float]:
    """(gain, error) of so many blocks: rms ‖A v‖ · rms ‖A⁻¹ u‖, and that of A⁻¹ A v - v."""
    taps, g, m, _ = kernel.shape
    entries = taps // 2 * m
    shape = (2, max(1, -(-4096 // (count * entries))), count, g, entries)
    white = np.random.default_rng(0).standard_normal(shape, np.float32)
    found, error = _measure(kernel, white.astype(kernel.dtype))
    return float(found), float(error)


@jax.jit
def _measure(kernel: Any, white: Any) -> tuple[Any, Any]:
    inside = lower, centre, upper = blocks_of(kernel)
    v, noise = white
    count = v.shape[1]
    reduction = _reduce(inside, None, count, lambda a: pivot.factorise(a, None, kernel).inverse)
    rows = _product(v, centre) + _padded(_product(v[:, :-1], lower), 1, v)
    rows = rows + _padded(_product(v[:, 1:], upper), 0, v)
    back, grown = substitute(reduction, jnp.stack([rows, noise]))
    size = jnp.sqrt(jnp.mean(grown**2, (0, 1, 3)))
    return jnp.max(_signal(kernel) * size), jnp.sqrt(jnp.mean((back - v) ** 2))
