"""What all networks share: how layers follow each other, shapes, variants' words, and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...training.names import nearest
from ..tasks import Task

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Layer = Callable[[Any, Any], Any]  # (x, parameters of the layer) -> x
Loss = Callable[[Any, Any, Any], Any]  # (params, x, target) -> loss


def identity(fun: Callable[..., Any]) -> Callable[..., Any]:
    return fun


def chain(
    layer: Layer | Sequence[Layer],
    x: Any,
    layers: Any,
    *,
    wrap: Wrap = identity,
    every: int = 1,
    inner: Wrap = identity,
) -> Any:
    """Layers one after the other: those of a list in a Python loop, stacked ones in a scan.

    **Arguments:**

    - `layer`: what each layer does; of a list, one for each if they differ.
    - `layers`: the layers' parameters: a list, or a tree whose leaves have the layers as first axis.
    - `wrap`: applied to every run of `every` layers, such as `jax.checkpoint`; of a scan with runs
        longer than one layer that makes a scan over scans.
    - `inner`: applied to the single layers of such runs.
    """
    if isinstance(layers, list):
        each = list(layer) if isinstance(layer, Sequence) else [layer] * len(layers)
        for start in range(0, len(layers), every):
            steps = [inner(step) for step in each[start : start + every]]
            x = wrap(functools.partial(_in_a_row, steps))(x, layers[start : start + every])
        return x
    assert not isinstance(layer, Sequence)
    step = lambda x, p: (layer(x, p), None)
    return scan(step, x, layers, wrap=wrap, every=every, inner=inner)[0]


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    wrap: Wrap = identity,
    every: int = 1,
    inner: Wrap = identity,
) -> tuple[Any, Any]:
    """`lax.scan`, with `wrap` around every run of `every` steps; `inner` as in `chain`."""
    if every == 1:
        return lax.scan(wrap(step), carry, xs)
    alone = inner(step)
    run = wrap(lambda carry, several: lax.scan(alone, carry, several))
    folded = jax.tree.map(lambda a: a.reshape((-1, every, *a.shape[1:])), xs)
    carry, ys = lax.scan(run, carry, folded)
    return carry, jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:])), ys)


def _in_a_row(steps: list[Layer], x: Any, layers: list[Any]) -> Any:
    for step, p in zip(steps, layers, strict=True):
        x = step(x, p)
    return x


@dataclass(frozen=True)
class Integers:
    """Data: whole numbers from `low` up to, but not including, `high`."""

    shape: tuple[int, ...]
    low: int
    high: int
    dtype: Any = jnp.int32


@dataclass(frozen=True)
class Network:
    """A loss with the shapes of its arguments.

    **Arguments:**

    - `init`: key -> parameters
    - `x`, `target`: shapes of the data, or trees of `jax.ShapeDtypeStruct` and `Integers`.
    - `model`: (params, x, target, *, wrap, every, inner) -> loss; the keywords are those of `chain`, by
        which the layers follow each other.
    - `depth`: how many layers the chain has.
    - `scanned`: whether it is a scan.
    - `classes`: integers in the data are below this, except for `Integers`.
    - `layer`: (x, w) -> x, where all layers are alike.
    - `block`: how many of them a user would put into one `jax.checkpoint`.
    """

    init: Callable[[Any], Any]
    x: Any
    target: Any
    model: Callable[..., Any]
    depth: int
    scanned: bool = False
    classes: int = 0
    layer: Layer | None = None
    block: int = 1

    def loss(self, params: Any, x: Any, target: Any) -> Any:
        return self.model(params, x, target)

    def by_hand(self, segments: int | str) -> Loss:
        """The loss with `jax.checkpoint` around runs of layers, as a user would write it.

        **Arguments:**

        - `segments`: how many runs there are; "block": one for every `block` layers; "dots": the same,
            and results of products without batch axes are kept; "sqrt": about the root of the depth.
        """
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if segments == "dots" else None
        # A scan's body cannot be merged with its recomputation, so preventing that would only cost time.
        wrap = functools.partial(jax.checkpoint, prevent_cse=not self.scanned, policy=policy)
        return functools.partial(self.model, wrap=wrap, every=self._every(segments))

    def checkpointed(self, params: Any, x: Any, target: Any) -> Any:
        """The same loss with little memory, for references.

        `jax.checkpoint` around every layer, and around about √depth of a scan.
        """
        every = self._every("sqrt") if self.scanned else 1
        inner = jax.checkpoint if every > 1 else identity
        return self.model(params, x, target, wrap=jax.checkpoint, every=every, inner=inner)

    def _every(self, segments: int | str) -> int:
        """Layers in a run; in a scan they divide its layers."""
        if segments in ("block", "dots"):
            return self.block
        wanted = self.depth**0.5 if segments == "sqrt" else self.depth / int(segments)
        fits = [k for k in range(1, self.depth + 1) if self.depth % k == 0 or not self.scanned]
        return min(fits, key=lambda k: abs(k - wanted))

    def types(self) -> tuple[Any, Any, Any]:
        """Shapes of (params, x, target)."""
        return jax.eval_shape(self.init, _key(0)), *map(structs, (self.x, self.target))

    def arguments(self, seed: int) -> tuple[Any, Any, Any]:
        """(params, x, target), the same ones for the same seed."""

        def draw(key: Any) -> tuple[Any, Any, Any]:
            weights, one, two = jax.random.split(key, 3)
            return self.init(weights), self._data(one, self.x), self._data(two, self.target)

        return jax.jit(draw)(_key(seed))

    def _data(self, key: Any, asked: Any) -> Any:
        leaves, tree = jax.tree.flatten(_plain(asked))
        keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
        made = [self._leaf(k, a) for k, a in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, made)

    def _leaf(self, key: Any, asked: Any) -> Any:
        if jnp.issubdtype(asked.dtype, jnp.inexact):
            return jax.random.normal(key, asked.shape, asked.dtype)
        low, high = (asked.low, asked.high) if isinstance(asked, Integers) else (0, self.classes)
        return jax.random.randint(key, asked.shape, low, high, asked.dtype)


def structs(asked: Any) -> Any:
    """Types of data: trees of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), _plain(asked))


def _plain(asked: Any) -> Any:
    """A plain shape stands for float32; trees are returned unchanged."""
    is_shape = isinstance(asked, tuple) and all(isinstance(n, int) for n in asked)
    return jax.ShapeDtypeStruct(asked, jnp.float32) if is_shape else asked


def _key(seed: int) -> Any:
    """A key of the generator that compiles fastest; it gives the same numbers on the same device."""
    return jax.random.key(seed, impl="rbg")


def words(task: Task, *flags: str) -> tuple[set[str], float | None]:
    """'identity, slope 0.25' -> ({'identity'}, 0.25)."""
    found, slope = set(), None
    for part in filter(None, (p.strip() for p in task.variant.split(","))):
        if part.startswith("slope "):
            slope = float(part.removeprefix("slope "))
        elif part in flags:
            found.add(part)
        else:
            raise ValueError(nearest(f"variant of {task.network}", part, (*flags, "slope 0.25")))
    return found, slope


# --- parameters ---------------------------------------------------------------------------------------


def normal(key: Any, shape: Sequence[int], fan_in: float | None = None) -> Any:
    """Normal numbers with variance 1 / fan_in, by default the product of all axes but the last."""
    size = fan_in or functools.reduce(lambda a, b: a * b, shape[:-1], 1)
    return jax.random.normal(key, tuple(shape), jnp.float32) / size**0.5


def constant(value: float, width: int) -> Any:
    """A constant array in float32, whatever JAX's default dtype is."""
    return jnp.full(width, value, jnp.float32)


def affine(width: int) -> dict[str, Any]:
    """Scale and bias of a normalisation."""
    return {"scale": constant(1, width), "bias": constant(0, width)}


def linear(key: Any, n: int, m: int) -> dict[str, Any]:
    """Weight and bias of a dense layer."""
    return {"w": normal(key, (n, m)), "b": constant(0, m)}


def stacked(init: Callable[[Any], Any], key: Any, count: int, *, scan: bool) -> Any:
    """Parameters of `count` layers of one kind, stacked for a scan or as a list."""
    keys = jax.random.split(key, count)
    return jax.vmap(init)(keys) if scan else [init(k) for k in keys]
