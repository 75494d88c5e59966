"""Dense layers."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import settings
from . import constraints
from .inputs import checked

KINDS = ("orthogonal", "lower", "free")


class Linear(eqx.Module):
    """y = x W + b over the last axis.

    | kind | W | a walk |
    |---|---|---|
    | `"orthogonal"` | orthonormal columns (rows, where it expands) | keeps nothing, loses no accuracy |
    | `"lower"` | lower triangular, diagonal within [1/2, 2] | keeps nothing; a plan measures its gain |
    | `"free"` | anything | as a plan measures it |

    Of a layer that expands, a walk keeps the `out - in` coordinates of the cotangent that it loses.

    **Arguments:**

    - `in_features`, `out_features`
    - `kind`: as above.
    - `use_bias`
    - `slope`: the slope of the activation that follows, which sets the initial variance of a lower or
        free layer: 2 / (1 + slope²) per output.
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> layer = mw.nn.Linear(8, 4, key=jax.random.key(0))
    >>> layer(jnp.ones((2, 3, 8))).shape
    (2, 3, 4)
    """

    raw: Float[Array, "n m"]
    bias: Float[Array, "m"] | None
    kind: str = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kind: str = "orthogonal",
        use_bias: bool = True,
        *,
        slope: float = 0.25,
        key: Array,
    ):
        settings.counts("Linear", in_features=in_features, out_features=out_features)
        settings.flag("Linear", "use_bias", use_bias)
        slope = settings.finite("Linear", "slope", slope)
        if kind not in KINDS:
            raise ValueError(f"Linear: unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
        if kind == "lower" and out_features > in_features:
            raise ValueError(
                f"Linear: a lower triangular layer cannot expand, {in_features} -> {out_features}; take "
                "kind='orthogonal' or kind='free' there, or at most as many outputs as inputs"
            )
        total = 2 / (1 + slope**2)
        if kind == "orthogonal":
            std = 1.0
        elif kind == "lower":
            # 1 from the diagonal, and on average half of the column below; at most 1/√n, which keeps
            # the inverse well conditioned.
            below = in_features - (out_features + 1) / 2
            std = math.sqrt(min((total - 1) / max(below, 1), 1 / in_features))
        else:
            std = math.sqrt(total / in_features)
        self.kind = kind
        self.raw = std * jax.random.normal(key, (in_features, out_features))
        if kind == "orthogonal":
            # Start from a matrix that is its own Q, because the QR of a Gaussian matrix is badly
            # conditioned and its derivative loses digits.
            self.raw = self._weight(self.raw)
        self.bias = jnp.zeros(out_features) if use_bias else None

    @property
    def weight(self) -> Float[Array, "n m"]:
        """W [in, out], declared."""
        return self._weight(self.raw)

    def _weight(self, raw: Float[Array, "n m"]) -> Float[Array, "n m"]:
        if self.kind == "orthogonal":
            if raw.shape[-1] <= raw.shape[-2]:
                return constraints.orthogonal(raw)
            return jnp.swapaxes(constraints.orthogonal(jnp.swapaxes(raw, -1, -2)), -1, -2)
        return constraints.lower(raw, scale=1.0) if self.kind == "lower" else raw

    def __call__(
        self, x: Float[Array, "*batch n"], *, key: Array | None = None
    ) -> Float[Array, "*batch m"]:
        checked("Linear", x, 0, self.raw.shape[0])
        if self.kind == "orthogonal":
            # In half precision the weight would not be orthogonal, so the product is rounded instead.
            y = (x @ self.weight.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
        else:
            y = x @ self._weight(self.raw.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)
