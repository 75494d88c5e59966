"""The columns of the paper's Table 1 that are not orders, each checked by an experiment.

- **variance**: ‖ĝ − g‖² / ‖g‖² on average over keys, for the method that takes a key. The others are run
  twice in `growth`, and must give the same bits.
- **forward**: a network with a layer that has no reverse mode: a loop whose length depends on data.
  Forward methods differentiate it; methods with a reverse pass cannot.
- **submersive**: a network that is submersive and not invertible, from 16 features to 4 with |x|.
  Either the gradient is exact, or the method refuses. Moonwalk has to walk through it, and not to
  recompute.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import gradient, preview
from ...errors import MoonwalkError
from ...operator.custom_vijp import custom_vijp
from ...planning.methods import Moonwalk, ProjectedForward
from ...trace.declare import declare
from . import measuring, methods
from .growth import roughly
from .judgement import ESTIMATES

KEYS = 400
WIDTHS = (16, 12, 8, 6, 4, 4)
WALKS = {
    "moonwalk": Moonwalk(walk="always"),
    "moonwalk-checkpoint": Moonwalk(walk="always", checkpoint="auto"),
}
EXACT = 1e-4
NO_REVERSE = "Reverse-mode differentiation does not work"  # JAX's words


def measure(method: str) -> dict[str, Any]:
    """{"forward": bool, "submersive": bool, and why; of an estimate its variance}."""
    return {**forward(method), **submersive(method), **(variance() if method in ESTIMATES else {})}


def _weights(*widths: int) -> list[Any]:
    """Orthonormal columns, from each width to the next."""
    random = np.random.default_rng(0)
    pairs = itertools.pairwise(widths)
    return [np.linalg.qr(random.standard_normal((n, m), np.float32))[0] for n, m in pairs]


def _data(n: int, m: int, rows: int = 8) -> tuple[Any, Any]:
    normal = np.random.default_rng(1).standard_normal
    return normal((rows, n), np.float32), normal((rows, m), np.float32)


def _leaky(x: Any) -> Any:
    return jax.nn.leaky_relu(x, 0.95)


def _network(activation: Any, between: Any = lambda x: x) -> Any:
    def loss(ws: Any, x: Any, target: Any) -> Any:
        for i, w in enumerate(ws):
            x = activation(x @ declare(w, "orthogonal"))
            x = between(x) if i == 0 else x
        return jnp.mean((x - target) ** 2)

    return loss


# --- variance -----------------------------------------------------------------------------------------


def variance(keys: int = KEYS) -> dict[str, Any]:
    """The variance of `ProjectedForward`, with a new key for every gradient."""
    loss, args = _network(_leaky), (_weights(4, 4, 4), *_data(4, 4))
    truth = roughly(jax.grad(loss), *args)(*args)
    one = lambda key: gradient.value_and_grad(loss, method=ProjectedForward(key))(*args)[1]
    given = jax.random.split(jax.random.key(1), keys)
    samples = roughly(jax.vmap(one), given)(given)
    size = _squares(truth)
    off = _squares(jax.tree.map(lambda s, t: s - t, samples, truth)) / keys
    bias = _squares(jax.tree.map(lambda s, t: s.mean(0) - t, samples, truth))
    return {
        "variance": float(off / size),
        "bias": float((bias / size) ** 0.5),  # if unbiased, its mean is off by about √(variance / keys)
        "variance_keys": keys,
        "variance_parameters": sum(leaf.size for leaf in jax.tree.leaves(truth)),
    }


def _squares(tree: Any) -> Any:
    return sum(jnp.vdot(a, a) for a in jax.tree.leaves(tree))


# --- forward ------------------------------------------------------------------------------------------


@custom_vijp
def _turned(x: Any) -> Any:
    """Features rotated by three places, one at a time, in a loop whose end is computed from x."""
    enough = jnp.int32(2) + jnp.any(jnp.isfinite(x))
    again = lambda state: state[0] < enough
    move = lambda state: (state[0] + 1, jnp.roll(state[1], 1, axis=1))
    return lax.while_loop(again, move, (jnp.int32(0), x))[1]


_turned.defvijp(lambda primals, h: _turned(h))  # an isometry: its vijp is its jvp


def forward(method: str) -> dict[str, Any]:
    args = (_weights(4, 4, 4), *_data(4, 4))
    truth = roughly(jax.grad(_network(_leaky, lambda x: jnp.roll(x, 3, axis=1))), *args)(*args)
    try:
        loss = _network(_leaky, _turned)
        fun = methods.differentiate(method, loss, args)
        if method in ESTIMATES:  # only that it returns matters here, not what
            jax.eval_shape(fun, *args)
            return {"forward": True, "forward_why": "an estimate"}
        found = roughly(fun, *args)(*args)[1]
    except (ValueError, MoonwalkError) as refusal:
        if NO_REVERSE not in str(refusal) and not isinstance(refusal, MoonwalkError):
            raise
        return {"forward": False, "forward_why": str(refusal).splitlines()[0]}
    return {"forward": True, "forward_why": f"off by {measuring.error(found, truth):.0e}"}


# --- submersive ---------------------------------------------------------------------------------------


def submersive(method: str) -> dict[str, Any]:
    loss, args = _network(jnp.abs), (_weights(*WIDTHS), *_data(WIDTHS[0], WIDTHS[-1], rows=256))
    try:
        if method in WALKS:  # a plan would rather store such a small network
            fun = gradient.value_and_grad(loss, method=WALKS[method])
        else:
            fun = methods.differentiate(method, loss, args)
        if method in ESTIMATES:
            jax.eval_shape(fun, *args)
            return {"submersive": True, "submersive_why": "an estimate"}
        found = roughly(fun, *args)(*args)[1]
    except MoonwalkError as refusal:
        return {"submersive": False, "submersive_why": str(refusal).splitlines()[0]}
    error, why, walked = measuring.error(found, roughly(jax.grad(loss), *args)(*args)), "", True
    if method in WALKS:
        types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
        count = preview.plan(loss, *types, method=WALKS[method]).walked
        why, walked = f", {count} blocks walked", count > 0
    return {"submersive": walked and error <= EXACT, "submersive_why": f"off by {error:.0e}{why}"}
