"""Any smooth block, matrix-free, on request.

The vijp is the least-squares solution of h' J = h. Its normal equations are (J Jᵀ) h'ᵀ = J hᵀ; LSMR
solves the same problem through products with J and Jᵀ without squaring the condition number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jax.flatten_util import ravel_pytree

from .. import _jax
from ..errors import SingularError
from ..trace.graph import Block
from .registry import Alarm, Gain, Rule, State, Verdict, cast_like_outputs, random_cotangents


@dataclass(frozen=True)
class MatrixFree(Rule):
    """Solve blocks that have no rule of their own by a Krylov method (LSMR, through lineax).

    Pass it to `moonwalk.vijp(..., fallback=MatrixFree())`, or to `custom_vijp(f).defvijp(...)` for
    one layer. It trusts that the block is submersive; what a check can see is checked: that the
    iteration converged, and that a random h' is recovered from its own pullback (which fails if J is
    not surjective, or too ill-conditioned for `max_steps`).

    **Arguments:**

    - `rtol`, `atol`: of the solver; None stands for 10 · machine epsilon.
    - `max_steps`: None stands for 10 n', ten times the number of unknowns.
    """

    rtol: float | None = None
    atol: float | None = None
    max_steps: int | None = None

    name = "matrix-free"

    def verdict(self, block: Block) -> Verdict:
        n, n_out = block.sizes
        if n_out > n:
            return Verdict(
                False,
                f"it expands: {n} numbers go in and {n_out} come out",
                "no solver can help: keep this cotangent",
            )
        return Verdict(True, "trusted to be submersive, solved matrix-free")

    def solve(self, pullback: Any, h: State, like: State) -> tuple[State, Any]:
        """(h' with pullback(h') = h, whether the iteration converged)."""
        flat, unravel = ravel_pytree(tuple(like))
        dtype = jnp.result_type(float)  # the widest enabled: LSMR's recurrences gain from it
        right = ravel_pytree(tuple(h))[0].astype(dtype)

        def matvec(v: Any) -> Any:
            return ravel_pytree(tuple(pullback(unravel(v.astype(flat.dtype)))))[0].astype(dtype)

        operator = lx.FunctionLinearOperator(matvec, jax.ShapeDtypeStruct(flat.shape, dtype))
        eps = float(jnp.finfo(flat.dtype).eps)
        solver = lx.LSMR(
            rtol=10 * eps if self.rtol is None else self.rtol,
            atol=10 * eps if self.atol is None else self.atol,
            max_steps=10 * flat.size if self.max_steps is None else self.max_steps,
        )
        solution = lx.linear_solve(operator, right, solver, throw=False)
        converged = solution.result == lx.RESULTS.successful
        return unravel(solution.value.astype(flat.dtype)), converged

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors
        solved, _ = self.solve(kept, h, _zeros(block))
        return cast_like_outputs(block, solved)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        del factors
        like = _zeros(block)
        u = random_cotangents(block)
        found, converged = self.solve(kept, kept(u), like)
        wide = [ravel_pytree(s)[0].astype(_jax.working_dtype(like[0].dtype)) for s in (found, u)]
        error = jnp.linalg.norm(wide[0] - wide[1]) / jnp.linalg.norm(wide[1])
        limit = float(jnp.finfo(like[0].dtype).eps) ** 0.5
        return [
            Alarm(
                ~(converged & (error <= limit)),
                "vijp: the matrix-free solver did not recover a random cotangent from its pullback: "
                "the block is not submersive, or too ill-conditioned; raise max_steps, or give the "
                "layer a rule with moonwalk.custom_vijp",
                SingularError,
            )
        ]

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        return Gain.unknown()


def _zeros(block: Block) -> State:
    return tuple(_jax.full(v.aval, 0.0) for v in block.outputs)
