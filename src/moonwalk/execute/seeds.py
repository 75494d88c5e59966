"""The cotangent of a seed by forward mode alone: one jvp for each of its entries.

With J the loss as a function of the seed x, ∂J/∂x_k = dJ[e_k]. Basis vectors go through the network a
chunk at a time, so memory does not grow with the depth, and hardly with the seed.

Where the loss is a function of sums over independent examples, J = φ(Σ_b r_b(x_b), …), all examples can
move at once: with the tangent "feature f of every example", the summands' tangents are
dr_b[e_f] = ∂r_b/∂x_bf, example by example, and h_bf = φ' ∂r_b/∂x_bf. That is one jvp per feature, not
one per feature and example.

The paper also considers starting from the first layer's parameter gradient; docs/seeds.md says why that
does not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import JaxprEqn, Literal
from ..trace import graph

Tail = Callable[..., Sequence[Any]]


def by_entries(tail: Tail, x: Sequence[Any], chunk: int) -> list[Any]:
    """∂J/∂x for a tail whose only result is the loss."""
    if any(map(jnp.iscomplexobj, x)):
        found = by_entries(lambda *parts: tail(*joined(x, parts)), real_parts(x), chunk)
        return as_gradients(x, found)
    sizes = [a.size for a in x]
    total = sum(sizes)

    def derivative(k: Any) -> Any:
        return _jvp(tail, x, _unit(x, [a.shape for a in x], k))[0]

    flat = _in_chunks(derivative, total, chunk)
    parts = jnp.split(flat[:total], np.cumsum(sizes)[:-1])
    # Added to zeros so that they are sharded like x.
    return [jnp.zeros_like(a) + p.reshape(a.shape) for p, a in zip(parts, x, strict=True)]


def by_features(
    tail: Tail, outer: Tail, shapes: Sequence[tuple[int, ...]], x: Sequence[Any], chunk: int
) -> list[Any]:
    """∂J/∂x for J = outer(Σ_b of each of the tail's results), with examples along axis 0.

    `shapes`: the shapes of the sums, which have one entry.
    """
    if any(map(jnp.iscomplexobj, x)):
        found = by_features(lambda *parts: tail(*joined(x, parts)), outer, shapes, real_parts(x), chunk)
        return as_gradients(x, found)
    examples = x[0].shape[0]
    sums = [jnp.sum(r).reshape(s) for r, s in zip(tail(*x), shapes, strict=True)]
    slopes = [
        _jvp(
            outer, sums, [jnp.ones_like(s) if i == k else jnp.zeros_like(s) for i, s in enumerate(sums)]
        )
        for k in range(len(sums))
    ]
    sizes = [a.size // examples for a in x]
    total = sum(sizes)

    def derivative(k: Any) -> Any:
        tangents = _jvp(tail, x, _unit(x, [a.shape[1:] for a in x], k))
        return sum(
            s * jnp.sum(d.reshape(examples, -1), 1) for (s,), d in zip(slopes, tangents, strict=True)
        )

    flat = _in_chunks(derivative, total, chunk)[:total]
    parts = jnp.split(flat, np.cumsum(sizes)[:-1])
    return [jnp.moveaxis(p, 0, -1).reshape(a.shape) for p, a in zip(parts, x, strict=True)]


def real_parts(arrays: Sequence[Any]) -> list[Any]:
    """Arrays with each complex one split into its real and imaginary part."""
    parts = ([jnp.real(a), jnp.imag(a)] if jnp.iscomplexobj(a) else [a] for a in arrays)
    return [part for of in parts for part in of]


def joined(arrays: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Arrays like the given ones, from their real parts."""
    values = iter(parts)
    is_complex = [jnp.iscomplexobj(a) for a in arrays]
    return [lax.complex(next(values), next(values)) if c else next(values) for c in is_complex]


def as_gradients(arrays: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Gradients by JAX's convention: that of a complex array a + ib is ∂J/∂a − i ∂J/∂b."""
    return [jnp.conj(g) if jnp.iscomplexobj(g) else g for g in joined(arrays, parts)]


def _jvp(fun: Tail, x: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    return list(jax.jvp(lambda *a: list(fun(*a)), tuple(x), tuple(tangents))[1])


def _unit(x: Sequence[Any], shapes: Sequence[tuple[int, ...]], k: Any) -> list[Any]:
    """The k-th basis vector over arrays of these shapes (zero beyond the last), typed like x."""
    result, first = [], 0
    for a, shape in zip(x, shapes, strict=True):
        size = math.prod(shape)
        place = jnp.where((k >= first) & (k < first + size), k - first, size)
        entries = lax.broadcasted_iota(place.dtype, (size,), 0) == place
        result.append(jnp.zeros_like(a) + entries.reshape(shape).astype(a.dtype))
        first += size
    return result


def _in_chunks(derivative: Callable[[Any], Any], total: int, chunk: int) -> Any:
    """`derivative` at 0 … total−1, and beyond up to a whole chunk; `chunk` of them side by side."""
    chunk = min(chunk, total)
    places = jnp.arange(-(-total // chunk) * chunk).reshape(-1, chunk)
    found = lax.map(jax.vmap(derivative), places)
    return found.reshape(-1, *found.shape[2:])


class Sums(NamedTuple):
    """A loss as a function of sums: which arrays are summed, and what is made of the sums."""

    loss: Any
    summands: list[Any]
    results: list[Any]  # the variables that hold the sums
    outer: list[JaxprEqn]


def find_sums(eqns: Sequence[JaxprEqn], loss: Any, seeds: Sequence[Any]) -> Sums | str:
    """The sums that the loss is a scalar function of, or the reason why there are none."""
    reached = set(seeds)
    producer: dict[Any, JaxprEqn] = {}
    for e in eqns:
        if any(not isinstance(v, Literal) and v in reached for v in e.invars):
            reached.update(e.outvars)
            producer.update((v, e) for v in e.outvars)
    summands, results, outer = [], [], []
    pending, seen = [loss], set()
    while pending:
        v = pending.pop()
        e = producer.get(v)
        if e is None:
            return (
                "the loss is made of the state that the sweep starts from, not of sums over the examples"
            )
        if id(e) in seen:
            continue
        seen.add(id(e))
        moving = [u for u in e.invars if not isinstance(u, Literal) and u in reached]
        if e.primitive is lax.reduce_sum_p and math.prod(v.aval.shape) == 1 and moving[0].aval.ndim:
            summands.append(moving[0])
            results.append(v)
        elif all(u.aval.size == 1 for u in moving):
            outer.append(e)
            pending += moving
        else:
            return f"the loss is made of `{e.primitive.name}` of an array, not of sums over the examples"
    order = {id(e): i for i, e in enumerate(eqns)}
    return Sums(loss, summands, results, sorted(outer, key=lambda e: order[id(e)]))


def evaluate(eqns: Sequence[JaxprEqn], env: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    """The values of some variables; `env` is not changed."""
    env = dict(env)
    graph.run(eqns, env)
    return [env[v] for v in wanted]
