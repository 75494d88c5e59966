"""What a walk needs of a block: derived once for all blocks that compute the same.

forward     Phase I: the outputs, and what is kept
pull_back   Phase II: h = h' J
prepare     factors of the weights alone, for the vijp
recover     Phase III: h' = h J⁺
gradients   Phase III: g = vjp(block wrt θ, h'), with the outputs
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..execute.barriers import Env
from ..execute.precision import is_narrow, precise, widened
from ..execute.residuals import Residual
from ..execute.scale import shifted
from ..execute.shared import Shared
from ..network.cutting import Network, Node, find_rule
from ..rules.registry import Rule, Verdict
from ..trace.graph import Block


class Linearised:
    """What a walk needs of a block, derived once for all blocks that compute the same.

    Its functions are of arrays alone, so that these blocks can share them as programs. The residual
    takes a trace, and is made when it is asked for: a fragment that keeps too much is not.
    """

    def __init__(
        self,
        node: Node,
        rule: Rule | None,
        wider: Block,
        inner: Block,
        trace: Callable[[], Residual],
    ):
        self.node, self._rule = node, rule
        self.wider, self.inner, self._trace = wider, inner, trace
        self.fragment_sizes: dict[Any, int] = {}  # by where their grid lies
        self._shared: dict[str, Shared] = {}

    @functools.cached_property
    def residual(self) -> Residual:
        return self._trace()

    @property
    def rule(self) -> Rule:
        assert self._rule is not None
        return self._rule

    def shared(self, name: str) -> Shared:
        """One of the functions below, as a program."""
        if name not in self._shared:
            self._shared[name] = Shared(getattr(self, name))
        return self._shared[name]

    def forward(self, x: Sequence[Any], operands: Sequence[Any]) -> Any:
        """Phase I: (outputs, what is kept)."""
        return self.residual.forward(x, operands)

    def pull_back(self, kept: Any, operands: Sequence[Any], h: Sequence[Any]) -> Any:
        """Phase II: the inputs' cotangents, from the outputs'."""
        ours, pullback = self.residual.restore(kept, operands)
        return (ours if pullback is None else pullback)(self.widened(h))

    def prepare(self, operands: Sequence[Any]) -> Any:
        """Factors of the vijp. `operands`: those that the rule reads."""
        return self.rule.prepare(self.inner, operands)

    def probe(self, operands: Sequence[Any]) -> list[Any]:
        """How far declared weights are from their structure."""
        return self.rule.probe(self.inner, operands)

    def recover(self, kept: Any, operands: Sequence[Any], factors: Any, h: Sequence[Any]) -> Any:
        """Phase III: the outputs' cotangents, from the inputs'."""
        ours, _ = self.residual.restore(kept, operands)
        return self.rule.vijp(self.inner, factors, ours, tuple(h))

    def gradients(
        self, x: Sequence[Any], operands: Sequence[Any], h: Sequence[Any], exponent: Any
    ) -> tuple[Any, list[Any]]:
        """(outputs and exports, gradients of the weights) where h, with its exponent, is of the outputs.

        `exponent`: None where nothing was rescaled.
        """
        block = self.node.block
        # The user's own precision: a gradient is one product away from its cotangent.
        wider = self.wider if is_narrow(block) else block
        at = [block.operands.index(v) for v in self.node.weights]
        values = cast((*wider.inputs, *wider.operands), (*x, *operands))

        def run(*new: Any) -> Any:
            values.update(zip((wider.operands[i] for i in at), new, strict=True))
            out = wider.values(
                (*wider.outputs, *wider.exports),
                [values[v] for v in wider.inputs],
                [values[v] for v in wider.operands],
            )
            return out[: len(block.outputs)], out[len(block.outputs) :]

        y, pullback, exports = jax.vjp(run, *(values[wider.operands[i]] for i in at), has_aux=True)
        arriving = tuple(a.astype(v.aval.dtype) for a, v in zip(h, wider.outputs, strict=True))
        found = [
            shifted(g, 0 if exponent is None else exponent).astype(v.aval.dtype)
            for v, g in zip(self.node.weights, pullback(arriving), strict=True)
        ]
        out = (*y, *exports)
        if wider is not block:
            out = block.values((*block.outputs, *block.exports), x, operands)
        return out, found

    def widened(self, h: Sequence[Any]) -> tuple[Any, ...]:
        """Cotangents of the outputs, as precise as they are pulled back."""
        return tuple(a.astype(v.aval.dtype) for a, v in zip(h, self.wider.outputs, strict=True))


def linearised(
    node: Node, network: Network, places: Sequence[int], is_walked: bool, precision: Any
) -> Linearised:
    rule, block = node.rule, node.model.block
    wider = block if precision is None else precise(block, precision)
    if is_narrow(block):
        wider = widened(block) or block
    inner = restricted(wider, [wider.inputs[i] for i in places]) if is_walked else wider
    x, operands = block.structs()

    def linearize(x: Sequence[Any], operands: Sequence[Any]) -> Any:
        y = block(x, operands)
        if not block.inputs:
            return y, (None, None)
        values = cast((*wider.inputs, *wider.operands), (*x, *operands))
        wide = [values[v] for v in wider.operands]

        def run(*x: Any) -> Any:
            return wider(x, wide)

        if not is_walked and (rule is None or not rule.keeps_pullback):
            return y, (None, jax.vjp(run, *(values[v] for v in wider.inputs))[1])
        assert rule is not None
        own, kept = rule.keep(
            inner, tuple(values[v] for v in inner.inputs), [values[v] for v in inner.operands]
        )
        y = own if wider is block else y
        if inner is wider and rule.keeps_pullback:
            return y, (kept, None)
        return y, (kept, jax.vjp(run, *(values[v] for v in wider.inputs))[1])

    kinds = network.kinds(block.operands)
    trace = functools.partial(Residual, linearize, x, operands, kinds, rerun=not node.effects)
    return Linearised(node.model, rule, wider, inner, trace)


def rule_through(node: Node, network: Network, through: Sequence[Any]) -> tuple[Any, Verdict, Block]:
    """(rule, verdict, block that it sees) of a node that is walked through some of its inputs."""
    model = node.model
    places = tuple(node.block.inputs.index(v) for v in through)
    key = ("rule", model, places)
    if key not in network.memory:
        block = restricted(model.block, [model.block.inputs[i] for i in places])
        found = (model.rule, model.verdict) if block is model.block else find_rule(block)
        network.memory[key] = (*found, block)
    return network.memory[key]


def cast(variables: Sequence[Any], values: Sequence[Any]) -> Env:
    """Values by variable, in the variables' dtypes."""
    return {
        v: a if a is None or a.dtype == v.aval.dtype else a.astype(v.aval.dtype)
        for v, a in zip(variables, values, strict=True)
    }


def restricted(block: Block, through: Sequence[Any]) -> Block:
    """The block with some of its inputs as operands."""
    if tuple(through) == block.inputs:
        return block
    rest = tuple(v for v in block.inputs if v not in through)
    return Block(
        block.eqns,
        tuple(through),
        block.outputs,
        (*block.operands, *rest),
        block.exports,
        block.declarations,
        block.names,
        block.constants,
    )
