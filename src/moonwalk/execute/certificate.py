"""How exact a walk was: cotangents of Phase II against those that Phase III recovers.

Of a cotangent h Phase II keeps a *sketch*: its entries, each with a sign of its own, summed into a few
hundred buckets. Phase III sketches what it recovers in the same way. A sketch is linear, so the
difference of two is the sketch of the error δ, and with random signs r and buckets B

    E ‖S δ‖² = Σ_B E (Σ_{j∈B} r_j δ_j)² = Σ_j δ_j² = ‖δ‖²:

every entry counts, wherever it lies. A bucket's sum is roughly normal, so an error ε = ‖δ‖ / ‖h‖ is
measured as less than τ

    with probability  P(χ²_b < b τ²/ε²)    where δ is spread over b buckets:

for ε = 10 τ that is 8 % if all of δ lies in one bucket (one channel of an eighth of the batch), 1e-7 if
it lies in eight. An error that lasts is measured again at every later place (docs/numerics.md §8).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .. import _jax

BUCKETS = 2048


class Certificate(NamedTuple):
    """What a walk measured of itself.

    - `error`: the largest relative error over all places where a recovered cotangent, or a state
        reconstructed by inverses, was measured; 0 if nothing was walked or inverted, NaN if the reverse
        pass itself is not finite (then backpropagation's is not either).
    - `closure`: the largest of those errors at the ends of walks, which every earlier error has reached.
    """

    error: Float[Array, ""]
    closure: Float[Array, ""]

    @classmethod
    def exact(cls) -> Certificate:
        """The certificate of a method that walks and inverts nothing."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


@dataclass(frozen=True)
class Place:
    """Where an error is measured, and how large it may be.

    `kind`: "walk" (a recovered cotangent), "inverse" (a reconstructed state), "declaration" (a weight
    that is said to have a structure), "seed" (the end of a forward-only sweep).
    """

    kind: str
    block: str
    line: str
    limit: float
    layers: int = 0  # how many layers its loop has; 0: not in a loop
    ends: bool = False  # whether it is the end of a walk


class Measured(NamedTuple):
    """An error at a place; for a loop, the largest one and the layer where it occurred."""

    error: Any
    place: Place
    layer: Any = 0


# --- sketches ---------------------------------------------------------------------------------------


def sketch(h: Array) -> Array:
    """Signed sums of the entries: one pass over the array, at most `BUCKETS` numbers."""
    wide = _jax.working_dtype(h.dtype)
    if not h.size:
        return jnp.zeros((1,), wide)
    if not h.ndim:
        return h.astype(wide)[None]
    shape, axes = _buckets(h.shape, _jax.shards(jax.typeof(h)))
    coins, h = _coins(h), h.astype(wide)
    if shape != h.shape:
        coins, h = coins.reshape(shape), h.reshape(shape)
    negative, first = (((coins >> np.uint32(bit)) & np.uint32(1)).astype(bool) for bit in (31, 30))
    signed = jnp.where(negative, -h, h)
    # Two sums in one pass. On a CPU, XLA hands a plain sum to a library, for which it first makes an
    # array of all signed entries, as large as the cotangent. The halves are chosen by a second coin, not
    # by sign: where all entries are alike, sums of one sign are large and their difference loses digits.
    zero = jnp.zeros((), wide)
    halves = jnp.where(first, signed, zero), jnp.where(first, zero, signed)
    one, other = lax.reduce(halves, (zero, zero), _added, axes)
    return one + other


def _added(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sum of pairs. Defined at module level because JAX compiles a reduction once per function."""
    return a[0] + b[0], a[1] + b[1]


def _buckets(shape: Sequence[int], shards: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, axes): reshaping an array to `shape` and summing over `axes` gives one sum per bucket.

    Entries share a bucket if they have the same place on the last axis and lie in the same part of the
    first, because compilers make plain loops of sums over neighbouring axes. Axes that are divided among
    devices stay whole.
    """
    last = shape[-1]
    kept = last if last <= BUCKETS or shards[-1] > 1 else _divisor(last, BUCKETS)
    tail = (last,) if kept == last else (last // kept, kept)
    if kept > BUCKETS:
        return tuple(shape), tuple(range(len(shape)))
    head = list(shape[:-1])
    first = next((a for a, n in enumerate(head) if n > 1), None)
    if first is None or shards[first] > 1:
        new = (*head, *tail)
        return new, tuple(range(len(new) - 1))
    parts = _divisor(head[first], max(1, BUCKETS // kept))
    new = (*head[:first], parts, head[first] // parts, *head[first + 1 :], *tail)
    return new, tuple(a for a in range(len(new) - 1) if a != first)


def _divisor(n: int, most: int) -> int:
    return next(k for k in range(min(n, most), 0, -1) if n % k == 0)


def _coins(h: Array) -> Array:
    """Fair coins for every entry, the same in every phase: the bits of a hash of its index."""
    sharding = _jax.explicit_sharding(jax.typeof(h))
    index: Any = np.uint32(0)
    if not _jax.sharded_axes(jax.typeof(h)):
        # Zero, which a compiler cannot know: it would make one array of all signs of this shape, a
        # quarter of a cotangent, and keep it from the first sketch to the last.
        index = (h[(0,) * h.ndim] * 0).astype(np.uint32)
    stride = 1
    for axis in reversed(range(h.ndim)):
        place = lax.broadcasted_iota(np.uint32, h.shape, axis, out_sharding=sharding)
        index = index + place * np.uint32(stride % 2**32)
        stride *= h.shape[axis]
    mixed = index * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE3D)
    return mixed


def exponent(kept: Array, size: int) -> Int[Array, ""]:
    """The binary order of magnitude of the entries of a sketched array of this size; 0 if they are zero.

    It is the same on all devices that run `jax.shard_map`, because what they sum must have one scale.
    """
    largest = jnp.max(jnp.abs(kept)) / math.sqrt(max(1.0, size / kept.size))
    largest = _jax.largest_anywhere(largest)
    usable = jnp.isfinite(largest) & (largest > 0)
    return jnp.where(usable, jnp.frexp(jnp.where(usable, largest, 1))[1], 0).astype(jnp.int32)


def compare(found: Array, kept: Array) -> Array:
    """‖found − kept‖ / ‖kept‖ of two sketches.

    Infinite if only `found` is not finite, NaN if `kept` is not.
    """
    return compare_together([(found, kept)])


def compare_together(pairs: Iterable[tuple[Array, Array]], beside: Sequence[Array] = ()) -> Array:
    """`compare` over the sketches of all arrays of one state.

    An array that is zero (a stream that starts empty) is measured against the others, from which it is
    computed. If all are zero, the error is measured against `beside`.
    """
    pairs = list(pairs)
    found, kept = (jnp.concatenate([p[i].reshape(-1) for p in pairs]) for i in range(2))
    # Divided by the largest entry: squares of very large or small ones leave the range.
    largest = jnp.max(jnp.abs(kept))
    tiny = jnp.finfo(kept.dtype).tiny
    unit = jnp.maximum(largest, tiny)
    if beside:
        others = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(s)) for s in beside])
        unit = jnp.where(largest > 0, unit, jnp.maximum(others.astype(unit.dtype), tiny))
    off = jnp.sqrt(jnp.sum((jnp.abs(found - kept) / unit) ** 2))
    size = jnp.sqrt(jnp.sum((jnp.abs(kept) / unit) ** 2))
    size = jnp.where(largest > 0, size, 1) if beside else jnp.maximum(size, tiny)
    error = jnp.where(off > 0, off / size, 0)
    error = jnp.where(jnp.isfinite(off), error, jnp.inf)
    return jnp.where(jnp.all(jnp.isfinite(kept)), error, jnp.nan)


# --- errors, gathered -------------------------------------------------------------------------------


class Worst:
    """The largest errors over the layers of a loop, place by place, as the loop carries them."""

    def __init__(self, places: Sequence[Place]):
        self.places = list(places)

    def start(self, zero: Any) -> Any:
        """The loop's initial carry. `zero`: one that varies over the same devices as the errors."""
        count = len(self.places)
        errors = jnp.zeros((count,), jnp.float32) + zero
        return errors, errors.astype(jnp.int32)

    def update(self, carried: Any, errors: Sequence[Any], layer: Any, first: int = 0) -> Any:
        """The carry, updated with the errors of one layer at the places from `first` on."""
        if not errors:
            return carried
        worst, layers = carried
        new = jnp.stack([jnp.asarray(e, jnp.float32) for e in errors])
        at = slice(first, first + len(errors))
        # NaN, once seen, stays; it is larger than everything.
        larger = ~(new <= worst[at]) & ~jnp.isnan(worst[at])
        layer = jnp.asarray(layer, jnp.int32)
        return (
            worst.at[at].set(jnp.where(larger, new, worst[at])),
            layers.at[at].set(jnp.where(larger, layer, layers[at])),
        )

    def finish(self, carried: Any) -> list[Measured]:
        worst, layers = carried
        return [Measured(worst[i], place, layers[i]) for i, place in enumerate(self.places)]


class Findings(NamedTuple):
    """All errors that a run has measured, by place: the largest over all devices."""

    errors: Float[Array, "places"]
    layers: Int[Array, "places"]

    @classmethod
    def of(cls, measured: Sequence[Measured], places: Sequence[Place]) -> Findings:
        assert [m.place for m in measured] == list(places), "what is measured is known beforehand"
        if not measured:
            return cls.none(places)
        errors = jnp.stack([jnp.asarray(m.error, jnp.float32) for m in measured])
        layers = jnp.stack([jnp.asarray(m.layer, jnp.int32) for m in measured])
        worst = _jax.largest_anywhere(errors)
        here = jnp.isnan(errors) | (errors == worst)
        return cls(worst, _jax.largest_anywhere(jnp.where(here, layers, -1)))

    @classmethod
    def none(cls, places: Sequence[Place]) -> Findings:
        """The findings of a run that rounds no more than backpropagation does."""
        return cls(jnp.zeros((len(places),), jnp.float32), jnp.zeros((len(places),), jnp.int32))

    def tangent(self) -> Any:
        """The zero tangents of a run's findings."""
        no_tangent: Any = np.zeros(self.layers.shape, jax.dtypes.float0)
        return Findings(jnp.zeros_like(self.errors), no_tangent)


def summary(found: Findings, places: Sequence[Place]) -> Certificate:
    """The certificate of a run."""

    def over(chosen: Sequence[bool]) -> Array:
        at = np.flatnonzero(np.asarray(chosen, bool))
        return largest(found.errors[at]) if at.size else jnp.zeros((), jnp.float32)

    measured = [p.kind != "declaration" for p in places]
    return Certificate(over(measured), over([p.ends for p in places]))


def largest(errors: Array) -> Array:
    """The largest of several errors; NaN is larger than everything."""
    return jnp.max(errors)  # NaN if one of them is
