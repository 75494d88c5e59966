"""Methods that need no network: plain reverse mode, and forward mode, exact or projected.

Each returns what the engine returns: (loss and auxiliary outputs, gradients of the leaves).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from ..network.loss import Staging
from ..trace import graph
from . import seeds


def forward(staging: Staging, chunk: int, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """One jvp for every entry of every leaf, leaf by leaf."""
    leaves, out, loss = _open(staging, flat)
    parts = seeds.real_parts(leaves)
    gradients = []
    for i, part in enumerate(parts):

        def tail(moved: Any, i: int = i) -> list[Any]:
            return [loss(seeds.joined(leaves, [*parts[:i], moved, *parts[i + 1 :]]))]

        (found,) = seeds.by_entries(tail, [part], chunk) if part.size else (part,)
        gradients.append(found.astype(part.dtype))
    return out, seeds.as_gradients(leaves, gradients)


def projected(
    staging: Staging, key: Any, samples: int, flat: Sequence[Any], direction: Sequence[Any] | None
) -> tuple[list[Any], list[Any]]:
    """Directional derivatives times their directions; `direction`: leaves of the predicted gradient."""
    leaves, out, loss = _open(staging, flat)
    parts = seeds.real_parts(leaves)

    def along(v: Sequence[Any]) -> list[Any]:
        """⟨∇J, v⟩ v."""
        v = [a.astype(p.dtype) for a, p in zip(v, parts, strict=True)]
        _, slope = jax.jvp(lambda *p: loss(seeds.joined(leaves, p)), tuple(parts), tuple(v))
        return [slope.astype(a.dtype) * a for a in v]

    unit: list[Any] | None = None
    total = [jnp.zeros_like(p) for p in parts]
    if direction is not None:
        # A gradient's imaginary part has the other sign than its derivative's (JAX's convention).
        given = [
            part
            for d, leaf in zip(direction, leaves, strict=True)
            for part in seeds.real_parts([jnp.conj(d).astype(leaf.dtype)])
        ]
        # Divided by the largest entry first, whose square might overflow.
        for size in (_largest, lambda a: jnp.sqrt(_dot(a, a))):
            found = size(given)
            given = [a / jnp.where(found > 0, found, 1).astype(a.dtype) for a in given]
        unit = given
        total = along(unit)

    def sample(total: Any, key: Any) -> Any:
        keys = jax.random.split(key, len(parts))
        v = [jax.random.normal(k, p.shape, p.dtype) for k, p in zip(keys, parts, strict=True)]
        if unit is not None:
            share = _dot(v, unit)
            v = [a - share.astype(a.dtype) * u for a, u in zip(v, unit, strict=True)]
        return [t + a / samples for t, a in zip(total, along(v), strict=True)], None

    if samples and parts:
        keys = jax.random.split(key, samples)
        total, _ = lax.scan(sample, total, keys)
    return out, seeds.as_gradients(leaves, total)


def _open(
    staging: Staging, flat: Sequence[Any]
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any]], Any]]:
    """(leaves, results, the loss as a function of the leaves, which neither prints nor calls back)."""
    jaxpr, count = staging.jaxpr, len(staging.order)
    silent = _jax.silenced(jaxpr.eqns)

    def run(leaves: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
        env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*leaves, *flat[count:]), strict=True))
        graph.run(eqns, env)
        return [graph.read(env, v) for v in jaxpr.outvars]

    leaves = list(flat[:count])
    return leaves, run(leaves, jaxpr.eqns), lambda leaves: run(leaves, silent)[0]


def _largest(parts: Sequence[Any]) -> Any:
    return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(a), initial=0) for a in parts])


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """The dot product, in float32 at least."""
    wide = [[u.astype(_jax.working_dtype(u.dtype)) for u in parts] for parts in (a, b)]
    return sum((jnp.vdot(u, v) for u, v in zip(*wide, strict=True)), jnp.zeros(()))
