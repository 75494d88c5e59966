"""Is a jaxpr linear in some of its inputs?

The backward rule of a `custom_vjp` is any function: it may clip a cotangent, or add a regulariser's
gradient to it. Only a linear one has a vijp, and JAX's own `linear_transpose` takes affine maps for
linear ones. So the equations that a cotangent passes are checked one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal

# Linear in the first operand, whatever the others are.
_LINEAR = frozenset(
    {
        lax.neg_p,
        lax.convert_element_type_p,
        lax.copy_p,
        lax.reduce_precision_p,
        lax.reduce_sum_p,
        lax.reduce_window_sum_p,
        lax.cumsum_p,
        lax.reshape_p,
        lax.transpose_p,
        lax.squeeze_p,
        lax.broadcast_in_dim_p,
        lax.rev_p,
        lax.slice_p,
        lax.split_p,
        lax.dynamic_slice_p,
        lax.gather_p,
        lax.div_p,
        _jax.name_p,
        *_jax.SAME_VALUES,
        lax.unstack_p,
        lax.tile_p,
    }
)
# Linear in either of two operands, if only one of them depends on the inputs.
_BILINEAR = frozenset({lax.mul_p, lax.dot_general_p, lax.conv_general_dilated_p})
# Linear in all operands together: each depends on the inputs, or is zero.
_JOINTLY = frozenset(
    {
        lax.add_p,
        lax.sub_p,
        _jax.add_jaxvals_p,
        lax.concatenate_p,
        lax.pad_p,
        lax.dynamic_update_slice_p,
        lax.scatter_add_p,
        lax.stack_p,
    }
)


def is_linear(
    eqns: Iterable[JaxprEqn], inputs: Iterable[Any], outputs: Iterable[Any], *, affine: bool = False
) -> bool:
    """Whether all outputs are linear in the inputs, as far as the equations show it.

    `affine`: a constant may be added.
    """
    linear, zero = set(inputs), set()

    def is_zero(atom: Any) -> bool:
        return not np.any(np.asarray(atom.val)) if isinstance(atom, Literal) else atom in zero

    def depends(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in linear

    for eqn in eqns:
        hit = [depends(v) for v in eqn.invars]
        if not any(hit):
            # zeros stay zeros through whatever moves or scales them
            if eqn.invars and eqn.primitive in _LINEAR and is_zero(eqn.invars[0]):
                zero.update(eqn.outvars)
            continue
        if eqn.primitive in _LINEAR:
            fine = not any(hit[1:])
        elif eqn.primitive in _BILINEAR:
            fine = sum(hit) == 1
        elif eqn.primitive in _JOINTLY:
            arrays = [v for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
            fine = affine or all(depends(v) or is_zero(v) for v in arrays)
        elif eqn.primitive is lax.select_n_p:
            fine = not hit[0] and (affine or all(depends(v) or is_zero(v) for v in eqn.invars[1:]))
        else:
            return False
        if not fine or not all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
            return False
        linear.update(eqn.outvars)
    return all(affine or depends(v) or is_zero(v) for v in outputs)
