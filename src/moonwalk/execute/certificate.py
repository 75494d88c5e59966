"""How exact a walk was: cotangents of Phase II against those that Phase III recovers.

Of a cotangent h Phase II keeps a *sketch*: its entries, each with a sign of its own, summed into a few
hundred buckets. Phase III sketches what it recovers in the same way. A sketch is linear, so the
difference of two is the sketch of the error δ, and with random signs r and buckets B

    E ‖S δ‖² = Σ_B E (Σ_{j∈B} r_j δ_j)² = Σ_j δ_j² = ‖δ‖²:

every entry counts, wherever it lies. A bucket's sum is about normal, so of an error ε = ‖δ‖ / ‖h‖ less
than τ is measured

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

    - `error`: the largest relative error of a recovered cotangent over all places where it was measured,
        or of a state that inverses arrived at; 0 where nothing was walked or inverted, NaN where the
        reverse pass itself is not finite (as backpropagation's then is not either).
    - `closure`: the largest of those errors at the ends of walks, where every earlier one has arrived.
    """

    error: Float[Array, ""]
    closure: Float[Array, ""]

    @classmethod
    def exact(cls) -> Certificate:
        """Of a method that walks and inverts nothing."""
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
    layers: int = 0  # of the loop that it stands in; 0: in none
    ends: bool = False  # whether it is the end of a walk


class Measured(NamedTuple):
    """An error at a place; of a loop the largest, and in which layer that was."""

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
    # Two sums in one pass. A plain sum XLA hands to a library on a CPU, and makes an array of all signed
    # entries for it, as large as the cotangent. Halves by a coin of their own, not by sign: where all
    # entries are alike, sums of one sign would be large, and their difference would lose digits.
    zero = jnp.zeros((), wide)
    halves = jnp.where(first, signed, zero), jnp.where(first, zero, signed)
    one, other = lax.reduce(halves, (zero, zero), _added, axes)
    return one + other


def _added(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of pairs. A function of the module: JAX compiles a reduction once per function."""
    return a[0] + b[0], a[1] + b[1]


def _buckets(shape: Sequence[int], shards: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, axes): summed over these axes after that reshape, an array leaves a sum per bucket.

    Entries of one place on the last axis, and of one part of the first, share a bucket: a sum over
    neighbouring axes is a plain loop to a compiler. Axes that are divided among devices stay whole.
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
    """Fair coins for every entry, the same in every phase: a hash of its index, whose bits they are."""
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
    """The power of two that the entries of a sketched array of this size have; 0 of zeros.

    The same on all devices that run `jax.shard_map`: what they sum must have one scale.
    """
    largest = jnp.max(jnp.abs(kept)) / math.sqrt(max(1.0, size / kept.size))
    largest = _jax.largest_anywhere(largest)
    usable = jnp.isfinite(largest) & (largest > 0)
    return jnp.where(usable, jnp.frexp(jnp.where(usable, largest, 1))[1], 0).astype(jnp.int32)


def compare(found: Array, kept: Array) -> Array:
    """‖found − kept‖ / ‖kept‖ of two sketches.

    Infinite where only `found` is not finite, NaN where `kept` is not.
    """
    return compare_together([(found, kept)])


def compare_together(pairs: Iterable[tuple[Array, Array]], beside: Sequence[Array] = ()) -> Array:
    """The same over the sketches of several arrays of one state.

    One of them may be zero (a stream that starts empty): its error is measured against the others, which
    it is made from. If all are zero, it is measured against `beside`.
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
        """`zero`: varies wherever what is measured does."""
        count = len(self.places)
        errors = jnp.zeros((count,), jnp.float32) + zero
        return errors, errors.astype(jnp.int32)

    def update(self, carried: Any, errors: Sequence[Any], layer: Any, first: int = 0) -> Any:
        """With the errors of one layer, at the places from `first` on."""
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
    """All that a run has measured, as arrays: by place, on whichever device it is largest."""

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
        """Of a run that rounds no more than backpropagation does."""
        return cls(jnp.zeros((len(places),), jnp.float32), jnp.zeros((len(places),), jnp.int32))

    def tangent(self) -> Any:
        """Zeros that a derivative has in their place."""
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
    return jnp.max(errors)  # which is NaN, if one of them is
