"""The paper's 2D network: convolutions of stride 2, all of whose windows are solved at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from .. import nn, settings


def pyramid_cnn(
    in_shape: Sequence[int],
    classes: int,
    *,
    key: Array,
    width: int = 128,
    depth: int | None = None,
    pivot: str = "diagonal",
    slope: float = 0.25,
    stem_size: int = 1,
    use_bias: bool = True,
) -> nn.Sequential:
    """A stem to `width` channels, 3×3 convolutions of stride 2 and padding 1, maximum, dense head.

    The network of the paper's memory figures: "an input of size 256 × 256 × 3 is first upsampled to
    256 × 256 × 128 channels. Each subsequent layer applies a 3 × 3 × 128 × 128 convolution with stride 2
    and padding 1 […]. All activation functions are LeakyReLU, and the final layer performs max pooling
    and projects the feature map to a scalar." The paper does not say how channels are upsampled (here:
    by an unconstrained 1×1 convolution), nor what the slope is (here 1/4; error would grow with much
    smaller ones). Its pivots are triangular; here they are diagonal by default, so that error does not
    grow. There is one output per class.

    **Arguments:**

    - `in_shape`: (height, width, channels).
    - `classes`
    - `key`
    - `width`: channels of every layer.
    - `depth`: the number of convolutions after the stem; None: enough to halve the size down to 2 or 3.
    - `pivot`: of the convolutions; `"lower"` is the paper's.
    - `slope`: of the LeakyReLU.
    - `stem_size`: the size of the stem's kernel, 1 or 3.
    - `use_bias`: in the convolutions.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> model = mw.models.pyramid_cnn((16, 16, 3), 10, key=jax.random.key(0), width=8)
    >>> model(jnp.ones((2, 16, 16, 3))).shape
    (2, 10)
    """
    rule = "is (height, width, channels) (for signals there is conv1d_cnn)"
    in_shape = settings.sizes("pyramid_cnn", "in_shape", in_shape, (3,), rule)
    settings.counts("pyramid_cnn", classes=classes, width=width, stem_size=stem_size)
    if depth is not None:
        settings.count("pyramid_cnn", "depth", depth, 0)
    if stem_size % 2 == 0:
        raise ValueError(f"pyramid_cnn: the stem's kernel has an odd size, got {stem_size}")
    depth = max(min(in_shape[:2]).bit_length() - 2, 0) if depth is None else depth
    stem_key, head_key, *keys = jax.random.split(key, 2 + depth)
    common: dict[str, Any] = dict(use_bias=use_bias, slope=slope)
    padding = stem_size // 2
    layers: list[Any] = [
        nn.Conv2d(in_shape[2], width, stem_size, 1, padding, pivot="free", **common, key=stem_key),
        nn.LeakyReLU(slope),
    ]
    for own in keys:
        layers.append(nn.Conv2d(width, width, 3, 2, 1, pivot=pivot, **common, key=own))
        layers.append(nn.LeakyReLU(slope))
    head = nn.Linear(width, classes, kind="free", slope=1.0, key=head_key)
    return nn.Sequential([*layers, nn.GlobalMax(2), head])
