"""CIFAR-10: the official archives in both formats, or a copy as image files."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from . import images
from .dataset import Dataset, statistics

CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
BATCHES = (*TRAIN, "test_batch")
PIXELS = 3 * 32 * 32
SOURCE = (
    "CIFAR-10 comes from https://www.cs.toronto.edu/~kriz/cifar.html as cifar-10-python.tar.gz or "
    "cifar-10-binary.tar.gz, whole or unpacked (cifar-10-batches-py, cifar-10-batches-bin); images are "
    "read from train/<class>/*.png and test/<class>/*.png (or .jpg), in a folder or a tar archive"
)


def cifar10(path: str | Path, *, cache: str | Path | None = None) -> Dataset:
    """CIFAR-10 (A. Krizhevsky, 2009): 50,000 + 10,000 images of 32 × 32 × 3, ten classes.

    Images that went through JPEG make a different data set, and its name says so.

    **Arguments:**

    - `path`: a folder that has the official archive, packed or unpacked, in its "python" or "binary"
        version, or `train/<class>/…` and `test/<class>/…` with images (this needs Pillow); or an archive
        of any of these.
    - `cache`: a folder for the decoded arrays, since decoding takes a while.
    """
    return read(Path(path), 10_000, None if cache is None else Path(cache))


def read(path: Path, per_batch: int, cache: Path | None) -> Dataset:
    found = locate(path)
    if isinstance(found, images.Images):
        return _checked(images.read(found, "CIFAR-10", cache), found.path, per_batch)
    decode = from_binary if "data_batch_1.bin" in found else from_pickle
    suffix = ".bin" if decode is from_binary else ""
    parts = []
    for batch in BATCHES:
        if batch + suffix not in found:
            raise DataError(
                f"cifar10: {path} has no {batch + suffix}; expected "
                f"{', '.join(b + suffix for b in BATCHES)}. {SOURCE}"
            )
        where, get = found[batch + suffix]
        parts.append(decode(get(), where, per_batch))
    x = np.concatenate([x for x, _ in parts[:-1]])
    mean, std = statistics(x)
    return Dataset(
        name="CIFAR-10",
        classes=CLASSES,
        train_x=x,
        train_y=np.concatenate([y for _, y in parts[:-1]]),
        test_x=parts[-1][0],
        test_y=parts[-1][1],
        mean=mean,
        std=std,
    )


# --- where the data is --------------------------------------------------------------------------------

Found = dict[str, tuple[str, Callable[[], bytes]]]  # a batch's name: where it is, how to read it


def locate(path: Path) -> Found | images.Images:
    if path.is_file():
        return _in_archive(path)
    if not path.is_dir():
        raise DataError(f"cifar10: there is no file or folder {path}. {SOURCE}")
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-10-batches-bin"):
        names = {n: p for n in (*BATCHES, *(f"{b}.bin" for b in BATCHES)) if (p := folder / n).is_file()}
        if names:
            return {n: (str(p), p.read_bytes) for n, p in names.items()}
    for name in ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"):
        if (path / name).is_file():
            return _in_archive(path / name)
    if (path / "train").is_dir():
        return images.Images(path)
    raise DataError(f"cifar10: {path} holds nothing that looks like CIFAR-10. {SOURCE}")


def _in_archive(path: Path) -> Found | images.Images:
    found: Found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name)
                if member.isfile() and name.suffix.lower() in images.SUFFIXES:
                    return images.Images(path)
                if member.isfile() and name.name.removesuffix(".bin") in BATCHES:
                    content = archive.extractfile(member)
                    assert content is not None
                    raw = content.read()
                    found[name.name] = (f"{path}:{member.name}", lambda raw=raw: raw)
    except (tarfile.TarError, EOFError, OSError, images.LZMAError) as error:
        raise DataError(
            f"cifar10: {path} is not a whole tar archive ({error}); get it again. {SOURCE}"
        ) from error
    if not found:
        raise DataError(f"cifar10: {path} holds nothing that looks like CIFAR-10. {SOURCE}")
    return found


# --- the two official formats --------------------------------------------------------------------------


def from_binary(raw: bytes, where: str, per_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label and 3 × 32 × 32 bytes, channels first."""
    if len(raw) != per_batch * (1 + PIXELS):
        raise DataError(
            f"cifar10: {where} should have {per_batch * (1 + PIXELS)} bytes ({per_batch} images), but "
            f"has {len(raw)}; get it again. {SOURCE}"
        )
    records = np.frombuffer(raw, np.uint8).reshape(per_batch, 1 + PIXELS)
    return _channels_last(records[:, 1:]), _labels(records[:, 0], where)


def from_pickle(raw: bytes, where: str, per_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A pickled dict with `data`, uint8 [images, 3 × 32 × 32], and `labels`, a list."""
    try:
        content = Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"cifar10: {where}: {error}") from error
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise DataError(
            f"cifar10: {where} is not a whole pickle ({type(error).__name__}: {error}); get it again. "
            + SOURCE
        ) from error
    data, labels = (
        (content.get(key.encode(), content.get(key)) if isinstance(content, dict) else None)
        for key in ("data", "labels")
    )
    expected = (per_batch, PIXELS)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != expected:
        kind = f"{data.dtype}{list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(
            f"cifar10: 'data' of {where} should be uint8{list(expected)}, but is {kind}. {SOURCE}"
        )
    if not isinstance(labels, list) or len(labels) != per_batch or {type(v) for v in labels} != {int}:
        raise DataError(
            f"cifar10: 'labels' of {where} should be a list of {per_batch} integers. {SOURCE}"
        )
    return _channels_last(data), _labels(np.array(labels), where)


class Unpickler(pickle.Unpickler):
    """Admits arrays, bytes, strings, numbers, lists and dicts: another pickle may run any program."""

    def find_class(self, module: str, name: str) -> Any:
        admitted = {
            ("numpy.core.multiarray", "_reconstruct"): _empty,
            ("numpy._core.multiarray", "_reconstruct"): _empty,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in admitted:
            raise DataError(
                f"the pickle asks for {module}.{name}, which no batch of CIFAR-10 contains: nothing of "
                "it was run; do not trust this file"
            )
        return admitted[module, name]


def _empty(*_: Any) -> np.ndarray:
    """What `numpy.core.multiarray._reconstruct` returns, filled by the state that follows."""
    return np.empty((0,), np.int8)


def _latin1(text: str, _encoding: str) -> bytes:
    """Bytes, as Python 3 pickles them for Python 2."""
    return text.encode("latin1")


def _channels_last(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _labels(labels: np.ndarray, where: str) -> np.ndarray:
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(
            f"cifar10: labels of {where} should lie in 0 … 9, found {labels.min()} … {labels.max()}"
        )
    return labels.astype(np.int32)


def _checked(found: Dataset, path: Path, per_batch: int) -> Dataset:
    """Check that a folder of images has the sizes and classes of CIFAR-10."""
    expected = (CLASSES, (5 * per_batch, 32, 32, 3), (per_batch, 32, 32, 3))
    actual = (found.classes, found.train_x.shape, found.test_x.shape)
    for what, want, have in zip(
        ("classes", "training images", "test images"), expected, actual, strict=True
    ):
        if want != have:
            raise DataError(f"cifar10: {path} should have {what} {want}, but has {have}. {SOURCE}")
    return found
