"""Fashion-MNIST from its four official idx files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from ...errors import DataError
from .dataset import Dataset, statistics

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FILES = {
    "train_x": "train-images-idx3-ubyte",
    "train_y": "train-labels-idx1-ubyte",
    "test_x": "t10k-images-idx3-ubyte",
    "test_y": "t10k-labels-idx1-ubyte",
}
SOURCE = (
    "Fashion-MNIST comes as four files, " + ", ".join(FILES.values()) + ", gzipped or not, from "
    "https://github.com/zalandoresearch/fashion-mnist (or Debian's package dataset-fashion-mnist)"
)


def fashion_mnist(folder: str | Path) -> Dataset:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 60,000 + 10,000 images, 28 × 28, ten classes.

    **Arguments:**

    - `folder`: where the four official idx files are, each with or without `.gz`.
    """
    return read(Path(folder), {"train": 60_000, "test": 10_000})


def read(folder: Path, sizes: dict[str, int]) -> Dataset:
    if not folder.is_dir():
        raise DataError(f"fashion_mnist: there is no folder {folder}. {SOURCE}")
    arrays = {}
    for key, name in FILES.items():
        part, kind = key.split("_")
        shape = (sizes[part], 28, 28) if kind == "x" else (sizes[part],)
        arrays[key] = read_idx(find(folder, name), shape)
    mean, std = statistics(arrays["train_x"][..., None])
    return Dataset(
        name="Fashion-MNIST",
        classes=CLASSES,
        train_x=arrays["train_x"][..., None],
        train_y=arrays["train_y"].astype(np.int32),
        test_x=arrays["test_x"][..., None],
        test_y=arrays["test_y"].astype(np.int32),
        mean=mean,
        std=std,
    )


def find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"fashion_mnist: {folder} has neither {name} nor {name}.gz. {SOURCE}")


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Unsigned bytes in LeCun's idx format: 0, 0, the type (8), the number of axes; sizes; values."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"fashion_mnist: {path} is not a whole gzip file ({error}); get it again. {SOURCE}"
            ) from error
    header = bytes([0, 0, 8, len(shape)])
    if raw[:4] != header:
        raise DataError(
            f"fashion_mnist: {path} does not begin like an idx file of {len(shape)} axes of bytes: "
            f"expected {header.hex()}, found {raw[:4].hex() or 'nothing'}. {SOURCE}"
        )
    start = 4 + 4 * len(shape)
    found = tuple(np.frombuffer(raw[4:start], ">u4").tolist()) if len(raw) >= start else ()
    if found != shape:
        raise DataError(
            f"fashion_mnist: {path} should hold {' × '.join(map(str, shape))} bytes, but its header "
            f"says {' × '.join(map(str, found)) or 'nothing'}. {SOURCE}"
        )
    if len(raw) - start != math.prod(shape):
        raise DataError(
            f"fashion_mnist: {path} should hold {math.prod(shape)} bytes after its header, but has "
            f"{len(raw) - start}; get it again. {SOURCE}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
