"""Names of methods -> how to differentiate a loss."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import gradient, preview
from ...planning import methods
from ...planning.report import Plan
from ...rules.fragments import Fragment
from ..training.names import nearest

# (params, x, target) -> (value, gradients), and a certificate where the method's name says so
Gradient = Callable[..., tuple[Any, ...]]
_WITHIN = r"moonwalk-within-(\d+)"


def differentiate(name: str, loss: Any, args: Any) -> Gradient:
    """`jax.value_and_grad(loss)` by the method of that name.

    **Arguments:**

    - `name`: one of `NAMES`, or with other numbers for K and B.
    - `loss`: of (params, x, target), a mean over the examples of x and target.
    - `args`: the arguments it will be called with; types suffice unless `needs_values`.
    """
    for pattern, make in _METHODS.items():
        found = re.fullmatch(pattern, name)
        if found:
            return make(loss, args, **{k: int(v) for k, v in found.groupdict().items()})
    raise ValueError(nearest("method", name, NAMES))


def planned(name: str, loss: Any, args: Any) -> Plan | None:
    """The plan that a method of this name makes beforehand; None if it makes none.

    "moonwalk-within-25" is the fastest plan, verified, for a budget a quarter of the way from the least
    memory to backpropagation's. `args`: as for `differentiate`.
    """
    if name == "moonwalk-measured":
        return preview.plan(loss, *args)
    share = re.fullmatch(_WITHIN, name)
    if share is None:
        return None
    least = preview.frontier(loss, *args)[0]
    budget = least.total_bytes + (least.backprop_bytes - least.peak_bytes) * int(share[1]) // 100
    return preview.plan(loss, *args, method=methods.Moonwalk(budget=budget), verify=True)


def by_hand(name: str) -> int | str | None:
    """Where `jax.checkpoint` stands in the loss that "jax-checkpoint-…" differentiates; None: nowhere.

    `networks.Network.by_hand` makes that loss.
    """
    found = re.fullmatch(r"jax-checkpoint-(\d+|block|dots|sqrt)", name)
    return None if found is None else int(found[1]) if found[1].isdigit() else found[1]


def needs_values(name: str) -> bool:
    """Whether a method plans from concrete weights."""
    return name == "moonwalk-measured"


def _by(method: Any, certify: bool = False) -> Callable[..., Gradient]:
    return lambda loss, args: gradient.value_and_grad(loss, method=method, certify=certify)


def _certified(**settings: Any) -> Callable[..., Gradient]:
    """TF32 rounds by 5e-4 in every layer: a large certificate over a thousand layers is no alarm."""
    return _by(methods.Moonwalk(on_inexact="ignore", **settings), certify=True)


def _accumulate(loss: Any, args: Any, count: int) -> Gradient:
    """The mean over micro-batches, one after the other, as a user does whose batch does not fit.

    The first axis of every array of the data is cut into `count` parts.
    """
    for batch in (a.shape[0] for a in jax.tree.leaves(args[1:])):
        if batch % count:
            raise ValueError(f"accumulate-{count}: a batch of {batch} has no {count} equal parts")

    def run(params: Any, x: Any, target: Any) -> Any:
        parts = jax.tree.map(lambda a: a.reshape((count, -1, *a.shape[1:])), (x, target))
        found = functools.partial(jax.value_and_grad(loss), params)

        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, found(*part)), None

        types = jax.eval_shape(found, *jax.tree.map(lambda a: a[0], parts))
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), types)
        total, _ = lax.scan(add, zero, parts)
        return jax.tree.map(lambda a: a / count, total)

    return run


def _as_printed(fragment: Fragment | None = None, precision: Any = None) -> methods.Moonwalk:
    """One walk over everything, whatever its memory and its error."""
    return methods.Moonwalk(
        walk="always",
        tolerance=math.inf,
        on_inexact="ignore",
        fragment=fragment,
        walk_precision=precision,
    )


def _fragment(stagger: bool, precision: Any = None) -> Callable[..., Gradient]:
    def make(loss: Any, args: Any, span: int) -> Gradient:
        return _by(_as_printed(Fragment(span, stagger), precision))(loss, args)

    return make


def _numbered(method: Any, name: str) -> Callable[..., Gradient]:
    return lambda loss, args, count: _by(method(**{name: count}))(loss, args)


def _planned(pattern: str) -> Callable[..., Gradient]:
    def make(loss: Any, args: Any, **numbers: int) -> Gradient:
        plan = planned(pattern.format(**numbers), loss, args)
        assert plan is not None
        return gradient.value_and_grad(loss, method=plan)

    return make


_METHODS: dict[str, Callable[..., Gradient]] = {
    "backprop": _by(methods.Backprop()),
    "checkpoint": _by(methods.Checkpoint()),
    "checkpoint-sqrt": _by(methods.Checkpoint("sqrt")),
    "checkpoint-recursive": _by(methods.Checkpoint("recursive")),
    "checkpoint-block": _by(methods.Checkpoint("block")),
    r"checkpoint-(?P<count>\d+)": _numbered(methods.Checkpoint, "segments"),
    r"jax-checkpoint-(\d+|block|dots|sqrt)": _by(methods.Backprop()),
    r"accumulate-(?P<count>\d+)": _accumulate,
    "forward": _by(methods.Forward()),
    "projected-forward": _by(methods.ProjectedForward(0)),
    "reversible": _by(methods.Reversible()),
    "pure-forward": _by(methods.PureForward()),
    "pure-forward-per-example": _by(methods.PureForward(per_example=True)),
    "moonwalk": _by(methods.Moonwalk()),
    "moonwalk-measured": _planned("moonwalk-measured"),
    r"moonwalk-within-(?P<share>\d+)": _planned("moonwalk-within-{share}"),
    "moonwalk-certified": _certified(),
    "moonwalk-checkpoint": _by(methods.Moonwalk(checkpoint="auto")),
    "moonwalk-checkpoint-certified": _certified(checkpoint="auto"),
    "moonwalk-checkpoint-certified-highest": _certified(checkpoint="auto", walk_precision="highest"),
    r"moonwalk-checkpoint-(?P<count>\d+)": _numbered(methods.Moonwalk, "checkpoint"),
    "moonwalk-as-printed": _by(_as_printed()),
    r"moonwalk-fragment-(?P<span>\d+)": _fragment(True),
    r"moonwalk-fragment-(?P<span>\d+)-aligned": _fragment(False),
    r"moonwalk-fragment-(?P<span>\d+)-default": _fragment(True, "default"),
    r"moonwalk-fragment-(?P<span>\d+)-aligned-default": _fragment(False, "default"),
}

NAMES = (
    "backprop",
    "checkpoint",
    "checkpoint-sqrt",
    "checkpoint-recursive",
    "checkpoint-block",
    "checkpoint-8",
    "jax-checkpoint-block",
    "jax-checkpoint-dots",
    "jax-checkpoint-sqrt",
    "jax-checkpoint-8",
    "accumulate-4",
    "forward",
    "projected-forward",
    "reversible",
    "pure-forward",
    "pure-forward-per-example",
    "moonwalk",
    "moonwalk-measured",
    "moonwalk-within-50",
    "moonwalk-certified",
    "moonwalk-checkpoint",
    "moonwalk-checkpoint-8",
    "moonwalk-checkpoint-certified",
    "moonwalk-checkpoint-certified-highest",
    "moonwalk-as-printed",
    "moonwalk-fragment-8",
    "moonwalk-fragment-8-aligned",
    "moonwalk-fragment-8-default",
    "moonwalk-fragment-8-aligned-default",
)
