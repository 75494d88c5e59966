"""Blocks that move entries: every output entry is one input entry, and none is used twice.

Such a Jacobian selects: J has one 1 per row and at most one per column, so J Jᵀ = I and

    h' = J h,

the vijp **is** the jvp, and its gain is 1. `reshape`, `transpose`, `slice`, `sort`, a pair of strided
slices, a concatenation of independent parts are all of this kind. What repeats entries (a circular
pad, a tile) or makes them from nothing (a zero pad) is not submersive. A walk passes it with a fragment:
h' at entries made from nothing, and at all copies of an entry except one, whose h' is what the others
leave of h.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..trace.graph import Block
from ..trace.partition import MOVING
from .fragments import FragmentRule, Place
from .registry import (
    Gain,
    Rule,
    State,
    Verdict,
    cast_like_outputs,
    pushforward,
    register_region,
    register_vijp,
)

_KEEP = "keep this cotangent instead of recovering it, or leave the step out"


class Selection(Rule):
    """J Jᵀ = I: h' = J h."""

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors
        return cast_like_outputs(block, pushforward(block, kept, h))

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=False)


def _repeated(eqn: JaxprEqn) -> bool:
    """Whether one variable is read twice by the equation."""
    variables = [v for v in eqn.invars if not isinstance(v, Literal)]
    return len(set(variables)) < len(variables)


@register_vijp(
    lax.reshape_p,
    lax.transpose_p,
    lax.rev_p,
    lax.squeeze_p,
    lax.slice_p,
    lax.split_p,
    lax.dynamic_slice_p,
    lax.device_put_p,
    lax.optimization_barrier_p,
    *_jax.PLACING,
    lax.unstack_p,
)
class Rearrangement(Selection):
    """A permutation, or a choice of distinct entries, whatever the parameters."""

    name = "rearrangement"

    def verdict(self, block: Block) -> Verdict:
        del block
        return Verdict(True, "selects distinct entries")


@register_vijp(lax.sort_p, lax.top_k_p)
class Sorting(Selection):
    """A permutation that depends on the values (GroupSort); ties as JAX's own derivative has them."""

    name = "sorting"

    def verdict(self, block: Block) -> Verdict:
        if len(block.inputs) != len(block.outputs):
            return Verdict(None, "only some of the sorted arrays carry a derivative", _KEEP)
        return Verdict(True, "permutes entries")


@register_vijp(
    lax.broadcast_in_dim_p,
    lax.tile_p,
    *({_jax.pvary_p} - {None}),
)
class Broadcast(Selection):
    """Only new axes of length one: any other broadcast repeats entries, in the array or over devices."""

    name = "broadcast"

    def verdict(self, block: Block) -> Verdict:
        if block.eqn.primitive is _jax.pvary_p:
            axes = ", ".join(map(repr, block.eqn.params["axes"]))
            return Verdict(
                False,
                f"all devices along the mesh axis {axes} read the same state: the cotangents of its "
                "copies add up and cannot be told apart",
                "divide the state over that axis, or keep this cotangent instead of recovering it",
            )
        n, n_out = block.sizes
        if n == n_out:
            return Verdict(True, "adds nothing but axes of length one")
        return Verdict(
            False,
            f"it repeats entries ({n} become {n_out}): the cotangents of the copies add up and "
            "cannot be told apart",
            _KEEP,
        )


def _padding(block: Block) -> tuple[tuple[int, ...], ...]:
    """(low, high, interior) of each axis."""
    return tuple(tuple(int(n) for n in axis) for axis in block.eqn.params["padding_config"])


@register_vijp(lax.pad_p)
class Pad(Selection):
    """Negative padding crops; positive padding makes entries from nothing."""

    name = "pad"

    def verdict(self, block: Block) -> Verdict:
        config = _padding(block)
        if len(block.inputs) > 1 or block.eqn.invars[1] in block.inputs:
            return Verdict(None, "the padding value depends on the state", _KEEP)
        if all(low <= 0 and high <= 0 and interior == 0 for low, high, interior in config):
            return Verdict(True, "crops")
        return Verdict(
            False,
            f"padding {config} adds entries that do not depend on the input: their cotangents are lost",
            "give the padding to the convolution itself, which may be submersive with it",
        )

    def fragmented(self, block: Block, ask: Any) -> Iterator[FragmentRule]:
        spread = any(interior for *_, interior in _padding(block))
        if self.verdict(block).submersive is False and not spread:
            yield Border()


@dataclass(frozen=True)
class Border(FragmentRule):
    """A pad (a shift is one, too): keeps h' on what it adds.

    Along an axis of n entries, y[j] = x[j - low] for `start` ≤ j < `stop`. The border is cut into
    strips, a low and a high one per axis, with all earlier axes cropped to start…stop, so that no corner
    is in two strips.
    """

    name = "border"

    def describe(self, block: Block) -> str:
        added = tuple((low, high) for low, high, _ in _padding(block))
        return f"pads by {added}: the border leaves no trace"

    def _spans(self, block: Block) -> list[tuple[int, int]]:
        """(start, stop) of what comes from the input, along each axis of the output."""
        sizes = zip(
            block.inputs[0].aval.shape, block.outputs[0].aval.shape, _padding(block), strict=True
        )
        return [
            (min(max(low, 0), new), min(max(old + low, max(low, 0)), new))
            for old, new, (low, *_) in sizes
        ]

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        (rest,), strips = h, []
        for axis, (start, stop) in enumerate(self._spans(block)):
            strips.append(_cut(rest, axis, 0, start, stop, rest.shape[axis]))
            rest = lax.slice_in_dim(rest, start, stop, axis=axis)
        return strips

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        (whole,) = h
        pairs = zip(self._spans(block), _padding(block), strict=True)
        for axis, ((start, stop), (low, *_)) in enumerate(pairs):
            first, last = (min(max(end - low, 0), whole.shape[axis]) for end in (start, stop))
            whole = lax.slice_in_dim(whole, first, last, axis=axis)
        for axis, (below, above) in reversed(list(enumerate(fragment))):
            whole = _joined([below, whole, above], axis)
        return cast_like_outputs(block, (whole,))

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=False)


def _cut(h: Any, axis: int, *ends: int) -> list[Any]:
    """Slices along an axis between pairs of ends; None for empty ones."""
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return [lax.slice_in_dim(h, a, b, axis=axis) if a < b else None for a, b in pairs]


def _joined(parts: Sequence[Any], axis: int) -> Any:
    """The arrays that are not None, side by side."""
    return lax.concatenate([p for p in parts if p is not None], axis)


@register_vijp(lax.concatenate_p, lax.stack_p)
class Concatenation(Selection):
    """Independent parts side by side."""

    name = "concatenation"

    def verdict(self, block: Block) -> Verdict:
        eqn = block.eqn
        if _repeated(eqn):
            return Verdict(False, "a part occurs twice: the cotangents of the copies add up", _KEEP)
        if any(v not in block.inputs for v in eqn.invars if not isinstance(v, Literal)) or any(
            isinstance(v, Literal) for v in eqn.invars
        ):
            return Verdict(
                False,
                "a part does not depend on the state: its cotangent is lost",
                "return the parts separately, or " + _KEEP,
            )
        return Verdict(True, "joins independent parts")

    def fragmented(self, block: Block, ask: Any) -> Iterator[FragmentRule]:
        yield from _copies(block)


@register_vijp(lax.dynamic_update_slice_p)
class Update(Selection):
    """One state written over part of another."""

    name = "update"

    def verdict(self, block: Block) -> Verdict:
        operand, update = block.eqn.invars[:2]
        if operand is update or operand not in block.inputs or update not in block.inputs:
            return Verdict(
                False,
                "only one of the two arrays depends on the state: the other's cotangent is lost",
                _KEEP,
            )
        return Verdict(True, "joins independent parts")


@register_vijp(lax.gather_p)
class Gather(Selection):
    """Indexing with static indices that select: each entry at most once."""

    name = "gather"

    def verdict(self, block: Block) -> Verdict:
        eqn = block.eqn
        indices = eqn.invars[1]
        if indices in block.inputs:
            return Verdict(None, "the indices carry a derivative", _KEEP)
        in_bounds = eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
        indexed = eqn.params["dimension_numbers"].start_index_map
        single = all(eqn.params["slice_sizes"][a] == 1 for a in indexed)
        if eqn.params["unique_indices"] and in_bounds and single:
            return Verdict(True, "selects distinct entries (promised by unique_indices)")
        known = block.constant(indices)
        if known is None:
            return Verdict(
                None,
                "the indices are not known while tracing, and an index that occurs twice would lose "
                "a cotangent",
                "use static (NumPy) indices, or promise with "
                "x.at[...].get(unique_indices=True, mode='promise_in_bounds')",
            )
        return _judge_indices(block, [known if v is indices else None for v in block.operands])


@register_region
class SelectionRegion(Selection):
    """Several structural equations that share a state: together they may still select."""

    name = "selection region"

    def matches(self, block: Block) -> bool:
        return len(block.eqns) > 1 and all(e.primitive in MOVING for e in block.eqns)

    def verdict(self, block: Block) -> Verdict:
        n, n_out = block.sizes
        if n_out > n:
            return Verdict(
                False,
                f"it repeats entries ({n} become {n_out}): the cotangents of the copies add up and "
                "cannot be told apart",
                _KEEP,
            )
        if all(e.primitive is lax.slice_p and e.invars[0] in block.inputs for e in block.eqns):
            if overlap := _overlapping(block.eqns):
                return Verdict(
                    False,
                    "two slices of one array overlap: their cotangents add up",
                    _KEEP,
                    overlap,
                )
            return Verdict(True, "slices one array into disjoint parts")
        known = [block.constant(v) for v in block.operands]
        if any(k is None for k in known):
            return Verdict(None, "its indices are not known while tracing", "use static indices")
        return _judge_indices(block, known)

    def fragmented(self, block: Block, ask: Any) -> Iterator[FragmentRule]:
        yield from _copies(block)


# --- entries that are repeated, or made from nothing, along one axis ---------------------------------


class Run(NamedTuple):
    """Neighbours in the output that are neighbours in the input, along one axis."""

    start: int
    length: int
    source: int  # input index of the first entry; negative: not from an input
    kept: bool  # whether h' is kept here


@dataclass(frozen=True)
class Copies(FragmentRule):
    """Slices and concatenations along one axis, repeating entries or adding constants.

    y[j] = x[t(j)], or a constant. Of the j with equal t(j) one is free; h' is kept at the others, and at
    constants:

        h[i] = Σ_{j: t(j) = i} h'[j]    ⇒    h'[free j] = h[t(j)] - Σ_{kept j': t(j') = t(j)} h'[j'].

    For a circular pad that keeps the two borders; for a class token before a sequence, one position.
    """

    axis: int
    runs: tuple[Run, ...]

    name = "copies"

    @property
    def has_difference(self) -> bool:
        return any(r.kept and r.source >= 0 for r in self.runs)

    def describe(self, block: Block) -> str:
        kinds = ["copies"] if self.has_difference else []
        kinds += ["constants"] if any(r.source < 0 for r in self.runs) else []
        return f"joins parts along axis {self.axis}: {' and '.join(kinds)} leave no trace of their own"

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        return [self._slice(h[0], r.start, r.length) for r in self.runs if r.kept]

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        rest, size = _joined(h, self.axis), sum(a.shape[self.axis] for a in h)
        strips = iter(fragment)
        parts = {r: next(strips) for r in self.runs if r.kept}
        for r, strip in parts.items():
            if r.source >= 0:
                edges = [(0, 0, 0)] * strip.ndim
                edges[self.axis] = (r.source, size - r.source - r.length, 0)
                rest = rest - lax.pad(strip, np.zeros((), strip.dtype), edges)
        for r in self.runs:
            if not r.kept:
                parts[r] = self._slice(rest, r.source, r.length)
        return cast_like_outputs(block, (_joined([parts[r] for r in self.runs], self.axis),))

    def _slice(self, h: Any, start: int, length: int) -> Any:
        return lax.slice_in_dim(h, start, start + length, axis=self.axis)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=False)


_MOST_RUNS = 64  # each is a slice of its own


def _copies(block: Block) -> Iterator[Copies]:
    """How a block selects entries along one axis, if it does so and loses some."""
    joins = [e for e in block.eqns if e.primitive is lax.concatenate_p]
    if len(block.outputs) != 1 or not joins or any(v in block.inputs for v in block.outputs):
        return
    axis = joins[-1].params["dimension"]
    sources = _sources_along(block, axis)
    if sources is None or any(v.aval.size == 0 for v in (*block.inputs, *block.outputs)):
        return
    runs = _runs(sources)
    if any(r.kept for r in runs) and len(runs) <= _MOST_RUNS:
        yield Copies(axis, runs)


def _sources_along(block: Block, axis: int) -> np.ndarray | None:
    """t: for each index along the output's axis, the index in the concatenated inputs.

    -1 for entries that come from no input. None if the block does anything except move entries along
    that axis.
    """
    known: dict[Any, np.ndarray] = {}
    first = 0
    for v in block.inputs:
        size = v.aval.shape[axis] if axis < v.aval.ndim else 0
        known[v] = np.arange(first, first + size)
        first += size
    for eqn in block.eqns:
        parts = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        if all(p is None for p in parts):
            continue  # computed from operands alone
        if eqn.primitive is lax.concatenate_p and eqn.params["dimension"] == axis:
            found = np.concatenate(
                [
                    np.full(v.aval.shape[axis], -1) if p is None else p
                    for v, p in zip(eqn.invars, parts, strict=True)
                ]
            )
        elif eqn.primitive is lax.slice_p and _cuts_only(eqn, axis):
            p = eqn.params
            step = 1 if p["strides"] is None else p["strides"][axis]
            found = parts[0][p["start_indices"][axis] : p["limit_indices"][axis] : step]  # type: ignore[index]
        elif eqn.primitive is lax.rev_p and tuple(eqn.params["dimensions"]) == (axis,):
            found = parts[0][::-1]  # type: ignore[index]
        else:
            return None
        known[eqn.outvars[0]] = found
    return known.get(block.outputs[0])


def _cuts_only(eqn: JaxprEqn, axis: int) -> bool:
    """Whether a slice leaves all other axes whole."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return all(a == axis or n == o for a, (o, n) in enumerate(zip(old, new, strict=True)))


def _runs(sources: np.ndarray) -> tuple[Run, ...]:
    """The output in runs. Of several copies of an entry, the one in the longest run is free."""
    constant = sources < 0
    joins = np.where(constant[1:], constant[:-1], (np.diff(sources) == 1) & ~constant[:-1])
    stretch = np.cumsum(np.concatenate([[0], ~joins]))
    length = np.bincount(stretch)[stretch]
    order = np.argsort(-length, kind="stable")
    _, first = np.unique(sources[order], return_index=True)
    kept = np.ones(sources.size, bool)
    kept[order[first]] = False
    kept |= constant
    breaks = np.flatnonzero(~joins | (kept[1:] != kept[:-1])) + 1
    ends = [0, *(int(b) for b in breaks), sources.size]
    return tuple(
        Run(start, stop - start, int(sources[start]), bool(kept[start]))
        for start, stop in itertools.pairwise(ends)
    )


def _overlapping(slices: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """The second of two slices that share an entry, if there are such."""

    def entries(eqn: JaxprEqn, axis: int) -> range:
        p = eqn.params
        step = 1 if p["strides"] is None else p["strides"][axis]
        return range(p["start_indices"][axis], p["limit_indices"][axis], step)

    for a, b in itertools.combinations(slices, 2):
        axes = range(a.invars[0].aval.ndim)
        if all(_meet(entries(a, axis), entries(b, axis)) for axis in axes):
            return b
    return None


def _meet(a: range, b: range) -> bool:
    """Whether two arithmetic progressions share a member: if not after b.step tries, then never."""
    skipped = max(0, -(-(b.start - a.start) // a.step)) if len(a) else 0
    return any(member in b for member in itertools.islice(a[skipped:], b.step))


_LOOK_LIMIT = 1 << 26


def _judge_indices(block: Block, operands: Sequence[np.ndarray | None]) -> Verdict:
    """Run the block on numbered entries: it selects iff no number comes out twice."""
    n, _ = block.sizes
    if n > _LOOK_LIMIT:
        return Verdict(None, f"{n} entries are too many to look through its indices", _KEEP)
    with _jax.evaluated_now():
        first, numbers = 0, []
        for v in block.inputs:
            numbers.append(jnp.arange(first, first + v.aval.size).reshape(v.aval.shape))
            first += v.aval.size
        env = dict(zip(block.inputs, numbers, strict=True))
        for v, o in zip(block.operands, operands, strict=True):
            if o is not None:  # indices, or constants beside the state, which are not entries of it
                constant = jnp.issubdtype(o.dtype, jnp.inexact)
                env[v] = jnp.full(o.shape, -1, numbers[0].dtype) if constant else jnp.asarray(o)
        for eqn in block.eqns:
            inputs = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.primitive is lax.gather_p:  # a number that no entry has, for out-of-bounds indices
                eqn = eqn.replace(params={**eqn.params, "fill_value": -1})
            env.update(zip(eqn.outvars, _jax.bind_now(eqn, inputs), strict=True))
        taken = np.concatenate([np.asarray(env[v]).ravel() for v in block.outputs])
    if (taken < 0).any():
        return Verdict(
            False,
            "some entries are constants, or their indices out of bounds: nothing is selected",
            _KEEP,
        )
    if np.bincount(taken, minlength=1).max(initial=0) > 1:
        twice = int(np.bincount(taken).argmax())
        return Verdict(
            False,
            f"an input entry (number {twice} of {n}) is used more than once: the cotangents of its "
            "copies add up and cannot be told apart",
            _KEEP,
        )
    return Verdict(True, "selects distinct entries")


@register_vijp(lax.cumsum_p)
class CumulativeSum(Rule):
    """y_i = Σ_{j≤i} x_j  ⇒  h_i = Σ_{j≥i} h'_j  ⇒  h'_i = h_i - h_{i+1}."""

    name = "cumsum"

    def verdict(self, block: Block) -> Verdict:
        del block
        return Verdict(True, "unit lower triangular")

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors, kept
        axis, reverse = block.eqn.params["axis"], block.eqn.params["reverse"]
        (h0,) = h
        if h0.shape[axis] < 2:
            return cast_like_outputs(block, h)
        edge = jnp.zeros_like(lax.slice_in_dim(h0, 0, 1, axis=axis))
        if reverse:
            shifted = lax.concatenate([edge, lax.slice_in_dim(h0, 0, -1, axis=axis)], axis)
        else:
            shifted = lax.concatenate([lax.slice_in_dim(h0, 1, None, axis=axis), edge], axis)
        return cast_like_outputs(block, (h0 - shifted,))

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        # ‖P‖_F ‖P⁻¹‖_F / m with m(m+1)/2 ones in P, and 2m-1 entries ±1 in its inverse.
        m = block.inputs[0].aval.shape[block.eqn.params["axis"]]
        return Gain(float(np.sqrt(m * (m + 1) / 2 * (2 * m - 1)) / m), mixes=True)
