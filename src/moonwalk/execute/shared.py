"""Programs shared by blocks that compute the same.

A network of 64 equal layers would be traced and lowered 64 times over. While a program is being staged,
a `Shared` function is an inner `jax.jit` instead: traced once, lowered once, called for every block.
XLA inlines the calls, so what is compiled stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import _jax


class Shared:
    """A function of arrays that several blocks call."""

    def __init__(self, fun: Callable[..., Any]):
        self.fun = fun
        self._jitted = jax.jit(self._distinct, static_argnums=0)
        self._results: dict[Any, tuple[Any, list[int]]] = {}  # by types: tree, places among all values

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if not _jax.is_staged(leaves):  # eagerly, every call would be compiled
            return self.fun(*args)
        types = (tree, tuple(map(jax.typeof, leaves)))
        values = (*leaves, *self._jitted(types, *leaves))
        out_tree, sources = self._results[types]
        return jax.tree.unflatten(out_tree, [values[i] for i in sources])

    def _distinct(self, types: Any, *leaves: Any) -> list[Any]:
        """The results that are not arguments, each once. An argument returned by the call would come out
        as a copy, which a later barrier would treat as a second array."""
        out, out_tree = jax.tree.flatten(self.fun(*jax.tree.unflatten(types[0], leaves)))
        place = {id(a): i for i, a in enumerate(leaves)}
        results: list[Any] = []
        for a in out:
            if id(a) not in place:
                place[id(a)] = len(leaves) + len(results)
                results.append(a)
        self._results[types] = out_tree, [place[id(a)] for a in out]
        return results
