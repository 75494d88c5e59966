"""The paper's 1D network: convolutions of stride 1, which keep fragments."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import Array

from .. import nn, settings


def conv1d_cnn(
    in_shape: Sequence[int],
    classes: int,
    *,
    key: Array,
    width: int = 256,
    depth: int = 20,
    pivot: str = "diagonal",
    slope: float = 0.25,
    kernel_size: int = 3,
) -> nn.Sequential:
    """A stem to `width` channels, `depth` convolutions that keep the length, mean, dense head.

    The network of the paper's fragments: "preserves spatial resolution at each layer by setting the
    stride and padding to 1. The 2048 × 3 input is upsampled to 2048 × 256, and kept at this shape across
    layers."
    The paper does not say how channels are upsampled (here: pointwise, unconstrained), nor what the last
    layer does (here: the mean over the signal, and one output per class). Its pivots are triangular;
    spans work as well with a diagonal first tap. The layers are scanned over, so compile time does not
    grow with their number.

    **Arguments:**

    - `in_shape`: (length, channels).
    - `classes`
    - `key`
    - `width`: channels of every layer.
    - `depth`: convolutions after the stem.
    - `pivot`: of the convolutions; `"lower"` is the paper's.
    - `slope`: of the LeakyReLU.
    - `kernel_size`: odd.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> model = mw.models.conv1d_cnn((40, 1), 10, key=jax.random.key(0), width=8, depth=4)
    >>> model(jnp.ones((2, 40, 1))).shape
    (2, 10)
    """
    rule = "is (length, channels) (for images there are pyramid_cnn and residual_cnn)"
    in_shape = settings.sizes("conv1d_cnn", "in_shape", in_shape, (2,), rule)
    settings.counts("conv1d_cnn", classes=classes, width=width, depth=depth, kernel_size=kernel_size)
    if kernel_size % 2 == 0:
        raise ValueError(
            f"conv1d_cnn: a kernel that keeps the length has an odd size, got {kernel_size}"
        )
    stem_key, body_key, head_key = jax.random.split(key, 3)

    def layer(key: Array) -> nn.Sequential:
        conv = nn.Conv1d(
            width, width, kernel_size, padding=kernel_size // 2, pivot=pivot, slope=slope, key=key
        )
        return nn.Sequential([conv, nn.LeakyReLU(slope)])

    stem = nn.Linear(in_shape[1], width, kind="free", slope=slope, key=stem_key)
    head = nn.Linear(width, classes, kind="free", slope=1.0, key=head_key)
    return nn.Sequential(
        [stem, nn.LeakyReLU(slope), nn.Stack(layer, depth, key=body_key), nn.GlobalMean(1), head]
    )
