"""The two prologues of a network: weights and data, evaluated for the phases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ..trace import graph
from ..trace.graph import needed
from .cutting import Network


class WeightPrologue:
    """From parameters to the operands of the network's nodes, and back."""

    def __init__(self, network: Network, parameters: Sequence[Any], also: Sequence[Any] = ()):
        """`also`: further variables of the weight prologue that are read (auxiliary outputs)."""
        self.parameters = tuple(parameters)
        made = {v for e in network.weight_prologue for v in e.outvars}
        # An output that depends on weights alone is no node's operand, but its gradient is wanted.
        outputs = (v for v in network.outputs if v in network.weights)
        self.wanted = tuple(dict.fromkeys((*network.wanted_weights, *outputs)))
        read = [v for n in network.nodes for v in n.block.operands if v in made]
        self.eqns = needed(network.weight_prologue, [*read, *self.wanted, *also])
        self.is_trivial = not any(v in made for v in self.wanted)
        self.silent = [e for e in network.weight_prologue if _jax.has_effects(e) and not e.outvars]
        self.loud = needed(
            network.weight_prologue, [v for e in self.silent for v in e.invars if _is_var(v)]
        )

    def run(self, env: dict[Any, Any], *, effects: bool = False) -> None:
        """Evaluate into `env`, which holds parameters and data. `effects`: print and call back, too."""
        graph.run(self.eqns, env)
        if effects and self.silent:
            graph.run([*(e for e in self.loud if e.outvars[0] not in env), *self.silent], env)

    def values(self, *parameters: Any, others: dict[Any, Any] | None = None) -> list[Any]:
        """The wanted operands as a function of the parameters."""
        env = dict(others or {})
        env.update(zip(self.parameters, parameters, strict=True))
        graph.run(self.eqns, env)
        return [env[v] for v in self.wanted]

    def sources(self, operands: Iterable[Any]) -> list[Any]:
        """The parameters that these operands are computed from."""
        reached = set(operands)
        for e in reversed(self.eqns):
            if any(v in reached for v in e.outvars):
                reached.update(v for v in e.invars if _is_var(v))
        return [v for v in self.parameters if v in reached]

    def complete(self, env: dict[Any, Any], found: dict[Any, Any]) -> list[Any]:
        """Gradients of all wanted operands, zeros where there are none."""
        return [found[v] if v in found else jnp.zeros_like(env[v]) for v in self.wanted]

    def pull(self, env: dict[Any, Any], found: dict[Any, Any]) -> list[Any]:
        """Gradients of the parameters from those of the operands."""
        if self.is_trivial:
            return [found[v] if v in found else jnp.zeros_like(env[v]) for v in self.parameters]
        _, pullback = jax.vjp(lambda *p: self.values(*p, others=env), *(env[v] for v in self.parameters))
        return list(pullback(self.complete(env, found)))


class DataPrologue:
    """What depends on no parameter."""

    def __init__(self, network: Network, also: Sequence[Any] = ()):
        made = {v for e in network.data_prologue for v in e.outvars}
        read = [v for n in network.nodes for v in (*n.block.operands, *n.block.inputs) if v in made]
        read += [v for e in network.weight_prologue for v in e.invars if _is_var(v)]
        self.silent = [e for e in network.data_prologue if _jax.has_effects(e) and not e.outvars]
        self.loud = needed(
            network.data_prologue, [v for e in self.silent for v in e.invars if _is_var(v)]
        )
        effects = [v for e in network.data_prologue if _jax.has_effects(e) for v in e.outvars]
        self.eqns = needed(network.data_prologue, [*(v for v in read if v in made), *also, *effects])

    def run(self, env: dict[Any, Any], *, effects: bool = False) -> None:
        """Evaluate into `env`, which holds the data. `effects`: print and call back, too."""
        graph.run(self.eqns, env)
        if effects and self.silent:
            graph.run([*(e for e in self.loud if e.outvars[0] not in env), *self.silent], env)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)
