"""Checks a vijp against an independent reference. Public: rule authors use it, and so do our tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .vijp import vijp

MODES = ("eager", "jit", "vmap")


def check_vijp(
    fun: Callable[..., Any],
    *primals: Any,
    modes: Sequence[str] = MODES,
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,
) -> float:
    """Assert that `moonwalk.vijp` recovers random output cotangents; returns the largest error.

    The reference needs no vijp: with the dense Jacobian J (`jax.jacrev`, whose rows are the vjps that
    Phase II computes) and a random h', the vijp of h = h' J must be h'. In mode `"vmap"` two examples
    with different primals run at once (compiled), each with its own J.

    **Arguments:**

    - `fun`, `primals`: as for `moonwalk.vijp`; `options` are passed on to it.
    - `modes`: any of `"eager"`, `"jit"`, `"vmap"`.
    - `tolerance`: on ‖h' - truth‖ / ‖truth‖; None stands for 1e-9 in float64, 2e-4 in float32 and
        5e-2 in half precision (of the output's dtype).
    - `seed`: the seed of h'; printed on failure.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"check_vijp: unknown mode {unknown[0]!r}; choose from {', '.join(MODES)}")
    primals = jax.tree.map(jnp.asarray, primals)
    examples = [primals, jax.tree.map(jnp.flip, primals)]

    def plain(*primals: Any) -> list[Any]:
        out = fun(*primals)
        return _differentiable(out[0] if options.get("has_aux") else out)

    def there(primals: Any, h_out: Any) -> Any:
        return plain(*primals), dense_cotangent(plain, primals, h_out)

    def back(primals: Any, h: Any) -> Any:
        out, vijp_fun = vijp(fun, *primals, **options)[:2]
        return _differentiable(out), _differentiable(vijp_fun(*h))

    # Compiled separately: together with the recovery, XLA would skip the rounding of h.
    there = jax.jit(there)
    truths = [_random_like(jax.eval_shape(plain, *primals), seed + i) for i in range(2)]
    worst = 0.0
    for mode in modes:
        if mode == "vmap":
            out, h = _stack([there(p, t) for p, t in zip(examples, truths, strict=True)])
            found_out, found = jax.jit(jax.vmap(back))(_stack(examples), h)
            truth = _stack(truths)
        else:
            out, h = there(primals, truths[0])
            found_out, found = (jax.jit(back) if mode == "jit" else back)(primals, h)
            truth = truths[0]
        _compare(found_out, out, tolerance, f"the primal output (mode {mode!r})")
        what = f"the recovered cotangent (mode {mode!r}, seed {seed})"
        worst = max(worst, _compare(found, truth, tolerance, what))
    return worst


def _compare(found: Any, truth: Any, tolerance: float | None, what: str) -> float:
    """The largest error over the leaves, or an AssertionError."""
    worst = 0.0
    for got, want in zip(found, truth, strict=True):
        limit = _default_tolerance(want.dtype) if tolerance is None else tolerance
        error = _error(got, want)
        if not error <= limit:
            raise AssertionError(
                f"check_vijp: {what} is off by {error:.3g} (tolerance {limit:.1g}), "
                f"output {want.dtype}{list(want.shape)}"
            )
        worst = max(worst, error)
    return worst


def _differentiable(out: Any) -> list[Any]:
    """The leaves that carry cotangents (integers do not)."""
    return [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]


def _default_tolerance(dtype: Any) -> float:
    return {8: 1e-9, 4: 2e-4}.get(jnp.dtype(dtype).itemsize, 5e-2)


def _error(found: Any, truth: Any) -> float:
    found, truth = (np.asarray(a, np.float64) for a in (found, truth))
    return float(np.linalg.norm(found - truth) / max(np.linalg.norm(truth), 1e-300))


def dense_cotangent(fun: Callable[..., Any], primals: Any, h_out: Any) -> Any:
    """h = h' J by a dense Jacobian, accumulated in float64 where that is enabled."""
    jacobian = jax.jacrev(fun, argnums=tuple(range(len(primals))))(*primals)
    out_leaves, out_tree = jax.tree.flatten(h_out)
    rows = out_tree.flatten_up_to(jacobian)  # per output leaf: a tree like the primals
    wide = jnp.float64 if jnp.zeros(()).dtype == jnp.float64 else jnp.float32

    def contract(*blocks: Any) -> Any:
        parts = [
            jnp.tensordot(h.astype(wide), b.astype(wide), axes=h.ndim, precision="highest")
            for h, b in zip(out_leaves, blocks, strict=True)
        ]
        return functools.reduce(jnp.add, parts).astype(blocks[0].dtype)

    return jax.tree.map(contract, *rows)


def _random_like(tree: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)  # JAX's generator would be compiled for every shape
    return jax.tree.map(lambda a: jnp.asarray(random.standard_normal(a.shape), a.dtype), tree)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
