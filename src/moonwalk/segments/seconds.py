"""How long nodes take: a roofline.

    seconds = max(FLOPs / rate, bytes / bandwidth) + one launch       of a product, convolution, sort, …
    seconds = bytes / bandwidth                                       of everything else

Compilers fuse what works entry by entry, so that of a chain of light steps only what it begins with and
what it ends with is read and written: values that no product reads or makes, and that do not leave the
network, are not counted. The pullback of a product is as much work again for every operand that has a
cotangent, and light steps read their cotangent besides.

Plans compare these figures with each other, so their ratios matter, not their absolute size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..execute.residuals import nbytes
from ..network.cutting import Network
from .fusion import is_apart


@dataclass(frozen=True)
class Rates:
    """What a device does in a second: rates that programs reach, about two thirds of data sheets'."""

    half: float  # FLOPs of products in half precision
    single: float  # in float32 at the default precision, which is TF32 on a GPU
    precise: float  # in float32 at the highest precision
    double: float  # in float64
    bandwidth: float  # bytes
    launch: float = 4e-6  # seconds that an operation takes at least


_RATES: Mapping[str, Rates] = {
    "NVIDIA B200": Rates(1.4e15, 7e14, 5e13, 2.5e13, 6e12),
    "NVIDIA H200": Rates(6e14, 3e14, 4e13, 4e13, 3.8e12),
    "NVIDIA H100": Rates(6e14, 3e14, 4e13, 4e13, 2.7e12),
    "NVIDIA A100": Rates(2.2e14, 1.1e14, 1.5e13, 1.5e13, 1.4e12),
    "TPU v4": Rates(2e14, 1.8e14, 3e13, 1e12, 9e11, 2e-6),
    "TPU v5 lite": Rates(1.4e14, 1.3e14, 2e13, 1e12, 6e11, 2e-6),
    "TPU v5": Rates(3.2e14, 3e14, 5e13, 1e12, 2e12, 2e-6),
    "TPU v6 lite": Rates(6e14, 5.5e14, 9e13, 1e12, 1.2e12, 2e-6),
    "cpu": Rates(5e10, 1e11, 1e11, 5e10, 2e10, 2e-6),
}
_UNKNOWN = {"gpu": "NVIDIA A100", "cuda": "NVIDIA A100", "rocm": "NVIDIA A100", "tpu": "TPU v4"}


def device_kind() -> str:
    """What the default device is, such as 'NVIDIA H200' or 'cpu'."""
    return _jax.default_device().device_kind


def rates_of(kind: str) -> Rates:
    """The rates of a kind of device; of an unknown one, those of a similar one.

    **Example:**

    >>> rates_of("NVIDIA H200 141GB") == rates_of("NVIDIA H200")
    True
    """
    known = [name for name in _RATES if kind.startswith(name)]
    name = max(known, key=len, default=_UNKNOWN.get(jax.default_backend(), "cpu"))
    return _RATES[name]


class NodeSeconds(NamedTuple):
    """Of one node."""

    forward: float = 0.0
    wrt_x: float = 0.0  # the pullback to the state
    wrt_theta: float = 0.0  # the pullback to weights

    @property
    def backward(self) -> float:
        """The whole pullback."""
        return self.wrt_x + self.wrt_theta


def node_seconds(network: Network) -> list[NodeSeconds]:
    """What every node takes on the default device."""
    kind = device_kind()
    if ("seconds", kind) not in network.memory:
        network.memory["seconds", kind] = _node_seconds(network, rates_of(kind))
    return network.memory["seconds", kind]


def _node_seconds(network: Network, rates: Rates) -> list[NodeSeconds]:
    original = {c: n.block.inputs[0] for n in network.nodes if n.is_fork for c in n.block.outputs}
    every = [e for n in network.nodes for e in n.block.eqns]
    stored = _Stored(every, [*network.state, *network.results, *network.outputs], original)
    known: dict[Any, float] = {}  # of nodes that compute the same, once
    found = []
    for node in network.nodes:
        block = node.block
        on_x, on_theta = set(block.inputs), set(node.weights)
        forward = wrt_x = wrt_theta = 0.0
        for place, eqn in enumerate(block.eqns):
            reads = [v for v in eqn.invars if not isinstance(v, Literal)]
            by_x, by_theta = (sum(v in on for v in reads) for on in (on_x, on_theta))
            if by_x:
                on_x.update(eqn.outvars)
            elif by_theta:
                on_theta.update(eqn.outvars)
            if _is_timed(eqn):
                key = (node.model, place)
                if key not in known:
                    known[key] = equation_seconds(eqn, rates)
                own = known[key]
                if _jax.inner_jaxprs(eqn):  # loops, branches, calls: both pullbacks, whatever they read
                    by_x, by_theta = int(by_x > 0), int(by_theta > 0 or by_x > 0)
                elif eqn.primitive.name not in _PRODUCTS:  # one pass over all operands' cotangents
                    by_x, by_theta = int(by_x > 0), int(by_theta > 0 and not by_x)
                forward += own
                wrt_x += by_x * own
                wrt_theta += by_theta * own
            else:
                own = stored.bytes(eqn) / rates.bandwidth
                forward += own
                wrt_x += _LIGHT_PULLBACK * own * bool(by_x)
                wrt_theta += _LIGHT_PULLBACK * own * bool(by_theta and not by_x)
        found.append(NodeSeconds(forward, wrt_x, wrt_theta))
    return found


# Of these, each operand's cotangent is a product as large as the forward one.
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "custom_vijp_call"}
_LIGHT_PULLBACK = 1.5  # it reads a cotangent and a residual, and writes a cotangent


def _is_timed(eqn: JaxprEqn) -> bool:
    """Whether it takes time of its own, rather than as part of a chain of light steps."""
    return is_apart(eqn) or eqn.primitive is lax.gather_p


class _Stored:
    """Which values of a program are written to memory, rather than fused into what reads them."""

    def __init__(
        self, eqns: Sequence[JaxprEqn], ends: Iterable[Any], original: Mapping[Any, Any] | None = None
    ):
        self.original = original or {}
        made = {v for e in eqns for v in e.outvars}
        self.written = {self._source(v) for v in ends if not isinstance(v, Literal)}
        for e in eqns:
            if _is_timed(e):
                self.written.update(e.outvars)
                self.written.update(self._source(v) for v in e.invars if not isinstance(v, Literal))
        self.fused = made - self.written

    def _source(self, v: Any) -> Any:
        while v in self.original:
            v = self.original[v]
        return v

    def bytes(self, eqn: JaxprEqn) -> int:
        """What a light equation reads and writes."""
        reads = {self._source(v) for v in eqn.invars if not isinstance(v, Literal)}
        values = (*(v for v in reads if v not in self.fused), *eqn.outvars)
        return nbytes(*(v.aval for v in values if v not in self.fused))


def equation_seconds(eqn: JaxprEqn, rates: Rates) -> float:
    """Of a heavy equation's forward pass."""
    if eqn.primitive is lax.scan_p:
        return eqn.params["length"] * _body_seconds(eqn.params["jaxpr"], rates)
    inner = _jax.inner_jaxprs(eqn)
    if eqn.primitive is lax.cond_p:
        return max((_body_seconds(j, rates) for j in inner), default=0.0)
    if inner and eqn.primitive is not lax.reduce_window_p:  # of a while loop, one iteration
        return sum(_body_seconds(j, rates) for j in inner)
    moved = nbytes(*(v.aval for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")))
    work = flops(eqn)
    return max(work / _rate(eqn, rates) if work else 0.0, moved / rates.bandwidth) + rates.launch


def _body_seconds(closed: Any, rates: Rates) -> float:
    jaxpr, _ = _jax.open_jaxpr(closed)
    stored = _Stored(jaxpr.eqns, (*jaxpr.invars, *jaxpr.outvars))
    total = 0.0
    for e in jaxpr.eqns:
        if _is_timed(e) or _jax.inner_jaxprs(e):
            total += equation_seconds(e, rates)
        else:
            total += stored.bytes(e) / rates.bandwidth
    return total


def flops(eqn: JaxprEqn) -> float:
    """Of one equation without loops. 0 where memory traffic decides, and where nobody knows (a kernel of
    the user's, a decomposition).

    **Example:**

    >>> import jax, jax.numpy as jnp
    >>> (eqn,) = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5))).eqns
    >>> flops(eqn)
    60.0
    """
    if eqn.primitive is lax.dot_general_p:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval
        return _each(eqn) * eqn.outvars[0].aval.size * math.prod(left.shape[a] for a in contracted)
    if eqn.primitive.name == "ragged_dot_general":  # every row meets the matrix of its group alone
        (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        left = eqn.invars[0].aval
        return _each(eqn) * eqn.outvars[0].aval.size * math.prod(left.shape[a] for a in contracted)
    if eqn.primitive is lax.conv_general_dilated_p:
        kernel = eqn.invars[1].aval
        outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return _each(eqn) * eqn.outvars[0].aval.size * kernel.size / max(1, outputs)
    if eqn.primitive is lax.fft_p:
        size = math.prod(eqn.params["fft_lengths"])
        return 5.0 * eqn.outvars[0].aval.size * math.log2(max(2, size))
    return 0.0


def _each(eqn: JaxprEqn) -> float:
    """FLOPs of one multiplication and addition."""
    return 8.0 if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating) else 2.0


def _rate(eqn: JaxprEqn, rates: Rates) -> float:
    dtype = eqn.invars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rates.single
    bits = jnp.finfo(dtype).bits
    if bits == 64:
        return rates.double
    if bits < 32:
        return rates.half
    given = eqn.params.get("precision")
    first = given[0] if isinstance(given, tuple) else given
    return rates.precise if first is lax.Precision.HIGHEST else rates.single
