"""A reversible transformer, inverted: memory and time beside backpropagation and checkpointing.

`models.reversible_transformer` on pictures, at some depths. Baselines are `jax.value_and_grad`, and
`jax.checkpoint` around every block, or every √L of them. On a GPU the sizes are those of a small vision
transformer, on a CPU they are tiny and only memory means anything: `python results/reversible.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import engine as base
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

import moonwalk as mw
from moonwalk.models.reversible import ReversibleTransformer


def loss_of(static: Any, every: int | None = None) -> Any:
    """(parameters, x, labels) -> loss; `every`: blocks between checkpoints."""

    def loss(params: Any, x: Any, labels: Any) -> Any:
        model: ReversibleTransformer = eqx.combine(params, static)
        if every is not None:
            model = eqx.tree_at(lambda m: m.blocks, model, Checkpointed(model.blocks, every))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(x), labels))

    return loss


class Checkpointed(eqx.Module):
    """A stack of layers, recomputed so many at a time."""

    stack: mw.nn.Stack
    every: int = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        arrays, rest = eqx.partition(self.stack.layer, eqx.is_array)
        arrays = jax.tree.map(lambda a: a.reshape((-1, self.every, *a.shape[1:])), arrays)

        def segment(x: Any, several: Any) -> Any:
            return lax.scan(lambda x, one: (eqx.combine(one, rest)(x), None), x, several)

        return lax.scan(jax.checkpoint(segment, prevent_cse=False), x, arrays)[0]


def measure(depth: int, sizes: dict[str, Any], repeats: int) -> dict[str, Any]:
    shape, batch = tuple(sizes["in_shape"]), sizes["batch"]
    settings = {name: sizes[name] for name in ("width", "heads", "patch")}
    key = jax.random.key(0)
    model = mw.models.reversible_transformer(shape, 10, key=key, depth=depth, **settings)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    args = (params, jax.random.normal(key, (batch, *shape)), jnp.arange(batch) % 10)
    ways = {
        "moonwalk": mw.value_and_grad(loss_of(static), certify=True),
        "checkpoint, each block": jax.value_and_grad(loss_of(static, 1)),
        "checkpoint, √L blocks": jax.value_and_grad(loss_of(static, round(depth**0.5))),
        "backprop": jax.value_and_grad(loss_of(static)),
    }
    found: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    for name, way in ways.items():
        program = base.compiled(way, *args)
        found[name] = {"temporaries_mib": program.memory_analysis().temp_size_in_bytes / base.MIB}
        gradients[name] = program(*args)[1]
        found[name]["milliseconds"] = 1000 * base.seconds(program, args, repeats)
        if name == "moonwalk":
            found[name]["certificate"] = float(program(*args)[2].error)
    found["moonwalk"]["off_backprop"] = _difference(gradients["moonwalk"], gradients["backprop"])
    return found


def _difference(found: Any, truth: Any) -> float:
    off = [jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True)]
    return float(jnp.sqrt(sum(off) / sum(jnp.sum(a**2) for a in jax.tree.leaves(truth))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", default="", help="the commit, where git is not at hand")
    parser.add_argument("--depths", type=int, nargs="+", default=[16, 64])
    given = parser.parse_args()
    is_gpu = jax.default_backend() == "gpu"
    sizes: dict[str, Any] = {"in_shape": (32, 32, 3), "batch": 16, "width": 32, "heads": 4, "patch": 4}
    if is_gpu:
        sizes = {"in_shape": (128, 128, 3), "batch": 64, "width": 384, "heads": 6, "patch": 8}
    record = base.recorder(given, sizes=sizes)
    for depth in given.depths:
        record(f"{depth} blocks", measure(depth, sizes, 10 if is_gpu else 3))


if __name__ == "__main__":
    main()
