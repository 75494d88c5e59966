"""Convolutions with a pivot: one tap has a structure that a walk can divide by, all others are free.

**Which tap** is the pivot follows from size, stride, padding and dilation. It is decided when a layer is
called, by the same code that the rules use (`rules.spans.declared_tap`): for stride > padding the
lemma's tap, for causal convolutions the last one, for "same" convolutions of stride one, which keep
fragments, the first.

**Variance.** An output's weights start with the total variance 2 / (1 + slope²), which keeps that of
activations; the pivot's 1 is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import settings
from ..rules.spans import declared_tap
from ..rules.windows import Axis
from . import constraints
from .inputs import checked, convolve

Size = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]
NAMED = ("SAME", "VALID", "CIRCULAR")


def pivot_taps(
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The tap of a kernel that a declared structure refers to, for an input of a given size.

    **Arguments:** one entry per spatial axis each; `padding` in pairs.

    **Example:** a convolution with stride 2 and padding 1, and one with stride 1:

    >>> import moonwalk as mw
    >>> mw.nn.pivot_taps((8, 8), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))
    (1, 1)
    >>> mw.nn.pivot_taps((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    (0, 0)
    """
    each = dict(size=size, kernel_size=kernel_size, stride=stride, dilation=dilation)
    for name, values in each.items():
        rank = (len(size),) if isinstance(size, Sequence) else ()
        settings.sizes("pivot_taps", name, values, rank, "has a positive number for every spatial axis")
    if len(padding) != len(size) or not all(_is_pair(p) for p in padding):
        rule = "has a pair of numbers for every spatial axis"
        raise settings.refuse("pivot_taps", "padding", rule, padding)
    taps = []
    for i, (n, k, s, (low, high), r) in enumerate(
        zip(size, kernel_size, stride, padding, dilation, strict=True)
    ):
        out = (n + low + high - r * (k - 1) - 1) // s + 1
        tap = declared_tap(Axis(n, out, k, s, low, r)) if out > 0 else None
        if tap is None:
            raise ValueError(
                f"spatial axis {i} (size {n} -> {out}, kernel {k}, stride {s}, padding {low} and "
                f"{high}, dilation {r}) has no tap that could be a pivot; take pivot='free', a "
                "stride of 1, or a dilation of 1"
            )
        taps.append(tap)
    return tuple(taps)


class Conv(eqx.Module):
    """A convolution over the axes before the last; see `Conv2d`."""

    raw: Float[Array, "*taps m out"]
    bias: Float[Array, "out"] | None
    stride: tuple[int, ...] = eqx.field(static=True)
    padding: str | tuple[tuple[int, int], ...] = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    pivot: str = eqx.field(static=True)

    dims: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        pivot: str = "diagonal",
        use_bias: bool = True,
        *,
        slope: float = 0.25,
        key: Array,
    ):
        settings.counts(self._name, in_channels=in_channels, out_channels=out_channels, groups=groups)
        settings.flag(self._name, "use_bias", use_bias)
        slope = settings.finite(self._name, "slope", slope)
        kernel = self._sizes("kernel_size", kernel_size)
        self.stride = self._sizes("stride", stride)
        self.dilation = self._sizes("dilation", dilation)
        self.padding = self._padding(padding)
        self.groups, self.pivot = groups, pivot
        if pivot not in constraints.PIVOTS:
            raise ValueError(
                f"{self._name}: unknown pivot {pivot!r}; choose one of {', '.join(constraints.PIVOTS)}"
            )
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{self._name}: {in_channels} -> {out_channels} channels do not divide into "
                f"{groups} groups"
            )
        if pivot != "free" and out_channels > in_channels:
            raise ValueError(
                f"{self._name}: channels expand, {in_channels} -> {out_channels}, so no tap can be a "
                f"{pivot} pivot; take pivot='free' for this layer (a stem's gradient needs no walk), or "
                "widen by pixel-unshuffling instead (moonwalk.nn.Unshuffle)"
            )
        m, taps = in_channels // groups, math.prod(kernel)
        std = _std(m, out_channels // groups, taps, pivot, 2 / (1 + slope**2))
        self.raw = std * jax.random.normal(key, (*kernel, m, out_channels))
        self.bias = jnp.zeros(out_channels) if use_bias else None

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _sizes(self, what: str, value: Size) -> tuple[int, ...]:
        rule = f"is a positive number, or {self.dims} of them"
        given = (value,) * self.dims if settings.is_count(value) else value
        return settings.sizes(self._name, what, given, (self.dims,), rule)

    def _padding(self, value: Padding) -> str | tuple[tuple[int, int], ...]:
        if isinstance(value, str):
            if value not in NAMED:
                raise ValueError(
                    f"{self._name}: unknown padding {value!r}; choose one of "
                    f"{', '.join(NAMED)}, or numbers"
                )
            return value
        values: Any = (value,) * self.dims if settings.is_count(value, 0) else value
        values = values if isinstance(values, Sequence) else ()
        pairs = [(v, v) if settings.is_count(v, 0) else v for v in values]
        if len(pairs) != self.dims or not all(_is_pair(p) for p in pairs):
            rule = f"is a number, or {self.dims} numbers or pairs of numbers, none negative"
            raise settings.refuse(self._name, "padding", rule, value)
        return tuple((int(low), int(high)) for low, high in pairs)

    def _pads(self, size: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The padding in numbers, for an input of a given size."""
        if not isinstance(self.padding, str):
            return self.padding
        reach = [r * (k - 1) for k, r in zip(self.raw.shape, self.dilation, strict=False)]
        if self.padding == "CIRCULAR":
            return tuple((n // 2, n - n // 2) for n in reach)
        windows = [n + 1 for n in reach]
        return tuple(lax.padtype_to_pads(size, windows, self.stride, self.padding))

    def kernel(self, size: Sequence[int], dtype: jnp.dtype | None = None) -> Float[Array, "*taps m out"]:
        """The declared kernel [*taps, in / groups, out] for an input of a given spatial size."""
        raw = self.raw if dtype is None else self.raw.astype(dtype)
        if self.pivot == "free":
            return raw
        pads = self._pads(size)
        if self.padding == "CIRCULAR":
            size = [n + low + high for n, (low, high) in zip(size, pads, strict=True)]
            pads = ((0, 0),) * self.dims
        try:
            taps = pivot_taps(size, self.raw.shape[: self.dims], self.stride, pads, self.dilation)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from None
        return constraints.pivot_kernel(raw, self.pivot, taps, self.groups)

    def __call__(
        self, x: Float[Array, "*batch_and_size c"], *, key: Array | None = None
    ) -> Float[Array, "*batch_and_size out"]:
        size = checked(self._name, x, self.dims, self.groups * self.raw.shape[-2])
        w, pads = self.kernel(size, x.dtype), self._pads(size)
        if self.padding == "CIRCULAR":
            leading = ((0, 0),) * (x.ndim - self.dims - 1)
            x = jnp.pad(x, (*leading, *pads, (0, 0)), mode="wrap")
            pads = ((0, 0),) * self.dims
        y = convolve(x, w, self.stride, pads, self.dilation, self.groups)
        return y if self.bias is None else y + self.bias.astype(y.dtype)


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, Sequence) and len(given) == 2 and all(settings.is_count(v, 0) for v in given)
    )


def _std(m: int, out: int, taps: int, pivot: str, total: float) -> float:
    """The standard deviation of random entries that gives an output's weights the variance `total`."""
    if pivot == "free":
        return math.sqrt(total / (taps * m))
    drawn = (taps - 1) * m
    if pivot == "lower":
        drawn += m - (out + 1) / 2  # on average, below the pivot's diagonal
    return math.sqrt(max(total - 1, 0) / drawn) if drawn else 0.0


class Conv1d(Conv):
    """`Conv2d` over one axis: x[..., n, channels]."""

    dims = 1
    __init__ = Conv.__init__


class Conv2d(Conv):
    """A convolution over x[..., h, w, channels], submersive by construction, or unconstrained.

    | pivot | the tap that a walk divides by | gain |
    |---|---|---|
    | `"diagonal"` | diagonal, within [1/2, 2] | 1: nothing mixes |
    | `"identity"` | I | 1; with slopes 2⁻ᵏ gradients are those of backpropagation to the last bit |
    | `"lower"` | lower triangular, its diagonal within [1/2, 2] | measured by a plan |
    | `"free"` | nothing is imposed | measured by a plan |

    If the stride is larger than the padding and the kernel no larger than their sum, all windows are
    solved at once. Otherwise walks go from window to window, or keep a fragment.

    **Arguments:**

    - `in_channels`, `out_channels`: with a pivot that is not free, no more out than in.
    - `kernel_size`, `stride`, `dilation`: a number, or one per axis.
    - `padding`: a number, one per axis, a pair per axis, or `"SAME"`, `"VALID"`, `"CIRCULAR"` (a
        torus: nothing is lost at edges).
    - `groups`: each has a pivot of its own.
    - `pivot`: as above.
    - `use_bias`
    - `slope`: the slope of the activation that follows, which sets the initial variance of the weights.
    - `key`

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> layer = mw.nn.Conv2d(8, 8, 3, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((4, 16, 16, 8))).shape
    (4, 8, 8, 8)
    """

    dims = 2
    __init__ = Conv.__init__


class Conv3d(Conv):
    """`Conv2d` over three axes: x[..., d, h, w, channels]."""

    dims = 3
    __init__ = Conv.__init__
