"""Which values a compiler writes to memory, and which it fuses into what reads them.

XLA runs a chain of light steps (casts, additions, activations, normalisations) as few kernels that read
what the chain begins with and write what it ends with. A value in between takes no memory. Written are

- what a product, a convolution, a loop or a sort reads or makes,
- what a gather reads: its pullback scatters into an array of that size,
- what is alive while one of these runs, and what leaves the network.

All others are *fused*. What a fused value is computed from stays alive until the last step that reads
the fused value; `last_read` says so.

The same holds between a forward pass and its pullback, if both are in one program: a light step's
residual is computed again from what its chain begins with, where that is less (`runs`). On a CPU that
ends at a costly function, such as exp or tanh: XLA does not compute it twice, and keeps what it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..execute.residuals import nbytes
from ..network.cutting import Network, Node, is_heavy
from ..trace.partition import MOVING, POINTWISE

# What compilers fuse, besides what works entry by entry or moves entries. All else stands apart: a
# primitive that is not known here is taken for one that writes its results.
_FUSED_NAMES = frozenset(
    "add_any argmax argmin bitcast_convert_type clz complex conj dynamic_slice igamma igammac imag iota "
    "mulhi pad pin population_count psum_invariant pvary random_bits random_clone random_fold_in "
    "random_seed random_split random_unwrap random_wrap real reduce_and reduce_max reduce_min reduce_or "
    "reduce_prod reduce_sum reduce_xor reshard sharding_constraint shift_left shift_right_arithmetic "
    "shift_right_logical threefry2x32 unpin vary_unreduced_cast reduced_vary_cast zeta polygamma".split()
)
# Entry by entry, but not computed twice on a CPU.
COSTLY = frozenset(
    {
        *(lax.exp_p, lax.exp2_p, lax.expm1_p, lax.log_p, lax.log1p_p, lax.pow_p, lax.div_p, lax.rem_p),
        *(lax.sin_p, lax.cos_p, lax.tan_p, lax.sinh_p, lax.cosh_p, lax.tanh_p, lax.atan2_p),
        *(lax.logistic_p, lax.erf_p, lax.erfc_p, lax.erf_inv_p, lax.lgamma_p, lax.digamma_p),
        *(lax.sqrt_p, lax.rsqrt_p, lax.cbrt_p, _jax.random_bits_p),
    }
)
# Of these, the derivative is computed from the result.
_KEPT = COSTLY & {
    *(lax.exp_p, lax.exp2_p, lax.expm1_p, lax.tanh_p, lax.logistic_p),
    *(lax.sqrt_p, lax.rsqrt_p, lax.cbrt_p, lax.erf_inv_p),
}
_FEW = 0.25  # of the largest result of a chain: costly functions of fewer entries do not count


class Step(NamedTuple):
    """A node of a network, or an equation of a loop's body."""

    reads: tuple[Any, ...]
    makes: tuple[Any, ...]
    apart: bool  # not fused with its neighbours
    scatters: bool = False  # its pullback does
    costly: int = 0  # the most entries for which it computes a costly function


class Fusion:
    """Of a program of steps; `fusion_of` makes that of a network, once.

    `begins`: variables that are there before the first step; `ends`: those that leave. `source`: of a
    copy that a fork makes, what it is a copy of.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        begins: Iterable[Any],
        ends: Iterable[Any],
        source: Mapping[Any, Any] | None = None,
    ):
        self.steps, self.source = steps, source or {}
        self.apart = [step.apart for step in steps]
        self.born = {v: 0 for v in begins}
        for i, step in enumerate(steps):
            self.born.update((v, i + 1) for v in step.makes)
        leaving = {self.of(v) for v in ends if self.of(v) in self.born}
        self.written = self._written(leaving)
        self.last_read = self._last_read(leaving)

    def of(self, v: Any) -> Any:
        """The array that a variable is: forks make no copies."""
        while v in self.source:
            v = self.source[v]
        return v

    def runs(self, start: int, stop: int) -> list[range]:
        """Steps [start, stop), in their order: each that stands apart, and runs of light ones."""
        cuts = [i for i in range(start, stop) if self.apart[i]]
        bounds = sorted({start, *cuts, *(i + 1 for i in cuts), stop})
        return [range(i, j) for i, j in itertools.pairwise(bounds)]

    def computed_again(self, places: range) -> range:
        """Of consecutive light steps, those that a pullback may start from to compute the rest again."""
        if not _on_cpu():
            return places
        most = max((v.aval.size for i in places for v in self.steps[i].makes), default=0)
        costly = (i for i in places if self.steps[i].costly > _FEW * most)
        return range(max(costly, default=places.start - 1) + 1, places.stop)

    def around(self) -> list[int]:
        """Bytes of what is written and alive before, while or after each step runs."""
        change = [0] * (len(self.steps) + 2)
        for v in self.written:
            first = max(self.born[v] - 1, 0)
            if self.last_read.get(v, -1) >= self.born[v]:
                change[first] += nbytes(v.aval)
                change[min(self.last_read[v], len(self.steps)) + 1] -= nbytes(v.aval)
        return list(itertools.accumulate(change))[: len(self.steps)]

    def _written(self, leaving: set[Any]) -> set[Any]:
        found, read = set(leaving), {v: len(self.steps) for v in leaving}
        for i, step in enumerate(self.steps):
            reads = {self.of(v) for v in step.reads}
            read.update((v, max(i, read.get(v, -1))) for v in reads)
            if step.apart:
                found.update(step.makes)
            if step.apart or step.scatters:
                found |= reads
        before = list(itertools.accumulate(self.apart, initial=0))  # how many stand apart
        for v, born in self.born.items():
            if read.get(v, -1) >= born and before[min(read[v], len(self.steps))] > before[born]:
                found.add(v)
        return found & self.born.keys()

    def _last_read(self, leaving: set[Any]) -> dict[Any, int]:
        last = dict.fromkeys(leaving, len(self.steps))
        for i in reversed(range(len(self.steps))):
            step, reach = self.steps[i], i
            if not step.apart:
                reach = max((last.get(v, i) for v in step.makes if v not in self.written), default=i)
            for v in {self.of(v) for v in step.reads}:
                last[v] = max(last.get(v, -1), reach)
        return last


def costly_bytes(node: Node, network: Network) -> int:
    """What a CPU keeps of a light node between its forward pass and its pullback although the node is
    linearised again from its state: results of costly functions."""
    if not _on_cpu():
        return 0
    key = "costly", node.model
    if key not in network.memory:
        found = [v for e in _all_inside(node.block.eqns) if e.primitive in _KEPT for v in e.outvars]
        most = max((v.aval.size for v in node.block.outputs), default=0)
        network.memory[key] = nbytes(*(v.aval for v in found if v.aval.size > _FEW * most))
    return network.memory[key]


def _on_cpu() -> bool:
    return _jax.default_device().platform == "cpu"


def fusion_of(network: Network) -> Fusion:
    """What is fused in a network."""
    if "fusion" not in network.memory:
        nodes = network.nodes
        source = {c: n.block.inputs[0] for n in nodes if n.is_fork for c in n.block.outputs}
        begins, ends = network.state, (*network.results, *network.outputs)
        network.memory["fusion"] = Fusion([_step(n) for n in nodes], begins, ends, source)
    return network.memory["fusion"]


def _step(node: Node) -> Step:
    block = node.block
    reads = (*block.inputs, *block.operands)
    if node.is_fork:
        return Step(reads, (), apart=False)
    apart = any(map(is_apart, block.eqns))
    scatters = any(e.primitive is lax.gather_p for e in block.eqns)
    costly = (v.aval.size for e in _all_inside(block.eqns) if e.primitive in COSTLY for v in e.outvars)
    return Step(reads, (*block.outputs, *block.exports), apart, scatters, max(costly, default=0))


def _all_inside(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Equations, and those of what they call."""
    for eqn in eqns:
        yield eqn
        for inner in _jax.inner_jaxprs(eqn):
            yield from _all_inside(inner.eqns)


_DRAWN = 3  # arrays of words that XLA makes for one of random bits on a CPU


def workspace_bytes(node: Node, network: Network) -> int:
    """What a compiler makes besides while it pulls back through a node: index arrays, on a CPU.

    There max pooling is pulled back by an index for every axis, of all inputs and twice of all outputs,
    and a sort by two. On a GPU they are fused into what reads them.
    """
    if not _on_cpu() or node.is_fork:
        return 0
    key = "workspace", node.model
    if key not in network.memory:
        network.memory[key] = max(map(_indices, _all_inside(node.block.eqns)), default=0)
    return network.memory[key]


def _indices(eqn: JaxprEqn) -> int:
    """Bytes of index arrays; indices have four bytes."""
    if eqn.primitive.name in ("reduce_window_max", "reduce_window_min"):
        x, y = eqn.invars[0].aval, eqn.outvars[0].aval
        return 4 * x.ndim * (x.size + 2 * y.size)
    return 2 * 4 * eqn.invars[0].aval.size if eqn.primitive is lax.sort_p else 0


def drawing_bytes(steps: Iterable[JaxprEqn]) -> int:
    """The same while random bits are drawn, one array after the other."""
    if not _on_cpu():
        return 0
    drawn = (nbytes(*(v.aval for v in e.outvars)) for e in steps if e.primitive in _jax.DRAWING)
    return _DRAWN * max(drawn, default=0)


def layer_bytes(node: Node, network: Network) -> int:
    """What one layer of a scan takes while it runs, besides its carry and what it reads."""
    key = "layer bytes", node.model
    if key not in network.memory:
        jaxpr, _ = _jax.open_jaxpr(node.block.eqns[0].params["jaxpr"])
        steps = [
            Step(_variables(e.invars), _variables(e.outvars), is_apart(e), e.primitive is lax.gather_p)
            for e in jaxpr.eqns
        ]
        network.memory[key] = max(Fusion(steps, (), _variables(jaxpr.outvars)).around(), default=0)
    return network.memory[key]


def _variables(of: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(v for v in of if not isinstance(v, Literal))


def is_apart(eqn: JaxprEqn) -> bool:
    """Whether an equation is not fused with those around it.

    **Example:**

    >>> import jax, jax.numpy as jnp
    >>> [is_apart(e) for e in jax.make_jaxpr(lambda x: jnp.cumsum(jnp.sin(x).T, 0))(jnp.eye(3)).eqns]
    [False, False, True]
    """
    if is_heavy(eqn):
        return True
    if eqn.primitive in POINTWISE or eqn.primitive in MOVING or eqn.primitive.name in _FUSED_NAMES:
        return False
    inner = _jax.inner_jaxprs(eqn) if _jax.is_call(eqn) else []
    return not inner or any(is_apart(e) for jaxpr in inner for e in jaxpr.eqns)
