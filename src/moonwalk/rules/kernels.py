"""A convolution's axes, channels and groups, and its kernel in one canonical layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..trace.graph import Block
from .registry import Verdict
from .windows import Axis


class Geometry(NamedTuple):
    """A convolution's shapes, read off its dimension numbers."""

    axes: tuple[Axis, ...]
    groups: int
    m: int  # input channels per group
    m_out: int  # output channels per group
    numbers: lax.ConvDimensionNumbers


def geometry_of(block: Block) -> Geometry:
    params, (x, w) = block.eqn.params, block.eqn.invars
    numbers = params["dimension_numbers"]
    out = block.outputs[0].aval
    axes = tuple(
        Axis(
            size=x.aval.shape[numbers.lhs_spec[2 + d]],
            out=out.shape[numbers.out_spec[2 + d]],
            taps=w.aval.shape[numbers.rhs_spec[2 + d]],
            stride=params["window_strides"][d],
            low=params["padding"][d][0],
            dilation=params["rhs_dilation"][d],
        )
        for d in range(len(numbers.lhs_spec) - 2)
    )
    groups = params["feature_group_count"]
    channels_out = w.aval.shape[numbers.rhs_spec[0]]
    return Geometry(axes, groups, w.aval.shape[numbers.rhs_spec[1]], channels_out // groups, numbers)


def declared_of(block: Block) -> str | None:
    """The kernel's declaration, if there is one."""
    declaration = block.declaration(block.eqn.invars[1])
    out, inp, *_ = block.eqn.params["dimension_numbers"].rhs_spec
    return declaration and declaration.of_kernel(inp, out)


def structure_of(block: Block) -> str | None:
    """The structure of the pivot, where one is declared."""
    structure = declared_of(block)
    # Being isometric as a whole says nothing about the pivot.
    return None if structure == "isometric" else structure


def canonical(geometry: Geometry, w: Any) -> Any:
    """The kernel as [k…, g, m, m']."""
    out, inp, *spatial = geometry.numbers.rhs_spec
    w = lax.transpose(w, (*spatial, inp, out))
    w = w.reshape((*w.shape[:-1], geometry.groups, geometry.m_out))
    return jnp.swapaxes(w, -3, -2)


def like_weight(geometry: Geometry, kernel: Any) -> Any:
    """A kernel [k…, m, g·m'] in the layout of w."""
    out, inp, *spatial = geometry.numbers.rhs_spec
    order = np.argsort((*spatial, inp, out))
    return lax.transpose(kernel, tuple(int(i) for i in order))


def unsuited(block: Block) -> Verdict | None:
    """Why no elimination can serve a convolution, whatever its geometry; None if one may."""
    params = block.eqn.params
    if block.inputs != (block.eqn.invars[0],) or block.eqn.invars[1] in block.inputs:
        return Verdict(
            None,
            "the kernel depends on the state",
            "wrap the layer in moonwalk.custom_vijp and give it a rule",
        )
    if any(d != 1 for d in params["lhs_dilation"]) or params["batch_group_count"] != 1:
        return Verdict(
            None,
            "a transposed (input-dilated) or batch-grouped convolution has no elimination here",
            "upsample by a pixel shuffle of a 1×1 convolution; or solve it matrix-free: "
            "moonwalk.vijp(..., fallback=moonwalk.MatrixFree())",
        )
    return None
