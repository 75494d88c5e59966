"""Checks every case of tests/cases.py on the device that JAX finds, and writes what it saw.

    PYTHONPATH=src:tests python results/vijp_cases.py results/vijp_cases-<device>.json [commit]

Compiled, in float64; in float32 with true float32 products; and in float32 as JAX multiplies by default
(TF32 on recent GPUs), where the cotangent that is to be recovered is itself only that exact.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from cases import CASES

import moonwalk as mw

SETTINGS = {
    "float64": (jnp.float64, None, 1e-9),
    "float32, true float32 products": (jnp.float32, "highest", 1e-4),
    "float32, default products": (jnp.float32, None, 2e-3),
}


def check(name: str, dtype, precision: str | None, tolerance: float) -> float | str:
    """The error of one case, or what went wrong."""
    case = CASES[name]
    primals = jax.tree.map(lambda a: a.astype(dtype), case.primals)
    limit = max(tolerance, case.tolerance)
    try:
        with jax.default_matmul_precision(precision):
            return mw.testing.check_vijp(case.fun, *primals, modes=["jit"], tolerance=limit)
    except Exception as error:  # the report says what
        return f"{type(error).__name__}: {error}"


def main(target: str, commit: str = "") -> None:
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "commit": commit}
    for setting, (dtype, precision, tolerance) in SETTINGS.items():
        start = time.perf_counter()
        found = {name: check(name, dtype, precision, tolerance) for name in CASES}
        errors = {n: e for n, e in found.items() if not isinstance(e, str)}
        exact = [e for n, e in errors.items() if CASES[n].tolerance <= 1e-9]
        report[setting] = {
            "tolerance": tolerance,
            "cases": len(found),
            "failed": {n: e for n, e in found.items() if isinstance(e, str)},
            "largest error": max(exact),
            "seconds": round(time.perf_counter() - start),
        }
        print(setting, {k: v for k, v in report[setting].items() if k != "failed"}, flush=True)
        with open(target, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
