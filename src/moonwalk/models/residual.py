"""The paper's Fig. 4: a residual CNN of ten layers, with convolutions that are constrained or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import nn, settings

_GROUP = 16  # channels per group of a normalisation


class ResidualBlock(eqx.Module):
    """x + conv(act(norm(conv(act(norm(x)))))); with `halves`, on half the size.

    The branch is halved by pixel-unshuffling, so that no constrained convolution has to expand channels;
    the shortcut by the mean over windows, with zeros for new channels. Neither has weights.
    """

    norms: tuple[nn.GroupNorm, nn.GroupNorm]
    convs: tuple[nn.Conv2d, nn.Conv2d]
    act: nn.LeakyReLU
    halves: bool = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def __init__(self, channels: int, width: int, halves: bool, pivot: str, slope: float, *, key: Array):
        first, second = jax.random.split(key)
        wide = 4 * channels if halves else channels
        self.norms = (_norm(channels), _norm(width))
        self.convs = (
            nn.Conv2d(wide, width, 3, 1, 1, pivot=pivot, use_bias=False, slope=slope, key=first),
            nn.Conv2d(width, width, 3, 1, 1, pivot=pivot, use_bias=False, slope=slope, key=second),
        )
        self.act, self.halves, self.width = nn.LeakyReLU(slope), halves, width

    def __call__(
        self, x: Float[Array, "batch h w c"], *, key: Array | None = None
    ) -> Float[Array, "batch h w c"]:
        y = self.act(self.norms[0](x))
        if self.halves:
            y, x = nn.Unshuffle(2)(y), nn.MeanPool(2)(x)
        y = self.convs[1](self.act(self.norms[1](self.convs[0](y))))
        new = self.width - x.shape[-1]
        if new:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, new)])
        return x + y


def residual_cnn(
    in_shape: Sequence[int],
    classes: int,
    *,
    key: Array,
    pivot: str | None = None,
    widths: Sequence[int] = (64, 128, 256, 256),
    halved: Sequence[int] = (1, 2),
    slope: float = 0.25,
) -> nn.Sequential:
    """A residual CNN of a stem, blocks of two 3×3 convolutions each, and a dense head.

    With four blocks it has the ten layers of the paper's Fig. 4, which asks whether the constraint that
    makes convolutions submersive costs accuracy. The paper says "10-layer 2D residual network, where all
    convolutions in the constrained variant follow the submersive parameterization", and no more. Chosen
    here: blocks with the activation first, GroupNorm of 16 channels a group (the paper does not name its
    normalisation), sizes halved by pixel-unshuffling, and zero-padded convolutions of stride one, whose
    pivot is the tap that fragments are restored by. The stem expands the channels and is free, as it is
    in the paper's other networks; all other convolutions are constrained.

    **Arguments:**

    - `in_shape`: (height, width, channels).
    - `classes`
    - `key`
    - `pivot`: None or `"free"`: unconstrained; `"lower"`: the paper's; `"diagonal"`, `"identity"`.
    - `widths`: channels of each block, none fewer than those of the block before.
    - `halved`: indices of the blocks that halve the size, which must be even there.
    - `slope`: of the LeakyReLU.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> model = mw.models.residual_cnn(
    ...     (8, 8, 1), 10, key=jax.random.key(0), pivot="lower", widths=(4, 8), halved=(1,)
    ... )
    >>> model(jnp.ones((2, 8, 8, 1))).shape
    (2, 10)
    """
    settings.counts("residual_cnn", classes=classes)
    _check(in_shape, widths, halved)
    pivot = "free" if pivot is None else pivot
    stem_key, head_key, *keys = jax.random.split(key, 2 + len(widths))
    channels = widths[0]
    layers: list[Any] = [
        nn.Conv2d(in_shape[-1], channels, 3, 1, 1, pivot="free", slope=1.0, key=stem_key)
    ]
    for i, (width, own) in enumerate(zip(widths, keys, strict=True)):
        layers.append(ResidualBlock(channels, width, i in halved, pivot, slope, key=own))
        channels = width
    head = nn.Linear(channels, classes, kind="free", slope=1.0, key=head_key)
    return nn.Sequential([*layers, _norm(channels), nn.LeakyReLU(slope), nn.GlobalMean(2), head])


def _norm(channels: int) -> nn.GroupNorm:
    groups = channels // _GROUP if channels % _GROUP == 0 else 1
    return nn.GroupNorm(groups, channels)


def _check(in_shape: Sequence[int], widths: Sequence[int], halved: Sequence[int]) -> None:
    rule = "is (height, width, channels) (for signals there is conv1d_cnn)"
    settings.sizes("residual_cnn", "in_shape", in_shape, (3,), rule)
    rule = "has the channels of each block, positive numbers"
    settings.sizes("residual_cnn", "widths", widths, range(1, 1000), rule)
    numbers = halved if isinstance(halved, Sequence) else (None,)
    if not all(settings.is_count(i, 0) for i in numbers):
        raise settings.refuse("residual_cnn", "halved", "has numbers of blocks, from 0 on", halved)
    if list(widths) != sorted(widths):
        raise ValueError(
            f"residual_cnn: widths must not fall from block to block, got {tuple(widths)}: a shortcut "
            "adds channels, it drops none"
        )
    factor = 2 ** len(halved)
    if any(n % factor for n in in_shape[:2]):
        raise ValueError(
            f"residual_cnn: a size of {tuple(in_shape[:2])} cannot be halved {len(halved)} times; "
            "choose fewer blocks in halved=, or pad the images"
        )
