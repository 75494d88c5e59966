"""How exact a plan has to be: tolerances, the limits of certificates, the precision of walks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from ..execute.precision import PRODUCTS, cotangent_dtype
from ..network.cutting import Network
from ..segments.base import Executor
from .cotangents import MARGIN, Options
from .methods import Checkpoint, Moonwalk, PureForward, Reversible

Planned = Moonwalk | PureForward | Checkpoint | Reversible  # methods that a plan is made for


def default_tolerance(dtype: Any) -> float:
    """1e-11 in float64, 1e-4 in float32, 1e-2 in half precision."""
    bits = jnp.finfo(dtype).bits
    return {64: 1e-11, 32: 1e-4}.get(bits, 1e-2)


def state_dtype(network: Network) -> Any:
    """The least precise dtype among the network's states."""
    if "state dtype" not in network.memory:
        network.memory["state dtype"] = _state_dtype(network)
    return network.memory["state dtype"]


def _state_dtype(network: Network) -> Any:
    states = (v for n in network.nodes for v in (*n.block.inputs, *n.block.outputs))
    dtypes = {v.aval.dtype for v in states if v.aval.size > 1}
    found = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(found, key=lambda d: float(jnp.finfo(d).eps), default=jnp.dtype(jnp.float32))


def runs_in_tf32(network: Network) -> bool:
    """Whether products of float32 run in TF32: by default they do, on a GPU."""
    if jax.default_backend() != "gpu" or state_dtype(network) != jnp.float32:
        return False
    products = [
        e for n in network.nodes for e in _flat_equations(n.block.eqns) if e.primitive in PRODUCTS
    ]
    return any(e.params["precision"] in (None, (lax.Precision.DEFAULT,) * 2) for e in products)


def _flat_equations(eqns: Iterable[Any]) -> Iterable[Any]:
    for e in eqns:
        yield e
        if e.primitive is lax.scan_p:
            yield from _flat_equations(_jax.open_jaxpr(e.params["jaxpr"])[0].eqns)


_TF32 = 1e-2  # the tolerance for walks whose products run in TF32, like everything around them


def ambient_growth(network: Network, method: Planned) -> float:
    """The growth of error up to which walks run in the ambient precision, which may be TF32."""
    if method.tolerance is not None or not runs_in_tf32(network):
        return 1.0
    return _TF32 / MARGIN / 2.0**-11


def tolerance_of(
    network: Network, method: Planned, segments: Sequence[Executor], planned: float
) -> float:
    """The tolerance that certificates are held to.

    A walk that loses little runs in the ambient precision, and may be as inexact as that. A tolerance of
    `math.inf` places no anchors, but a wrong gradient is still reported: only `on_inexact="ignore"` lets
    it pass.
    """
    if math.isinf(planned):
        return default_tolerance(state_dtype(network))
    limit = ambient_growth(network, method)
    faithful = all(s.facts.growth <= limit for s in segments)
    if method.tolerance is None and method.walk_precision is None and faithful and runs_in_tf32(network):
        return max(planned, _TF32)
    return planned


def hold_to(tolerance: float, network: Network, method: Planned, segments: Sequence[Executor]) -> float:
    """Set the limits of the segments' certificates, and return the largest.

    A limit is the tolerance, or what rounding alone explains if that is more. A tolerance that the user
    has set is final.
    """
    by_default = method.tolerance is None or math.isinf(method.tolerance)
    # A seed's closure is computed in the dtype of the activations, not in that of the walk's cotangents.
    dtype = state_dtype(network) if isinstance(method, PureForward) else None
    least = max((rounding(network, s, dtype) for s in segments), default=0.0) if by_default else 0.0
    for segment in segments:
        segment.hold_to(max(tolerance, least) if segment.blocks_walked else tolerance)
    return max(tolerance, least)


def rounding(network: Network, segment: Executor, dtype: Any = None) -> float:
    """A bound on a cotangent's error from rounding in every block, down and up again: ε √(2 · blocks).

    Walks through isometries measure a fifth of it in bfloat16 and half in float32, at any depth. In
    bfloat16 the bound exceeds a tolerance of 1e-2 after one block. `dtype`: None for the dtype of
    cotangents in a walk.
    """
    dtype = cotangent_dtype(state_dtype(network)) if dtype is None else dtype
    eps = 2.0**-10 if runs_in_tf32(network) else float(jnp.finfo(dtype).eps)
    return eps * math.sqrt(2 * segment.blocks_walked)


def options_for(network: Network, method: Planned) -> tuple[Options, float]:
    """A method's settings on this network, and its tolerance."""
    dtype = state_dtype(network)
    tolerance = default_tolerance(dtype) if method.tolerance is None else method.tolerance
    limit = max(1.0, tolerance / MARGIN / float(jnp.finfo(cotangent_dtype(dtype)).eps))
    options = Options(limit, precision=method.walk_precision, fragments=False)
    options.ambient = ambient_growth(network, method)
    options.anchors = not isinstance(method, PureForward)
    if isinstance(method, Moonwalk):
        options.fragments, options.requested = True, method.fragment
        options.anchor_every, options.checkpoint = method.anchor_every, method.checkpoint
        options.always = method.walk == "always"
    return options, tolerance
