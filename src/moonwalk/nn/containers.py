"""Containers of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array

from .. import settings


class Sequential(eqx.Module):
    """Layers one after the other.

    A layer is anything that takes `x` and `key=`. If a key is given, it is split among the layers.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> net = mw.nn.Sequential([mw.nn.Linear(8, 8, key=jax.random.key(0)), mw.nn.Abs()])
    >>> net(jnp.ones((2, 8))).shape
    (2, 8)
    """

    layers: tuple[Any, ...]

    def __init__(self, layers: Iterable[Any]):
        if not isinstance(layers, Iterable):
            raise TypeError(f"Sequential: takes a list of layers, got {type(layers).__name__}")
        self.layers = tuple(layers)
        for i, layer in enumerate(self.layers):
            if not callable(layer):
                raise TypeError(f"Sequential: layer {i} is no layer but {type(layer).__name__}")

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        keys = [None] * len(self.layers) if key is None else jax.random.split(key, len(self.layers))
        for layer, own in zip(self.layers, keys, strict=True):
            x = layer(x, key=own)
        return x

    def __getitem__(self, index: int) -> Any:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)


class Stack(eqx.Module):
    """The same layer `depth` times, each with its own parameters, as one `lax.scan`.

    Parameters are stacked along a first axis. Compile time does not grow with the depth, and a walk goes
    through the scan layer by layer; what depends on weights alone (an orthogonalisation) is done for all
    layers at once.

    **Arguments:**

    - `make`: `make(key)` builds one layer, whose output must have the shape and dtype of its input.
    - `depth`
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> make = lambda key: mw.nn.Sequential([mw.nn.Linear(8, 8, key=key), mw.nn.Abs()])
    >>> net = mw.nn.Stack(make, 100, key=jax.random.key(0))
    >>> net(jnp.ones((2, 8))).shape
    (2, 8)
    """

    layer: Any
    depth: int = eqx.field(static=True)

    def __init__(self, make: Callable[[Array], Any], depth: int, *, key: Array):
        depth = settings.count("Stack", "depth", depth, what="counts layers")
        if not callable(make):
            raise TypeError(f"Stack: make is a function of a key that returns a layer, got {make!r}")
        self.layer = eqx.filter_vmap(make)(jax.random.split(key, depth))
        self.depth = depth

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        arrays, static = eqx.partition(self.layer, eqx.is_array)
        keys = None if key is None else jax.random.split(key, self.depth)

        def step(x: Array, one: Any) -> tuple[Array, None]:
            own, own_key = one
            return eqx.combine(own, static)(x, key=own_key), None

        return lax.scan(step, x, (arrays, keys), length=self.depth)[0]
