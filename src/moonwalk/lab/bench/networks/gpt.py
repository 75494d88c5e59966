"""A language model like GPT-2: causal attention and MLPs in a residual stream.

`depth` blocks of `width` features over `length` tokens of `batch` texts; embeddings are tied. Variants:
"scanned" (blocks are stacked; otherwise a Python loop), "bfloat16" (computed in, from parameters that
stay float32), "tiny" (a small vocabulary and few heads).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Network, Wrap, affine, chain, identity, linear, normal, stacked, words

SIZES = {
    "full": {"depth": 12, "width": 768, "length": 1024, "batch": 32},
    "tiny": {"depth": 4, "width": 16, "length": 8, "batch": 2},
}
VOCABULARY = {"full": 50304, "tiny": 64}
HEAD = {"full": 64, "tiny": 8}  # features of a head


def layer_norm(x: Any, p: Any) -> Any:
    """LayerNorm in float32, whatever the dtype of the stream."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
    return (centred * scale * p["scale"] + p["bias"]).astype(x.dtype)


def dense(x: Any, p: Any) -> Any:
    return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)


def attention(x: Any, p: Any, *, head: int, causal: bool = True) -> Any:
    """Self-attention of the normalised stream, `head` features a head."""
    batch, length, width = x.shape
    qkv = dense(layer_norm(x, p["norm1"]), p["qkv"]).reshape(batch, length, 3, width // head, head)
    q, k, v = (qkv[:, :, i] for i in range(3))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    return dense(mixed.reshape(x.shape), p["out"])


def block(x: Any, p: Any, *, head: int) -> Any:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    x = x + attention(x, p, head=head)
    return x + dense(jax.nn.gelu(dense(layer_norm(x, p["norm2"]), p["up"])), p["down"])


def init_attention(key: Any, width: int) -> dict[str, Any]:
    one, two = jax.random.split(key)
    return {
        "norm1": affine(width),
        "qkv": linear(one, width, 3 * width),
        "out": linear(two, width, width),
    }


def init_mlp(key: Any, width: int, hidden: int) -> dict[str, Any]:
    one, two = jax.random.split(key)
    return {
        "norm2": affine(width),
        "up": linear(one, width, hidden),
        "down": linear(two, hidden, width),
    }


def init_block(key: Any, width: int) -> dict[str, Any]:
    one, two = jax.random.split(key)
    return init_attention(one, width) | init_mlp(two, width, 4 * width)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over all labels, in float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - right)


def gpt(task: Task) -> Network:
    found, _ = words(task, "scanned", "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    scanned, vocabulary, head = "scanned" in found, VOCABULARY[size], HEAD[size]
    width, one = task.width, functools.partial(init_block, width=task.width)

    def init(key: Any) -> dict[str, Any]:
        tokens, places, blocks = jax.random.split(key, 3)
        return {
            "tokens": 0.02 * normal(tokens, (vocabulary, width), 1),
            "places": 0.02 * normal(places, (task.length, width), 1),
            "blocks": stacked(one, blocks, task.depth, scan=scanned),
            "norm": affine(width),
        }

    def model(
        params: Any,
        tokens: Any,
        following: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        x = params["tokens"][tokens] + params["places"]
        x = x.astype(jnp.bfloat16) if "bfloat16" in found else x
        step = lambda x, p: block(x, p, head=head)
        x = chain(step, x, params["blocks"], wrap=wrap, every=every, inner=inner)
        x = layer_norm(x, params["norm"])
        return cross_entropy(x @ params["tokens"].T.astype(x.dtype), following)

    shape = jax.ShapeDtypeStruct((task.batch, task.length), jnp.int32)
    return Network(init, shape, shape, model, task.depth, scanned, classes=vocabulary)
