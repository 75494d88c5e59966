"""A folder, or a tar archive, of images: `train/<class>/*.png` and `test/<class>/*.png`, or `.jpg`."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ...errors import DataError
from . import npz
from .dataset import Dataset, statistics

SUFFIXES = (".png", ".jpg", ".jpeg")
PARTS = ("train", "test")


def image_folder(path: str | Path, name: str, *, cache: str | Path | None = None) -> Dataset:
    """Images of one size, sorted into folders by class. Needs Pillow.

    **Arguments:**

    - `path`: a folder with `train/<class>/` and `test/<class>/`, or a tar archive of it. Classes are
        numbered in alphabetical order.
    - `name`: what the images are; `Dataset.name` adds whether they are PNG or JPEG copies.
    - `cache`: a folder for the decoded arrays.
    """
    return read(Images(Path(path)), name, None if cache is None else Path(cache))


@dataclass(frozen=True)
class Images:
    """Where image files are."""

    path: Path

    def stamp(self) -> str:
        """A stamp that changes when the files do."""
        paths = [self.path] if self.path.is_file() else [p for p in self.path.rglob("*") if p.is_file()]
        found = hashlib.sha256()
        for p in sorted(paths):
            status = p.stat()
            found.update(f"{p.absolute()} {status.st_size} {status.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]

    def files(self) -> Iterator[tuple[PurePosixPath, bytes]]:
        """(train/<class>/<file>, its bytes), in whatever order they are stored."""
        if self.path.is_dir():
            for p in self.path.rglob("*"):
                if p.suffix.lower() in SUFFIXES:
                    yield PurePosixPath(p.relative_to(self.path).as_posix()), p.read_bytes()
            return
        try:
            with tarfile.open(self.path) as archive:
                for member in archive:
                    path = PurePosixPath(member.name)
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is not None and path.suffix.lower() in SUFFIXES:
                        yield PurePosixPath(*path.parts[-3:]), content.read()
        except (tarfile.TarError, EOFError, OSError, LZMAError) as error:
            raise DataError(
                f"image_folder: {self.path} is not a whole tar archive ({error}); get it again"
            ) from error


def read(where: Images, name: str, cache: Path | None) -> Dataset:
    if not where.path.exists():
        raise DataError(f"image_folder: there is no file or folder {where.path}")
    stored = None if cache is None else cache / f"images-{where.stamp()}.npz"
    if stored is not None and stored.is_file():
        return npz.load(stored)
    found = _decode(where, name)
    if stored is not None:
        npz.save(stored, found)
    return found


def _decode(where: Images, name: str) -> Dataset:
    found: dict[str, list[tuple[str, str, np.ndarray]]] = {part: [] for part in PARTS}
    formats, first = set(), None
    for path, raw in where.files():
        if len(path.parts) != 3 or path.parts[0] not in PARTS:
            raise DataError(
                f"image_folder: {where.path}: expected train/<class>/<image> and test/<class>/<image>, "
                f"found {path}"
            )
        part, label, file = path.parts
        pixels, kind = _pixels(raw, f"{where.path}: {path}")
        first = first or (pixels.shape, path)
        if pixels.shape != first[0]:
            raise DataError(
                f"image_folder: images must have one size, but in {where.path} {first[1]} is "
                f"{first[0][0]} × {first[0][1]} and {path} is {pixels.shape[0]} × {pixels.shape[1]}"
            )
        formats.add(kind)
        found[part].append((label, file, pixels))
    for part in PARTS:
        if not found[part]:
            raise DataError(f"image_folder: {where.path} has no images in {part}/<class>/ (.png, .jpg)")
    classes = sorted({label for label, _, _ in found["train"]})
    unknown = sorted({label for label, _, _ in found["test"]} - set(classes))
    if unknown:
        raise DataError(f"image_folder: {where.path} has test/{unknown[0]}, but no train/{unknown[0]}")
    arrays: dict[str, Any] = {}
    for part, rows in found.items():
        rows.sort(key=lambda row: row[:2])
        arrays[f"{part}_x"] = np.stack([pixels for _, _, pixels in rows])
        arrays[f"{part}_y"] = np.array([classes.index(label) for label, _, _ in rows], np.int32)
    mean, std = statistics(arrays["train_x"])
    copy = " and ".join(sorted(formats))
    return Dataset(name=f"{name} ({copy} copy)", classes=tuple(classes), mean=mean, std=std, **arrays)


def _pixels(raw: bytes, where: str) -> tuple[np.ndarray, str]:
    """(uint8 [height, width, 3], "PNG" or "JPEG")."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            "image_folder: images are decoded by Pillow: pip install 'moonwalk-jax[cli]'"
        ) from error
    try:
        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
            return np.asarray(image.convert("RGB")), str(image.format)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"image_folder: {where} is not a whole image ({error})") from error
