"""`Dataset`: what every loader returns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from ...errors import DataError


@dataclass(frozen=True)
class Dataset:
    """A labelled data set, in memory, as it was stored.

    Arrays have the dtype of their source (uint8 for images); networks are given `normalise(x)`.

    - `name`: the name to report results under ("CIFAR-10 (image copy)" is not CIFAR-10).
    - `classes`: the names of the labels 0, 1, ….
    - `train_x`, `test_x`: `[examples, *in_shape]`, channels last, uint8 or float32.
    - `train_y`, `test_y`: `[examples]`, int32.
    - `mean`, `std`: per channel, in the units of `train_x`.
    """

    name: str
    classes: tuple[str, ...]
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            if x.dtype not in (np.uint8, np.float32) or x.ndim < 2:
                raise DataError(
                    f"{self.name}: {part}_x must be uint8 or float32 [examples, …, channels], "
                    f"got {x.dtype}{list(x.shape)}"
                )
            if x.shape[1:] != self.in_shape:
                raise DataError(
                    f"{self.name}: test examples {list(x.shape[1:])} differ from training examples "
                    f"{list(self.in_shape)}"
                )
            if y.dtype != np.int32 or y.shape != x.shape[:1]:
                raise DataError(
                    f"{self.name}: {part}_y must be int32[{len(x)}], one label per example, "
                    f"got {y.dtype}{list(y.shape)}"
                )
            if len(y) and not (y.min() >= 0 and y.max() < len(self.classes)):
                raise DataError(
                    f"{self.name}: labels of {part}_y must lie in 0 … {len(self.classes) - 1}, "
                    f"found {y.min()} … {y.max()}"
                )
        if not len(self.mean) == len(self.std) == self.in_shape[-1]:
            raise DataError(
                f"{self.name}: mean and std need one number for each of {self.in_shape[-1]} channels, "
                f"got {self.mean} and {self.std}"
            )

    @property
    def in_shape(self) -> tuple[int, ...]:
        """The shape of one example, which `moonwalk.models` take as `in_shape`."""
        return self.train_x.shape[1:]

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """Float32 of mean 0 and standard deviation 1 per channel, over the training examples."""
        mean, std = (np.asarray(a, np.float32) for a in (self.mean, self.std))
        return (x.astype(np.float32) - mean) / std

    def take(self, train: int, test: int) -> Dataset:
        """A data set of the first examples of both parts, for trials; its name says so."""
        name = f"{self.name}, first {train} and {test}"
        x, y = self.train_x[:train], self.train_y[:train]
        return replace(
            self, name=name, train_x=x, train_y=y, test_x=self.test_x[:test], test_y=self.test_y[:test]
        )

    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the contents of all arrays."""
        found = hashlib.sha256()
        for a in (self.train_x, self.train_y, self.test_x, self.test_y):
            found.update(f"{a.dtype}{a.shape}".encode())
            found.update(np.ascontiguousarray(a).data)
        return found.hexdigest()[:16]


def statistics(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) per channel of uint8 images, from their histogram: exact, and without a float copy."""
    values = np.arange(256, dtype=np.float64)
    means, stds = [], []
    for channel in range(x.shape[-1]):
        counts = np.bincount(x[..., channel].reshape(-1), minlength=256)
        mean = counts @ values / counts.sum()
        means.append(float(mean))
        stds.append(float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())) or 1.0)
    return tuple(means), tuple(stds)
