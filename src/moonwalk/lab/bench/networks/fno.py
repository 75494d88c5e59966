"""A Fourier neural operator (Li et al. 2021): from a coefficient field to the solution of an equation.

Fields on length × length points; `depth` layers of `width` channels, each the sum of a product with
complex weights at the lowest frequencies and a dense layer. Variants: "tiny" (few frequencies).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..tasks import Task
from .base import Network, Wrap, chain, identity, linear, normal, stacked, words
from .gpt import dense

SIZES = {
    "full": {"depth": 4, "width": 64, "length": 256, "batch": 32},
    "tiny": {"depth": 3, "width": 4, "length": 8, "batch": 4},
}
MODES = {"full": 24, "tiny": 2}
HIDDEN = 128


def spectral(x: Any, weights: Any) -> Any:
    """Multiplies the lowest frequencies of x [batch, n, n, in]; [2, m, m, in, out, 2] are the weights.

    Their first axis: frequencies along the first axis from zero up, and from below zero; their last
    one: real and imaginary parts.
    """
    m = weights.shape[1]
    up, down = lax.complex(weights[..., 0], weights[..., 1])
    spectrum = jnp.fft.rfft2(x, axes=(1, 2))
    product = jnp.zeros((*spectrum.shape[:3], weights.shape[4]), spectrum.dtype)
    for part, w in ((slice(0, m), up), (slice(-m, None), down)):
        one = jnp.einsum("bxyi,xyio->bxyo", spectrum[:, part, :m], w)
        product = product.at[:, part, :m].set(one)
    return jnp.fft.irfft2(product, s=x.shape[1:3], axes=(1, 2))


def layer(x: Any, p: Any) -> Any:
    return jax.nn.gelu(spectral(x, p["spectral"]) + dense(x, p["dense"]))


def fno(task: Task) -> Network:
    found, _ = words(task, "tiny")
    modes, width, length = MODES["tiny" if "tiny" in found else "full"], task.width, task.length

    def init_layer(key: Any) -> dict[str, Any]:
        one, two = jax.random.split(key)
        shape = (2, modes, modes, width, width, 2)
        return {"spectral": normal(one, shape, width), "dense": linear(two, width, width)}

    def init(key: Any) -> dict[str, Any]:
        stem, layers, one, two = jax.random.split(key, 4)
        return {
            "stem": linear(stem, 3, width),
            "layers": stacked(init_layer, layers, task.depth, scan=False),
            "head": [linear(one, width, HIDDEN), linear(two, HIDDEN, 1)],
        }

    def model(
        params: Any,
        fields: Any,
        solutions: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        line = jnp.linspace(0, 1, length, dtype=fields.dtype)
        grid = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), -1)
        grid = jnp.broadcast_to(grid, (fields.shape[0], length, length, 2))
        x = dense(jnp.concatenate([fields, grid], -1), params["stem"])
        x = chain(layer, x, params["layers"], wrap=wrap, every=every, inner=inner)
        one, two = params["head"]
        x = dense(jax.nn.gelu(dense(x, one)), two)
        norm = lambda a: jnp.sqrt(jnp.sum(a**2, (1, 2, 3)))
        return jnp.mean(norm(x - solutions) / norm(solutions))

    shape = (task.batch, length, length, 1)
    return Network(init, shape, shape, model, task.depth)
