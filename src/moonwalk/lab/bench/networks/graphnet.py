"""A graph network that simulates particles (Sanchez-Gonzalez et al. 2020).

`batch` graphs of `length` nodes and `DEGREE` times as many edges, whose ends are data. `depth` steps of
message passing update edges and nodes by MLPs of `width` features, with residuals; messages are summed
by `jax.ops.segment_sum`. It predicts an acceleration for every node. Variants: "scanned" (steps are
stacked; otherwise a Python loop), "tiny" (fewer edges).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Network, Wrap, affine, chain, identity, linear, stacked, words
from .gpt import dense, layer_norm

SIZES = {
    "full": {"depth": 10, "width": 128, "length": 4096, "batch": 16},
    "tiny": {"depth": 3, "width": 8, "length": 8, "batch": 4},
}
DEGREE = {"full": 16, "tiny": 2}
FEATURES = {"nodes": 16, "edges": 4, "out": 3}


def mlp(x: Any, p: Any) -> Any:
    """Two hidden layers, and a normalisation unless it is the last MLP."""
    x = jax.nn.relu(dense(x, p["one"]))
    x = dense(jax.nn.relu(dense(x, p["two"])), p["three"])
    return layer_norm(x, p["norm"]) if "norm" in p else x


def init_mlp(key: Any, inputs: int, width: int, outputs: int, *, norm: bool = True) -> dict[str, Any]:
    one, two, three = jax.random.split(key, 3)
    p = {
        "one": linear(one, inputs, width),
        "two": linear(two, width, width),
        "three": linear(three, width, outputs),
    }
    return p | {"norm": affine(outputs)} if norm else p


def message_passing(state: tuple[Any, Any, Any, Any], p: Any) -> tuple[Any, Any, Any, Any]:
    """(nodes, edges, senders, receivers) -> the same; of all graphs together."""
    nodes, edges, senders, receivers = state
    sent = mlp(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1), p["edge"])
    summed = jax.ops.segment_sum(sent, receivers, nodes.shape[0])
    changed = mlp(jnp.concatenate([nodes, summed], -1), p["node"])
    return nodes + changed, edges + sent, senders, receivers


def graphnet(task: Task) -> Network:
    found, _ = words(task, "scanned", "tiny")
    scanned, width = "scanned" in found, task.width
    count = task.length * DEGREE["tiny" if "tiny" in found else "full"]

    def init_step(key: Any) -> dict[str, Any]:
        edge, node = jax.random.split(key)
        return {
            "edge": init_mlp(edge, 3 * width, width, width),
            "node": init_mlp(node, 2 * width, width, width),
        }

    def init(key: Any) -> dict[str, Any]:
        nodes, edges, steps, head = jax.random.split(key, 4)
        return {
            "nodes": init_mlp(nodes, FEATURES["nodes"], width, width),
            "edges": init_mlp(edges, FEATURES["edges"], width, width),
            "steps": stacked(init_step, steps, task.depth, scan=scanned),
            "head": init_mlp(head, width, width, FEATURES["out"], norm=False),
        }

    def model(
        params: Any,
        graphs: Any,
        accelerations: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        batch = accelerations.shape[0]
        offsets = task.length * jnp.arange(batch, dtype=jnp.int32)[:, None]
        senders, receivers = (jnp.ravel(graphs[end] + offsets) for end in ("senders", "receivers"))
        flat = lambda a: a.reshape(-1, a.shape[-1])
        nodes = mlp(flat(graphs["nodes"]), params["nodes"])
        edges = mlp(flat(graphs["edges"]), params["edges"])
        state = (nodes, edges, senders, receivers)
        nodes, *_ = chain(message_passing, state, params["steps"], wrap=wrap, every=every, inner=inner)
        return jnp.mean((mlp(nodes, params["head"]) - flat(accelerations)) ** 2)

    array = lambda *shape: jax.ShapeDtypeStruct((task.batch, *shape), jnp.float32)
    ends = jax.ShapeDtypeStruct((task.batch, count), jnp.int32)
    graphs = {
        "nodes": array(task.length, FEATURES["nodes"]),
        "edges": array(count, FEATURES["edges"]),
        "senders": ends,
        "receivers": ends,
    }
    target = array(task.length, FEATURES["out"])
    return Network(init, graphs, target, model, task.depth, scanned, classes=task.length)
