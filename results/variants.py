"""Memory and time of `checkpoint=`, `PureForward` and `fused_update`: `make bench-variants`.

Memory is `memory_analysis()` of the compiled program. On a GPU, 1,024 isometric convolutions (128 × 2048
× 256) are also run, beside backpropagation checkpointed every 32 layers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import moonwalk as mw
from moonwalk import compat

sys.path.insert(0, str(Path(__file__).parent))
import engine as base

# --- checkpoint= over 1,024 and 4,096 orthogonal dense layers -----------------------------------------


def checkpoint_memory(rows: int) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": rows}
    segmented = functools.partial(mw.value_and_grad, method=mw.Moonwalk(checkpoint="auto"))
    for layers in (1024, 4096):
        args = base.dense_types(layers, rows)
        result[f"moonwalk_{layers}_mib"] = base.temp(mw.value_and_grad(base.scanned), *args)
        result[f"segments_{layers}_mib"] = base.temp(segmented(base.scanned), *args)
        plan = mw.plan(base.scanned, *args, method=mw.Moonwalk(checkpoint="auto"))
        result[f"segments_{layers}"] = plan.segments
        result[f"predicted_{layers}_mib"] = plan.peak_bytes / base.MIB
    args = base.dense_types(1024, rows)
    result["checkpoint_1024_mib"] = {
        k: base.temp(jax.value_and_grad(functools.partial(base.segmented, every=k)), *args)
        for k in (16, 32, 64)
    }
    return result


def forward_memory(rows: int = 256) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": rows}
    for name, each in (("entries", False), ("features", True)):
        fun = mw.value_and_grad(base.scanned, method=mw.PureForward(chunk=8, per_example=each))
        for layers in (8, 64):
            result[f"{name}_{layers}_mib"] = base.temp(fun, *base.dense_types(layers, rows))
    return result


# --- fused updates ------------------------------------------------------------------------------------


def relu_scanned(ws: Any, x: Any, t: Any) -> Any:
    return base.head(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0], t)


def relu_looped(ws: Any, x: Any, t: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return base.head(x, t)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def held(step: Any, optimizer: Any, params: Any, *data: Any) -> float:
    """MiB beside donated arguments: argument + output + temp − alias, less the arguments."""
    args = (params, jax.eval_shape(optimizer.init, params), *data)
    m = compat.compiled(jax.jit(step, donate_argnums=(0, 1)), *args).memory_analysis()
    return (m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes) / base.MIB


def fused_memory(
    layers: int = 16,
    width: int = 1024,
    rows: int = 64,
    networks: Sequence[str] = ("scanned", "looped", "relu_scanned", "relu_looped"),
    optimizers: Sequence[str] = ("adam", "clipped"),
) -> dict[str, Any]:
    x = base.struct(rows, width)
    stacked = base.struct(layers, width, width)
    losses = {
        "scanned": (base.scanned, stacked),
        "looped": (base.looped, [base.struct(width, width)] * layers),
        "relu_scanned": (relu_scanned, stacked),
        "relu_looped": (relu_looped, [base.struct(width, width)] * layers),
    }
    result: dict[str, Any] = {"parameters_mib": layers * width * width * 4 / base.MIB}
    for name, kind in itertools.product(networks, optimizers):
        (loss, params), optimizer = losses[name], OPTIMIZERS[kind]

        def unfused(params: Any, state: Any, x: Any, t: Any, loss=loss, opt=optimizer) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x, t)
            updates, state = opt.update(gradients, state, params)
            return value, optax.apply_updates(params, updates), state

        result[f"{name}_{kind}"] = {
            "fused_mib": held(mw.fused_update(loss, optimizer), optimizer, params, x, x),
            "backprop_mib": held(unfused, optimizer, params, x, x),
        }
    return result


# --- 1,024 isometric convolutions ---------------------------------------------------------------------


def kernels(layers: int, width: int, seed: int = 0) -> Any:
    """Paraunitary kernels of three taps: an orthogonal matrix, and two (P + (I − P) z)."""

    def one(key: Any) -> Any:
        q, a, b = (
            jnp.linalg.qr(jax.random.normal(k, (width, width)))[0] for k in jax.random.split(key, 3)
        )
        p1, p2 = (u[:, : width // 2] @ u[:, : width // 2].T for u in (a, b))
        i = jnp.eye(width)
        return jnp.stack([q @ p1 @ p2, q @ (p1 @ (i - p2) + (i - p1) @ p2), q @ (i - p1) @ (i - p2)])

    with jax.default_matmul_precision("highest"):
        return lax.map(one, jax.random.split(jax.random.key(seed), layers))


def conv_layer(x: Any, w: Any) -> Any:
    wrapped = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
    w = mw.declare(w, "isometric")
    dims = ("NHC", "HIO", "NHC")
    return jnp.abs(lax.conv_general_dilated(wrapped, w, (1,), "VALID", dimension_numbers=dims))


def conv_net(ws: Any, x: Any, t: Any) -> Any:
    return base.head(lax.scan(lambda x, w: (conv_layer(x, w), None), x, ws)[0], t)


def conv_segmented(ws: Any, x: Any, t: Any, every: int = 32) -> Any:
    def segment(x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (conv_layer(x, w), None), x, ws)

    ws = ws.reshape((-1, every, *ws.shape[1:]))
    return base.head(lax.scan(jax.checkpoint(segment, prevent_cse=False), x, ws)[0], t)


def conv_run(layers: int, shape: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 2)
    x, t = (jax.random.normal(k, shape, jnp.float32) for k in keys)
    args = (jax.jit(kernels, static_argnums=(0, 1))(layers, shape[-1]), x, t)

    def moonwalk(**options: Any) -> Any:
        # TF32 rounds by 5e-4 in every layer: over 1,024 of them the certificate exceeds 1e-2.
        method = mw.Moonwalk(on_inexact="ignore", **options)
        return mw.value_and_grad(conv_net, method=method, certify=True)

    methods = {
        "checkpoint_32": jax.value_and_grad(conv_segmented),
        "moonwalk": mw.value_and_grad(conv_net),
        "moonwalk_certified": moonwalk(),
        "segments_32": mw.value_and_grad(conv_net, method=mw.Moonwalk(checkpoint=layers // 32)),
        "segments_auto": mw.value_and_grad(conv_net, method=mw.Moonwalk(checkpoint="auto")),
        "segments_auto_certified": moonwalk(checkpoint="auto"),
        "segments_auto_true_float32": moonwalk(checkpoint="auto", walk_precision="highest"),
    }
    result: dict[str, Any] = {"layers": layers, "shape": shape}
    reference = None
    for name, fun in methods.items():
        program = base.compiled(fun, *args)
        found: dict[str, Any] = {"gib": program.memory_analysis().temp_size_in_bytes / 2**30}
        out = program(*args)
        if reference is None:
            reference = out[1]
        found["difference"] = float(jnp.linalg.norm(out[1] - reference) / jnp.linalg.norm(reference))
        if len(out) == 3:
            found["certificate"] = float(out[2].error)
        del out
        found["ms"] = 1e3 * base.seconds(program, args, repeats)
        result[name] = found
        print(name, json.dumps(found), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", default="", help="the commit, where git is not at hand")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", mw.PlanWarning)
    record = base.recorder(arguments)
    on_gpu = jax.default_backend() == "gpu"
    record(
        "isometric_conv", conv_run(*((1024, (128, 2048, 256), 3) if on_gpu else (64, (4, 64, 16), 5)))
    )
    record("checkpoint_memory", checkpoint_memory(16384))
    record("forward_memory", forward_memory())
    record("fused_memory", fused_memory())


if __name__ == "__main__":
    main()
