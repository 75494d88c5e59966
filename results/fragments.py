"""The paper's 1D network with fragments of cotangents: `make bench-fragments`.

Convolutions of stride one (three taps, the first of them lower triangular with a unit diagonal) and
LeakyReLUs of slope 0.3. Beside them: `jax.value_and_grad`, and `jax.checkpoint` around every K layers.
Memory is `memory_analysis().temp_size_in_bytes`, time the median of several runs. Errors are relative
differences of gradients, the largest over the parameters: from those of backpropagation with true
float32 products, and from those of backpropagation in the ambient precision. Spans are walked over the
whole network, whether or not a plan would find another way cheaper; "planned" is what
`moonwalk.value_and_grad` does by itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import moonwalk as mw

sys.path.insert(0, str(Path(__file__).parent))
import engine as base

SLOPE = 0.3
DIMS = ("NHC", "HIO", "NHC")


def parameters(layers: int, width: int, taps: float = 0.7, seed: int = 0) -> Any:
    """`taps`: of the standard deviation by He."""

    def layer(key: Any) -> Any:
        w = jax.random.normal(key, (3, width, width)) * taps * math.sqrt(2 / (3 * width))
        return w.at[0].set(jnp.tril(w[0], -1) + jnp.eye(width))

    stem, body, head = jax.random.split(jax.random.key(seed), 3)
    return {
        "stem": jax.random.normal(stem, (1, 3, width)) / math.sqrt(3),
        "layers": lax.map(layer, jax.random.split(body, layers)),
        "head": jax.random.normal(head, (width, 1)) / math.sqrt(width),
    }


def layer(x: Any, w: Any) -> Any:
    w = mw.declare(w, "lower")
    return jax.nn.leaky_relu(
        lax.conv_general_dilated(x, w, (1,), [(1, 1)], dimension_numbers=DIMS), SLOPE
    )


def stem(p: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, p["stem"], (1,), "VALID", dimension_numbers=DIMS)


def head(p: Any, x: Any, t: Any) -> Any:
    return jnp.mean((jnp.max(x, axis=1) @ p["head"] - t) ** 2)


def looped(p: Any, x: Any, t: Any, every: int | None = None) -> Any:
    def segment(x: Any, ws: Any) -> Any:
        for w in ws:
            x = layer(x, w)
        return x

    x, ws = stem(p, x), list(p["layers"])
    for i in range(0, len(ws), every or len(ws)):
        run = segment if every is None else jax.checkpoint(segment)
        x = run(x, ws[i : i + (every or len(ws))])
    return head(p, x, t)


def scanned(p: Any, x: Any, t: Any) -> Any:
    return head(p, lax.scan(lambda x, w: (layer(x, w), None), stem(p, x), p["layers"])[0], t)


def walked(loss: Any, method: mw.Moonwalk, certify: bool = True) -> Any:
    """`moonwalk.value_and_grad` by one walk over everything."""
    fun = mw.value_and_grad(loss, method=replace(method, walk="always"), certify=certify)

    def run(*args: Any) -> Any:
        value, gradients, *found = fun(*args)
        return value, gradients, found[0].error if found else jnp.zeros(())

    return run


def plain(loss: Any) -> Any:
    return lambda *args: (*jax.value_and_grad(loss)(*args), jnp.zeros(()))


def planned(loss: Any, method: Any) -> Any:
    def run(*args: Any) -> Any:
        value, gradients, found = mw.value_and_grad(loss, method=method, certify=True)(*args)
        return value, gradients, found.error

    return run


def ways(args: Any, layers: int) -> dict[str, Any]:
    root = round(math.sqrt(layers))
    result = {"backprop": plain(looped)}
    for k in sorted({1, 2, root, root + 1, layers // 2}):
        result[f"checkpoint every {k}"] = plain(functools.partial(looped, every=k))
    for kind, loss in (("looped", looped), ("scanned", scanned)):
        for span in (4, 8, 16):
            for stagger in (True, False) if kind == "looped" else (True,):
                grid = "staggered" if stagger else "aligned"
                asked = mw.Fragment(span, stagger)
                for name, precision in (("float32", "highest"), ("ambient", "default")):
                    method = mw.Moonwalk(fragment=asked, walk_precision=precision)
                    result[f"{kind}, span {span}, {grid}, {name}"] = walked(loss, method)
            method = mw.Moonwalk(fragment=mw.Fragment(span), walk_precision="default")
            result[f"{kind}, span {span}, staggered, ambient, unchecked"] = walked(loss, method, False)
    for kind, loss in (("looped", looped), ("scanned", scanned)):
        for checkpoint in (None, "auto"):
            method = mw.Moonwalk(on_inexact="ignore", checkpoint=checkpoint)
            plan = mw.plan(loss, *args, method=method)
            name = f"{kind}, planned" + (f", checkpoint={checkpoint}" if checkpoint else "")
            result[name] = planned(loss, plan)
    return result


def difference(found: Any, truth: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def measure(
    layers: int, width: int, length: int, batch: int, only: str, repeats: int = 5
) -> dict[str, Any]:
    p = parameters(layers, width)
    x, t = (
        jax.random.normal(jax.random.key(s), shape)
        for s, shape in ((1, (batch, length, 3)), (2, (batch, 1)))
    )
    args = (p, x, t)
    with jax.default_matmul_precision("highest"):
        truth = base.compiled(jax.grad(functools.partial(looped, every=4)), *args)(*args)
    ambient = base.compiled(jax.grad(looped), *args)(*args)
    table: dict[str, Any] = {}
    for name, fun in ways(args, layers).items():
        if only and not any(part in name for part in only.split(";")):
            continue
        program = base.compiled(fun, *args)
        gradients, certificate = program(*args)[1:]
        table[name] = {
            "gib": program.memory_analysis().temp_size_in_bytes / 2**30,
            "ms": 1e3 * base.seconds(program, args, repeats),
            "error": difference(gradients, truth),
            "from_backprop": difference(gradients, ambient),
            "certificate": float(certificate),
        }
        row = table[name]
        print(
            f"{name:44s} {row['gib']:8.3f} GiB {row['ms']:9.2f} ms  error {row['error']:.1e}"
            f"  from backprop {row['from_backprop']:.1e}  certificate {row['certificate']:.1e}",
            flush=True,
        )
    return {"layers": layers, "width": width, "length": length, "batch": batch, "ways": table}


def main() -> None:
    warnings.simplefilter("ignore", mw.PlanWarning)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="parts of names, separated by semicolons")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    sizes = (20, 256, 2048, 128) if on_gpu else (20, 32, 512, 4)
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": options.commit or base._commit(),
        **measure(*sizes, options.only),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
