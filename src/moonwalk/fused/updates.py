"""Algorithm 1's "apply g_i to θ_i": a sink that updates a parameter as soon as its gradient is complete.

A gradient is complete when every node that reads the parameter, or anything that the weight prologue
computes from it, has closed; so tied weights wait for their last contribution. Then the gradient is
pulled back through its part of the weight prologue, the optimizer's piece for that leaf runs, and the
gradient is forgotten. The leaves of a scan's stacked layers are updated inside the scan: parameter and
state travel in the loop's carry, a layer is read from there, and its new value is written in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Literal
from ..execute.barriers import Env
from ..execute.sinks import Gradients, GradientSink, StackedSink, put, take
from ..network.cutting import Network
from ..network.prologues import WeightPrologue
from ..segments.scan_step import ScanStep
from ..trace import graph
from ..trace.graph import needed
from .optimizers import Program, is_entrywise, run_layer


class Part(NamedTuple):
    """Parameters that the weight prologue ties together, and the operands it makes of them."""

    parameters: tuple[Any, ...]
    operands: tuple[Any, ...]
    eqns: tuple[Any, ...]


def parts_of(prologue: WeightPrologue) -> list[Part]:
    """The weight prologue cut into independent parts."""
    group: dict[Any, Any] = {v: v for v in prologue.parameters}

    def find(v: Any) -> Any:
        while group[v] is not v:
            v = group[v]
        return v

    for e in prologue.eqns:
        reads = [v for v in e.invars if not isinstance(v, Literal) and v in group]
        for v in e.outvars:
            group[v] = v
        for v in (*reads[1:], *e.outvars):
            if reads:
                group[find(v)] = find(reads[0])
    result = []
    for root in [v for v in group if group[v] is v]:
        parameters = tuple(v for v in prologue.parameters if find(v) is root)
        operands = tuple(v for v in prologue.wanted if v in group and find(v) is root)
        if parameters:
            result.append(Part(parameters, operands, tuple(needed(prologue.eqns, operands))))
    return result


class Fusing:
    """What is static about a fused update: parts of the weight prologue, and updates inside scans."""

    def __init__(
        self, cut: Network, prologue: WeightPrologue, weights: Sequence[Any], segments: Sequence[Any]
    ):
        self.weights = list(weights)
        self.parts = parts_of(prologue)
        self.part_of = {v: part for part in self.parts for v in (*part.parameters, *part.operands)}
        self.readers: dict[Any, int] = {}
        for node in cut.nodes:
            for v in node.weights:
                self.readers[v] = self.readers.get(v, 0) + 1
        scans = [loop for segment in segments for loop in segment.loops]
        self.in_loop = {v: part for scan in scans for v, part in self._layered(scan)}
        """Stacked operands that are updated layer by layer, and their parts."""

    def _layered(self, scan: ScanStep) -> Iterable[tuple[Any, Part]]:
        """A scan's stacked operands that are one parameter, entry by entry, which nothing else reads."""
        if scan.layers.hoisted:
            return
        body, invars = scan.body, scan.layers.eqn.invars
        stacked = [invars[i] for i in body.weights if i >= body.counts.stacked]
        others = {invars[i] for i in body.weights if i < body.counts.stacked}
        for v in dict.fromkeys(stacked):
            part = self.part_of[v]
            alone = len(part.parameters) == 1 and part.operands == (v,) and self.readers[v] == 1
            shape = v.aval.shape
            if (
                alone
                and v.aval.size > 1
                and v in scan.weights_in_sweep
                and v not in (*scan.weights_in_back, *others)
                and part.parameters[0].aval.shape == shape
                and is_entrywise(part.eqns, shape)
            ):
                yield v, part

    @property
    def layered(self) -> list[int]:
        """The leaves that are updated layer by layer."""
        return [self.leaf(part) for part in self.in_loop.values()]

    def leaf(self, part: Part) -> int:
        return self.weights.index(part.parameters[0])


class Updating(GradientSink):
    """Applies gradients as they become complete; with `norms`, only computes the norms."""

    def __init__(self, fusing: Fusing, program: Program, env: Env, fixed: Env, *, norms: bool = False):
        super().__init__()
        self.fusing, self.program, self.env, self.fixed = fusing, program, env, fixed
        self.norms = norms
        self.open = dict(fusing.readers)
        self.done: set[Part] = set()
        self.new: dict[Any, Any] = {}  # new values by output, or norms by variable
        self.held: set[Any] = set()  # those of `new` that have passed a barrier

    def close(self, weights: Iterable[Any]) -> None:
        for v in weights:
            self.open[v] -= 1
            part = self.fusing.part_of[v]
            if part not in self.done and not any(self.open.get(o) for o in part.operands):
                self._apply(part)

    def parts(self, weights: Iterable[Any]) -> list[tuple[dict[Any, Any], Sequence[Any]]]:
        fresh = [k for k in self.new if k not in self.held]
        self.held.update(fresh)
        return [*super().parts(weights), (self.new, fresh)]

    def finish(self) -> dict[Any, Any]:
        """Update the leaves that no node has closed, as nothing reads them; returns all new values."""
        for part in self.fusing.parts:
            if part not in self.done:
                self._apply(part)
        return self.new

    def give(self, v: Any, g: Any) -> None:
        """Receive the complete gradient of a leaf from outside the network."""
        self._take(self.fusing.weights.index(v), g)

    def _apply(self, part: Part) -> None:
        self.done.add(part)
        values = {v: self.fixed[v] for v in part.parameters}
        found = [self.found.pop(v, None) for v in part.operands]
        if part.operands == part.parameters:
            gradients = [_or_zeros(g, values[v]) for v, g in zip(part.parameters, found, strict=True)]
        else:

            def prologue(*parameters: Any) -> list[Any]:
                env = {**self.fixed, **dict(zip(part.parameters, parameters, strict=True))}
                for e in part.eqns:
                    for v in e.outvars:
                        env.pop(v, None)
                graph.run(part.eqns, env)
                return [env[v] for v in part.operands]

            made, pullback = jax.vjp(prologue, *values.values())
            whole = [_or_zeros(g, a) for g, a in zip(found, made, strict=True)]
            gradients = list(pullback(whole))
        for v, g in zip(part.parameters, gradients, strict=True):
            self._take(self.fusing.weights.index(v), g)

    def _take(self, i: int, g: Any) -> None:
        if self.norms:
            names = self.program.norms.get(i, [])
            self.new.update(zip(names, self.program.leaf_norms(self.env, i, g), strict=True))
        else:
            self.new.update(self.program.leaf_update(self.env, i, g))

    def layers(self, stacked: Mapping[Any, Any]) -> StackedSink:
        return UpdatedLayers(self, stacked)


class UpdatedLayers(StackedSink):
    """A scan's stacked operands; those that can be are updated layer by layer."""

    def __init__(self, sink: Updating, stacked: Mapping[Any, Any]):
        fused = {v: part for v, part in sink.fusing.in_loop.items() if v in stacked}
        super().__init__({v: a for v, a in stacked.items() if v not in fused})
        self.sink, self.program, self.fused = sink, sink.program, fused
        self.leaves = {v: sink.fusing.leaf(part) for v, part in fused.items()}

    def start(self) -> Any:
        env, program = self.sink.env, self.program
        own = []
        for i in self.leaves.values():
            if self.sink.norms:
                own.append(program.no_norms(i) if i in program.norms else [])
            else:
                own.append([env[program.stacked_input(k)] for k in program.carried(i)])
        return super().start(), own

    def _old(self, i: int, own: Sequence[Any], layer: Any) -> dict[int, Any]:
        """One layer of a leaf and of its state, before their update."""
        program, env = self.program, self.sink.env
        places = program.carried(i)
        held = [env[program.stacked_input(k)] for k in places] if self.sink.norms else own
        return dict(zip(places, take(list(held), layer), strict=True))

    def read(self, carried: Any, i: Any) -> dict[Any, Any]:
        if self.sink.norms:
            return {}
        result = {}
        for v, own in zip(self.leaves, carried[1], strict=True):
            # Behind a barrier, because reading the stack again after its update would force a copy.
            (parameter,) = _jax.barrier([take(own[0], i)])
            result[v] = self._operand(v, i)(parameter)
        return result

    def _operand(self, v: Any, i: Any) -> Any:
        """The weight prologue of layer i, as a function of the parameter."""
        part, fixed = self.fused[v], self.sink.fixed
        (w,) = part.parameters

        def prologue(parameter: Any) -> Any:
            return run_layer(part.eqns, fixed, {w: parameter}, v.aval.shape, i)[v]

        return (lambda parameter: parameter) if w is v else prologue

    def write(self, carried: Any, i: Any, found: Mapping[Any, Any]) -> Any:
        plain, own = carried
        program, env, new = self.program, self.sink.env, []
        for (v, leaf), held in zip(self.leaves.items(), own, strict=True):
            # Behind a barrier, as in `read`.
            old = self._old(leaf, held, i)
            *values, g = _jax.barrier([*old.values(), found[v]])
            old = dict(zip(old, values, strict=True))
            if self.fused[v].parameters != (v,):
                (g,) = jax.vjp(self._operand(v, i), old[leaf])[1](g)
            if not self.sink.norms:
                made = program.layer_update(env, leaf, i, g, old)
                new.append([put(a, i, made[k]) for k, a in zip(old, held, strict=True)])
            elif leaf in program.norms:
                more = program.layer_norms(env, leaf, i, g, old)
                new.append(program.add_norms(leaf, held, more))
            else:
                new.append(held)
        return super().write(plain, i, found), new

    def finish(self, carried: Any) -> Gradients:
        plain, own = carried
        for (v, leaf), held in zip(self.leaves.items(), own, strict=True):
            self.sink.done.add(self.fused[v])
            names = self.program.carried(leaf)
            if self.sink.norms:
                names = self.program.norms.get(leaf, [])
            self.sink.new.update(zip(names, held, strict=True))
        return super().finish(plain)


def _or_zeros(g: Any, like: Any) -> Any:
    return jnp.zeros_like(like) if g is None else g
