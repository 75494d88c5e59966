"""An MLP-Mixer (Mixer-B/16), as trained on ImageNet.

Images of length × length × 3 in patches, and `depth` blocks of `width` features: an MLP over patches,
then one over features. Variants: "scanned" (blocks are stacked; otherwise a Python loop), "bfloat16"
(computed in, from parameters that stay float32), "tiny" (small patches, ten classes).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Network, Wrap, affine, chain, identity, linear, stacked, words
from .gpt import cross_entropy, dense, init_mlp, layer_norm
from .resnet import CLASSES
from .vit import PATCH, patches

SIZES = {
    "full": {"depth": 12, "width": 768, "length": 224, "batch": 256},
    "tiny": {"depth": 4, "width": 16, "length": 16, "batch": 4},
}


def block(x: Any, p: Any) -> Any:
    y = layer_norm(x, p["norm1"]).mT
    x = x + dense(jax.nn.gelu(dense(y, p["over"])), p["back"]).mT
    return x + dense(jax.nn.gelu(dense(layer_norm(x, p["norm2"]), p["up"])), p["down"])


def mixer(task: Task) -> Network:
    found, _ = words(task, "scanned", "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    scanned, classes, side, width = "scanned" in found, CLASSES[size], PATCH[size], task.width
    count = (task.length // side) ** 2

    def init_block(key: Any) -> dict[str, Any]:
        over, back, channels = jax.random.split(key, 3)
        return {
            "norm1": affine(width),
            "over": linear(over, count, width // 2),
            "back": linear(back, width // 2, count),
            **init_mlp(channels, width, 4 * width),
        }

    def init(key: Any) -> dict[str, Any]:
        stem, blocks, head = jax.random.split(key, 3)
        return {
            "stem": linear(stem, 3 * side * side, width),
            "blocks": stacked(init_block, blocks, task.depth, scan=scanned),
            "norm": affine(width),
            "head": linear(head, width, classes),
        }

    def model(
        params: Any,
        images: Any,
        labels: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        images = images.astype(jnp.bfloat16) if "bfloat16" in found else images
        x = dense(patches(images, side), params["stem"])
        x = chain(block, x, params["blocks"], wrap=wrap, every=every, inner=inner)
        x = jnp.mean(layer_norm(x, params["norm"]), 1)
        return cross_entropy(dense(x, params["head"]), labels)

    shape = (task.batch, task.length, task.length, 3)
    labels = jax.ShapeDtypeStruct((task.batch,), jnp.int32)
    return Network(init, shape, labels, model, task.depth, scanned, classes=classes)
