"""Isometric networks, for any depth.

Every layer is orthogonal and every activation is |x| or MaxMin. So cotangents keep their length on the
way back, walks lose no accuracy, and one more layer costs a walk only one bit per entry (or pair).
Activations lose nothing either: a head that reads all positions sees everything that the stem computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from .. import nn, settings

ACTIVATIONS: dict[str, Callable[[], Any]] = {"maxmin": nn.MaxMin, "abs": nn.Abs}


class Flatten(eqx.Module):
    """Flattens all axes after the first: [batch, ...] -> [batch, n]."""

    def __call__(self, x: Float[Array, "batch ..."], *, key: Array | None = None) -> Array:
        return x.reshape((x.shape[0], -1))


def isometric_mlp(
    in_shape: Sequence[int],
    classes: int,
    *,
    key: Array,
    width: int = 128,
    depth: int = 16,
    activation: str = "maxmin",
) -> nn.Sequential:
    """A dense stem to `width`, orthogonal layers with an isometric activation, a dense head.

    **Arguments:**

    - `in_shape`: any; inputs are flattened.
    - `classes`
    - `key`
    - `width`: of every layer; even, for `"maxmin"`.
    - `depth`: orthogonal layers, scanned over: compile time does not grow with their number.
    - `activation`: `"maxmin"` or `"abs"`.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> model = mw.models.isometric_mlp((40, 1), 10, key=jax.random.key(0), width=8, depth=100)
    >>> model(jnp.ones((2, 40, 1))).shape
    (2, 10)
    """
    name = "isometric_mlp"
    rule = "is a shape, positive numbers with the channels last"
    in_shape = settings.sizes(name, "in_shape", in_shape, range(1, 9), rule)
    settings.counts(name, classes=classes, width=width, depth=depth)
    act = _activation(name, activation, width)
    stem_key, body_key, head_key = jax.random.split(key, 3)

    def layer(key: Array) -> nn.Sequential:
        return nn.Sequential([nn.Linear(width, width, key=key), act()])

    numbers = math.prod(in_shape)
    stem = nn.Linear(numbers, width, kind="free", slope=1.0, key=stem_key)
    head = nn.Linear(width, classes, kind="free", slope=1.0, key=head_key)
    return nn.Sequential([Flatten(), stem, nn.Stack(layer, depth, key=body_key), head])


def isometric_cnn(
    in_shape: Sequence[int],
    classes: int,
    *,
    key: Array,
    channels: int = 32,
    depth: int = 100,
    activation: str = "maxmin",
    kernel_size: int = 3,
    stem_size: int = 5,
    padding: str = "CIRCULAR",
    spread: float = 0.1,
    head: str = "flatten",
) -> nn.Sequential:
    """A stem to `channels`, orthogonal convolutions with an isometric activation, a dense head.

    It works on signals or images, depending on `in_shape`. Its initial weights make it almost a network
    of one layer: the convolutions are close to the identity (`spread`), and applying the activation
    twice is the same as once.

    **Arguments:**

    - `in_shape`: (length, channels) or (height, width, channels).
    - `classes`
    - `key`
    - `channels`: of every layer; even, for `"maxmin"`.
    - `depth`: orthogonal convolutions, scanned over: compile time does not grow with their number.
    - `activation`: `"maxmin"` or `"abs"`.
    - `kernel_size`, `padding`, `spread`: of the convolutions; see `moonwalk.nn.OrthogonalConv2d`.
    - `stem_size`: the size of the stem's kernel, which is unconstrained; odd.
    - `head`: `"flatten"`, a dense layer that reads all positions, or `"mean"`, their mean alone.
        Isometric layers lose nothing, but a mean loses almost everything: with it, training was far
        slower.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> model = mw.models.isometric_cnn((40, 1), 10, key=jax.random.key(0), channels=4, depth=100)
    >>> model(jnp.ones((2, 40, 1))).shape
    (2, 10)
    """
    rule = "is (length, channels) or (height, width, channels)"
    in_shape = settings.sizes("isometric_cnn", "in_shape", in_shape, (2, 3), rule)
    settings.counts("isometric_cnn", classes=classes, channels=channels, depth=depth)
    settings.counts("isometric_cnn", kernel_size=kernel_size, stem_size=stem_size)
    if head not in ("flatten", "mean"):
        raise ValueError(f"isometric_cnn: unknown head {head!r}; choose one of flatten, mean")
    if stem_size % 2 == 0:
        raise ValueError(f"isometric_cnn: the stem's kernel has an odd size, got {stem_size}")
    act = _activation("isometric_cnn", activation, channels)
    dims = len(in_shape) - 1
    conv, free = (nn.OrthogonalConv1d, nn.Conv1d) if dims == 1 else (nn.OrthogonalConv2d, nn.Conv2d)
    stem_key, body_key, head_key = jax.random.split(key, 3)

    def layer(key: Array) -> nn.Sequential:
        one = conv(channels, kernel_size, padding, spread=spread, key=key)
        if activation == "maxmin":
            one = eqx.tree_at(lambda c: c.raw.matrix, one, _paired(one.raw.matrix))
        return nn.Sequential([one, act()])

    stem = free(
        in_shape[-1], channels, stem_size, padding=stem_size // 2, pivot="free", slope=1.0, key=stem_key
    )
    last = Flatten() if head == "flatten" else nn.GlobalMean(dims)
    numbers = channels * (math.prod(in_shape[:-1]) if head == "flatten" else 1)
    dense = nn.Linear(numbers, classes, kind="free", slope=1.0, key=head_key)
    return nn.Sequential([stem, nn.Stack(layer, depth, key=body_key), last, dense])


def _paired(matrix: Float[Array, "c c"]) -> Float[Array, "c c"]:
    """Permute a weight's rows for channels in MaxMin's order, all larger ones first: pairs meet again.

    Without this, near-identity layers and MaxMin would, layer after layer, sort all channels of a
    position.
    """
    channels = matrix.shape[0]
    return matrix[np.r_[0:channels:2, 1:channels:2]]


def _activation(name: str, activation: str, channels: int) -> Callable[[], Any]:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"{name}: unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}"
        )
    if activation == "maxmin" and channels % 2:
        raise ValueError(
            f"{name}: MaxMin takes channels in pairs, got {channels}; take an even number, or "
            "activation='abs'"
        )
    return ACTIVATIONS[activation]
