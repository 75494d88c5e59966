"""What layers take: floating-point arrays with any leading axes, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

SPATIAL = "DHW"


def checked(name: str, x: Array, dims: int, channels: int | None = None) -> tuple[int, ...]:
    """The spatial size of x[..., *size, channels]; raises an error if x does not fit."""
    x_shape = jnp.shape(x)
    if len(x_shape) < dims + 1 or channels not in (None, x_shape[-1]):
        last = "channels" if channels is None else channels
        raise ValueError(
            f"{name}: takes arrays [..., {'size, ' * dims}{last}], channels last, got the shape "
            f"{x_shape}"
        )
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(
            f"{name}: takes floating-point arrays, got {jnp.result_type(x)}; scale images and the like "
            "first, x / 255"
        )
    return x_shape[len(x_shape) - dims - 1 : -1]


def checked_raw(
    name: str, raw: Array, least: int = 2, most: int | None = None, shape: str = "[..., n, m]"
) -> tuple[int, ...]:
    """The shape of a constraint's argument; raises an error if that does not fit."""
    if not hasattr(raw, "shape") or not hasattr(raw, "dtype"):
        raise TypeError(f"{name}: takes an array {shape}, got {raw!r} of type {type(raw).__name__}")
    if len(raw.shape) < least or (most is not None and len(raw.shape) > most):
        raise ValueError(f"{name}: takes an array {shape}, got the shape {tuple(raw.shape)}")
    if not jnp.issubdtype(raw.dtype, jnp.floating):
        raise TypeError(
            f"{name}: takes floating-point numbers, got {raw.dtype}; convert them, raw.astype(float)"
        )
    return tuple(raw.shape)


def convolve(
    x: Float[Array, "*batch_and_size c"],
    w: Float[Array, "*taps m out"],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int] | None = None,
    groups: int = 1,
) -> Float[Array, "*batch_and_size out"]:
    """A convolution with any leading axes, in one call of XLA's."""
    dims = len(stride)
    batch = x.shape[: x.ndim - dims - 1]
    if len(batch) != 1:
        x = x.reshape((-1, *x.shape[len(batch) :]))
    letters = SPATIAL[-dims:]
    y = lax.conv_general_dilated(
        x,
        w,
        stride,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )
    return y if len(batch) == 1 else y.reshape((*batch, *y.shape[1:]))
