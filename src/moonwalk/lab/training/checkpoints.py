"""States of a run on disk, written by orbax, each whole or not at all.

A folder belongs to one run. Besides its arrays a checkpoint holds the run's settings, the names and
types of the arrays, and a digest of their bytes, so that a folder of another run, or a damaged one, is
recognised before training goes on.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ... import settings as settings_
from ...errors import CheckpointError
from .. import files

_OVERHEAD = 2**20  # a generous bound on what a checkpoint takes besides its arrays


class Saved(NamedTuple):
    """What is needed to resume."""

    state: Any
    step: int
    seconds: float
    planned: tuple[int, int]  # the step from whose weights the plan was made, and which attempt it was


class Checkpoints:
    """The checkpoints of one run, in a folder of its own.

    **Arguments:**

    - `folder`: made if it is not there.
    - `settings`: whatever distinguishes this run from others; names, numbers, strings.
    - `resume`: whether to go on from existing checkpoints. Without it, they are an error.
    - `keep`: how many to keep.
    """

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any], *, resume: bool = False, keep: int = 2
    ):
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise ImportError(
                "checkpoints are written by orbax: pip install 'moonwalk-jax[cli]'"
            ) from error
        keep = settings_.count("Checkpoints", "keep", keep)
        settings_.flag("Checkpoints", "resume", resume)
        self.orbax, self.keep = orbax, keep
        self.folder = files.folder(folder).absolute()
        self.settings = {str(k): v for k, v in settings.items()}
        self.protected: set[int] = set()
        self.needs: dict[int, int] = {}  # the step from whose weights a checkpoint's plan was made
        options = orbax.CheckpointManagerOptions(
            create=True, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.manager = orbax.CheckpointManager(self.folder, options=options)
        if self.steps() and not resume:
            raise CheckpointError(
                f"{self.folder} has checkpoints already, the last after step {self.last_step}: resume "
                "that run (--resume), or name another folder"
            )

    def steps(self) -> list[int]:
        """The steps after which there are complete checkpoints."""
        return sorted(self.manager.all_steps())

    @property
    def last_step(self) -> int | None:
        return max(self.steps(), default=None)

    def save(self, saved: Saved, *, protect: bool = False) -> None:
        """Write a checkpoint and drop the oldest. `protect`: keep this one as long as the run lasts."""
        if protect:
            self.protected = {saved.step}
        if saved.step in self.steps():
            return
        leaves, names = _flat(saved.state)
        about = {
            "settings": self.settings,
            "step": saved.step,
            "seconds": saved.seconds,
            "planned": list(saved.planned),
            "arrays": [[name, _type(a)] for name, a in zip(names, leaves, strict=True)],
            "digest": _digest(leaves),
        }
        args = self.orbax.args
        composite = args.Composite(
            state=args.StandardSave(_numbered(leaves)), about=args.JsonSave(about)
        )
        try:
            self._require_room(sum(int(a.nbytes) for a in leaves))
            with _quiet_threads():
                self.manager.save(saved.step, args=composite)
                self.manager.wait_until_finished()
        except Exception as error:  # orbax and tensorstore raise whatever the system's refusal leads to
            last = self.last_step
            what = f"the checkpoint after step {saved.step}"
            what += " (the first)" if last is None else f" (the last one is after step {last})"
            raise files.cannot_write(self.folder, error, what) from error
        self.needs[saved.step] = saved.planned[0]
        there = self.steps()
        kept = {*[s for s in there if s not in self.protected][-self.keep :], *self.protected}
        kept |= {self.needs[s] for s in kept if s in self.needs}
        for step in there:
            if step not in kept:
                self.manager.delete(step)

    def _require_room(self, size: int) -> None:
        """Checked before writing, because on a full disk orbax's threads print tracebacks."""
        if shutil.disk_usage(self.folder).free < size + _OVERHEAD:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def latest(self, like: Any) -> Saved | None:
        """The last whole checkpoint, checked; `like`: a state of the same structure."""
        step = self.last_step
        if step is None:
            return None
        found = self.at(step, like)
        self.protected = {found.planned[0]}
        for earlier in self.steps():
            about = self._read(earlier, "about", self.orbax.args.JsonRestore())
            self.needs[earlier] = int(about.get("planned", [0])[0])
        return found

    def at(self, step: int, like: Any) -> Saved:
        """The checkpoint after a certain step."""
        about = self._read(step, "about", self.orbax.args.JsonRestore())
        leaves, names = _flat(like)
        try:
            settings, arrays = about["settings"], [tuple(a) for a in about["arrays"]]
            digest, planned, seconds = about["digest"], tuple(about["planned"]), about["seconds"]
        except (KeyError, TypeError) as error:
            raise self._damaged(step, error) from error
        self._compare("settings", settings, self.settings)
        own = {name: _type(a) for name, a in zip(names, leaves, strict=True)}
        self._compare("arrays", dict(arrays), own)
        target = _numbered([jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in leaves])
        stored = self._read(step, "state", self.orbax.args.StandardRestore(target))
        found = [stored[key] for key in target]
        if _digest(found) != digest:
            raise self._damaged(step, ValueError("its arrays are not those that were saved"))
        return Saved(jax.tree.unflatten(jax.tree.structure(like), found), step, seconds, planned)

    def close(self) -> None:
        self.manager.close()

    def _read(self, step: int, item: str, how: Any) -> Any:
        try:
            return self.manager.restore(step, args=self.orbax.args.Composite(**{item: how}))[item]
        except Exception as error:  # orbax and tensorstore raise whatever the damage leads to
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        earlier = [s for s in self.steps() if s < step]
        way = f"to go on from step {max(earlier)}" if earlier else "to begin anew"
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return CheckpointError(
            f"the checkpoint {self.folder / str(step)} cannot be read "
            f"({type(error).__name__}: {reason}); remove that folder {way}"
        )

    def _compare(self, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        missing = "nothing"
        lines = [
            f"  {key}: {there.get(key, missing)} there, {here.get(key, missing)} here"
            for key in dict.fromkeys((*there, *here))
            if there.get(key, missing) != here.get(key, missing)
        ]
        if lines:
            shown = lines[:8] + ([f"  … and {len(lines) - 8} more"] if len(lines) > 8 else [])
            raise CheckpointError(
                f"{self.folder} holds checkpoints of another run; its {what} differ:\n"
                + "\n".join(shown)
                + "\nName another folder, or give that run's settings."
            )


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Silence the errors of orbax's other threads: the first one is raised, and says everything."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        gc.collect()  # tasks whose errors were never read log them when they are collected
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _flat(state: Any) -> tuple[list[Any], list[str]]:
    flat = jax.tree.flatten_with_path(state)[0]
    return [leaf for _, leaf in flat], [jax.tree_util.keystr(path) for path, _ in flat]


def _numbered(leaves: list[Any]) -> dict[str, Any]:
    return {f"{i:06d}": leaf for i, leaf in enumerate(leaves)}


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _digest(leaves: list[Any]) -> str:
    found = hashlib.sha256()
    for leaf in leaves:
        found.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return found.hexdigest()
