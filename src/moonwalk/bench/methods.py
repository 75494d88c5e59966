"""Names of methods -> how to differentiate a loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import gradient, methods
from ..fragments import Fragment
from ..training.names import nearest

Gradient = Callable[..., tuple[Any, Any]]  # (params, x, target) -> (value, gradients)


def differentiate(name: str, loss: Any, args: Any) -> Gradient:
    """`jax.value_and_grad(loss)` by the method of that name.

    **Arguments:**

    - `name`: one of `NAMES`, or with other numbers for K and B.
    - `loss`: of (params, x, target), a mean over the examples of x and target.
    - `args`: what it will be called with; types do, but for what `needs_values` names.
    """
    for pattern, make in _METHODS.items():
        found = re.fullmatch(pattern, name)
        if found:
            return make(loss, args, **{k: int(v) for k, v in found.groupdict().items()})
    raise ValueError(nearest("method", name, NAMES))


def needs_values(name: str) -> bool:
    """Whether a method plans from concrete weights."""
    return name == "moonwalk-measured"


def _by(method: Any) -> Callable[..., Gradient]:
    return lambda loss, args: gradient.value_and_grad(loss, method=method)


def _accumulate(loss: Any, args: Any, count: int) -> Gradient:
    """The mean over micro-batches, one after the other: what a user does whose batch does not fit."""
    batch = args[1].shape[0]
    if batch % count:
        raise ValueError(f"accumulate-{count}: a batch of {batch} has no {count} equal parts")

    def run(params: Any, x: Any, target: Any) -> Any:
        parts = jax.tree.map(lambda a: a.reshape((count, batch // count, *a.shape[1:])), (x, target))

        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *part)), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), x.dtype), params))
        total, _ = lax.scan(add, zero, parts)
        return jax.tree.map(lambda a: a / count, total)

    return run


def _as_printed(fragment: Fragment | None = None) -> methods.Moonwalk:
    """One walk over everything, whatever it takes and whatever comes of it."""
    return methods.Moonwalk(walk="always", tolerance=math.inf, on_inexact="ignore", fragment=fragment)


def _fragment(stagger: bool) -> Callable[..., Gradient]:
    def make(loss: Any, args: Any, span: int) -> Gradient:
        return _by(_as_printed(Fragment(span, stagger)))(loss, args)

    return make


def _measured(loss: Any, args: Any) -> Gradient:
    return gradient.value_and_grad(loss, method=gradient.plan(loss, *args))


_METHODS: dict[str, Callable[..., Gradient]] = {
    "backprop": _by(methods.Backprop()),
    "checkpoint": _by(methods.Checkpoint()),
    "checkpoint-sqrt": _by(methods.Checkpoint("sqrt")),
    "checkpoint-recursive": _by(methods.Checkpoint("recursive")),
    "checkpoint-block": _by(methods.Checkpoint("block")),
    r"accumulate-(?P<count>\d+)": _accumulate,
    "forward": _by(methods.Forward()),
    "projected-forward": _by(methods.ProjectedForward(0)),
    "reversible": _by(methods.Reversible()),
    "pure-forward": _by(methods.PureForward()),
    "pure-forward-per-example": _by(methods.PureForward(per_example=True)),
    "moonwalk": _by(methods.Moonwalk()),
    "moonwalk-measured": _measured,
    "moonwalk-checkpoint": _by(methods.Moonwalk(checkpoint="auto")),
    "moonwalk-as-printed": _by(_as_printed()),
    r"moonwalk-fragment-(?P<span>\d+)": _fragment(True),
    r"moonwalk-fragment-(?P<span>\d+)-aligned": _fragment(False),
}

NAMES = (
    "backprop",
    "checkpoint",
    "checkpoint-sqrt",
    "checkpoint-recursive",
    "checkpoint-block",
    "accumulate-4",
    "forward",
    "projected-forward",
    "reversible",
    "pure-forward",
    "pure-forward-per-example",
    "moonwalk",
    "moonwalk-measured",
    "moonwalk-checkpoint",
    "moonwalk-as-printed",
    "moonwalk-fragment-8",
    "moonwalk-fragment-8-aligned",
)
