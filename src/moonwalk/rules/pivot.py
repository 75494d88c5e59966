"""Solving with the pivot: the small matrix [in, out] inside a dense layer or a convolution.

A layer's vjp reads h = h' Mᵀ on the rows that the vijp uses, with M [in, out] of full column rank. The
vijp multiplies by a left inverse, made once from the weights:

    structure     left inverse of M                          uses of h
    orthogonal    Mᵀ                                         all of it; no solve, no growth of error
    diagonal      1 / diag                                   the first `out` entries; nothing mixes
    lower, upper  T⁻¹ by a triangular solve against I        the first `out` entries, T = M[:out]
    (general)     R⁻¹ Qᵀ from M = Q R                        all of it, by least squares

The inverse is applied as a product, because a small solve inside a hot loop is bound by latency; a
triangular solve against I loses 10 to 30 times less accuracy than a general inverse does
(docs/numerics.md §3).

A layer that expands, M [in, out] with in < out and of full row rank, loses h' off the row space of M.
With the complete QR factorisation Mᵀ = [Q₁ Q₂] [R; 0],

    h = h' Mᵀ = h' Q₁ R    ⇒    h' = h R⁻¹ Q₁ᵀ + f Q₂ᵀ,    f = h' Q₂:

f, out - in coordinates of h', is all that a walk must keep. R⁻¹ Q₁ᵀ is the transpose of M's
pseudo-inverse, so it is applied like a left inverse; and since Q is orthogonal, only R lets error grow.
Declared structures would not make this factorisation any cheaper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from .. import _jax
from ..errors import DeclarationError, SingularError
from ..trace.declare import allowed_defect, defect
from .registry import Alarm, Gain


class Factors(NamedTuple):
    """A left inverse, and what its alarms need."""

    inverse: Float[Array, "*batch out in"]  # for "diagonal": the diagonal itself, [*batch, out]
    singular: Bool[Array, "*batch out"]
    defect: Float[Array, "*batch"]
    finite: Bool[Array, ""]  # the whole weight: a vijp reads the pivot's rows, a vjp all of them


class Cokernel(NamedTuple):
    """The pseudo-inverse of a matrix that expands, and a basis of what it loses."""

    pivot: Factors
    basis: Float[Array, "*batch out lost"]  # Q₂


def factorise(
    matrix: Float[Array, "*batch in out"], structure: str | None, weight: Float[Array, "..."]
) -> Factors:
    """The left inverse of a pivot [in, out], out ≤ in, of a weight."""
    out = matrix.shape[-1]
    part, matrix = matrix, _jax.gathered(matrix)
    off = defect(matrix, structure) if structure else jnp.zeros(matrix.shape[:-2], matrix.dtype)
    matrix = matrix.astype(_jax.working_dtype(matrix.dtype))
    square = matrix[..., :out, :]
    if structure == "orthogonal":
        inverse = jnp.swapaxes(part.astype(matrix.dtype), -1, -2)  # a product, which keeps its sharding
        diagonal = jnp.ones((*matrix.shape[:-2], out), matrix.dtype)
    elif structure == "diagonal":
        inverse = diagonal = jnp.diagonal(square, axis1=-2, axis2=-1)
    elif structure in ("lower", "upper"):
        identity = jnp.broadcast_to(jnp.eye(out, dtype=matrix.dtype), square.shape)
        inverse = solve_triangular(square, identity, lower=structure == "lower")
        diagonal = jnp.diagonal(square, axis1=-2, axis2=-1)
    else:
        q, r = jnp.linalg.qr(matrix)
        inverse = solve_triangular(r, jnp.swapaxes(q, -1, -2))
        diagonal = _shown_rank(r, matrix.shape[-2])
    return Factors(inverse, ~(jnp.abs(diagonal) > 0), off, jnp.all(jnp.isfinite(weight)))


def _shown_rank(r: Any, size: int) -> Any:
    """The diagonal of R, with zeros where it shows a loss of rank relative to the size of the matrix."""
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    largest = jnp.max(jnp.abs(diagonal), axis=-1, keepdims=True, initial=0)
    return jnp.where(jnp.abs(diagonal) <= jnp.finfo(r.dtype).eps * size * largest, 0, diagonal)


def expand(
    matrix: Float[Array, "*batch in out"], structure: str | None, weight: Float[Array, "..."]
) -> Cokernel:
    """The pseudo-inverse of a matrix [in, out], in < out, of a weight, and a basis of its cokernel."""
    matrix = _jax.gathered(matrix)
    off = defect(matrix, structure) if structure else jnp.zeros(matrix.shape[:-2], matrix.dtype)
    matrix = matrix.astype(_jax.working_dtype(matrix.dtype))
    rows, columns = matrix.shape[-2:]
    q, r = jnp.linalg.qr(jnp.swapaxes(matrix, -1, -2), mode="complete")
    r = r[..., :rows, :]
    solved = solve_triangular(r, jnp.swapaxes(q[..., :rows], -1, -2))  # R⁻¹ Q₁ᵀ
    singular = ~(jnp.abs(_shown_rank(r, columns)) > 0)
    finite = jnp.all(jnp.isfinite(weight))
    return Cokernel(Factors(jnp.swapaxes(solved, -1, -2), singular, off, finite), q[..., rows:])


def keep(factors: Cokernel, h: Float[Array, "*batch out"], precision: Any) -> Any:
    """f = h' Q₂ [..., lost], in the dtype of h'."""
    return jnp.matmul(h.astype(factors.basis.dtype), factors.basis, precision=precision).astype(h.dtype)


def kept_part(factors: Cokernel, f: Float[Array, "*batch lost"], precision: Any) -> Any:
    """f Q₂ᵀ [..., out], the part of h' that was kept."""
    basis = jnp.swapaxes(factors.basis, -1, -2)
    return jnp.matmul(f.astype(basis.dtype), basis, precision=precision)


def apply(
    factors: Factors,
    structure: str | None,
    h: Float[Array, "*batch in"],
    precision: Any,
    out_sharding: Any = None,
) -> Any:
    """h' [..., out] from the rows h [..., in] of the cotangent that the pivot touches."""
    if structure == "diagonal":
        return h[..., : factors.inverse.shape[-1]] / factors.inverse
    columns = factors.inverse.shape[-1]
    inverse = jnp.swapaxes(factors.inverse, -1, -2)
    return jnp.matmul(h[..., :columns], inverse, precision=precision, out_sharding=out_sharding)


def solve_precision(structure: str | None, ambient: Any) -> Any:
    """The ambient precision where errors do not grow (docs/numerics.md §3), true float32 elsewhere."""
    return ambient if structure in ("orthogonal", "diagonal") else lax.Precision.HIGHEST


def gain(structure: str | None, matrix: Any = None) -> Gain:
    """‖P‖_F ‖P⁻¹‖_F / m, the worst over a batch; while tracing, what the structure promises."""
    if structure == "orthogonal":
        return Gain(1.0, mixes=True)
    if matrix is None:
        return Gain(1.0, mixes=False, assumed=True) if structure == "diagonal" else Gain.unknown()
    matrix = matrix.astype(_jax.working_dtype(matrix.dtype))
    rows, out = matrix.shape[-2:]
    if structure == "diagonal":
        d = jnp.diagonal(matrix[..., :out, :], axis1=-2, axis2=-1)
        factor = jnp.sqrt(jnp.mean(d**2, -1) * jnp.mean(d**-2.0, -1))
        return Gain(float(jnp.max(factor)), mixes=False)
    if structure in ("lower", "upper"):
        matrix = matrix[..., :out, :]
    solver = expand(matrix, None, matrix).pivot if rows < out else factorise(matrix, structure, matrix)
    norms = [jnp.sqrt(jnp.sum(m**2, (-2, -1))) for m in (matrix, solver.inverse)]
    return Gain(float(jnp.max(norms[0] * norms[1])) / min(rows, out), mixes=True)


def declared(structure: str | None, dtype: Any, size: int, what: str) -> list[tuple[str, float]]:
    """`Rule.declared` for a pivot: the structure relied on, and how far it may be off."""
    if structure is None:
        return []
    rounding = 3 * allowed_defect(dtype, size, structure)  # of a product, on a random vector
    return [(f"{what}, declared {structure!r}", rounding)]


def probe(matrix: Float[Array, "*batch in out"], structure: str) -> Float[Array, ""]:
    """How far a pivot is from its declared structure, at about the cost of reading it.

    Declared zeros are all checked. Orthogonality is tested on random vectors v of signs: with
    E = MᵀM − I, E ‖E v‖² = ‖E‖_F², so that ‖E v‖ / ‖v‖ ≥ ‖E‖₂ / √n is measured, on average.
    """
    matrix = _jax.gathered(matrix)
    if structure != "orthogonal":
        return jnp.max(defect(matrix, structure), initial=0).astype(jnp.float32)
    wide = matrix.astype(_jax.working_dtype(matrix.dtype))
    # Contracted without transposing: a copy would be as large as the weights of all layers.
    once, twice = ("...io,ok->...ik", "...io,...ik->...ok")
    if matrix.shape[-2] < matrix.shape[-1]:
        once, twice = ("...io,ik->...ok", "...io,...ok->...ik")
    size = min(matrix.shape[-2:])
    rng = np.random.default_rng(0)
    v = jnp.asarray(rng.choice([-1.0, 1.0], (size, _VECTORS)), wide.dtype)
    exact = lax.Precision.HIGHEST
    product = jnp.einsum(twice, wide, jnp.einsum(once, wide, v, precision=exact), precision=exact)
    off = jnp.sqrt(jnp.sum((product - v) ** 2, -2) / max(1, size))
    return jnp.max(off, initial=0).astype(jnp.float32)


_VECTORS = 4


def alarms(factors: Factors, structure: str | None, dtype: Any, what: str) -> list[Alarm]:
    """A zero pivot; a declaration that does not hold."""
    kind = structure or "general"
    found = [
        Alarm(
            ~factors.finite,
            f"vijp: {what} holds NaN or infinity (values that are not finite), so no cotangent came "
            "through it unharmed; look for the step that made them",
            SingularError,
        ),
        Alarm(
            factors.singular,
            f"vijp: the {kind} pivot of {what} is singular, so the output's cotangent cannot be "
            "recovered; parametrise its diagonal (or its smallest singular value) away from zero",
            SingularError,
        ),
    ]
    if structure is not None:
        limit = allowed_defect(dtype, factors.inverse.shape[-1], structure)
        found.append(
            Alarm(
                ~(factors.defect <= limit),
                f"vijp: {what} is declared {structure!r}, but its values are not; re-parametrise it, "
                "or leave the declaration out (undeclared weights get the general solver)",
                DeclarationError,
            )
        )
    return found
