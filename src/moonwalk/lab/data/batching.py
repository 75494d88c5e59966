"""Batches that depend only on a seed and a step, so that a resumed run sees the same batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import DataError
from .dataset import Dataset


def indices(examples: int, batch: int, seed: int, start: int, count: int) -> np.ndarray:
    """Which examples the steps `start`, …, `start + count - 1` see: int32[count, batch].

    Each epoch is a permutation of its own, cut into batches; examples that do not fill a last one wait
    for the next epoch.

    **Example:**

    >>> from moonwalk import data
    >>> data.indices(6, 2, seed=0, start=2, count=2).tolist()
    [[2, 1], [0, 5]]
    """
    if not 1 <= batch <= examples:
        raise DataError(
            f"batches: batch must lie in 1 … {examples}, the number of examples, got {batch}"
        )
    if start < 0 or seed < 0:
        raise DataError(f"batches: seed and step must not be negative, got {seed} and {start}")
    per_epoch = examples // batch
    found = np.empty((count, batch), np.int32)
    permutation, current = np.empty(0, np.int32), -1
    for i in range(count):
        epoch, place = divmod(start + i, per_epoch)
        if epoch != current:
            # RandomState's stream does not change between releases of NumPy.
            permutation, current = np.random.RandomState([seed, epoch]).permutation(examples), epoch
        found[i] = permutation[place * batch : (place + 1) * batch]
    return found


def batches(
    dataset: Dataset, batch: int, seed: int, step: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches (x, y) of the training examples, normalised, from step `step` on, without end.

    **Example:**

    >>> from moonwalk import data
    >>> found = data.mnist1d()
    >>> stream = data.batches(found, 8, seed=0)
    >>> _, (x, y) = next(stream), next(stream)
    >>> again, _ = next(data.batches(found, 8, seed=0, step=1))
    >>> x.shape, y.shape, bool((x == again).all())
    ((8, 40, 1), (8,), True)
    """
    per_epoch = max(1, len(dataset.train_y) // max(1, batch))
    while True:
        # An epoch's permutation at a time.
        count = per_epoch - step % per_epoch
        for chosen in indices(len(dataset.train_y), batch, seed, step, count):
            yield dataset.normalise(dataset.train_x[chosen]), dataset.train_y[chosen]
        step += count
