"""Every rule recovers h' from h = h' J: {eager, jit, vmap} in float64, and lower precisions."""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES

import moonwalk as mw


@pytest.mark.parametrize("mode", ["eager", "jit", "vmap"])
@pytest.mark.parametrize("name", CASES)
def test_float64(name, mode):
    case = CASES[name]
    limit = case.tolerance
    assert mw.testing.check_vijp(case.fun, *case.primals, modes=[mode], tolerance=limit) <= limit


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    case = CASES[name]
    primals = jax.tree.map(lambda a: a.astype(jnp.float32), case.primals)
    mw.testing.check_vijp(case.fun, *primals, modes=["jit"], tolerance=max(case.tolerance, 1e-4))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.half])
def test_bfloat16(name):
    case = CASES[name]
    primals = jax.tree.map(lambda a: a.astype(jnp.bfloat16), case.primals)
    mw.testing.check_vijp(case.fun, *primals, modes=["jit"], tolerance=0.06)
