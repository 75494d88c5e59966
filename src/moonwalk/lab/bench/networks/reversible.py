"""`models.reversible_transformer` on pictures of length × length × 3, whose blocks can be inverted.

`width` features, `depth` blocks. Variants: "tiny" (smaller patches, fewer heads).
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .... import models
from ..tasks import Task
from .base import Network, chain, words
from .gpt import cross_entropy

CLASSES = 10


class Chained(eqx.Module):
    """The layers of a stack, cut into runs."""

    stack: Any
    cuts: dict[str, Any] = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        arrays, rest = eqx.partition(self.stack.layer, eqx.is_array)
        return chain(lambda x, one: eqx.combine(one, rest)(x), x, arrays, **self.cuts)


def reversible(task: Task) -> Network:
    found, _ = words(task, "tiny")
    heads, patch = (4, 4) if "tiny" in found else (6, 8)

    def make(key: Any) -> Any:
        shape = (task.length, task.length, 3)
        return models.reversible_transformer(
            shape, CLASSES, key=key, width=task.width, depth=task.depth, heads=heads, patch=patch
        )

    def init(key: Any) -> Any:
        return eqx.filter(make(key), eqx.is_inexact_array)

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    is_trained = lambda a: isinstance(a, jax.ShapeDtypeStruct) and jnp.issubdtype(a.dtype, jnp.inexact)
    _, static = eqx.partition(shapes, is_trained)

    def model(params: Any, images: Any, labels: Any, **cuts: Any) -> Any:
        net = eqx.combine(params, static)
        if cuts:
            net = eqx.tree_at(lambda m: m.blocks, net, Chained(net.blocks, cuts))
        return cross_entropy(net(images), labels)

    shape = (task.batch, task.length, task.length, 3)
    labels = jax.ShapeDtypeStruct((task.batch,), jnp.int32)
    return Network(init, shape, labels, model, task.depth, scanned=True, classes=CLASSES)
