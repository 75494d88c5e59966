"""One step of training, and many as one program.

A step is a pure function of the state and its number: the batch and the keys of the augmentation follow
from (seed, number). A step whose loss or gradients are not finite, or whose certificate exceeds the
tolerance, leaves the state unchanged, and so do the steps after it in the same program: a caller that
reads the metrics afterwards can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from ... import _jax, gradient
from ...planning.report import Plan
from ..data import Dataset

Loss = Callable[[Any, Array, Array], tuple[Array, Array]]  # (params, x, y) -> (loss, accuracy)
Augment = Callable[[Array, Array], Array]


class State(NamedTuple):
    """What training changes."""

    params: Any
    opt_state: Any


class Metrics(NamedTuple):
    """Metrics of each step of a program."""

    loss: Array
    accuracy: Array
    certificate: Array
    is_finite: Array  # loss and gradients
    is_applied: Array


class Examples(NamedTuple):
    """A part of a data set, on the device."""

    x: Array
    y: Array


def cross_entropy(
    logits: Float[Array, "batch classes"], y: Int[Array, "batch"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(mean softmax cross entropy, accuracy) of a batch, in at least float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == y, dtype=jnp.float32)


def loss_of(static: Any) -> Loss:
    """The loss of a model whose arrays were taken out by `eqx.partition`."""

    def loss(params: Any, x: Array, y: Array) -> tuple[Array, Array]:
        return cross_entropy(eqx.combine(params, static)(x), y)

    return loss


def normaliser(dataset: Dataset) -> Callable[[Array], Array]:
    """`Dataset.normalise` for arrays on the device."""
    mean, std = (np.asarray(a, np.float32) for a in (dataset.mean, dataset.std))
    return lambda x: (x.astype(jnp.float32) - mean) / std


def differentiated(loss: Loss, method: Any) -> Callable[..., tuple[tuple[Array, Array], Any, Array]]:
    """(params, x, y) -> ((loss, accuracy), gradients, measured error of the walks)."""
    walk = gradient.value_and_grad(loss, has_aux=True, method=quiet(method), certify=True)

    def run(*args: Any) -> tuple[tuple[Array, Array], Any, Array]:
        value, gradients, certificate = walk(*args)
        return value, gradients, certificate.error

    return run


def quiet(method: Any) -> Any:
    """The same method, except that the loop judges its certificates."""
    if isinstance(method, Plan):
        return replace(method, method=quiet(method.method))
    judges = any(field.name == "on_inexact" for field in fields(method))
    return replace(method, on_inexact="ignore") if judges else method


def make_steps(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    method: Any,
    tolerance: float,
    normalise: Callable[[Array], Array],
    augment: Augment | None = None,
) -> Callable[[State, Examples, Array, Array, Array], tuple[State, Metrics]]:
    """A function (state, examples, chosen [steps, batch], key, numbers [steps]) -> (state, metrics).

    All its steps are one `lax.scan`; examples stay on the device.
    """
    differentiate = differentiated(loss, method)

    def step(state: State, x: Array, y: Array, is_stopped: Array) -> tuple[State, Metrics]:
        (value, accuracy), gradients, certificate = differentiate(state.params, x, y)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        updated = State(optax.apply_updates(state.params, updates), opt_state)
        is_finite = jnp.isfinite(value) & all_finite(gradients)
        is_applied = is_finite & (certificate <= tolerance) & ~is_stopped
        kept = jax.tree.map(lambda new, old: jnp.where(is_applied, new, old), updated, state)
        return kept, Metrics(value, accuracy, certificate, is_finite, is_applied)

    def steps(
        state: State, examples: Examples, chosen: Array, key: Array, numbers: Array
    ) -> tuple[State, Metrics]:
        def body(carry: tuple[State, Array], each: tuple[Array, Array]) -> Any:
            state, is_stopped = carry
            rows, number = each
            x, y = examples.x[rows], examples.y[rows]
            if augment is not None:
                x = augment(jax.random.fold_in(key, number), x)
            state, metrics = step(state, normalise(x), y, is_stopped)
            return (state, ~metrics.is_applied), metrics

        (state, _), metrics = lax.scan(body, (state, jnp.zeros((), bool)), (chosen, numbers))
        return state, metrics

    return steps


def all_finite(tree: Any) -> Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def make_evaluate(
    loss: Loss, normalise: Callable[[Array], Array], batch: int
) -> Callable[[Any, Examples], tuple[Array, Array]]:
    """A function (params, examples) -> (mean loss, accuracy) that runs over chunks of examples."""

    def evaluate(params: Any, examples: Examples) -> tuple[Array, Array]:
        count = len(examples.y)
        size = min(batch, count)
        whole = count - count % size

        def part(rows: Array) -> tuple[Array, Array]:
            return loss(params, normalise(examples.x[rows]), examples.y[rows])

        found = lax.map(part, jnp.arange(whole).reshape(-1, size))
        sums = [jnp.sum(a) * size for a in found]
        if whole < count:
            rest = part(jnp.arange(whole, count))
            sums = [a + b * (count - whole) for a, b in zip(sums, rest, strict=True)]
        return sums[0] / count, sums[1] / count

    return evaluate


def compiled(fun: Callable[..., Any], *args: Any, donate: bool = False) -> Any:
    """A program for arguments like these; `donate`: the first argument's memory is reused."""
    return _jax.compiled(jax.jit(fun, donate_argnums=(0,) if donate else ()), *args)


def temporaries(program: Any) -> int:
    """Bytes that a compiled program takes besides its arguments and results."""
    return int(program.memory_analysis().temp_size_in_bytes)
