"""`python -m moonwalk.lab.data NAME [PATH] FILE.npz`: a data set in one file, read with NumPy alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...errors import MoonwalkError
from . import cifar10, fashion_mnist, mnist1d, save


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moonwalk.lab.data", description=__doc__)
    parser.add_argument("name", choices=["mnist1d", "fashion-mnist", "cifar10"])
    parser.add_argument("path", nargs="?", help="where the files of fashion-mnist or cifar10 are")
    parser.add_argument("file", type=Path, help="the .npz to write")
    given = parser.parse_args(arguments)
    if given.name != "mnist1d" and given.path is None:
        parser.error(f"{given.name} needs PATH, where its files are")
    if given.file.suffix != ".npz":
        parser.error(f"the file to write is a .npz, got {given.file}")
    try:
        if given.name == "mnist1d":
            dataset = mnist1d()
        else:
            dataset = (fashion_mnist if given.name == "fashion-mnist" else cifar10)(given.path)
        save(given.file, dataset)
    except (MoonwalkError, ImportError, OSError) as error:
        sys.exit(f"moonwalk.data: {error}")
    print(f"{given.file}: {dataset.name}, {len(dataset.train_y)} + {len(dataset.test_y)} examples")


if __name__ == "__main__":
    main()
