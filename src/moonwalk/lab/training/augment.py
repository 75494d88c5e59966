"""Augmentation of image batches as pure functions of (key, batch), to be run on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def flip(key: Array, x: Shaped[Array, "batch h w c"]) -> Shaped[Array, "batch h w c"]:
    """Each image mirrored left to right with probability 1/2."""
    mirrored = jax.random.bernoulli(key, shape=(len(x), 1, 1, 1))
    return jnp.where(mirrored, x[:, :, ::-1], x)


def crop(key: Array, x: Shaped[Array, "batch h w c"], padding: int = 4) -> Shaped[Array, "batch h w c"]:
    """Each image shifted by up to `padding` pixels along both axes; its mirror image fills the edge."""
    edge = (padding, padding)
    padded = jnp.pad(x, ((0, 0), edge, edge, (0, 0)), mode="reflect")
    shifts = jax.random.randint(key, (len(x), 2), 0, 2 * padding + 1)

    def window(image: Array, shift: Array) -> Array:
        return jax.lax.dynamic_slice(image, (shift[0], shift[1], 0), x.shape[1:])

    return jax.vmap(window)(padded, shifts)


def flip_and_crop(key: Array, x: Shaped[Array, "batch h w c"]) -> Shaped[Array, "batch h w c"]:
    """`flip` and `crop`, each with a key of its own.

    **Example:**

    >>> import jax, jax.numpy as jnp
    >>> from moonwalk import training
    >>> x = jnp.arange(2 * 8 * 8).reshape(2, 8, 8, 1)
    >>> training.flip_and_crop(jax.random.key(0), x).shape
    (2, 8, 8, 1)
    """
    first, second = jax.random.split(key)
    return crop(second, flip(first, x))
