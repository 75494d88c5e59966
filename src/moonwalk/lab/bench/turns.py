"""Measurements side by side: processes compile together, and use the device one at a time.

A compiler for a GPU times kernels on it, so nothing may compile either while a program is timed. Memory
is read from compiled programs, and does not depend on what else runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def compiling(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Together with other processes that compile; waits while one runs its program."""
    return _turn(folder, exclusive=False)


def running(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Alone; waits until no other process compiles or runs."""
    return _turn(folder, exclusive=True)


@contextlib.contextmanager
def _turn(folder: Path | None, *, exclusive: bool) -> Iterator[None]:
    if folder is None:
        yield
        return
    try:
        import fcntl
    except ImportError:  # not on Windows, where measurements run one after the other
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "device.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield  # closing the file ends the turn
