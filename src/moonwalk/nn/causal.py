"""A causal convolution that stays stable while it learns.

    y[i] = Σ_j w[j] x[i - r·(k-1-j)]        w[k-1] = D, diagonal;   w[j] = D V_j, Σ_j ‖V_j‖₂ < 0.9

The tap k-1 touches the present alone, so h'[i] = D⁻¹ h[i] - Σ_j V_j h'[i + r·(k-1-j)] runs from the end
to the start. The recursion forgets: error does not grow along a signal of any length (docs/numerics.md
§5).
"""

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


class CausalConv1d(eqx.Module):
    """A causal convolution over x[..., n, channels], stable by construction.

    With a plan made from concrete arguments, which measures its gain, a walk goes through it along the
    signal and keeps nothing. Under `jit` alone a trace cannot tell that it is stable, and a walk keeps
    half of the cotangent as fragments.

    **Arguments:**

    - `in_channels`, `out_channels`: no more out than in.
    - `kernel_size`, `dilation`
    - `use_bias`
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> layer = mw.nn.CausalConv1d(8, 8, 3, key=jax.random.key(0))
    >>> layer(jnp.ones((4, 32, 8))).shape
    (4, 32, 8)
    """

    raw: Float[Array, "others m out"]
    raw_pivot: Float[Array, "out"]
    bias: Float[Array, "out"] | None
    dilation: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        dilation: int = 1,
        use_bias: bool = True,
        *,
        key: Array,
    ):
        sizes = dict(in_channels=in_channels, out_channels=out_channels)
        settings.counts("CausalConv1d", **sizes, kernel_size=kernel_size, dilation=dilation)
        settings.flag("CausalConv1d", "use_bias", use_bias)
        if out_channels > in_channels:
            raise ValueError(
                f"CausalConv1d: channels expand, {in_channels} -> {out_channels}, so no tap can be a "
                "pivot; widen by moonwalk.nn.Linear before it"
            )
        # ‖raw[j]‖₂ ≈ 2 √m std: together about 1, of which `stable_taps` leaves half.
        std = 1 / (2 * math.sqrt(in_channels) * max(kernel_size - 1, 1))
        self.raw = std * jax.random.normal(key, (kernel_size - 1, in_channels, out_channels))
        self.raw_pivot = jnp.zeros(out_channels)
        self.bias = jnp.zeros(out_channels) if use_bias else None
        self.dilation = int(dilation)

    @property
    def kernel(self) -> Float[Array, "taps m out"]:
        """[k, in, out], declared diagonal at its last tap."""
        return self._kernel(self.raw, self.raw_pivot)

    def _kernel(
        self, raw: Float[Array, "others m out"], raw_pivot: Float[Array, "out"]
    ) -> Float[Array, "taps m out"]:
        m, out = raw.shape[1:]
        pivot = constraints.diagonal(raw_pivot, rows=m)
        # D V_j, where inputs beyond the pivot's have no entry in D
        scale = jnp.concatenate([constraints.bounded(raw_pivot), jnp.ones(m - out, raw.dtype)])
        others = scale[:, None] * constraints.stable_taps(raw)
        return declare(jnp.concatenate([others, pivot[None]]), "diagonal", taps=(raw.shape[0],))

    def __call__(
        self, x: Float[Array, "*batch n c"], *, key: Array | None = None
    ) -> Float[Array, "*batch n out"]:
        checked("CausalConv1d", x, 1, self.raw.shape[1])
        w = self._kernel(self.raw.astype(x.dtype), self.raw_pivot.astype(x.dtype))
        y = convolve(x, w, (1,), ((self.dilation * self.raw.shape[0], 0),), (self.dilation,))
        return y if self.bias is None else y + self.bias.astype(y.dtype)
