"""A vision transformer (ViT-B/16) with dropout, as trained on ImageNet.

Images of length × length × 3 in patches, a class token, and `depth` blocks of `width` features. Data
hold a random key for every image, from which the model draws its dropout masks. Variants: "scanned"
(blocks are stacked; otherwise a Python loop), "bfloat16" (computed in, from parameters that stay
float32), "tiny" (small patches, heads of eight features, ten classes).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..tasks import Task
from .base import Integers, Network, Wrap, affine, chain, identity, linear, normal, stacked, words
from .gpt import HEAD, attention, cross_entropy, dense, init_block, layer_norm
from .resnet import CLASSES

SIZES = {
    "full": {"depth": 12, "width": 768, "length": 224, "batch": 256},
    "tiny": {"depth": 4, "width": 16, "length": 16, "batch": 4},
}
PATCH = {"full": 16, "tiny": 4}
DROP = 0.1


def patches(images: Any, side: int) -> Any:
    """[batch, side × rows, side × columns, c] to [batch, rows × columns, side² c]."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // side, side, width // side, side, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, side * side * channels)


def dropout(x: Any, keys: Any) -> Any:
    """Another mask for each example, from its key."""
    # In float32 also where x has more digits, so that the same keys give the same masks.
    draw = lambda key: jax.random.bernoulli(key, np.float32(1 - DROP), x.shape[1:])
    return jnp.where(jax.vmap(draw)(keys), x / (1 - DROP), 0)


def split(keys: Any, count: int) -> Any:
    """Keys [batch] to [count, batch]."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)


def block(x: Any, given: tuple[Any, Any], *, head: int) -> Any:
    """A transformer block; `given`: its parameters, and a key for each example."""
    p, keys = given
    mixed, hidden, out = split(keys, 3)
    x = x + dropout(attention(x, p, head=head, causal=False), mixed)
    y = dropout(jax.nn.gelu(dense(layer_norm(x, p["norm2"]), p["up"])), hidden)
    return x + dropout(dense(y, p["down"]), out)


def vit(task: Task) -> Network:
    found, _ = words(task, "scanned", "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    scanned, classes, side, width = "scanned" in found, CLASSES[size], PATCH[size], task.width
    count = (task.length // side) ** 2
    one = functools.partial(init_block, width=width)

    def init(key: Any) -> dict[str, Any]:
        stem, places, blocks, head = jax.random.split(key, 4)
        return {
            "stem": linear(stem, 3 * side * side, width),
            "class": jnp.zeros((1, 1, width), jnp.float32),
            "places": 0.02 * normal(places, (1 + count, width), 1),
            "blocks": stacked(one, blocks, task.depth, scan=scanned),
            "norm": affine(width),
            "head": linear(head, width, classes),
        }

    def model(
        params: Any,
        data: Any,
        labels: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        images, keys = data
        images = images.astype(jnp.bfloat16) if "bfloat16" in found else images
        first, *others = split(jax.random.wrap_key_data(keys), 1 + task.depth)
        x = dense(patches(images, side), params["stem"])
        token = jnp.broadcast_to(params["class"].astype(x.dtype), (x.shape[0], 1, width))
        x = jnp.concatenate([token, x], 1) + params["places"].astype(x.dtype)
        x = dropout(x, first)
        blocks = params["blocks"]
        layers = (blocks, jnp.stack(others)) if scanned else list(zip(blocks, others, strict=True))
        step = lambda x, given: block(x, given, head=HEAD[size])
        x = chain(step, x, layers, wrap=wrap, every=every, inner=inner)
        return cross_entropy(dense(layer_norm(x[:, 0], params["norm"]), params["head"]), labels)

    images = jax.ShapeDtypeStruct((task.batch, task.length, task.length, 3), jnp.float32)
    keys = Integers((task.batch, 2), 0, 2**31 - 1, jnp.uint32)  # the words of a Threefry key
    labels = jax.ShapeDtypeStruct((task.batch,), jnp.int32)
    return Network(init, (images, keys), labels, model, task.depth, scanned, classes=classes)
