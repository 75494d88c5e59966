"""What is known of a weight's values, said by whoever makes the weight.

A trace sees shapes, never values, so "this matrix is orthogonal" has to be told to it. `declare` is
an identity that leaves an equation in the trace; rules find it on their operands. It is a primitive
of its own (and not `checkpoint_name`) because a structure speaks of two axes, [in, out], and only a
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

from . import compat
from .compat import JaxprEqn, Literal
from .errors import DeclarationError

STRUCTURES = ("orthogonal", "diagonal", "lower", "upper", "isometric")
_TRANSPOSED = {"lower": "upper", "upper": "lower"}


@dataclass(frozen=True)
class Declaration:
    """A structure, and the axes of the array it speaks of.

    `pending` holds axes of length 1 left by indexing a stack, still to be squeezed away; `cut` says
    that a slice took some of the taps, after which nothing is known of a kernel's pivot.
    """

    structure: str
    in_axis: int
    out_axis: int
    pending: frozenset[int] = frozenset()
    cut: bool = False

    def of_matrix(self, in_axis: int, out_axis: int) -> str | None:
        """The structure of the matrix [in, out] that a dense layer reads from the array."""
        if (in_axis, out_axis) == (self.in_axis, self.out_axis):
            return self.structure
        if (in_axis, out_axis) == (self.out_axis, self.in_axis):
            return _TRANSPOSED.get(self.structure, self.structure)
        return self.structure if self.structure == "isometric" else None

    def of_kernel(self) -> str | None:
        """The structure of a convolution kernel (of its pivot tap [in, out])."""
        return None if self.cut or self.pending else self.structure

    def moved(self, axes: Mapping[int, int]) -> Declaration | None:
        """The declaration after axis a has become axis axes[a]; None if a matrix axis is gone."""
        if self.in_axis not in axes or self.out_axis not in axes:
            return None
        return replace(
            self,
            in_axis=axes[self.in_axis],
            out_axis=axes[self.out_axis],
            pending=frozenset(axes[a] for a in self.pending if a in axes),
        )


def declare(w: ArrayLike, structure: str) -> Array:
    """Say what is known of a weight's values; returns `w` unchanged.

    The structures `"orthogonal"`, `"diagonal"`, `"lower"` and `"upper"` speak of a matrix as it lies,
    its last two axes read as [in, out] (a matrix used transposed, as in `x @ w.T`, has the transposed
    structure), or of the pivot tap [in, out] of a convolution kernel in whatever layout the
    convolution reads it; the paper's lemma is `"lower"`: w[c, c'] = 0 for c < c'. `"isometric"`
    speaks of the whole linear operator: J Jᵀ = I, so that vijp = jvp.

    Declare inside the function that is differentiated (or on the stack of weights outside a scan, as
    long as that is traced too): the declaration lives in the trace, and is seen through `jit`,
    `vmap`, `scan`, transposition, stacking and indexing. A cast to a narrower type drops it, because
    rounding is enough to break an orthogonality that a deep walk relies on.

    Called on concrete values it checks them and raises `DeclarationError` if they are not what is
    declared. Of a kernel only what can be seen without the convolution's stride and padding is
    checked here; the rest when `moonwalk.vijp` meets the convolution.

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
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"declare: weights must be real floating-point arrays, got {w.dtype}")
    if (values := compat.concrete(w)) is not None:
        _check_concrete(values, structure)
    return declare_p.bind(w, structure=structure, in_axis=w.ndim - 2, out_axis=w.ndim - 1)


# --- the primitive: an identity under every transformation ---------------------------------------

declare_p = compat.Primitive("moonwalk_declare")
declare_p.def_impl(lambda w, **_: w)
declare_p.def_abstract_eval(lambda w, **_: w)
compat.mlir.register_lowering(declare_p, lambda ctx, w, **_: [w])
# Tangents and cotangents of a weight are not themselves orthogonal: the declaration stays behind.
compat.ad.primitive_jvps[declare_p] = lambda primals, tangents, **params: (
    declare_p.bind(*primals, **params),
    tangents[0],
)


def _batch_declare(args: Sequence[Any], dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    (w,), (dim,) = args, dims

    def shifted(axis: int) -> int:
        return axis + (axis >= dim)

    params.update(in_axis=shifted(params["in_axis"]), out_axis=shifted(params["out_axis"]))
    return declare_p.bind(w, **params), dim


compat.batching.primitive_batchers[declare_p] = _batch_declare


# --- values: is it what it is said to be? ---------------------------------------------------------


def tolerance(dtype: Any, size: int) -> float:
    """How far from I the product WᵀW of a matrix orthogonal up to rounding may be."""
    return float(min(10 * float(jnp.finfo(dtype).eps) * np.sqrt(max(size, 1)), 5e-2))


def defect(matrix: Any, structure: str) -> Any:
    """How far a matrix [..., in, out] is from its declared structure: the largest entry off it."""
    rows, cols = matrix.shape[-2:]
    i, j = np.indices((rows, cols))
    if structure in ("orthogonal", "isometric"):
        tall = rows >= cols
        wide = jnp.promote_types(matrix.dtype, jnp.float32)
        m = jnp.asarray(matrix, wide)
        gram = jnp.einsum(
            "...ia,...ib->...ab" if tall else "...ai,...bi->...ab",
            m,
            m,
            precision=lax.Precision.HIGHEST,
        )
        return jnp.max(jnp.abs(gram - jnp.eye(min(rows, cols), dtype=wide)), axis=(-2, -1))
    off = {"diagonal": i != j, "lower": i < j, "upper": i > j}[structure]
    return jnp.max(jnp.where(off, jnp.abs(matrix), 0), axis=(-2, -1))


def allowed_defect(dtype: Any, size: int, structure: str) -> float:
    """Zeros must be zeros; orthogonality may be off by rounding."""
    return tolerance(dtype, size) if structure in ("orthogonal", "isometric") else 0.0


def _check_concrete(values: np.ndarray, structure: str) -> None:
    dtype = values.dtype
    values = np.asarray(values, np.promote_types(np.float32, dtype) if dtype.itemsize > 2 else "f4")
    with jax.ensure_compile_time_eval():
        readings = [np.asarray(d) for d in _readings(values, structure)]
    limit = allowed_defect(dtype, max(values.shape), structure)
    worst = min(float(np.max(d)) for d in readings)
    if not worst <= limit:
        raise DeclarationError(
            f"declare: the array {dtype}{list(values.shape)} is not {structure}: "
            + (
                f"its largest entry off the {structure} pattern is {worst:.3g}"
                if limit == 0.0
                else f"|WᵀW - I| is {worst:.3g}, more than rounding ({limit:.1g}) explains"
            )
            + ". Re-parametrise the weight so that it holds, or leave the declaration out "
            "(undeclared weights get the general solver)."
        )


def _readings(values: np.ndarray, structure: str) -> Iterable[Any]:
    """Defects under every reading an array may have: matrices, or taps of a kernel."""
    yield defect(values, structure)  # a matrix, or a stack of matrices
    if values.ndim < 3:
        return
    spatial_first = values.reshape((-1, *values.shape[-2:]))  # taps [in, out]
    spatial_last = np.moveaxis(values.reshape((*values.shape[:2], -1)), -1, 0)  # taps [out, in]
    if structure == "isometric":
        # Windows inside the input: Σ_taps w[j]ᵀ w[j] = I, whatever stride and padding are.
        yield defect(spatial_first.reshape(-1, values.shape[-1]), structure)
        yield defect(spatial_last.transpose(0, 2, 1).reshape(-1, values.shape[0]), structure)
        return
    for taps in (spatial_first, np.swapaxes(spatial_last, -1, -2)):
        yield np.min(np.asarray(defect(taps, structure)))  # one of them is the pivot


# --- the way of a declaration through the weight side of a trace ----------------------------------


def propagate(eqns: Iterable[JaxprEqn], known: Mapping[Any, Declaration]) -> dict[Any, Declaration]:
    """Declarations of all variables, from those of the inputs and the `declare` equations."""
    known = dict(known)
    for eqn in eqns:
        incoming = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        if eqn.primitive is declare_p:
            outgoing = [Declaration(**eqn.params)]
        elif any(incoming) and eqn.primitive in _PASSAGE:
            outgoing = _PASSAGE[eqn.primitive](eqn, incoming)
        else:
            continue
        for var, declaration in zip(eqn.outvars, outgoing, strict=True):
            if declaration is not None:
                known[var] = declaration
    return known


def _same(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    return list(incoming)


def _negated(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    return list(incoming)  # every structure is closed under a change of sign


def _cast(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    wider = jnp.issubdtype(new, jnp.floating) and jnp.finfo(new).nmant >= jnp.finfo(old).nmant
    return [incoming[0] if wider else None]


def _transpose(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    permutation = eqn.params["permutation"]
    return [incoming[0] and incoming[0].moved({old: new for new, old in enumerate(permutation)})]


def _squeeze(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    kept = [a for a in range(eqn.invars[0].aval.ndim) if a not in eqn.params["dimensions"]]
    return [incoming[0] and incoming[0].moved({old: new for new, old in enumerate(kept)})]


def _broadcast(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = {o: int(n) for o, n in enumerate(eqn.params["broadcast_dimensions"]) if old[o] == new[int(n)]}
    return [incoming[0] and incoming[0].moved(axes)]


def _reshape(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    """Only reshapes of what lies before the two matrix axes (merging or splitting a stack)."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.params["dimensions"] is not None or old[-2:] != new[-2:] or len(new) < 2:
        return [None]
    axes = {len(old) - 2: len(new) - 2, len(old) - 1: len(new) - 1}
    moved = incoming[0] and incoming[0].moved(axes)
    return [moved and replace(moved, cut=moved.cut or len(old) > 3 or len(new) > 3)]


def _sliced(
    declaration: Declaration | None, old: Sequence[int], new: Sequence[int]
) -> Declaration | None:
    """An index into a stack keeps the structure; a cut through the matrix loses it."""
    if declaration is None:
        return None
    shortened = {a for a in range(len(old)) if old[a] != new[a]}
    if shortened & {declaration.in_axis, declaration.out_axis}:
        return None
    indexed = {a for a in shortened if new[a] == 1}
    return replace(
        declaration,
        pending=declaration.pending | indexed,
        cut=declaration.cut or bool(shortened - indexed),
    )


def _slice(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    old = eqn.invars[0].aval.shape
    return [_sliced(incoming[0], old, out.aval.shape) for out in eqn.outvars]


def _gather(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    """Indexing a stack, `ws[i]`: whole slices over all axes but the collapsed ones."""
    d, numbers = incoming[0], eqn.params["dimension_numbers"]
    old, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if d is None or numbers.operand_batching_dims:
        return [None]
    kept = [a for a in range(len(old)) if a not in numbers.collapsed_slice_dims]
    if any(sizes[a] != old[a] for a in kept):
        return [None]
    return [d.moved(dict(zip(kept, numbers.offset_dims, strict=True)))]


def _concatenate(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    first, along = incoming[0], eqn.params["dimension"]
    if first is None or any(d != first for d in incoming):
        return [None]
    if along in (first.in_axis, first.out_axis):
        return [None]
    return [replace(first, pending=first.pending - {along})]


def _stack(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    first, axis = incoming[0], eqn.params.get("axis", 0)
    if first is None or any(d != first for d in incoming):
        return [None]
    return [first.moved({a: a + (a >= axis) for a in range(eqn.invars[0].aval.ndim)})]


def _unstack(eqn: JaxprEqn, incoming: Sequence[Declaration | None]) -> list[Declaration | None]:
    axis = eqn.params.get("axis", 0)
    kept = [a for a in range(eqn.invars[0].aval.ndim) if a != axis]
    moved = incoming[0] and incoming[0].moved({old: new for new, old in enumerate(kept)})
    return [moved for _ in eqn.outvars]


_PASSAGE = {
    lax.neg_p: _negated,
    lax.copy_p: _same,
    lax.stop_gradient_p: _same,
    lax.optimization_barrier_p: _same,
    lax.sharding_constraint_p: _same,
    compat.name_p: _same,
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
}
for _name, _passage in (("stack_p", _stack), ("unstack_p", _unstack)):
    if hasattr(lax, _name):  # JAX >= 0.11 (or earlier, unused) spells stacking as one primitive
        _PASSAGE[getattr(lax, _name)] = _passage
