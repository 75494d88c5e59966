"""A staged loss: a flat jaxpr, the roles of its inputs, and its network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._jax import Literal
from ..errors import EffectError
from ..trace import staging
from ..trace.staging import Staged
from . import cutting
from .cutting import Network


class Staging(NamedTuple):
    """A staged loss, and the roles of its inputs."""

    staged: Staged
    weights: tuple[Any, ...]  # variables of the differentiated leaves that are weights
    inputs: tuple[Any, ...]  # variables of the differentiated leaves that are network inputs
    order: tuple[Any, ...]  # all differentiated leaves, in the order of the arguments

    @property
    def jaxpr(self) -> Any:
        return self.staged.jaxpr

    @property
    def loss(self) -> Any:
        return self.jaxpr.outvars[0]


def stage(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    others: Sequence[Any],
    is_input: Sequence[bool],
    names: Sequence[str] = (),
) -> Staging:
    """`fun(*leaves, *others)` returns a flat list whose first entry is the loss."""
    staged = staging.stage(fun, *leaves, *others, differentiated=len(leaves))
    order = tuple(staged.jaxpr.invars[: len(leaves)])
    staged = staged._replace(names={**staged.names, **dict(zip(order, names, strict=False))})
    weights = tuple(v for v, i in zip(order, is_input, strict=True) if not i)
    inputs = tuple(v for v, i in zip(order, is_input, strict=True) if i)
    return Staging(staged, weights, inputs, order)


def cut(staging: Staging, *, crossings: bool = True) -> Network:
    """The loss as prologues and nodes. `crossings`: as in `cutting.build`."""
    staged = staging.staged
    return cutting.build(
        staged.jaxpr,
        state=staging.inputs,
        weights=staging.weights,
        constants=cutting.small(staged.jaxpr.constvars),
        outputs=[staging.loss] if not isinstance(staging.loss, Literal) else [],
        consts=dict(zip(staged.jaxpr.constvars, staged.consts, strict=True)),
        names=staged.names,
        crossings=crossings,
    )


def refuse_effects(jaxpr: Any) -> None:
    """Refuse a callback whose answer the loss reads: Phase III would call it again."""
    for e in jaxpr.eqns:
        if not _jax.has_effects(e):
            continue
        inner = _jax.inner_jaxprs(e)
        for j in inner:
            refuse_effects(j)
        if not inner and e.outvars:
            raise EffectError(
                f"value_and_grad: the loss runs `{e.primitive.name}` at {_jax.source_line(e)} and "
                "reads its answer, but Moonwalk runs parts of the forward pass twice; compute that "
                "value before the loss and pass it as an argument, or use jax.pure_callback if "
                "repeating it is harmless"
            )
