"""A data set as one `.npz` file: a cache for slow loaders, read with NumPy alone."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from ...errors import DataError
from .. import files
from .dataset import Dataset

ARRAYS = ("train_x", "train_y", "test_x", "test_y")


def save(path: str | Path, dataset: Dataset) -> None:
    """Write a data set; the file appears whole or not at all."""
    fields = {key: getattr(dataset, key) for key in ARRAYS}
    fields |= {key: np.array(getattr(dataset, key)) for key in ("name", "classes", "mean", "std")}
    with files.whole(path, "wb") as file:
        np.savez_compressed(file, **fields)


def load(path: str | Path) -> Dataset:
    """Read what `save` wrote."""
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"data.load: there is no file {path}; write one with data.save, or with "
            "`python -m moonwalk.lab.data NAME FOLDER FILE`"
        )
    try:
        with np.load(path, allow_pickle=False) as stored:
            fields = {key: stored[key] for key in stored.files}
        return Dataset(
            name=str(fields["name"]),
            classes=tuple(fields["classes"].tolist()),
            mean=tuple(fields["mean"].tolist()),
            std=tuple(fields["std"].tolist()),
            **{key: fields[key] for key in ARRAYS},
        )
    except DataError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(
            f"data.load: {path} is not a whole file that data.save wrote ({error}); write it again"
        ) from error
