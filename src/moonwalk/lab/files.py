"""Files that are written whole or not at all, and the error if one cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import WriteError

_WAYS_OUT = {
    errno.ENOSPC: "make room there, or name another folder",
    errno.EDQUOT: "make room there, or name another folder",
    errno.EACCES: "name a folder that you may write to",
    errno.EPERM: "name a folder that you may write to",
    errno.EROFS: "name a folder that you may write to",
}


@contextlib.contextmanager
def writing(path: str | Path, what: str = "the file") -> Iterator[None]:
    """A context for writing to `path`; if the system refuses, one sentence says what and where."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise cannot_write(path, error, what) from error


def cannot_write(path: str | Path, error: BaseException, what: str = "the file") -> WriteError:
    """The error for a file or a folder that could not be written."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:  # libraries that write files themselves quote the system's message
        number = next((n for n in _WAYS_OUT if os.strerror(n) in str(error)), None)
    if number is None:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        reason = f"{type(error).__name__}: {reason}"
    else:
        reason = os.strerror(number)
    return WriteError(
        f"{what} could not be written to {path} ({reason}); "
        + _WAYS_OUT.get(number or 0, "see that the folder can be written to, or name another one")
    )


def refuse_file(path: str | Path) -> Path:
    """Raise if a path cannot be a folder, because it or a parent is a file."""
    path = Path(path)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise WriteError(
                f"{path} cannot be a folder: {part} is a file; name another folder, or move it away"
            )
    return path


def folder(path: str | Path) -> Path:
    """Create a folder if it does not exist."""
    path = refuse_file(path)
    with writing(path, "a folder"):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def whole(path: str | Path, mode: str = "w", **options: Any) -> Iterator[Any]:
    """An open file that replaces `path` once complete; readers find the old file or the new one."""
    path = Path(path)
    folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with partial.open(mode, **options) as file:
                yield file
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
