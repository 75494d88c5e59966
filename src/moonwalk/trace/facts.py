"""What is known of variables while tracing: their names, and static numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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


_FOLD_LIMIT = 1 << 22  # entries; larger index arrays are not evaluated


class Constants(Mapping[Any, np.ndarray]):
    """Integers and single numbers known while tracing: static indices, and what is computed from them.

    Which variables have such a value is determined at once. The values are computed when a rule asks for
    them, because few rules do and every step compiles a program.
    """

    def __init__(self, eqns: Iterable[JaxprEqn], consts: Mapping[Any, Any]):
        small = {v: _jax.concrete(c) for v, c in consts.items() if _foldable(c)}
        self._values = {v: c for v, c in small.items() if c is not None}
        self._makers: dict[Any, JaxprEqn] = {}
        self._keys: dict[Any, int] = {}
        known: dict[Any, int] = {}  # the computation of each value, numbered

        def key(way: Any) -> int:
            try:
                return known.setdefault(way, len(known))
            except TypeError:  # a parameter without a hash equals nothing else
                return known.setdefault(object(), len(known))

        for v, value in self._values.items():
            self._keys[v] = key(_bytes(value))
        for eqn in eqns:
            folds = eqn.primitive in POINTWISE or eqn.primitive in _FOLDED
            if (
                (folds or eqn.primitive in _jax.SAME_VALUES)
                and all(_foldable(v.aval) for v in eqn.outvars)
                and all(isinstance(v, Literal) or v in self for v in eqn.invars)
            ):
                self._makers.update((v, eqn) for v in eqn.outvars)
                reads = (_bytes(v.val) if isinstance(v, Literal) else self._keys[v] for v in eqn.invars)
                types = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
                way = (eqn.primitive, tuple(sorted(eqn.params.items())), tuple(reads), types)
                self._keys.update((v, key((way, i))) for i, v in enumerate(eqn.outvars))

    def __getitem__(self, v: Any) -> np.ndarray:
        pending = [] if v in self._values else [self._makers[v]]
        while pending:
            eqn = pending[-1]
            if eqn.outvars[0] in self._values:
                pending.pop()
                continue
            reads = [a for a in eqn.invars if not isinstance(a, Literal)]
            missing = [self._makers[a] for a in reads if a not in self._values]
            if missing:
                pending += missing
                continue
            inputs = [
                np.asarray(a.val) if isinstance(a, Literal) else self._values[a] for a in eqn.invars
            ]
            self._values.update(zip(eqn.outvars, _evaluated(eqn, inputs), strict=True))
            pending.pop()
        return self._values[v]

    def __contains__(self, v: object) -> bool:
        return v in self._values or v in self._makers

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys((*self._values, *self._makers)))

    def __len__(self) -> int:
        return len({*self._values, *self._makers})

    def key(self, v: Any) -> Hashable:
        """A key that is equal for variables whose values are computed alike, and so are equal."""
        return id(self), self._keys[v]


_COMPARED = 4096  # bytes up to which arrays are compared by value


def _bytes(value: Any) -> Hashable:
    array = np.asarray(value)
    return (array.shape, str(array.dtype), array.tobytes()) if array.nbytes <= _COMPARED else object()


def _evaluated(eqn: JaxprEqn, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    if eqn.primitive in _jax.SAME_VALUES:
        return list(inputs)
    with _jax.evaluated_now():
        outputs = _jax.bind_now(eqn, [jnp.asarray(a) for a in inputs])
    return [np.asarray(a) for a in outputs]


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
