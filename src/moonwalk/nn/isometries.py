"""Isometric layers: orthogonal convolutions, and downsampling."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import settings
from .dense import Linear
from .inputs import checked, convolve
from .paraunitary import Raw, paraunitary_init, paraunitary_kernel
from .pooling import Unshuffle

PADDINGS = ("CIRCULAR", "ZEROS")


class OrthogonalConv(eqx.Module):
    """An orthogonal convolution over the axes before the last; see `OrthogonalConv2d`."""

    raw: Raw
    bias: Float[Array, "c"] | None
    padding: str = eqx.field(static=True)

    dims: ClassVar[int]

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        padding: str = "CIRCULAR",
        use_bias: bool = True,
        *,
        spread: float = 1.0,
        key: Array,
    ):
        name = type(self).__name__
        if padding not in PADDINGS:
            raise ValueError(
                f"{name}: unknown padding {padding!r}; an orthogonal convolution keeps the size, with "
                f"one of {', '.join(PADDINGS)}"
            )
        settings.flag(name, "use_bias", use_bias)
        spread = settings.finite(name, "spread", spread)
        if not settings.is_count(channels, 2) or not settings.is_count(kernel_size):
            raise ValueError(
                f"{name}: takes 2 channels or more, which neighbouring positions share, and 1 tap or "
                f"more, got channels={channels!r}, kernel_size={kernel_size!r}"
            )
        self.raw = paraunitary_init(key, channels, kernel_size, self.dims, spread=spread)
        self.bias = jnp.zeros(channels) if use_bias else None
        self.padding = padding

    @property
    def weight(self) -> Float[Array, "*taps c c"]:
        """The kernel [*taps, in, out], declared isometric."""
        return paraunitary_kernel(self.raw)

    def __call__(
        self, x: Float[Array, "*batch_and_size c"], *, key: Array | None = None
    ) -> Float[Array, "*batch_and_size c"]:
        d, dtype = self.dims, x.dtype
        size = checked(type(self).__name__, x, d, self.raw.matrix.shape[-1])
        # In half precision the kernel would not be orthogonal, so the product is rounded instead.
        w = self.weight.astype(jnp.promote_types(dtype, jnp.float32))
        reach = w.shape[0] - 1
        low, high = reach // 2, reach - reach // 2
        if self.padding == "CIRCULAR" and min(size) < high:
            raise ValueError(
                f"{type(self).__name__}: {reach + 1} taps go around an axis of {min(size)} more than "
                "once; take a smaller kernel_size, or padding='ZEROS'"
            )
        # One batch axis before the wrap-around copy: a walk takes that and the convolution together.
        batch = x.shape[: x.ndim - d - 1]
        x = x.astype(w.dtype).reshape((-1, *x.shape[len(batch) :]))
        pads = ((low, high),) * d
        if self.padding == "CIRCULAR":
            for axis in range(1, d + 1):
                x = _wrapped(x, axis, low, high)
            pads = ((0, 0),) * d
        y = convolve(x, w, (1,) * d, pads).astype(dtype)
        y = y.reshape((*batch, *y.shape[1:]))
        return y if self.bias is None else y + self.bias.astype(dtype)


def _wrapped(x: Array, axis: int, low: int, high: int) -> Array:
    """The last entries before the first, and the first after the last."""
    size = x.shape[axis]
    parts = [(size - low, size), (0, size), (0, high)]
    # An empty slice would still be one more reader of the state.
    return lax.concatenate(
        [x if (a, b) == (0, size) else lax.slice_in_dim(x, a, b, axis=axis) for a, b in parts if a < b],
        axis,
    )


class OrthogonalConv1d(OrthogonalConv):
    """`OrthogonalConv2d` over one axis: x[..., n, channels]."""

    dims = 1
    __init__ = OrthogonalConv.__init__


class OrthogonalConv2d(OrthogonalConv):
    """An orthogonal convolution over x[..., h, w, channels], of stride 1: J Jᵀ = I, whatever is learned.

    | padding | a walk |
    |---|---|
    | `"CIRCULAR"` | keeps nothing, loses no accuracy: the vijp is the jvp |
    | `"ZEROS"` | keeps the cotangents of the windows at the edges, loses no accuracy |

    Circular padding costs a copy of the input with its wrapped edges. The kernel is paraunitary
    (`moonwalk.nn.paraunitary_kernel`).

    **Arguments:**

    - `channels`: in and out, at least 2.
    - `kernel_size`: along each axis. Odd ones are centred; even ones reach one position further on.
    - `padding`: as above.
    - `use_bias`
    - `spread`: how far the initial kernel is from the identity. 1: random; 0: the identity (for odd
        sizes). Small numbers suit deep networks.
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> layer = mw.nn.OrthogonalConv2d(8, 3, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (2, 6, 6, 8))
    >>> bool(jnp.allclose(jnp.linalg.norm(layer(x)), jnp.linalg.norm(x), rtol=1e-5))
    True
    """

    dims = 2
    __init__ = OrthogonalConv.__init__


class Downsample(eqx.Module):
    """Pixel-unshuffling and an orthonormal projection: [..., h, w, c] -> [..., h/f, w/f, out].

    An isometry, J Jᵀ = I: a walk keeps nothing and loses no accuracy. With out = fᵈ·c it is orthogonal,
    and loses no information either.

    **Arguments:**

    - `in_channels`, `out_channels`: no more out than in · factorᵈⁱᵐˢ.
    - `factor`: by which every spatial axis shrinks; it must divide their sizes.
    - `dims`: how many spatial axes there are.
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> mw.nn.Downsample(8, 16, key=jax.random.key(0))(jnp.ones((2, 6, 6, 8))).shape
    (2, 3, 3, 16)
    """

    unshuffle: Unshuffle
    projection: Linear

    def __init__(
        self, in_channels: int, out_channels: int, factor: int = 2, dims: int = 2, *, key: Array
    ):
        settings.counts("Downsample", in_channels=in_channels, out_channels=out_channels)
        settings.counts("Downsample", factor=factor, dims=dims)
        self.unshuffle = Unshuffle(factor, dims)
        numbers = in_channels * factor**dims
        if out_channels > numbers:
            raise ValueError(
                f"Downsample: {in_channels} channels of {factor}^{dims} positions are {numbers} "
                f"numbers, which no orthonormal projection makes {out_channels}; take at most "
                f"{numbers} out_channels"
            )
        self.projection = Linear(numbers, out_channels, "orthogonal", use_bias=False, key=key)

    @property
    def weight(self) -> Float[Array, "n m"]:
        """The projection [in · factorᵈⁱᵐˢ, out], declared orthogonal."""
        return self.projection.weight

    def __call__(
        self, x: Float[Array, "*batch_and_size c"], *, key: Array | None = None
    ) -> Float[Array, "*batch_and_size out"]:
        return self.projection(self.unshuffle(x))
