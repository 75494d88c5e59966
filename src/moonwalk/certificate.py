"""How exact a walk was: cotangents kept in Phase II against those swept in Phase III.

Of every block that is walked through, 64 entries of the output's cotangent are kept: a strided slice,
because a gather would keep the whole array alive. Their relative distance from the swept ones is within
a factor of about 5 of the error of the whole array (docs/numerics.md §8).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from . import compat

SAMPLES = 64


class Certificate(NamedTuple):
    """What a walk measured of itself.

    - `error`: the largest sampled relative error of a swept cotangent over all blocks, or of a state
        that inverses arrived at; 0 where nothing was walked or inverted.
    - `closure`: the largest of those errors at the ends of walks, where every earlier one has arrived.
    """

    error: Float[Array, ""]
    closure: Float[Array, ""]

    @classmethod
    def exact(cls) -> Certificate:
        """Of a method that walks and inverts nothing."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


class Sample(NamedTuple):
    """Some entries of a cotangent, and the size that the others have."""

    entries: Array
    size: Array


def sample(h: Array) -> Sample:
    """What Phase II keeps of a cotangent.

    Its size is a bound of its root mean square that neither overflows nor underflows, times 1/4: for a
    dense cotangent less than the size of the entries. A sparse one (behind a max-pool) may be zero in
    all of them, and rounding there is measured against the rest.
    """
    entries = entries_of(h)
    wide = jnp.abs(h.astype(compat.working_dtype(h.dtype)))
    largest = jnp.max(wide, initial=0)
    return Sample(entries, jnp.sqrt(jnp.mean(wide)) * jnp.sqrt(largest) / 4 if h.size else largest)


def entries_of(h: Array) -> Array:
    """64 entries or fewer, spread over the array, as one strided slice; at least one per device."""
    if not h.size:
        return h
    shards = compat.shards(jax.typeof(h))
    counts = _counts(h.shape, shards)
    # Odd steps meet every place in a span of 4, 8 or 16, where fragments are exact in some places only.
    strides = [
        n // c + (n // c % 2 == 0 and parts == 1)
        for n, c, parts in zip(h.shape, counts, shards, strict=True)
    ]
    counts = [min(c, (n - 1) // s + 1) for n, c, s in zip(h.shape, counts, strides, strict=True)]
    starts = [(n - 1 - s * (c - 1)) // 2 for n, s, c in zip(h.shape, strides, counts, strict=True)]
    limits = [a + s * (c - 1) + 1 for a, s, c in zip(starts, strides, counts, strict=True)]
    return lax.slice(h, starts, limits, strides)


def _counts(shape: tuple[int, ...], shards: tuple[int, ...]) -> list[int]:
    """How many entries to take along each axis: as even as the sizes allow, 64 in all.

    Where an axis is divided among devices, each gives the same number.
    """
    counts = list(shards)
    total = math.prod(counts)
    while True:
        able = [a for a, n in enumerate(shape) if 2 * counts[a] <= n]
        if total * 2 > SAMPLES or not able:
            return counts
        axis = min(able, key=lambda a: counts[a])
        counts[axis] *= 2
        total *= 2


def compare(swept: Array, kept: Sample) -> Array:
    """‖swept − kept‖ / ‖kept‖ over the sample, in at least float32."""
    wide = compat.working_dtype(kept.entries.dtype)
    truth, found = kept.entries.astype(wide), entries_of(swept).astype(wide)
    # Scaled by the largest entry: with a loss scale, or far down a deep net, squares leave the range.
    unit = jnp.maximum(jnp.max(jnp.abs(truth), initial=0), kept.size.astype(wide))
    unit = jnp.maximum(unit, jnp.finfo(wide).tiny)
    difference = jnp.sqrt(jnp.sum(((found - truth) / unit) ** 2))
    floor = kept.size.astype(wide) / unit * math.sqrt(max(1, truth.size))
    size = jnp.maximum(jnp.sqrt(jnp.sum((truth / unit) ** 2)), floor)
    return difference / jnp.maximum(size, 1e-3)


def compare_together(pairs: Any) -> Array:
    """‖found − kept‖ / ‖kept‖ over the samples of several arrays of one state.

    One of them may be zero (a stream that starts empty): its error is then that of the others, which it
    is made from.
    """
    units, squares, sizes, count = [], [], [], 0
    for found, kept in pairs:
        wide = compat.working_dtype(kept.entries.dtype)
        truth = kept.entries.astype(wide)
        units.append(jnp.maximum(jnp.max(jnp.abs(truth), initial=0), kept.size.astype(wide)))
        squares.append((entries_of(found).astype(wide) - truth, truth, kept.size.astype(wide)))
        count += truth.size
    unit = functools.reduce(jnp.maximum, units)
    unit = jnp.maximum(unit, jnp.finfo(unit.dtype).tiny)
    off = sum(jnp.sum((d / unit) ** 2) for d, _, _ in squares)
    for _, truth, size in squares:
        sizes.append(jnp.maximum(jnp.sum((truth / unit) ** 2), (size / unit) ** 2 * truth.size))
    return jnp.sqrt(off) / jnp.maximum(jnp.sqrt(sum(sizes)), 1e-3)


def worst(errors: Any) -> Array:
    """The largest of several errors; NaN counts as infinite."""
    if not errors:
        return jnp.zeros((), jnp.float32)
    stacked = jnp.stack([jnp.asarray(e, jnp.float32) for e in errors])
    return jnp.max(jnp.where(jnp.isnan(stacked), jnp.inf, stacked))


def summary(errors: tuple[Any, Any]) -> Certificate:
    """Of (all sampled errors, those at the ends of walks), on whichever device they are largest."""
    return Certificate(*(compat.largest_anywhere(worst(e)) if e else worst(e) for e in errors))
