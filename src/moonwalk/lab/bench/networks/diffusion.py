"""A U-Net as used in diffusion models: residual blocks with group norm, long skips, time embeddings.

It predicts the noise of images of length × length × 3 at given times; `width` channels at the finest
level, and `depth` residual blocks, down and up together. Attention stands at the coarsest level.
Variants: "bfloat16" (computed in, from parameters that stay float32), "tiny" (two levels of a block).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..tasks import Task
from .base import Network, Wrap, affine, chain, identity, linear, normal, words
from .gpt import dense
from .resnet import conv

# (channels of each level over the first one's, blocks a level, groups of a normalisation)
LEVELS = {"full": ((1, 2, 3, 4), 2, 32), "tiny": ((1, 2), 1, 2)}
SIZES = {
    "full": {"depth": 19, "width": 128, "length": 64, "batch": 128},
    "tiny": {"depth": 7, "width": 4, "length": 8, "batch": 2},
}
TIMES = 1000


def group_norm(x: Any, p: Any, groups: int) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide.reshape(*x.shape[:3], groups, -1)
    mean = jnp.mean(wide, (1, 2, 4), keepdims=True)
    variance = jnp.mean((wide - mean) ** 2, (1, 2, 4), keepdims=True)
    wide = ((wide - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def embedding(times: Any, width: int) -> Any:
    """Sines and cosines of falling frequencies."""
    rates = jnp.exp(-math.log(10_000) * jnp.arange(width // 2) / (width // 2))
    angles = times[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def residual_block(state: tuple[Any, Any], p: Any, groups: int) -> tuple[Any, Any]:
    """(x, time) -> (x, time)."""
    x, time = state
    y = conv(jax.nn.silu(group_norm(x, p["norm1"], groups)), p["conv1"])
    y = y + dense(jax.nn.silu(time), p["time"])[:, None, None]
    y = conv(jax.nn.silu(group_norm(y, p["norm2"], groups)), p["conv2"])
    return (conv(x, p["skip"]) if "skip" in p else x) + y, time


def attention(x: Any, p: Any, groups: int) -> Any:
    batch, height, width, channels = x.shape
    qkv = dense(group_norm(x, p["norm"], groups), p["qkv"])
    q, k, v = (a.reshape(batch, height * width, 1, channels) for a in jnp.split(qkv, 3, axis=-1))
    return x + dense(jax.nn.dot_product_attention(q, k, v).reshape(x.shape), p["out"])


def halved(x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


def doubled(x: Any) -> Any:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


# --- parameters ---------------------------------------------------------------------------------------


def _block(key: Any, inputs: int, outputs: int, time: int) -> dict[str, Any]:
    one, two, three, four = jax.random.split(key, 4)
    p = {
        "norm1": affine(inputs),
        "conv1": normal(one, (3, 3, inputs, outputs)),
        "time": linear(three, time, outputs),
        "norm2": affine(outputs),
        "conv2": 1e-2 * normal(two, (3, 3, outputs, outputs)),  # blocks start close to the identity
    }
    return p if inputs == outputs else p | {"skip": normal(four, (1, 1, inputs, outputs))}


def unet(task: Task) -> Network:
    found, _ = words(task, "bfloat16", "tiny")
    ratios, each, groups = LEVELS["tiny" if "tiny" in found else "full"]
    channels, time = [task.width * r for r in ratios], 4 * task.width
    step = lambda state, p: residual_block(state, p, groups)

    def init(key: Any) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 64))
        now, skipped, down, up = task.width, [task.width], [], []
        for width in channels:
            blocks = []
            for _ in range(each):
                blocks.append(_block(next(keys), now, width, time))
                now = width
                skipped.append(now)
            down.append(blocks)
        middle = {
            "before": [_block(next(keys), now, now, time)],
            "norm": affine(now),
            "qkv": linear(next(keys), now, 3 * now),
            "out": linear(next(keys), now, now),
            "after": [_block(next(keys), now, now, time)],
        }
        for level, width in enumerate(reversed(channels)):
            blocks = []
            for _ in range(each + (level == len(channels) - 1)):
                blocks.append(_block(next(keys), now + skipped.pop(), width, time))
                now = width
            up.append(blocks)
        return {
            "time": [linear(next(keys), task.width, time), linear(next(keys), time, time)],
            "stem": normal(next(keys), (3, 3, 3, task.width)),
            "down": down,
            "middle": middle,
            "up": up,
            "norm": affine(now),
            "head": normal(next(keys), (3, 3, now, 3)),
        }

    def model(
        params: Any,
        data: Any,
        noise: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        images, times = data
        dtype = jnp.bfloat16 if "bfloat16" in found else images.dtype
        wrapped = lambda x, p: chain(step, (x, time), [p], wrap=wrap, every=every, inner=inner)[0]
        first, second = params["time"]
        time = embedding(times, task.width).astype(dtype)
        time = dense(jax.nn.silu(dense(time, first)), second)
        x = conv(images.astype(dtype), params["stem"])
        skipped = [x]
        for level, blocks in enumerate(params["down"]):
            x = halved(x) if level else x
            for p in blocks:
                x = wrapped(x, p)
                skipped.append(x)
        middle = params["middle"]
        x = wrapped(x, middle["before"][0])
        x = wrapped(attention(x, middle, groups), middle["after"][0])
        for level, blocks in enumerate(params["up"]):
            x = doubled(x) if level else x
            for p in blocks:
                x = wrapped(jnp.concatenate([x, skipped.pop()], -1), p)
        x = conv(jax.nn.silu(group_norm(x, params["norm"], groups)), params["head"])
        return jnp.mean((x.astype(noise.dtype) - noise) ** 2)

    shape = (task.batch, task.length, task.length, 3)
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    data = (image, jax.ShapeDtypeStruct((task.batch,), jnp.int32))
    return Network(init, data, image, model, task.depth, classes=TIMES)
