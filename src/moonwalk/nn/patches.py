"""Patches: convolutions whose stride is their kernel's size."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import settings
from ..trace.declare import declare
from . import constraints
from .inputs import checked, convolve

KINDS = ("orthogonal", "free")


class Patchify(eqx.Module):
    """Each patch of p × p positions to one, by one matrix: [..., h, w, c] -> [..., h/p, w/p, out].

    | kind | the matrix [p²·c, out] | a walk |
    |---|---|---|
    | `"orthogonal"` | orthonormal columns: an isometry | keeps nothing, loses no accuracy |
    | `"free"` | anything | as a plan measures it |

    **Arguments:**

    - `in_channels`, `out_channels`: in an orthogonal layer, no more out than a patch has numbers.
    - `patch`: its size p along each axis; positions that fill no patch are left out.
    - `dims`: how many spatial axes there are.
    - `kind`: as above.
    - `use_bias`
    - `slope`: the slope of the activation that follows, which sets the initial variance of a free layer.
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> layer = mw.nn.Patchify(3, 48, 4, key=jax.random.key(0))
    >>> layer(jnp.ones((2, 32, 32, 3))).shape
    (2, 8, 8, 48)
    """

    raw: Float[Array, "patch out"]
    bias: Float[Array, "out"] | None
    patch: int = eqx.field(static=True)
    dims: int = eqx.field(static=True)
    kind: str = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        patch: int,
        dims: int = 2,
        kind: str = "orthogonal",
        use_bias: bool = True,
        *,
        slope: float = 0.25,
        key: Array,
    ):
        settings.counts("Patchify", in_channels=in_channels, out_channels=out_channels)
        settings.flag("Patchify", "use_bias", use_bias)
        slope = settings.finite("Patchify", "slope", slope)
        if kind not in KINDS:
            raise ValueError(f"Patchify: unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
        if not settings.is_count(dims) or dims > 3 or not settings.is_count(patch):
            raise ValueError(
                f"Patchify: patches have a positive size along 1, 2 or 3 axes, got patch={patch!r}, "
                f"dims={dims!r}"
            )
        numbers = patch**dims * in_channels
        if kind == "orthogonal" and out_channels > numbers:
            raise ValueError(
                f"Patchify: a patch of {numbers} numbers has no {out_channels} orthonormal columns; "
                "take larger patches, fewer channels, or kind='free'"
            )
        total = 1.0 if kind == "orthogonal" else 2 / (1 + slope**2)
        self.raw = math.sqrt(total / numbers) * jax.random.normal(key, (numbers, out_channels))
        self.bias = jnp.zeros(out_channels) if use_bias else None
        self.patch, self.dims, self.kind = patch, dims, kind

    @property
    def kernel(self) -> Float[Array, "*patch c out"]:
        """[*p, in, out], declared."""
        shape = (*(self.patch,) * self.dims, -1, self.raw.shape[-1])
        if self.kind == "free":
            return self.raw.reshape(shape)
        # Windows do not overlap, so the convolution is isometric if its matrix is.
        return declare(constraints.orthogonal(self.raw).reshape(shape), "isometric")

    def __call__(
        self, x: Float[Array, "*batch_and_size c"], *, key: Array | None = None
    ) -> Float[Array, "*batch_and_size out"]:
        checked("Patchify", x, self.dims, self.raw.shape[0] // self.patch**self.dims)
        # In half precision the weight would not be orthogonal, so the product is rounded instead.
        wide = jnp.promote_types(x.dtype, jnp.float32) if self.kind == "orthogonal" else x.dtype
        stride, none = (self.patch,) * self.dims, ((0, 0),) * self.dims
        y = convolve(x.astype(wide), self.kernel.astype(wide), stride, none).astype(x.dtype)
        return y if self.bias is None else y + self.bias.astype(y.dtype)
