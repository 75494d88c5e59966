"""Convolutions declared isometric: J Jᵀ = I, so the vijp is the jvp, h' = J h.

A dense layer that is declared so is orthogonal (`linear`); a convolution is one as a whole, with the
copying step before it (`chain`), and its pivot alone says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import compat
from ..chain import is_declared_isometric
from ..declare import tolerance
from ..errors import DeclarationError
from ..graph import Block
from ..registry import (
    Alarm,
    Gain,
    Rule,
    State,
    Verdict,
    cast_like_outputs,
    pushforward,
    random_cotangents,
    register_region,
)


@register_region
class Isometry(Rule):
    """A convolution whose kernel is declared "isometric"."""

    name = "isometry"

    def matches(self, block: Block) -> bool:
        return is_declared_isometric(block)

    def verdict(self, block: Block) -> Verdict:
        n, n_out = block.sizes
        if n_out > n:
            return Verdict(
                False,
                f"declared isometric, but {n} numbers cannot hold {n_out} orthogonal rows",
                "declare only operators whose output is no larger than their input",
            )
        return Verdict(True, "declared isometric")

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors
        return cast_like_outputs(block, pushforward(block, kept, h))

    def gain(self, block: Block, operands: Any = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=True)

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        x = [compat.full(v.aval, 0.0) for v in block.inputs]  # a linear map: any state will do
        return self.alarms(block, (), jax.vjp(lambda *x: block(x, operands), *x)[1])

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        """J Jᵀ u = u on a random u."""
        del factors
        u = random_cotangents(block)
        back = pushforward(block, kept, kept(u))
        off = _norm([a - b for a, b in zip(back, u, strict=True)]) / _norm(u)
        limit = tolerance(block.outputs[0].aval.dtype, 256)
        return [
            Alarm(
                ~(off <= limit),
                "vijp: an operator is declared 'isometric', but J Jᵀ is not the identity; check the "
                "kernel, its stride and its padding, or leave the declaration out",
                DeclarationError,
            )
        ]


def _norm(arrays: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(compat.working_dtype(a.dtype)))) for a in arrays))
