"""A transformer that can be run backwards: attention and MLP as the two functions of a coupling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import nn, settings


class Attention(eqx.Module):
    """Multi-head self-attention over the second-last axis, after a LayerNorm."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention

    def __init__(self, width: int, heads: int, *, key: Array):
        self.norm = eqx.nn.LayerNorm(width)
        attention = eqx.nn.MultiheadAttention(heads, width, key=key)
        self.attention = _quiet(attention, lambda a: a.output_proj.weight)

    def __call__(self, x: Float[Array, "*batch n d"], *, key: Array | None = None) -> Array:
        def one(x: Float[Array, "n d"]) -> Array:
            y = jax.vmap(self.norm)(x)
            return self.attention(y, y, y)

        return _over_batches(one, x, 2)


class MLP(eqx.Module):
    """Two dense layers with a GELU between them, after a LayerNorm."""

    norm: eqx.nn.LayerNorm
    wide: eqx.nn.Linear
    back: eqx.nn.Linear

    def __init__(self, width: int, ratio: int, *, key: Array):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.wide = eqx.nn.Linear(width, ratio * width, key=first)
        self.back = _quiet(eqx.nn.Linear(ratio * width, width, key=second), lambda a: a.weight)

    def __call__(self, x: Float[Array, "*batch n d"], *, key: Array | None = None) -> Array:
        return _over_batches(lambda x: self.back(jax.nn.gelu(self.wide(self.norm(x)))), x, 1)


def _quiet(layer: Any, where: Callable[[Any], Array]) -> Any:
    """A branch with a small initial output, so that a deep stack starts close to the identity."""
    return eqx.tree_at(where, layer, where(layer) / 8)


def _over_batches(fun: Callable[[Array], Array], x: Array, own: int) -> Array:
    """A function of the last `own` axes, mapped over all others."""
    flat = x.reshape((-1, *x.shape[-own:]))
    return jax.vmap(fun)(flat).reshape(x.shape)


class ReversibleTransformer(eqx.Module):
    """Tokens, reversible blocks, and a dense head on their mean."""

    embed: nn.Patchify
    places: Float[Array, "n d"]
    blocks: nn.Stack
    norm: eqx.nn.LayerNorm
    head: nn.Linear

    def __call__(self, x: Float[Array, "batch ..."], *, key: Array | None = None) -> Array:
        tokens = self.embed(x)
        tokens = tokens.reshape((tokens.shape[0], -1, tokens.shape[-1])) + self.places
        # Both streams start as the tokens (Kitaev et al. 2020).
        tokens = self.blocks(jnp.concatenate([tokens, tokens], -1), key=key)
        first, second = jnp.split(tokens, 2, -1)
        mean = jnp.mean(_over_batches(self.norm, (first + second) / 2, 1), -2)
        return self.head(mean)


def reversible_transformer(
    in_shape: Sequence[int],
    classes: int,
    *,
    key: Array,
    width: int = 64,
    depth: int = 12,
    heads: int = 4,
    ratio: int = 4,
    patch: int | None = None,
) -> ReversibleTransformer:
    """A vision or signal transformer whose blocks are additive couplings: y₁ = x₁ + attention(x₂),
    y₂ = x₂ + mlp(y₁).

    Attention has no vijp, and an ordinary transformer is recomputed (docs/transformer.md). This one is
    *inverted*: `moonwalk.value_and_grad` keeps the last block's output, whatever the depth.

    **Arguments:**

    - `in_shape`: (length, channels) or (height, width, channels).
    - `classes`
    - `key`
    - `width`: features of a token, in each of the two streams.
    - `depth`: blocks.
    - `heads`: of the attention.
    - `ratio`: how many times wider than a token the MLP is.
    - `patch`: how many positions along each axis become one token; None: the largest divisor up to 4.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> model = mw.models.reversible_transformer((40, 1), 10, key=jax.random.key(0), width=16, depth=2)
    >>> model(jnp.ones((2, 40, 1))).shape
    (2, 10)
    """
    name = "reversible_transformer"
    rule = "is (length, channels) or (height, width, channels)"
    *space, channels = settings.sizes(name, "in_shape", in_shape, (2, 3), rule)
    settings.counts(name, classes=classes, width=width, depth=depth, heads=heads, ratio=ratio)
    if patch is not None:
        settings.count(name, "patch", patch)
    if patch is None:
        patch = next(p for p in (4, 3, 2, 1) if all(n % p == 0 for n in space))
    if any(n % patch for n in space):
        raise ValueError(
            f"reversible_transformer: patches of {patch} do not divide an input of {tuple(space)}; "
            "choose a divisor of every size"
        )
    if width % heads:
        raise ValueError(
            f"reversible_transformer: {heads} heads do not divide a width of {width}; choose a divisor"
        )
    embed_key, place_key, block_key, head_key = jax.random.split(key, 4)
    tokens = math.prod(n // patch for n in space)

    def block(key: Array) -> nn.Coupling:
        first, second = jax.random.split(key)
        return nn.Coupling(Attention(width, heads, key=first), MLP(width, ratio, key=second))

    return ReversibleTransformer(
        nn.Patchify(channels, width, patch, dims=len(space), kind="free", key=embed_key),
        jax.random.normal(place_key, (tokens, width)) / 8,
        nn.Stack(block, depth, key=block_key),
        eqx.nn.LayerNorm(width),
        nn.Linear(width, classes, kind="free", slope=1.0, key=head_key),
    )
