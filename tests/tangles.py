"""Small random networks whose variables are read in many places: tied weights, skips, auxiliary states.

What is read twice has to be split, and what is split must not make two nodes wait for each other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH = 24, 4  # more rows than `cutting.small` takes for numbers
ACTIVATIONS = [
    getattr(jax.nn, name)
    for name in (
        "celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid mish relu relu6 "
        "selu sigmoid silu soft_sign softmax log_softmax softplus sparse_plus squareplus standardize swish tanh"
    ).split()
]


class Tangle:
    """A loss `(params, x, rows) -> (value, aux)` drawn from a seed."""

    def __init__(self, seed: int):
        self.seed = seed
        draw = np.random.default_rng(seed)
        self.params = {
            "matrices": [jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / 2) for _ in range(2)],
            "vectors": [jnp.asarray(draw.normal(size=WIDTH)) for _ in range(2)],
        }
        self.x = jnp.asarray(draw.normal(size=(ROWS, WIDTH)))
        self.rows = jnp.asarray(draw.integers(0, WIDTH, ROWS))
        count = int(draw.integers(3, 11))
        self.steps: list[tuple[Any, ...]] = [
            (draw.choice(["scale", "product", "embed"]), 0, 0, int(draw.integers(2)), 0)
        ]
        for i in range(1, count):
            kind = draw.choice(["activation"] * 4 + ["product"] * 4 + list(_STEPS))
            near = int(i - 1 - min(draw.geometric(0.6) - 1, i - 1))  # mostly the state before
            other = int(draw.integers(i))
            self.steps.append(
                (kind, near, other, int(draw.integers(2)), int(draw.integers(len(ACTIVATIONS))))
            )
        self.in_aux = [bool(b) for b in draw.random(count) < draw.choice([0, 0.3, 0.8])]
        self.in_loss = [bool(b) for b in draw.random(count) < 0.15]
        self.in_loss[-1] = True

    @property
    def args(self) -> tuple[Any, ...]:
        return self.params, self.x, self.rows

    def __call__(self, params: Any, x: Any, rows: Any) -> tuple[Any, list[Any]]:
        states: list[Any] = []
        for kind, near, other, weight, activation in self.steps:
            a, b = (states[near], states[other]) if states else (x, x)
            w, v = params["matrices"][weight], params["vectors"][weight]
            states.append(_step(str(kind), a, b, w, v, rows, ACTIVATIONS[activation]))
        loss = sum(jnp.mean(s**2) for s, wanted in zip(states, self.in_loss, strict=True) if wanted)
        return loss, [s for s, wanted in zip(states, self.in_aux, strict=True) if wanted]


_STEPS = (
    "transposed",
    "scale",
    "shift",
    "add",
    "multiply",
    "gate",
    "split",
    "norm",
    "statistics",
    "embed",
)


def _step(kind: str, a: Any, b: Any, w: Any, v: Any, rows: Any, activation: Any) -> Any:
    match kind:
        case "activation":
            return activation(a)
        case "product":
            return a @ w
        case "transposed":
            return a @ w.T
        case "scale":
            return a * v
        case "shift":
            return a + v
        case "add":
            return a + b
        case "multiply":
            return a * b
        case "gate":
            return a * jax.nn.sigmoid(b @ w)
        case "split":
            left, right = jnp.split(a, 2, -1)
            return jnp.concatenate([jnp.tanh(right), left * right], -1)
        case "norm":
            return (a - a.mean(-1, keepdims=True)) / jnp.sqrt(a.var(-1, keepdims=True) + 0.1) * v
        case "statistics":
            return (a - a.mean(0)) / jnp.sqrt(jnp.mean(a**2, 0) - a.mean(0) ** 2 + 0.1)
        case "embed":
            return w[rows] + a
        case _:
            raise ValueError(kind)
