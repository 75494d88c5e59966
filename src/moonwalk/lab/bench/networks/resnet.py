"""ResNet-50 with batch norm, as trained on ImageNet (v1.5: strides are in the 3×3 convolutions).

Images of length × length × 3, `width` channels in the first stage. Normalisation is by the statistics
of the batch, as in training; running averages, which no gradient passes, are left out. Variants:
"bfloat16" (computed in, from parameters that stay float32, with statistics in float32), "tiny" (one
block a stage, ten classes).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..tasks import Task
from .base import Layer, Network, Wrap, affine, chain, identity, linear, normal, words
from .gpt import cross_entropy

SIZES = {
    "full": {"depth": 16, "width": 64, "length": 224, "batch": 128},
    "tiny": {"depth": 4, "width": 4, "length": 32, "batch": 2},
}
STAGES = {"full": (3, 4, 6, 3), "tiny": (1, 1, 1, 1)}
CLASSES = {"full": 1000, "tiny": 10}
_DIMS = ("NHWC", "HWIO", "NHWC")


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    pad = [((k - 1) // 2, k // 2) for k in w.shape[:2]]
    return lax.conv_general_dilated(x, w.astype(x.dtype), (stride, stride), pad, dimension_numbers=_DIMS)


def batch_norm(x: Any, p: Any) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, (0, 1, 2))
    variance = jnp.mean((wide - mean) ** 2, (0, 1, 2))
    scale = p["scale"] * lax.rsqrt(variance + 1e-5)
    return ((wide - mean) * scale + p["bias"]).astype(x.dtype)


def max_pool(x: Any) -> Any:
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)]
    )


def bottleneck(x: Any, p: Any, stride: int) -> Any:
    y = jax.nn.relu(batch_norm(conv(x, p["reduce"]), p["norm1"]))
    y = jax.nn.relu(batch_norm(conv(y, p["spatial"], stride), p["norm2"]))
    y = batch_norm(conv(y, p["expand"]), p["norm3"])
    if "skip" in p:
        x = batch_norm(conv(x, p["skip"], stride), p["skip_norm"])
    return jax.nn.relu(x + y)


def _init_block(key: Any, inputs: int, width: int, has_skip: bool) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 4))
    kernel = lambda *shape: 2**0.5 * normal(next(keys), shape)
    p = {
        "reduce": kernel(1, 1, inputs, width),
        "norm1": affine(width),
        "spatial": kernel(3, 3, width, width),
        "norm2": affine(width),
        "expand": kernel(1, 1, width, 4 * width),
        "norm3": affine(4 * width),
    }
    if has_skip:
        p |= {"skip": kernel(1, 1, inputs, 4 * width), "skip_norm": affine(4 * width)}
    return p


def resnet(task: Task) -> Network:
    found, _ = words(task, "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    stages, classes, width = STAGES[size], CLASSES[size], task.width
    places = [(stage, i) for stage, count in enumerate(stages) for i in range(count)]
    strides = [2 if stage and not i else 1 for stage, i in places]
    steps: list[Layer] = [lambda x, p, s=stride: bottleneck(x, p, s) for stride in strides]

    def init(key: Any) -> dict[str, Any]:
        stem, head, *keys = jax.random.split(key, 2 + len(places))
        blocks, inputs = [], width
        for (stage, i), own in zip(places, keys, strict=True):
            wide = width * 2**stage
            blocks.append(_init_block(own, inputs, wide, has_skip=not i))
            inputs = 4 * wide
        return {
            "stem": 2**0.5 * normal(stem, (7, 7, 3, width)),
            "norm": affine(width),
            "blocks": blocks,
            "head": linear(head, inputs, classes),
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
        x = images.astype(jnp.bfloat16) if "bfloat16" in found else images
        x = max_pool(jax.nn.relu(batch_norm(conv(x, params["stem"], 2), params["norm"])))
        x = chain(steps, x, params["blocks"], wrap=wrap, every=every, inner=inner)
        x, head = jnp.mean(x, (1, 2)), params["head"]
        return cross_entropy(x @ head["w"].astype(x.dtype) + head["b"].astype(x.dtype), labels)

    shape = (task.batch, task.length, task.length, 3)
    labels = jax.ShapeDtypeStruct((task.batch,), jnp.int32)
    return Network(init, shape, labels, model, len(places), classes=classes)
