"""One measurement: compile, read the memory, run, compare the gradient with a reference.

Memory is read from the compiled program (`memory_analysis()`) before anything runs; times are those of
several runs after a first one, which also gives the gradient. On a GPU the process's peak is read too,
as the paper does it, before the reference is computed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax, gradient, preview
from ...errors import MoonwalkError, PlanWarning
from . import methods, networks, turns
from .tasks import Task

REFERENCES = {
    "float64": "backprop, float64",
    "highest": "backprop, float32 (highest)",
    "same": "checkpointed backprop, same precision",
}
_PATIENCE = 20.0  # seconds after which no further run is begun
BOUNDLESS = 1e38  # stands for errors that are not finite, which JSON cannot express
NO_ROOM = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
_LONGEST = 2000  # characters of a message
_CACHED = 2**28  # bytes: larger references take longer to read than to compute


def compiled(fun: Any, *args: Any) -> Any:
    """`fun`, compiled for arguments, or types, like these."""
    return _jax.compiled(jax.jit(fun), *args)


def memory(program: Any) -> dict[str, int]:
    found = program.memory_analysis()
    return {
        "temp_bytes": found.temp_size_in_bytes,
        "argument_bytes": found.argument_size_in_bytes,
        "output_bytes": found.output_size_in_bytes,
    }


def held(found: dict[str, Any]) -> int:
    """All bytes that a program needs: arguments, results and temporaries."""
    return found["temp_bytes"] + found["argument_bytes"] + found["output_bytes"]


def timed(program: Any, args: Any, repeats: int) -> tuple[Any, dict[str, Any]]:
    """(what the first run returned, on the host; times of those after it)."""
    first = jax.device_get(jax.block_until_ready(program(*args)))
    return first, interleaved({"": program}, args, repeats)[""]


def interleaved(programs: Mapping[str, Any], args: Any, repeats: int) -> dict[str, dict[str, Any]]:
    """Times of programs that have run before, in turns, so that a disturbance affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    begun = time.perf_counter()
    for number in range(repeats):
        if number and time.perf_counter() - begun >= _PATIENCE * len(programs):
            break
        for name, program in programs.items():
            start = time.perf_counter()
            out = jax.block_until_ready(program(*args))
            times[name].append(time.perf_counter() - start)
            del out  # before the next one is made
    return {name: spread(each) for name, each in times.items()}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """The fields of a record for some times."""
    low, high, runs = min(seconds), max(seconds), len(seconds)
    return {"median": statistics.median(seconds), "low": low, "high": high, "runs": runs}


def peak() -> int | None:
    """The most bytes that this process has had in use on the device, where it counts them."""
    found = jax.devices()[0].memory_stats()
    return found.get("peak_bytes_in_use") if found else None


def precisely(precision: str) -> Any:
    """A context in which products have that precision."""
    if precision == "default":
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)


def error(found: Any, truth: Any) -> float:
    """‖found − truth‖ / ‖truth‖ over all leaves together, in float64; `BOUNDLESS` at most."""
    off = total = 0.0
    for a, b in zip(_pieces(found), _pieces(truth), strict=True):
        off += float(np.sum((a - b) ** 2))
        total += float(np.sum(b**2))
    relative = float(np.sqrt(off / total)) if total else float(np.sqrt(off))
    return relative if relative < BOUNDLESS else BOUNDLESS


def _pieces(tree: Any) -> Iterable[np.ndarray]:
    """Leaf by leaf and layer by layer, so that a stack of thousands is never in float64 as a whole."""
    for leaf in jax.tree.leaves(tree):
        leaf = np.asarray(leaf)
        for piece in leaf if leaf.ndim > 2 else (leaf,):
            yield piece.astype(np.float64)


def reference(network: networks.Network, kind: str, precision: str) -> Callable[[Any], Any]:
    """A compiled program: arguments -> the gradient by backpropagation, on the host."""
    double = kind == "float64"
    bits = functools.partial(jax.enable_x64, True) if double else contextlib.nullcontext
    with bits(), precisely("highest" if kind == "highest" else precision):
        types = jax.tree.map(_widened if double else lambda a: a, network.types())
        program = compiled(jax.grad(network.loss if double else network.checkpointed), *types)

    def run(args: Any) -> Any:
        with bits():
            cast = jax.tree.map(lambda a, t: a.astype(t.dtype), args, types)
            return jax.device_get(program(*cast))

    return run


def _widened(a: Any) -> Any:
    dtype = jnp.float64 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype
    return jax.ShapeDtypeStruct(a.shape, dtype)


def measure(task: Task, cache: Path | None = None) -> dict[str, Any]:
    """The fields of a task's record."""
    warnings.simplefilter("ignore", PlanWarning)
    with precisely(task.precision):
        if "search" not in task.settings:
            return _measure(task, cache)
        with turns.compiling(cache):
            return largest(task)


def failure(error: Exception) -> dict[str, str]:
    """Status and message: out of memory, refused (also at run time, by a certificate), or an error."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(word in text for word in NO_ROOM):
        return {"status": "oom", "message": text[:_LONGEST]}
    if isinstance(error, MoonwalkError | NotImplementedError):
        return {"status": "refused", "message": str(error)[:_LONGEST]}
    alarm = re.search(r"EquinoxRuntimeError: (.*)", text)  # what a compiled program raises
    if alarm:
        return {"status": "refused", "message": alarm[1][:_LONGEST]}
    return {"status": "error", "message": text[:_LONGEST]}


class Program:
    """The compiled gradient of a task, and what was learned by compiling it."""

    def __init__(self, task: Task, cache: Path | None = None):
        self.network = networks.make(task)
        types = self.network.types()
        self.tree = jax.tree.structure(types)
        self.leaves = functools.cache(lambda: argument_leaves(task, self.network, cache))
        given = self.arguments() if methods.needs_values(task.method) else types
        places = methods.by_hand(task.method)
        loss = self.network.loss if places is None else self.network.by_hand(places)
        plan = methods.planned(task.method, loss, given)
        begun = time.perf_counter()
        if plan is None:
            differentiated = methods.differentiate(task.method, loss, given)
        else:
            differentiated = gradient.value_and_grad(loss, method=plan)
        self.run = compiled(differentiated, *types)
        self.found: dict[str, Any] = {
            **memory(self.run),
            "compile_seconds": time.perf_counter() - begun,
            "parameters": sum(a.size for a in jax.tree.leaves(types[0])),
            "extra": {},
        }
        if asked := task.settings.get("plan"):
            plan = preview.plan(self.network.loss, *types) if plan is None else plan
            self.found["extra"] |= {
                "plan": str(plan) if asked == "summary" else plan.to_dict()["rows"],
                "predicted_bytes": plan.peak_bytes,
                "predicted_seconds": plan.seconds,
                "budget_bytes": plan.budget_bytes,
            }

    def arguments(self) -> Any:
        """(params, x, target) on the device."""
        return jax.device_put(jax.tree.unflatten(self.tree, self.leaves()))


def _measure(task: Task, cache: Path | None) -> dict[str, Any]:
    asked, truth = task.settings, None
    with turns.compiling(cache):
        program = Program(task, cache)
        found, limit = program.found, asked.get("limit_bytes")
        if limit is not None and held(found) > limit:
            return {**found, "status": "oom", "message": f"{held(found)} bytes, of {limit}"}
        if not asked.get("run", True):
            return found
        try:  # the program's memory is known, whatever happens now
            program.leaves()
            truth = _truth(task, program, cache)
        except Exception as stopped:
            return {**found, **failure(stopped)}
    with turns.running(cache):
        return _run(task, program, truth)


def _truth(task: Task, program: Program, cache: Path | None) -> Callable[[Any], Any] | None:
    """(arguments -> the leaves of the reference); None if there is none to compare with."""
    kind = task.settings.get("reference")
    if kind is None:
        return None
    name = _name(task, kind)
    make = functools.cache(lambda: reference(program.network, kind, task.precision))
    if cache is None or not (cache / f"{name}.npz").is_file():
        with contextlib.suppress(Exception):  # it fails again where it is needed, and is reported there
            make()
    return lambda args: cached(cache, name, lambda: make()(args))


def _run(task: Task, program: Program, truth: Callable[[Any], Any] | None) -> dict[str, Any]:
    """What was found by compiling, with times and the error of the gradient."""
    found = program.found
    try:
        args = program.arguments()
        (_, gradients, *more), found["seconds"] = timed(
            program.run, args, task.settings.get("repeats", 5)
        )
        if more:
            found["extra"]["certificate"] = float(more[0].error)
    except Exception as stopped:
        return {**found, **failure(stopped), "peak_bytes": peak()}
    found["peak_bytes"] = peak()
    if truth is not None:
        try:
            expected = truth(args)
        except Exception as stopped:  # keep what has been measured
            return {**found, "message": f"no reference: {failure(stopped)['message']}"}
        found["reference"] = REFERENCES[task.settings["reference"]]
        if all(np.isfinite(piece).all() for piece in _pieces(expected)):
            found["gradient_error"] = error(gradients, expected)
        else:
            found |= {"gradient_error": math.nan, "message": "the reference is not finite: an overflow"}
    return found


# --- the largest size within a limit ------------------------------------------------------------------


def largest(task: Task) -> dict[str, Any]:
    """The largest depth, or batch, whose program is within `limit_bytes`; nothing is run.

    Only compiled programs are compared, so one process serves for all sizes.
    """
    asked, limit = task.settings["search"], task.settings["limit_bytes"]
    found: dict[int, dict[str, Any]] = {}

    def needs(steps: int) -> int:
        if steps not in found:
            one = replace(task, **{asked["over"]: steps * asked["step"]})
            try:
                found[steps] = Program(one).found
            except Exception as stopped:  # too large even for the compiler
                if failure(stopped)["status"] != "oom":
                    raise
                found[steps] = {"temp_bytes": 2**60, "argument_bytes": 0, "output_bytes": 0}
        return held(found[steps])

    best = bisect(needs, limit, asked["most"] // asked["step"])
    probes = sorted((steps * asked["step"], held(f)) for steps, f in found.items())
    extra = {"largest": best * asked["step"], "probes": probes, "most": asked["most"]}
    if not best:
        message = f"{needs(1)} bytes at {asked['over']} {asked['step']}, of {limit}"
        return {"status": "oom", "message": message, "extra": extra}
    return {**found[best], "extra": extra}


def bisect(needs: Callable[[int], int], limit: int, most: int) -> int:
    """The largest n ≤ most with needs(n) ≤ limit, as far as `needs` grows; 0: none.

    Memory is nearly linear in n, so every other guess is where the line through both ends meets the
    limit; the others bisect.

    **Example:**

    >>> bisect(lambda n: 10 + 3 * n, 100, 1000)
    30
    """
    if needs(most) <= limit:
        return most
    low, high, by_line = 0, most, True
    while high - low > 1:
        guess = (low + high) // 2
        if by_line:
            below = needs(low) if low else 0
            share = (limit - below) / (needs(high) - below)
            guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        if needs(guess) <= limit:
            # If memory is linear, the next size is already too large: one more evaluation decides.
            if by_line and guess + 1 < high and needs(guess + 1) > limit:
                high = guess + 1
            low = guess
        else:
            high = guess
        by_line = not by_line
    return low


# --- what several measurements need -------------------------------------------------------------------


def argument_leaves(task: Task, network: networks.Network, cache: Path | None) -> list[Any]:
    """The leaves of (params, x, target), on the host."""
    make = lambda: jax.device_get(network.arguments(task.settings.get("seed", 0)))
    return cached(cache, _name(task), make)


def _name(task: Task, reference: str = "") -> str:
    """A key for a network's arguments, or its reference, that is the same for all methods."""
    about = {k: v for k, v in task.to_dict().items() if k not in ("experiment", "method", "settings")}
    about |= {"seed": task.settings.get("seed"), "reference": reference, "jax": jax.__version__}
    about["source"] = networks.source()
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def cached(folder: Path | None, name: str, compute: Callable[[], Any]) -> list[Any]:
    """The leaves that `compute` returns, read from disk if an earlier measurement left them there."""
    path = None if folder is None else folder / f"{name}.npz"
    if path is not None and path.is_file():
        with np.load(path) as file:
            return [file[f"arr_{i}"] for i in range(len(file.files))]
    leaves = jax.tree.leaves(compute())
    if path is not None and sum(a.nbytes for a in leaves) <= _CACHED:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}.npz")
        np.savez(partial, *map(np.asarray, leaves))
        partial.replace(path)
    return leaves
