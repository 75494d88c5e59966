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
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from .. import compat
from ..declare import allowed_defect, defect
from ..errors import DeclarationError, SingularError
from ..registry import Alarm, Gain


class Factors(NamedTuple):
    """A left inverse and what is known of its quality."""

    inverse: Float[Array, "*batch out in"]  # for "diagonal": the diagonal itself, [*batch, out]
    singular: Bool[Array, "*batch out"]
    defect: Float[Array, "*batch"]
    finite: Bool[Array, ""]  # of the whole weight: a vijp reads the pivot's rows, a vjp all of them


def factorise(
    matrix: Float[Array, "*batch in out"], structure: str | None, weight: Float[Array, "..."]
) -> Factors:
    """The left inverse of a pivot [in, out], out ≤ in, of a weight."""
    out = matrix.shape[-1]
    part, matrix = matrix, compat.gathered(matrix)
    off = defect(matrix, structure) if structure else jnp.zeros(matrix.shape[:-2], matrix.dtype)
    matrix = matrix.astype(compat.working_dtype(matrix.dtype))
    square = matrix[..., :out, :]
    eps = jnp.finfo(matrix.dtype).eps
    if structure == "orthogonal":
        inverse = jnp.swapaxes(part.astype(matrix.dtype), -1, -2)  # a product: it stays where it is
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
        diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
        # The diagonal of R shows a loss of rank relative to the matrix's own size.
        size = jnp.max(jnp.abs(diagonal), axis=-1, keepdims=True, initial=0)
        diagonal = jnp.where(jnp.abs(diagonal) <= eps * matrix.shape[-2] * size, 0, diagonal)
    return Factors(inverse, ~(jnp.abs(diagonal) > 0), off, jnp.all(jnp.isfinite(weight)))


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
    matrix = matrix.astype(compat.working_dtype(matrix.dtype))
    out = matrix.shape[-1]
    if structure == "diagonal":
        d = jnp.diagonal(matrix[..., :out, :], axis1=-2, axis2=-1)
        factor = jnp.sqrt(jnp.mean(d**2, -1) * jnp.mean(d**-2.0, -1))
        return Gain(float(jnp.max(factor)), mixes=False)
    if structure in ("lower", "upper"):
        matrix = matrix[..., :out, :]
    inverse = factorise(matrix, structure, matrix).inverse
    norms = [jnp.sqrt(jnp.sum(m**2, (-2, -1))) for m in (matrix, inverse)]
    return Gain(float(jnp.max(norms[0] * norms[1])) / out, mixes=True)


def alarms(factors: Factors, structure: str | None, dtype: Any, what: str) -> list[Alarm]:
    """A zero pivot; a declaration that does not hold."""
    kind = structure or "general"
    found = [
        Alarm(
            ~factors.finite,
            f"vijp: {what} holds values that are not finite, so no cotangent came through it unharmed; "
            "look for the step that made them",
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
