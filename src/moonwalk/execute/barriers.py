"""Barriers, which XLA may not move computation across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax

Env = dict[Any, Any]  # values by variable


def barrier(*parts: tuple[dict[Any, Any] | list[Any], Sequence[Any]]) -> None:
    """Put entries of environments (or lists) behind one barrier.

    XLA would otherwise merge Phase III's forward pass with Phase I's and keep everything between
    them, or delay the packing of a residual and keep the activation that it is made from.
    """
    leaves, tree = jax.tree.flatten([[container[key] for key in keys] for container, keys in parts])
    distinct = {id(a): a for a in leaves}  # an array that appears twice must stay one array
    if not distinct:
        return
    behind = dict(zip(distinct, _jax.barrier(list(distinct.values())), strict=True))
    values = jax.tree.unflatten(tree, [behind[id(a)] for a in leaves])
    for (container, keys), new in zip(parts, values, strict=True):
        for key, value in zip(keys, new, strict=True):
            container[key] = value
