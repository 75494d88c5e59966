"""Golden records: what the library makes of the networks of `networks.py` and of the bench.

Of each network: the traced program (a hash of its jaxpr), the rows of its plan, and the temporaries of the compiled
program. A change that only moves code leaves all of them equal. One that changes a plan changes them visibly, and the
commit says why:

    make golden           what differs from tests/golden.json
    make golden WRITE=1   take what there is now
"""

import argparse
import hashlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":  # as for the tests
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp

import moonwalk as mw
from moonwalk.lab.bench import networks as bench
from moonwalk.lab.bench.tasks import Task

FILE = Path(__file__).with_name("golden.json")
METHODS = {
    "Moonwalk()": mw.Moonwalk(),
    "walk=always": mw.Moonwalk(walk="always"),
    "checkpoint=auto": mw.Moonwalk(checkpoint="auto", walk="always"),
    "Checkpoint()": mw.Checkpoint(),
    "Checkpoint(sqrt)": mw.Checkpoint("sqrt"),
    "Checkpoint(block)": mw.Checkpoint("block"),
    "Checkpoint(recursive)": mw.Checkpoint("recursive"),
}
BENCH = {
    "dense": Task("", "dense", "", depth=9, width=32, batch=256),
    "pyramid": Task("", "pyramid", "", depth=4, width=8, length=64, batch=4),
    "signal": Task("", "signal", "", depth=4, width=8, length=256, batch=4),
    "isometric": Task("", "isometric", "", depth=20, width=16, length=64, batch=8),
}


def scans_between_blocks(p, x):
    """Four scans, two residual blocks behind each: tiles whose transients are never alive together."""
    for u, w in zip(p["u"], p["w"], strict=True):
        x, _ = jax.lax.scan(lambda c, w: (c + jnp.tanh(jax.nn.gelu(c @ w) @ w), None), x, u)
        for block in w:
            x = x + jax.nn.gelu(x @ block)
    return jnp.sum(x**2)


def stacked_rnns(p, x):
    """Scans that read activations, which tiles keep beside their carries."""
    for u, w in zip(p["u"], p["w"], strict=True):
        cell = lambda c, s, u=u, w=w: (jnp.tanh(c @ w + s @ u),) * 2
        _, x = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
    return jnp.sum(x**2)


def structs(**shapes):
    return {
        name: [jax.ShapeDtypeStruct(shape[1:], jnp.float32)] * shape[0] for name, shape in shapes.items()
    }


SHAPES = {
    "scans between blocks": (
        scans_between_blocks,
        (structs(u=(4, 6, 16, 16), w=(4, 2, 16, 16)), jax.ShapeDtypeStruct((1024, 16), jnp.float32)),
    ),
    "stacked RNNs": (
        stacked_rnns,
        (structs(u=(4, 16, 16), w=(4, 16, 16)), jax.ShapeDtypeStruct((32, 64, 16), jnp.float32)),
    ),
}


def cases():
    """name -> (loss, arguments, options)."""
    from networks import NETWORKS

    found = {}
    for name, n in NETWORKS.items():
        found[name] = (n.loss, (n.args, n.kwargs), {"method": n.method, **n.options})
    for name, (loss, types) in SHAPES.items():
        for method in ("Moonwalk()", "Checkpoint()", "Checkpoint(recursive)"):
            found[f"{name}, {method}"] = (loss, (types, {}), {"method": METHODS[method]})
    for name, task in BENCH.items():
        network = bench.make(task)
        for method, settings in METHODS.items():
            found[f"bench {name}, {method}"] = (
                network.loss,
                (network.types(), {}),
                {"method": settings},
            )
    return found


def record(case, *, compiled=True):
    """Of one network; without `compiled`, no temporaries."""
    loss, (args, kwargs), options = case
    run = mw.value_and_grad(lambda *args, **kwargs: loss(*args, **kwargs), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "dtype") else a, args
        )
        plan = mw.plan(loss, *shapes, **kwargs, **options)
        dynamic, tree = jax.tree.flatten(args)
        arrays = [a for a in dynamic if hasattr(a, "dtype")]

        def flat(*arrays):
            values = iter(arrays)
            filled = [next(values) if hasattr(a, "dtype") else a for a in dynamic]
            out = run(*jax.tree.unflatten(tree, filled), **kwargs)
            return [a for a in jax.tree.leaves(out) if hasattr(a, "dtype")]

        traced = jax.jit(flat).trace(*arrays)
        found = {"program": digest(str(traced.jaxpr)), "plan": rows(plan)}
        if compiled:
            found["temporaries"] = traced.lower().compile().memory_analysis().temp_size_in_bytes
    return found


def digest(program):
    """Addresses, functions' names and source lines (which hold the path of the checkout) are no part of a program."""
    program = re.sub(r" at 0x[0-9a-f]+", "", program)
    program = re.sub(r"line=('[^']*'|\"[^\"]*\")", "", program)
    program = re.sub(r"(name|jvp|bwd|fwd|jvp_jaxpr_fun|callback)=\S+", "", program)
    return hashlib.sha1(program.encode()).hexdigest()[:16]


def rows(plan):
    return [
        f"{'  ' * r.depth}{r.block} | {r.mode} | {r.bytes} B x{r.times} | gain {r.gain if r.gain is None else f'{r.gain:.4g}'} | {without_lines(r.why)}"
        for r in plan.rows
    ] + [f"kept {plan.kept_bytes}, peak {plan.peak_bytes}, tolerance {plan.tolerance:.1e}"]


def without_lines(text):
    """A reason may name the user's line, which holds the path of the checkout and moves with every edit."""
    return re.sub(r" at \S+\.py:\d+( \([^)]*\))?", "", text)


def ground():
    return f"jax {jax.__version__}, {jax.default_backend()}"


def differences(old, new):
    """Lines that say what differs between two records."""
    found = []
    if old.get("plan") != new["plan"]:
        gone = [r for r in old.get("plan", ()) if r not in new["plan"]]
        came = [r for r in new["plan"] if r not in old.get("plan", ())]
        found += [f"  - {r}" for r in gone] + [f"  + {r}" for r in came]
    if "temporaries" in new and old.get("temporaries") != new["temporaries"]:
        found.append(f"  temporaries {old.get('temporaries')} -> {new['temporaries']}")
    if not found and old.get("program") != new["program"]:
        found.append("  another program")
    return found


def main():
    parser = argparse.ArgumentParser("golden", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    old = json.loads(FILE.read_text()) if FILE.exists() else {"ground": ground(), "networks": {}}
    if old["ground"] != ground():
        print(f"The records were made with {old['ground']}, and this is {ground()}.")
    changed, records = 0, {}
    for name, case in cases().items():
        if options.only not in name:
            continue
        records[name] = record(case)
        lines = differences(old["networks"].get(name, {}), records[name])
        if lines:
            changed += 1
            print(name, *lines, sep="\n", flush=True)
    print(f"{len(records)} networks, {changed} differ")
    if options.write:
        new = {**old["networks"], **records} if options.only else records
        FILE.write_text(
            json.dumps({"ground": ground(), "networks": new}, indent=1, ensure_ascii=False) + "\n"
        )
        return 0
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
