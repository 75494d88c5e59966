"""An encoder-decoder transformer, as trained for translation ("Transformer big", pre-norm).

`depth` layers each in the encoder and in the decoder, of `width` features, on `batch` pairs of texts of
`length` tokens. Source texts are padded: data hold their lengths. One embedding serves both texts and
the output. Variants: "bfloat16" (computed in, from parameters that stay float32), "tiny" (a small
vocabulary, heads of eight features).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Integers, Network, Wrap, affine, chain, identity, linear, normal, stacked, words
from .diffusion import embedding
from .gpt import HEAD, cross_entropy, dense, init_attention, init_mlp, layer_norm
from .gpt import attention as self_attention

SIZES = {
    "full": {"depth": 6, "width": 1024, "length": 512, "batch": 64},
    "tiny": {"depth": 2, "width": 16, "length": 8, "batch": 4},
}
VOCABULARY = {"full": 32000, "tiny": 64}


def attention(x: Any, source: Any, lengths: Any, p: Any, *, head: int) -> Any:
    """From every token of x to the first `lengths` tokens of each source."""
    keys, values = jnp.split(dense(source, p["kv"]), 2, axis=-1)
    shaped = lambda a: a.reshape(*a.shape[:2], -1, head)
    mixed = jax.nn.dot_product_attention(
        shaped(dense(x, p["q"])), shaped(keys), shaped(values), key_value_seq_lengths=lengths
    )
    return dense(mixed.reshape(x.shape), p["to"])


def mlp(x: Any, p: Any) -> Any:
    return dense(jax.nn.relu(dense(layer_norm(x, p["norm2"]), p["up"])), p["down"])


def encoder_layer(state: tuple[Any, Any], p: Any, *, head: int) -> tuple[Any, Any]:
    """(x, lengths) -> (x, lengths)."""
    x, lengths = state
    y = layer_norm(x, p["norm1"])
    x = x + attention(y, y, lengths, p, head=head)
    return x + mlp(x, p), lengths


def decoder_layer(state: tuple[Any, Any, Any], p: Any, *, head: int) -> tuple[Any, Any, Any]:
    """(x, source, lengths) -> (x, source, lengths)."""
    x, source, lengths = state
    x = x + self_attention(x, p, head=head)
    x = x + attention(layer_norm(x, p["norm3"]), source, lengths, p, head=head)
    return x + mlp(x, p), source, lengths


def init_cross(key: Any, width: int) -> dict[str, Any]:
    q, kv, to = jax.random.split(key, 3)
    return {
        "q": linear(q, width, width),
        "kv": linear(kv, width, 2 * width),
        "to": linear(to, width, width),
    }


def seq2seq(task: Task) -> Network:
    found, _ = words(task, "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    vocabulary, head, width = VOCABULARY[size], HEAD[size], task.width

    def init_encoder(key: Any) -> dict[str, Any]:
        cross, mlp = jax.random.split(key)
        return {"norm1": affine(width), **init_cross(cross, width), **init_mlp(mlp, width, 4 * width)}

    def init_decoder(key: Any) -> dict[str, Any]:
        own, rest = jax.random.split(key)
        return {"norm3": affine(width), **init_encoder(rest), **init_attention(own, width)}

    def init(key: Any) -> dict[str, Any]:
        tokens, encoder, decoder = jax.random.split(key, 3)
        return {
            "tokens": normal(tokens, (vocabulary, width), width),
            "encoder": stacked(init_encoder, encoder, task.depth, scan=False),
            "encoder_norm": affine(width),
            "decoder": stacked(init_decoder, decoder, task.depth, scan=False),
            "decoder_norm": affine(width),
        }

    def model(
        params: Any,
        data: Any,
        target: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        cuts: Any = {"wrap": wrap, "every": every, "inner": inner}
        source, lengths = data
        dtype = jnp.bfloat16 if "bfloat16" in found else params["tokens"].dtype
        places = embedding(jnp.arange(task.length), width)

        def embedded(tokens: Any) -> Any:
            return (math.sqrt(width) * params["tokens"][tokens] + places).astype(dtype)

        layer = lambda state, p: encoder_layer(state, p, head=head)
        x, _ = chain(layer, (embedded(source), lengths), params["encoder"], **cuts)
        source = layer_norm(x, params["encoder_norm"])
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]  # token 0 begins a text
        layer = lambda state, p: decoder_layer(state, p, head=head)
        y, _, _ = chain(layer, (embedded(shifted), source, lengths), params["decoder"], **cuts)
        y = layer_norm(y, params["decoder_norm"])
        return cross_entropy(y @ params["tokens"].T.astype(dtype), target)

    tokens = jax.ShapeDtypeStruct((task.batch, task.length), jnp.int32)
    lengths = Integers((task.batch,), (task.length + 1) // 2, task.length + 1)
    return Network(init, (tokens, lengths), tokens, model, task.depth, classes=vocabulary)
