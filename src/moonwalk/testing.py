"""Check a vijp against an independent truth. Public: rule authors use it, and so does this suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .api import vijp

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

    The truth needs no vijp: J is the dense Jacobian (`jax.jacrev`, row by row the vjp that Phase II
    computes), h' is random, h = h' J, and h' must come back. In mode `"vmap"` two examples with
    different primals run at once (compiled), each with its own J.

    **Arguments:**

    - `fun`, `primals`: as for `moonwalk.vijp`; `options` are passed on to it.
    - `modes`: any of `"eager"`, `"jit"`, `"vmap"`.
    - `tolerance`: on ‖h' - truth‖ / ‖truth‖; None stands for 1e-9 in float64, 2e-4 in float32 and
        5e-2 in half precision (of the output's dtype).
    - `seed`: of h'; printed on failure.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"check_vijp: unknown mode {unknown[0]!r}; choose from {', '.join(MODES)}")
    primals = jax.tree.map(jnp.asarray, primals)
    examples = [primals, jax.tree.map(jnp.flip, primals)]
    truths = [_random_like(jax.eval_shape(fun, *primals), seed + i) for i in range(2)]

    def pull_back(primals: Any, h_out: Any) -> Any:
        return dense_cotangent(fun, primals, h_out)

    def recover(primals: Any, h: Any) -> Any:
        return vijp(fun, *primals, **options)[1](*h)

    def there_and_back(primals: Any, h_out: Any) -> Any:
        return recover(primals, pull_back(primals, h_out))

    worst = _error_of_output(fun, primals, options)
    for mode in modes:
        if mode == "eager":
            found, truth = recover(primals, jax.jit(pull_back)(primals, truths[0])), truths[0]
        elif mode == "jit":
            found, truth = jax.jit(there_and_back)(primals, truths[0]), truths[0]
        else:
            found, truth = (
                jax.jit(jax.vmap(there_and_back))(_stack(examples), _stack(truths)),
                _stack(truths),
            )
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
            limit = _default_tolerance(want.dtype) if tolerance is None else tolerance
            error = _error(got, want)
            if not error <= limit:
                raise AssertionError(
                    f"check_vijp: the recovered cotangent is off by {error:.3g} (tolerance "
                    f"{limit:.1g}) in mode {mode!r}, output {want.dtype}{list(want.shape)}, seed {seed}"
                )
            worst = max(worst, error)
    return worst


def _error_of_output(fun: Any, primals: Any, options: Any) -> float:
    """The primal output that `vijp` returns must be the function's own."""
    out = jax.jit(lambda *primals: (vijp(fun, *primals, **options)[0], fun(*primals)))(*primals)
    for got, want in zip(*map(jax.tree.leaves, out), strict=True):
        error = _error(got, want)
        if not error <= _default_tolerance(want.dtype):
            raise AssertionError(f"check_vijp: the primal output is off by {error:.3g}")
    return 0.0


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
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    drawn = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=False)]
    return jax.tree.unflatten(treedef, drawn)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
