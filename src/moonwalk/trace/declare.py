"""Declarations: what is known of a weight's values, stated where the weight is made.

A trace sees shapes, never values, so it has to be told that a matrix is orthogonal. `declare` is an
identity that leaves an equation in the trace; rules find it on their operands. It is a separate
primitive (and not `checkpoint_name`) because a structure refers to two axes, [in, out], and only a
batching rule of our own can tell where those two are after `vmap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..errors import DeclarationError

STRUCTURES = ("orthogonal", "diagonal", "lower", "upper", "isometric")
_TRANSPOSED = {"lower": "upper", "upper": "lower"}


@dataclass(frozen=True)
class Declaration:
    """A structure, and where the axes that it refers to are now.

    Axes of the declared array keep their numbers as names: `axes[i]` is the name of what is axis i now,
    None for an axis that was added. `touched` are axes along which entries were picked or joined.
    """

    structure: str
    matrix: tuple[int, int]  # the names of [in, out]
    rank: int
    axes: tuple[int | None, ...]
    touched: frozenset[int] = frozenset()
    taps: tuple[int, ...] | None = None  # the tap of a kernel that has the structure, if it was named

    def of_matrix(self, in_axis: int, out_axis: int) -> str | None:
        """The structure of the matrix [in, out], or stack of matrices, that a dense layer reads."""
        read = (self.axes[in_axis], self.axes[out_axis])
        if read == self.matrix:
            return self.structure
        return _TRANSPOSED.get(self.structure, self.structure) if read == self.matrix[::-1] else None

    def of_kernel(self, in_axis: int, out_axis: int) -> str | None:
        """The structure of the pivot tap [in, out] of a kernel as a convolution reads it.

        The kernel must be the declared array, or one of a stack of them: no axis added, taps neither
        picked nor moved. If axes were transposed on the way, the two usual layouts (in and out last;
        out and in first) tell whether in and out have changed places.
        """
        kept = [a for a in self.axes if a is not None]
        removed = self.rank - len(self.axes)
        if len(kept) < len(self.axes) or self.touched & set(kept) or min(kept) < removed:
            return None
        if kept == sorted(kept):
            return self.structure
        read = (kept[in_axis] - removed, kept[out_axis] - removed)
        usual = ((len(kept) - 2, len(kept) - 1), (1, 0))
        if read in usual:
            return self.structure
        if read[::-1] in usual and self.structure != "isometric":
            return _TRANSPOSED.get(self.structure, self.structure)
        return None

    def moved(self, order: Sequence[int | None]) -> Declaration | None:
        """The declaration after a transposition: axis i is the old axis order[i] (None: a new axis)."""
        axes = tuple(None if place is None else self.axes[place] for place in order)
        return replace(self, axes=axes) if set(self.matrix) <= set(axes) else None

    def picked(self, places: Iterable[int]) -> Declaration | None:
        """The declaration after entries were picked or joined along these axes."""
        names = {self.axes[place] for place in places} - {None}
        if names & set(self.matrix):
            return None
        return replace(self, touched=self.touched | frozenset(n for n in names if n is not None))


def declare(
    w: ArrayLike, structure: str, *, groups: int = 1, taps: Sequence[int] | None = None
) -> Array:
    """Say what is known of a weight's values; returns `w` unchanged.

    The structures `"orthogonal"`, `"diagonal"`, `"lower"` and `"upper"` describe a matrix, with its last
    two axes read as [in, out], or every matrix of a stack. A matrix used transposed, as in `x @ w.T`,
    has the transposed structure. For a convolution kernel they describe the pivot tap [in, out], in
    whatever layout the convolution reads it; the paper's lemma needs `"lower"`: w[c, c'] = 0 for c < c'.
    `"isometric"` describes the whole linear operator: J Jᵀ = I, so that vijp = jvp. For a kernel that is
    the convolution on an endless or circular axis; where zero padding cuts off windows at the edges,
    walks keep their cotangents, and `moonwalk.vijp` refuses.

    Declare inside the function that is differentiated (or on the stack of weights outside a scan, as
    long as that is traced too): the declaration lives in the trace, and is seen through `jit`,
    `vmap`, `scan`, transposition, stacking and indexing. A cast to a narrower type drops it, because
    rounding is enough to break an orthogonality that a deep walk relies on.

    Concrete values are checked, and `DeclarationError` is raised if they do not have the structure. For
    a kernel, this checks only what does not depend on the convolution's stride and padding;
    `moonwalk.vijp` checks the rest when it meets the convolution. `groups` tells this check that the
    kernel [..., in / groups, out] is that of a convolution in groups, each of which has a pivot. `taps`
    says which tap of a kernel [*taps, in, out] has the structure, one index per spatial axis. It refers
    to the convolution as written: a zero pad before the convolution is then not merged into its padding,
    because that would make another tap the pivot.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> mw.declare(jnp.eye(2), "orthogonal").shape
    (2, 2)
    """
    if structure not in STRUCTURES:
        raise ValueError(
            f"declare: unknown structure {structure!r}; choose one of {', '.join(STRUCTURES)}"
        )
    w = jnp.asarray(w)
    if w.ndim < 2:
        raise ValueError(
            f"declare: a structure speaks of a matrix [in, out] or a kernel, but the array has shape "
            f"{w.shape}"
        )
    if groups != 1 and (w.ndim < 3 or groups < 1 or (w.shape[0] % groups and w.shape[-1] % groups)):
        raise ValueError(
            f"declare: groups={groups} speaks of a kernel [*taps, in / groups, out], but the array has "
            f"shape {w.shape}"
        )
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"declare: weights must be real floating-point arrays, got {w.dtype}")
    taps = None if taps is None else _checked_taps(taps, w.shape)
    if (values := _jax.concrete(w)) is not None:
        _check_concrete(values, structure, groups, taps)
    return declare_p.bind(w, structure=structure, in_axis=w.ndim - 2, out_axis=w.ndim - 1, taps=taps)


def _checked_taps(taps: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One index for each of the axes before [in, out], or for the last of them in a stack of kernels."""
    given: tuple[Any, ...]
    given = tuple(taps) if isinstance(taps, Sequence) and not isinstance(taps, str) else (taps,)
    whole = all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in given)
    spatial = shape[: len(shape) - 2][-len(given) :] if given else ()
    if not whole or not given or len(spatial) != len(given):
        raise ValueError(
            "declare: taps is a sequence of whole numbers, one for each spatial axis of a kernel "
            f"[*taps, in, out], got {taps!r} for an array of shape {shape}"
        )
    if not all(0 <= t < n for t, n in zip(given, spatial, strict=True)):
        raise ValueError(
            f"declare: taps={given} is none of the taps of a kernel [*taps, in, out] of shape {shape}: "
            f"indices run from 0 to {tuple(n - 1 for n in spatial)}. A kernel in another layout is "
            "transposed before it is declared, and back after"
        )
    return tuple(int(t) for t in given)


# --- the primitive: an identity under every transformation ---------------------------------------

declare_p = _jax.Primitive("moonwalk_declare")
declare_p.def_impl(lambda w, **_: w)
declare_p.def_abstract_eval(lambda w, **_: w)
_jax.mlir.register_lowering(declare_p, lambda ctx, w, **_: [w])
# Tangents and cotangents of a weight are not themselves orthogonal, so they carry no declaration.
_jax.ad.primitive_jvps[declare_p] = lambda primals, tangents, **params: (
    declare_p.bind(*primals, **params),
    tangents[0],
)


def _batch_declare(args: Sequence[Any], dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    (w,), (dim,) = args, dims

    def shifted(axis: int) -> int:
        return axis + (axis >= dim)

    params.update(in_axis=shifted(params["in_axis"]), out_axis=shifted(params["out_axis"]))
    return declare_p.bind(w, **params), dim


_jax.batching.primitive_batchers[declare_p] = _batch_declare


# --- values: is it what it is said to be? ---------------------------------------------------------


def tolerance(dtype: Any, size: int) -> float:
    """How far WᵀW may be from I if W is orthogonal up to rounding."""
    return float(min(10 * float(jnp.finfo(dtype).eps) * np.sqrt(max(size, 1)), 5e-2))


def defect(matrix: Any, structure: str) -> Any:
    """How far a matrix [..., in, out] is from its declared structure: its largest offending entry."""
    rows, cols = matrix.shape[-2:]
    i, j = np.indices((rows, cols))
    if structure in ("orthogonal", "isometric"):
        tall = rows >= cols
        wide = _jax.working_dtype(matrix.dtype)
        m = jnp.asarray(matrix, wide)
        gram = jnp.einsum(
            "...ia,...ib->...ab" if tall else "...ai,...bi->...ab",
            m,
            m,
            precision=lax.Precision.HIGHEST,
        )
        return jnp.max(jnp.abs(gram - jnp.eye(min(rows, cols), dtype=wide)), axis=(-2, -1), initial=0)
    off = {"diagonal": i != j, "lower": i < j, "upper": i > j}[structure]
    return jnp.max(jnp.where(off, jnp.abs(matrix), 0), axis=(-2, -1), initial=0)


def allowed_defect(dtype: Any, size: int, structure: str) -> float:
    """Zeros must be zeros; orthogonality may be off by rounding."""
    return tolerance(dtype, size) if structure in ("orthogonal", "isometric") else 0.0


def _check_concrete(
    values: np.ndarray, structure: str, groups: int, taps: tuple[int, ...] | None
) -> None:
    dtype = values.dtype
    if not values.size:
        return
    values = np.asarray(values, np.promote_types(np.float32, dtype) if dtype.itemsize > 2 else "f4")
    if not np.isfinite(values).all():
        what = "NaN" if np.isnan(values).any() else "infinity"
        places = [tuple(map(int, p)) for p in np.argwhere(~np.isfinite(values))]
        raise DeclarationError(
            f"declare: the array {dtype}{list(values.shape)} holds {what} (at {places[0]}; "
            f"{len(places)} of {values.size} entries are not finite), so it is not {structure}. Look "
            "for the step that made it: a learning rate too high, or an overflow."
        )
    with _jax.evaluated_now(), jax.debug_nans(False):
        if taps is not None and structure != "isometric":
            tap = values[(..., *taps, slice(None), slice(None))]
            parts = np.split(tap, groups, -1) if tap.shape[-1] % groups == 0 else [tap]
            readings = [np.asarray(max(np.max(np.asarray(defect(p, structure))) for p in parts))]
        else:
            readings = [np.asarray(d) for d in _readings(values, structure, groups)]
    limit = allowed_defect(dtype, max(values.shape), structure)
    worst = min(float(np.max(d)) for d in readings)
    if not worst <= limit:
        raise DeclarationError(
            f"declare: the array {dtype}{list(values.shape)} is not {structure}"
            + (": " if taps is None else f" at its tap {taps}: ")
            + (
                f"its largest entry off the {structure} pattern is {worst:.3g}"
                if limit == 0.0
                else f"|WᵀW - I| is {worst:.3g}, more than rounding ({limit:.1g}) explains"
            )
            + ". Re-parametrise the weight so that it holds, or leave the declaration out "
            "(undeclared weights get the general solver)."
        )


def _readings(values: np.ndarray, structure: str, groups: int) -> Iterable[Any]:
    """Defects under every reading an array may have: matrices, or taps of a kernel."""
    if groups == 1:
        yield defect(values, structure)  # a matrix, or a stack of matrices
    if values.ndim < 3:
        return
    spatial_first = values.reshape((-1, *values.shape[-2:]))  # taps [in, out]
    spatial_last = np.moveaxis(values.reshape((*values.shape[:2], -1)), -1, 0)  # taps [out, in]
    if structure == "isometric":
        # Windows inside the input: Σ_taps w[j]ᵀ w[j] = I, whatever stride and padding are.
        for rows in (
            spatial_first.reshape(-1, values.shape[-1]),
            spatial_last.transpose(0, 2, 1).reshape(-1, values.shape[0]),
        ):
            if rows.shape[-1] % groups == 0:
                yield np.max(np.asarray(defect(np.stack(np.split(rows, groups, -1)), structure)))
        return
    for taps in (spatial_first, np.swapaxes(spatial_last, -1, -2)):
        if taps.shape[-1] % groups == 0:
            parts = np.stack(np.split(taps, groups, axis=-1), axis=1)
            off = np.asarray(defect(parts, structure))
            yield np.min(np.max(off, axis=1))  # one of the taps is the pivot


# --- the way of a declaration through the weight prologue of a trace ----------------------------------


def propagate(eqns: Iterable[JaxprEqn], known: Mapping[Any, Declaration]) -> dict[Any, Declaration]:
    """Declarations of all variables, from those of the inputs and the `declare` equations."""
    known = dict(known)
    for eqn in eqns:
        incoming = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        if eqn.primitive is declare_p:
            rank = eqn.invars[0].aval.ndim
            matrix = (eqn.params["in_axis"], eqn.params["out_axis"])
            structure, taps = eqn.params["structure"], eqn.params["taps"]
            outgoing = [Declaration(structure, matrix, rank, tuple(range(rank)), taps=taps)]
        elif incoming and incoming[0] is not None and eqn.primitive in _PASSAGE:
            outgoing = _PASSAGE[eqn.primitive](eqn, incoming)
        else:
            continue
        for var, declaration in zip(eqn.outvars, outgoing, strict=True):
            if declaration is not None:
                known[var] = declaration
    return known


Passage = list[Declaration | None]


def _same(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    """Identities, and a change of sign, under which every structure is closed."""
    return list(incoming)


def _cast(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    wider = jnp.issubdtype(new, jnp.floating) and jnp.finfo(new).nmant >= jnp.finfo(old).nmant
    return [incoming[0] if wider else None]


def _transpose(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    return [incoming[0].moved(eqn.params["permutation"])]


def _squeeze(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    gone = eqn.params["dimensions"]
    return [incoming[0].moved([a for a in range(eqn.invars[0].aval.ndim) if a not in gone])]


def _broadcast(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    places = {int(n): o for o, n in enumerate(eqn.params["broadcast_dimensions"])}
    moved = incoming[0].moved([places.get(n) for n in range(len(new))])
    return [moved and moved.picked([n for n, o in places.items() if old[o] != new[n]])]


def _reshape(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    """Only reshapes of what lies before the two last axes (merging or splitting a stack)."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.params["dimensions"] is not None or old[-2:] != new[-2:] or len(new) < 2:
        return [None]
    return [incoming[0].moved([*[None] * (len(new) - 2), len(old) - 2, len(old) - 1])]


def _slice(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    old = eqn.invars[0].aval.shape
    return [
        incoming[0].picked([a for a in range(len(old)) if old[a] != out.aval.shape[a]])
        for out in eqn.outvars
    ]


def _gather(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    """Indexing a stack, `ws[i]`: whole slices over all axes but the collapsed ones."""
    numbers, old = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    kept = [a for a in range(len(old)) if a not in numbers.collapsed_slice_dims]
    if numbers.operand_batching_dims or any(eqn.params["slice_sizes"][a] != old[a] for a in kept):
        return [None]
    places = dict(zip(numbers.offset_dims, kept, strict=True))
    return [incoming[0].moved([places.get(n) for n in range(eqn.outvars[0].aval.ndim)])]


def _concatenate(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    equal = all(d == incoming[0] for d in incoming)
    return [incoming[0].picked([eqn.params["dimension"]]) if equal else None]


def _stack(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    order: list[int | None] = list(range(eqn.invars[0].aval.ndim))
    order.insert(eqn.params.get("axis", 0), None)
    return [incoming[0].moved(order) if all(d == incoming[0] for d in incoming) else None]


def _unstack(eqn: JaxprEqn, incoming: Sequence[Any]) -> Passage:
    axis = eqn.params.get("axis", 0)
    moved = incoming[0].moved([a for a in range(eqn.invars[0].aval.ndim) if a != axis])
    return [moved for _ in eqn.outvars]


_PASSAGE = {
    lax.neg_p: _same,
    lax.copy_p: _same,
    lax.stop_gradient_p: _same,
    lax.optimization_barrier_p: _same,
    _jax.name_p: _same,
    **dict.fromkeys(_jax.SAME_VALUES, _same),
    lax.convert_element_type_p: _cast,
    lax.transpose_p: _transpose,
    lax.squeeze_p: _squeeze,
    lax.broadcast_in_dim_p: _broadcast,
    lax.reshape_p: _reshape,
    lax.slice_p: _slice,
    lax.split_p: _slice,
    lax.dynamic_slice_p: _slice,
    lax.gather_p: _gather,
    lax.concatenate_p: _concatenate,
    lax.stack_p: _stack,
    lax.unstack_p: _unstack,
}
