"""What is known of variables before anything runs: their names, and static numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from .declare import declare_p
from .partition import POINTWISE


def propagate_names(eqns: Iterable[JaxprEqn], names: Mapping[Any, str]) -> dict[Any, str]:
    """A weight keeps its name through the identities and layout changes on its way to a rule."""
    keeping = {
        declare_p,
        _jax.name_p,
        lax.transpose_p,
        lax.reshape_p,
        lax.convert_element_type_p,
        lax.broadcast_in_dim_p,
        lax.squeeze_p,
        lax.copy_p,
        *_jax.SAME_VALUES,
    }
    names = dict(names)
    for eqn in eqns:
        source = eqn.invars[0] if eqn.invars else None
        if (
            eqn.primitive in keeping
            and source is not None
            and not isinstance(source, Literal)
            and source in names
        ):
            names[eqn.outvars[0]] = names[source]
    return names


_FOLD_LIMIT = 1 << 22  # entries; indices larger than this are not looked into


def fold_constants(eqns: Iterable[JaxprEqn], consts: Mapping[Any, Any]) -> dict[Any, np.ndarray]:
    """Integer values that are known while tracing: static indices and what is computed from them."""
    small = {v: _jax.concrete(c) for v, c in consts.items() if _foldable(c)}
    known = {v: c for v, c in small.items() if c is not None}
    for eqn in eqns:
        if eqn.primitive in _jax.SAME_VALUES:
            value = _value(eqn.invars[0], known)
            if value is not None and _foldable(eqn.outvars[0].aval):
                known[eqn.outvars[0]] = value
        elif (
            (eqn.primitive in POINTWISE or eqn.primitive in _FOLDED)
            and all(_foldable(v.aval) for v in eqn.outvars)
            and all(isinstance(v, Literal) or v in known for v in eqn.invars)
        ):
            with _jax.evaluated_now():
                inputs = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
                outputs = _jax.bind_now(eqn, [jnp.asarray(a) for a in inputs])
            known.update((v, np.asarray(o)) for v, o in zip(eqn.outvars, outputs, strict=True))
    return known


def _value(atom: Any, known: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    return np.asarray(atom.val) if isinstance(atom, Literal) else known.get(atom)


def _foldable(array: Any) -> bool:
    """Indices and masks, and single numbers; never weights, never random keys."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    return array.size <= (1 if jnp.issubdtype(array.dtype, jnp.inexact) else _FOLD_LIMIT)


_FOLDED: frozenset[Any] = frozenset(
    {
        lax.iota_p,
        lax.broadcast_in_dim_p,
        lax.reshape_p,
        lax.concatenate_p,
        lax.squeeze_p,
        lax.transpose_p,
        lax.slice_p,
        lax.rev_p,
        lax.clamp_p,
    }
)
