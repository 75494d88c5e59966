"""The same with Flax NNX: modules of Flax, constraints of `moonwalk.nn` as plain functions.

`nn.pivot_kernel` and `nn.orthogonal` take raw parameters, which any optimizer may move anywhere, to
weights that Moonwalk can walk through, and say so in the trace. A stem, a convolution of stride 2 with a
diagonal pivot, then 16 isometric layers under one scan, as in `examples/demo.py`, and a head.

Run it with `python examples/flax_nnx.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array, lax

import moonwalk as mw
from moonwalk import data, nn


class StridedConv(nnx.Module):
    """Stride 2, three taps, padding 1: the middle tap is the pivot, the others are free."""

    def __init__(self, channels: int, width: int, pivot: str, *, rngs: nnx.Rngs):
        raw = jax.random.normal(rngs.params(), (3, channels, width)) / (3 * channels) ** 0.5
        self.raw, self.bias = nnx.Param(raw), nnx.Param(jnp.zeros(width))
        self.pivot = pivot

    def __call__(self, x: Array) -> Array:
        w = nn.pivot_kernel(self.raw[...], self.pivot, taps=(1,))
        dims = ("NHC", "HIO", "NHC")
        x = lax.conv_general_dilated(x, w, (2,), [(1, 1)], dimension_numbers=dims)
        return jax.nn.leaky_relu(x + self.bias[...], 0.25)


class IsometricStack(nnx.Module):
    """x ↦ shift(MaxMin(x Q_i + b_i)) for i = 1 … depth, with Q_i = orthogonal(raw_i)."""

    def __init__(self, width: int, depth: int, *, rngs: nnx.Rngs):
        # Well conditioned to begin with, so that the derivative of the QR is, too.
        self.raw = nnx.Param(jax.random.orthogonal(rngs.params(), width, shape=(depth,)))
        self.bias = nnx.Param(jnp.zeros((depth, width)))

    def __call__(self, x: Array) -> Array:
        def layer(x: Array, theta: tuple[Array, Array]) -> tuple[Array, None]:
            raw, bias = theta
            x = nn.MaxMin()(x @ nn.orthogonal(raw) + bias)
            right, left, rest = jnp.split(x, [x.shape[-1] // 4, x.shape[-1] // 2], axis=-1)
            return jnp.concatenate([jnp.roll(right, 1, -2), jnp.roll(left, -1, -2), rest], -1), None

        return lax.scan(layer, x, (self.raw[...], self.bias[...]))[0]


class Network(nnx.Module):
    """[batch, 40, 1] to logits [batch, 10]."""

    def __init__(self, width: int, depth: int, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, width, (5,), padding="SAME", rngs=rngs)
        self.conv = StridedConv(width, width, "diagonal", rngs=rngs)
        self.stack = IsometricStack(width, depth, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.head(self.stack(self.conv(self.stem(x))).max(1))


def largest_difference(found: Any, truth: Any) -> float:
    """max ‖a − b‖ / ‖b‖ over parameters."""
    off = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), found, truth)
    return max(map(float, jax.tree.leaves(off)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--depth", type=int, default=16)
    given = parser.parse_args()

    dataset = data.mnist1d()
    model = Network(32, given.depth, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: Array, y: Array) -> Array:
        logits = nnx.merge(graphdef, params, rest)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, x: Array, y: Array) -> Any:
        value, g, certificate = mw.value_and_grad(loss, certify=True)(params, x, y)
        updates, opt_state = optimizer.update(g, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state, certificate.error

    stream = data.batches(dataset, given.batch, seed=0)
    x, y = next(stream)
    print(mw.plan(loss, params, x, y).walked, "blocks walked")
    off = largest_difference(jax.jit(mw.grad(loss))(params, x, y), jax.jit(jax.grad(loss))(params, x, y))
    print(f"largest relative difference of a gradient: {off:.0e}")
    for i in range(given.steps):
        value, params, opt_state, error = step(params, opt_state, x, y)
        if i % 50 == 0 or i == given.steps - 1:
            print(f"step {i + 1:>3}: loss {value:.3f}, certificate {error:.0e}")
        x, y = next(stream)

    trained = nnx.merge(graphdef, params, rest)
    guess = jnp.argmax(trained(dataset.normalise(dataset.test_x)), -1)
    print(f"test accuracy {jnp.mean(guess == dataset.test_y):.1%}")


if __name__ == "__main__":
    main()
