"""What Phase I keeps: as few bits as later phases need.

A block is linearised once, while planning, into a jaxpr (x, operands) → (y, residuals). Residuals that
follow from weights or data alone are recomputed instead of kept; booleans are packed to one bit; and if
the state itself is smaller than all that would be kept (`gelu` has five floats per entry), the state is
kept and the block is linearised again from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..trace import graph
from ..trace.graph import needed


def nbytes(*avals: Any) -> int:
    """Bytes that keeping arrays of these types takes."""
    total = 0
    for aval in avals:
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # random keys
            total += 8 * aval.size
        elif aval.dtype == np.bool_:
            total += -(-aval.size // 8)
        else:
            total += aval.size * aval.dtype.itemsize
    return total


# --- bits -------------------------------------------------------------------------------------------


def pack(bits: Any) -> Any:
    """Booleans packed eight to a byte."""
    aval = jax.typeof(bits)
    axis = _packed_axis(aval)
    if axis is None:
        if _jax.sharded_axes(aval):
            return bits  # flattening would move them between devices
        flat = bits.reshape(-1)
        bits, axis = jnp.pad(flat, (0, -flat.size % 8)), 0
    shape = bits.shape
    split = bits.reshape((*shape[:axis], shape[axis] // 8, 8, *shape[axis + 1 :]))
    places = jnp.arange(8, dtype=np.uint8).reshape((8, *[1] * (len(shape) - axis - 1)))
    return jnp.sum(split.astype(np.uint8) << places, axis=axis + 1, dtype=np.uint8)


def unpack(packed: Any, aval: Any) -> Any:
    """The booleans, of the given type, that `pack` packed."""
    if packed.dtype == np.bool_:
        return packed
    axis = _packed_axis(aval)
    flat = axis is None
    axis = 0 if axis is None else axis
    places = jnp.arange(8, dtype=np.uint8).reshape((8, *[1] * (packed.ndim - axis - 1)))
    split = (jnp.expand_dims(packed, axis + 1) >> places) & np.uint8(1)
    bits = split.astype(bool)
    if flat:
        return bits.reshape(-1)[: math.prod(aval.shape)].reshape(aval.shape)
    return bits.reshape(aval.shape)


def _packed_axis(aval: Any) -> int | None:
    """The axis along which eight neighbours share a byte: the last that eight divides on each device."""
    shards = _jax.shards(aval)
    whole = [a for a, n in enumerate(aval.shape) if n and n % (8 * shards[a]) == 0]
    return whole[-1] if whole else None


# --- residuals --------------------------------------------------------------------------------------


class Residual:
    """A function (x, operands) → (y, any pytree), and how a later phase restores that pytree."""

    def __init__(
        self,
        fun: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]],
        x: Sequence[Any],
        operands: Sequence[Any],
        kinds: Sequence[str],
        *,
        rerun: bool = True,
    ):
        """`x`, `operands`: types. `kinds`: for each operand "weight", "data", or "moving" if later
        phases cannot read it. `rerun`: whether the function may run again (a callback may not)."""
        trees = []

        def flat(*args: Any) -> Any:
            y, kept = fun(args[: len(x)], args[len(x) :])
            leaves, tree = jax.tree.flatten(kept)
            trees.append((tree, len(y)))
            return [*y, *leaves]

        closed = jax.make_jaxpr(flat)(*x, *operands)
        self.jaxpr, self.consts = _jax.open_jaxpr(closed)
        self.tree, outputs = trees[-1]
        self.y, self.leaves = self.jaxpr.outvars[:outputs], self.jaxpr.outvars[outputs:]
        self.count = len(x)
        variables = self.jaxpr.invars
        kinds = [*["moving"] * len(x), *kinds]
        of_kind = {
            kind: [v for v, k in zip(variables, kinds, strict=True) if k == kind]
            for kind in ("moving", "weight", "data")
        }
        moving = of_kind["moving"]
        eqns = self.jaxpr.eqns
        # Random bits would not be drawn again, even if a later phase could: XLA would keep those that
        # were drawn first, a byte for each Boolean.
        moving_roots = [*moving, *(v for e in eqns if e.primitive in _jax.DRAWING for v in e.outvars)]
        roots = {**of_kind, "moving": moving_roots}
        on = {kind: _descendants(eqns, found) for kind, found in roots.items()}
        # What follows from weights or from data alone is recomputed; from both, it is an activation.
        self.kept = [
            not isinstance(v, Literal) and (v in on["moving"] or (v in on["weight"] and v in on["data"]))
            for v in self.leaves
        ]
        self.moving = [variables.index(v) for v in moving]
        self.distinct = list(dict.fromkeys(v for v, k in zip(self.leaves, self.kept, strict=True) if k))
        leaf_bytes = nbytes(*(v.aval for v in self.distinct))
        state_bytes = nbytes(*(v.aval for v in moving))
        self.leaf_bytes, self.state_bytes = leaf_bytes, state_bytes
        self.from_state = rerun and state_bytes < leaf_bytes
        unkept = [v for v, k in zip(self.leaves, self.kept, strict=True) if not k]
        self.remade = needed(self.jaxpr.eqns, [v for v in unkept if not isinstance(v, Literal)])
        shown = [v for v in self.y if not isinstance(v, Literal)]
        self.for_y = needed(self.jaxpr.eqns, shown, effects=True)
        self.for_all = needed(self.jaxpr.eqns, [*shown, *self.distinct], effects=True)

    @property
    def held(self) -> list[tuple[int | None, Any]]:
        """For everything kept: the input that it is (None if computed), and its type."""
        places = {v: i for i, v in enumerate(self.jaxpr.invars)}
        kept = [self.jaxpr.invars[i] for i in self.moving] if self.from_state else self.distinct
        return [(places.get(v), v.aval) for v in kept]

    @property
    def bytes(self) -> int:
        """Bytes of what is kept."""
        return self.state_bytes if self.from_state else self.leaf_bytes

    def forward(
        self, x: Sequence[Any], operands: Sequence[Any], *, silent: bool = False
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """(y, what is kept). `silent`: skip equations that only print or call back, as they have run."""
        env = self._env([*x, *operands])
        eqns = self.for_y if self.from_state else self.for_all
        graph.run([e for e in eqns if e.outvars or not silent], env)
        y = tuple(graph.read(env, v) for v in self.y)
        if self.from_state:
            return y, [env[self.jaxpr.invars[i]] for i in self.moving]
        return y, [_packed(env[v]) for v in self.distinct]

    def restore(self, kept: Sequence[Any], operands: Sequence[Any]) -> Any:
        """The pytree, from what was kept and the operands that are fixed (others may be None)."""
        env = self._env([*[None] * self.count, *operands])
        if self.from_state:
            env.update(zip((self.jaxpr.invars[i] for i in self.moving), kept, strict=True))
            graph.run([e for e in self.jaxpr.eqns if not _jax.has_effects(e)], env)
        else:
            graph.run(self.remade, env)
            for v, value in zip(self.distinct, kept, strict=True):
                env[v] = unpack(value, v.aval) if v.aval.dtype == np.bool_ else value
        return jax.tree.unflatten(self.tree, [graph.read(env, v) for v in self.leaves])

    def _env(self, args: Sequence[Any]) -> dict[Any, Any]:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(self.jaxpr.invars, args, strict=True))
        return env


def _packed(value: Any) -> Any:
    return pack(value) if value.dtype == np.bool_ else value


def _descendants(eqns: Sequence[JaxprEqn], roots: Sequence[Any]) -> set[Any]:
    found = set(roots)
    for eqn in eqns:
        if any(not isinstance(v, Literal) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found
