"""Sinks receive gradients during the reverse pass, and accumulate or apply them.

Algorithm 1 of the paper allows two things to be done with each g_i: return it to the user, or apply it
to θ_i at once and forget it. A `GradientSink` does the first: it sums gradients by operand.
`updates.Updating` does the second. The phases do not know which one they have: they pass on the
gradients they compute (`add`) and report when a node has no more to come (`close`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Gradients = dict[Any, Any]


class GradientSink:
    """Gradients by operand, summed."""

    def __init__(self) -> None:
        self.found: Gradients = {}

    def add(self, found: Mapping[Any, Any]) -> None:
        """Receive the gradients of some operands; those of a shared operand are summed."""
        for v, g in found.items():
            self.found[v] = g if v not in self.found else self.found[v] + g

    def close(self, weights: Iterable[Any]) -> None:
        """One of the nodes that read these operands has handed out all its gradients."""

    def parts(self, weights: Iterable[Any]) -> list[tuple[dict[Any, Any], Sequence[Any]]]:
        """What changed when these operands' gradients arrived, as arguments for `barriers.barrier`."""
        return [(self.found, [v for v in weights if v in self.found])]

    def layers(self, stacked: Mapping[Any, Any]) -> StackedSink:
        """How a scan hands out the gradients of stacked operands (`stacked`: variable → value)."""
        return StackedSink(stacked)


class StackedSink:
    """Gradients of a scan's stacked operands: one buffer each, filled layer by layer.

    The buffers travel in the loop's carry, where XLA writes them in place. As outputs of nested loops
    they would exist once more for every level.
    """

    def __init__(self, stacked: Mapping[Any, Any]):
        self.stacked = dict(stacked)

    def start(self) -> Any:
        """The loop's initial carry."""
        return [jnp.zeros_like(a) for a in self.stacked.values()]

    def read(self, carried: Any, i: Any) -> dict[Any, Any]:
        """Layer i of those operands that live in the loop's carry; here there are none."""
        del carried, i
        return {}

    def write(self, carried: Any, i: Any, found: Mapping[Any, Any]) -> Any:
        """Write one layer's gradients into the carry."""
        return [put(a, i, found[v]) for v, a in zip(self.stacked, carried, strict=True)]

    def finish(self, carried: Any) -> Gradients:
        """The gradients of the stacked operands, at the end of the loop."""
        return dict(zip(self.stacked, carried, strict=True))


def take(stacked: Any, i: Any) -> Any:
    """Layer i of every array in a tree."""

    def one(a: Any) -> Any:
        return lax.dynamic_index_in_dim(a, i, 0, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, stacked)


def put(stacked: Any, i: Any, value: Any) -> Any:
    """The array with layer i replaced; in place if it is a loop's carry."""
    value = value.astype(stacked.dtype)
    return lax.dynamic_update_index_in_dim(stacked, value, i, 0, allow_negative_indices=False)
