"""A walk through a small network: every cotangent and every gradient from h₀ alone.

Backpropagation carries h_i = ∂J/∂x_i from the loss to the input and needs every activation x_i on the
way. Moonwalk turns round at the input: from h₀ it goes forward again, with x and h side by side,

    x_i = f_i(θ_i, x_{i-1})        h_i = vijp(f_i, h_{i-1})        g_i = ∂J/∂θ_i = vjp(f_i wrt θ_i, h_i)

so that no x_i has to be kept for g_i. This script takes that walk by hand, layer by layer, and
compares it with what `jax.grad` says. It shows that the walk is exact, not that it is lean: the truth
it compares with is computed by plain backpropagation.

Run it with `python examples/by_hand.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import moonwalk as mw

jax.config.update("jax_enable_x64", True)  # float64, so that nothing but rounding is left to see


class Layer(NamedTuple):
    """x_i = apply(theta, x_{i-1})."""

    name: str
    apply: Callable[[Array, Array], Array]
    theta: Array


class Step(NamedTuple):
    """What the walk knows after layer i, and the rules that took it there."""

    layer: Layer
    rules: str
    x: Array
    h: Array
    g: Array


# --- the network ------------------------------------------------------------------------------------


def conv(x: Array, w: Array, padding: int) -> Array:
    """Stride 2: larger than the padding, as the paper's lemma asks."""
    return jax.lax.conv_general_dilated(
        x, w, (2, 2), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def patches(w: Array, x: Array) -> Array:
    """2×2 patches, each to as many channels as it has numbers."""
    return conv(x, w, padding=0)


def conv_leaky(w: Array, x: Array) -> Array:
    """3×3 convolution and LeakyReLU."""
    return jax.nn.leaky_relu(conv(x, w, padding=1), 0.3)


def dense(w: Array, x: Array) -> Array:
    """All pixels and channels to fewer features."""
    return x.reshape(len(x), -1) @ w


def orthogonal_max_min(w: Array, x: Array) -> Array:
    """An isometry, known to the walk by its declaration, and the activation that sorts pairs."""
    a, b = jnp.split(x @ mw.declare(w, "orthogonal"), 2, axis=-1)
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], axis=-1)


def make_layers(key: Array) -> list[Layer]:
    """Random weights; nothing is done to make them easy to invert."""
    k = jax.random.split(key, 5)
    return [
        Layer("2×2 patches", patches, jax.random.normal(k[0], (2, 2, 3, 12)) / 12**0.5),
        Layer("3×3 conv + LeakyReLU", conv_leaky, jax.random.normal(k[1], (3, 3, 12, 12)) / 108**0.5),
        Layer("3×3 conv + LeakyReLU", conv_leaky, jax.random.normal(k[2], (3, 3, 12, 8)) / 108**0.5),
        Layer("dense 128 -> 64", dense, jax.random.normal(k[3], (128, 64)) / 128**0.5),
        Layer("orthogonal + MaxMin", orthogonal_max_min, jax.random.orthogonal(k[4], 64)),
    ]


def loss(y: Array) -> Array:
    """Any function of the network's output."""
    return jnp.mean(jnp.cos(y) + y**2)


# --- the walk ---------------------------------------------------------------------------------------


def walk(layers: list[Layer], x: Array, h: Array) -> Iterator[Step]:
    """Phase III: from (x₀, h₀) forward, one layer at a time."""
    for layer in layers:
        step = take_step(layer, x, h)
        x, h = step.x, step.h
        yield step


def take_step(layer: Layer, x: Array, h: Array) -> Step:
    """From (x, h) before a layer to (x, h) after it, and its gradient g."""
    y, vijp_fun = mw.vijp(partial(layer.apply, layer.theta), x)
    h = vijp_fun(h)
    _, vjp_fun = jax.vjp(lambda theta: layer.apply(theta, x), layer.theta)
    (g,) = vjp_fun(h)
    return Step(layer, rules_of(vijp_fun), y, h, g)


def rules_of(vijp_fun: Callable) -> str:
    """The rules behind a vijp, in order (a look inside: there is no public list of them yet)."""
    return ", ".join(link.rule.name for link in vijp_fun.func.composed.links)


# --- the truth --------------------------------------------------------------------------------------


def forward(layers: list[Layer], thetas: list[Array], x: Array) -> Array:
    """J(θ, x₀)."""
    for layer, theta in zip(layers, thetas, strict=True):
        x = layer.apply(theta, x)
    return loss(x)


def error(found: Array, truth: Array) -> float:
    """‖found - truth‖ / ‖truth‖."""
    return float(jnp.linalg.norm(found - truth) / jnp.linalg.norm(truth))


def main() -> None:
    layers = make_layers(jax.random.key(0))
    thetas = [layer.theta for layer in layers]
    x0 = jax.random.normal(jax.random.key(1), (4, 32, 32, 3))

    truth_g, h0 = jax.grad(forward, argnums=(1, 2))(layers, thetas, x0)
    print(f"{len(layers)} layers in {x0.dtype}, from h0 {h0.shape} alone:\n")
    print(f"{'layer':<22}{'rules':<50}{'error of h':>10}{'error of g':>13}")
    for i, step in enumerate(walk(layers, x0, h0), start=1):
        truth_h = jax.grad(forward, argnums=2)(layers[i:], thetas[i:], step.x)
        off_h, off_g = error(step.h, truth_h), error(step.g, truth_g[i - 1])
        print(f"{step.layer.name:<22}{step.rules:<50}{off_h:>10.0e}{off_g:>13.0e}")

    print("\nReLU throws cotangents away, and no walk can bring them back:\n")
    try:
        mw.vijp(lambda x: jax.nn.relu(conv(x, thetas[0], padding=0)), x0)
    except mw.NotSubmersiveError as refusal:
        print(refusal)


if __name__ == "__main__":
    main()
