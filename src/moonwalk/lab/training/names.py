"""Methods, optimizers and schedules by name: resolved here and nowhere else."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import optax

from ... import settings
from ...gradient import check_method
from ...planning.methods import Backprop, Checkpoint, Moonwalk, ProjectedForward, Reversible

METHODS: dict[str, Any] = {
    "backprop": Backprop(),
    "checkpoint": Checkpoint(),
    "reversible": Reversible(),
    "moonwalk": Moonwalk(),
    "moonwalk-checkpoint": Moonwalk(checkpoint="auto"),
}
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lion": optax.lion,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
}
SCHEDULES: dict[str, Callable[[float, int], Any]] = {
    "constant": lambda rate, steps: rate,
    "cosine": optax.cosine_decay_schedule,
    "warmup-cosine": lambda rate, steps: optax.warmup_cosine_decay_schedule(
        0.0, rate, max(1, steps // 10), max(2, steps)
    ),
}


def method(given: Any) -> Any:
    """A name of `METHODS`, or anything that `moonwalk.value_and_grad(method=...)` takes."""
    if isinstance(given, str):
        return lookup("method", given, METHODS)
    check_method(given)
    if isinstance(given, ProjectedForward):
        raise ValueError(
            "fit: ProjectedForward would draw the same directions in every step, since its key is part "
            "of the method; write the loop yourself, and make the method from another key in each step"
        )
    return given


def optimizer(
    name: str, rate: float, schedule: str = "constant", steps: int = 1
) -> optax.GradientTransformation:
    """A name of `OPTIMIZERS` with a learning rate that follows a name of `SCHEDULES` over `steps`.

    **Example:**

    >>> import jax.numpy as jnp
    >>> from moonwalk import training
    >>> made = training.optimizer("sgd", 0.5, "cosine", steps=100)
    >>> w = jnp.ones(2)
    >>> updates, state = made.update(w, made.init(w))
    >>> updates.tolist()
    [-0.5, -0.5]
    """
    make = lookup("optimizer", name, OPTIMIZERS)
    rate = settings.positive("optimizer", "rate", rate)
    steps = settings.count("optimizer", "steps", steps)
    return make(lookup("schedule", schedule, SCHEDULES)(rate, steps))


def lookup(kind: str, name: str, table: dict[str, Any]) -> Any:
    if not isinstance(name, str) or name not in table:
        raise ValueError(nearest(kind, name, table))
    return table[name]


def nearest(kind: str, name: str, names: Iterable[str]) -> str:
    """The error message for a name that is not in `names`."""
    names = list(names)
    close = difflib.get_close_matches(str(name), names, 1, 0.5)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {name!r}{guess} There are: {', '.join(names)}"
