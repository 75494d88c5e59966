"""MNIST-1D, generated.

S. Greydanus and D. Kobak, *Scaling Down Deep Learning with MNIST-1D* (ICML 2024). Ten hand-drawn
signals of 12 points are padded, stretched, scaled, shifted, covered with noise, sheared and sampled at
40 points. The random numbers are drawn in the order of the authors' package `mnist1d` (Apache-2.0,
https://github.com/greydanus/mnist1d), so that the examples are theirs.
"""

from __future__ import annotations

import numpy as np

from ...errors import DataError
from .dataset import Dataset

DIGITS = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
PADDING = (36, 60)  # fewest and most zeros behind a signal
LENGTH = 12 + PADDING[1]  # to which all are stretched
SHIFT = 48
SCALE, SHEAR, NOISE, GRAIN = 0.4, 0.75, 0.25, 2e-2
POINTS = 40


def mnist1d(seed: int = 42, examples: int = 5000, train_fraction: float = 0.8) -> Dataset:
    """MNIST-1D: 4,000 training and 1,000 test signals of 40 points, ten classes.

    With the default arguments these are the arrays of `mnist1d.data.make_dataset()`, in float32 and with
    a channel axis.

    **Arguments:**

    - `seed`: the seed of NumPy's `RandomState`, whose stream never changes.
    - `examples`: how many in total; a multiple of ten.
    - `train_fraction`: the fraction used for training.

    **Example:**

    >>> from moonwalk import data
    >>> found = data.mnist1d()
    >>> found.train_x.shape, found.test_x.shape, found.in_shape
    ((4000, 40, 1), (1000, 40, 1), (40, 1))
    """
    if examples < 10 or examples % 10:
        raise DataError(f"mnist1d: examples must be a positive multiple of 10, got {examples}")
    if not 0 < train_fraction < 1:
        raise DataError(f"mnist1d: train_fraction must lie between 0 and 1, got {train_fraction}")
    x, y = generate(seed, examples)
    x = x.astype(np.float32)[..., None]
    split = int(examples * train_fraction)
    return Dataset(
        name="MNIST-1D"
        if (seed, examples) == (42, 5000)
        else f"MNIST-1D (seed {seed}, {examples} examples)",
        classes=tuple("0123456789"),
        train_x=x[:split],
        train_y=y[:split],
        test_x=x[split:],
        test_y=y[split:],
        mean=(0.0,),
        std=(1.0,),
    )


def generate(seed: int, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """(x [examples, 40] in float64, y [examples] in int32), shuffled, of mean 0 and deviation 1."""
    from scipy.ndimage import (
        gaussian_filter1d,  # imported here because it takes a fifth of a second
    )

    random = np.random.RandomState(seed)
    y = np.repeat(np.arange(10, dtype=np.int32), examples // 10)
    signals = templates()
    stretched = np.empty((examples, LENGTH))
    shears = np.empty(examples)
    noise, grain = np.empty((examples, LENGTH)), np.empty((examples, LENGTH))
    low, high = PADDING
    # Several kinds of draws share the stream, so examples are drawn one at a time.
    for i, label in enumerate(y):
        zeros = low + int(random.rand() * (high - low + 1))
        padded = np.concatenate([signals[label] + 1e-8, np.zeros(zeros)])
        signal = resample(padded, LENGTH) * (1 + SCALE * (random.rand() - 0.5))
        stretched[i] = np.roll(signal, random.choice(SHIFT))
        noise[i], grain[i] = random.randn(LENGTH), random.randn(LENGTH)
        shears[i] = random.rand()
    shuffle = random.permutation(examples)

    # Smooth noise where there is no signal, fine noise everywhere.
    x = np.where(stretched != 0, stretched, gaussian_filter1d(NOISE * noise, 2)) + GRAIN * grain
    x -= SHEAR * (shears[:, None] - 0.5) * np.linspace(-0.5, 0.5, LENGTH)
    x = np.stack([resample(row, POINTS) for row in x])[shuffle]
    return (x - x.mean()) / x.std(), y[shuffle]


def templates() -> np.ndarray:
    """The ten signals [10, 12], of equal size, starting at 0."""
    x = np.array(DIGITS, np.float64)
    x -= x.mean(1, keepdims=True)
    x /= x.std(1, keepdims=True)
    return (x - x[:, :1]) / 6.0


def resample(x: np.ndarray, points: int) -> np.ndarray:
    """Linear interpolation at equidistant points, both ends included."""
    return np.interp(np.linspace(0, 1, points), np.linspace(0, 1, len(x)), x)
